"""Checks the keys of training records.

Some keys are honoured, some are notes, and some ask for what cannot be trained.
"""

from collections.abc import Container, Mapping
from typing import Any

_CALLS = "training on function calls is not supported; leave such records out"
_MEDIA = "a text model reads no images, videos or sounds; leave such records out"
_THOUGHTS = (
    "write the reasoning at the beginning of the content, as <think>...</think>, or remove the key"
)
_SYSTEM = 'the system message of a record belongs under "system"; rename the key, or remove it'
_CONTEXT = "write this text into the question, or remove the key"
_TEMPLATE = "the chat template gets no options; remove the key"
_LOSS = (
    '"weight": 0 or "loss": false on an assistant message leaves that answer out of training; use '
    "one of them"
)
_SAMPLING = "a record has no weight; give the whole file one, as FILE:2, or repeat the record"
_DISLIKED = (
    "an answer that is marked as undesirable would be trained like a good one; leave such "
    "records out"
)
# These keys ask for nothing if their value is empty; LLaMA-Factory writes "[]" for no tools.
_UNSUPPORTED = {
    **dict.fromkeys(("tools", "functions", "tool_calls", "function_call", "tool_call_id"), _CALLS),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _MEDIA),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHTS),
    **dict.fromkeys(("system_prompt", "system_message"), _SYSTEM),
    **dict.fromkeys(("context", "documents"), _CONTEXT),
    **dict.fromkeys(("chat_template_kwargs", "enable_thinking"), _TEMPLATE),
    **dict.fromkeys(("loss_scale", "mask", "masked"), _LOSS),
}
_EMPTY = (None, False, "", "[]", "{}", [], {})
# These keys ask for something only if they are false.
_SWITCHES = {
    **dict.fromkeys(("train", "training", "trainable"), _LOSS),
    **dict.fromkeys(("label", "kto_tag"), _DISLIKED),
}
# These keys weigh a whole record, which is refused, or a message, which is_trained() honours.
_WEIGHTS = ("weight", "loss")
# Lists and objects that describe a record, or that belong to another way of training on it.
_NOTES = (
    "metadata",
    "meta",
    "info",
    "extra",
    "extra_info",
    "header",
    "tags",
    "labels",
    "scores",
    "openai_moderation",
    "detoxify_moderation",
    "chosen",
    "rejected",
    "rejected_messages",
)


def check_record(record: Mapping[str, Any], layout: Container[str]) -> None:
    """Raise ValueError if a record has an unread key that would change what is learned.

    `layout` holds the keys that are read. Other keys with a text or a number, such as "id" and
    "source", are ignored, and so are lists and objects under the name of a note, such as
    "metadata".
    """
    for key, value in record.items():
        if key not in layout:
            _check(key, value, "")


def check_message(message: Mapping[str, Any], n: int) -> None:
    """Raise ValueError if message `n` has an unread key that would change what is learned."""
    for key, value in message.items():
        if key not in ("role", "content", *_WEIGHTS):
            _check(key, value, f" of message {n}")


def _check(
    key: str,
    value: Any,
    place: str,
) -> None:
    reason = None
    if key in _WEIGHTS and value not in (None, 1):
        reason = _SAMPLING
    elif key in _SWITCHES and value is False:
        reason = _SWITCHES[key]
    elif key in _UNSUPPORTED and value not in _EMPTY:
        reason = _UNSUPPORTED[key]
    if reason is not None:
        raise ValueError(f'the key "{key}"{place} cannot be honoured: {reason}')
    if isinstance(value, list | dict) and value and key not in _NOTES:
        raise ValueError(
            f'the key "{key[:40]}"{place} is unknown, and a list or an object may change what the '
            'record means; remove the key, or rename it to "metadata"'
        )


def is_trained(message: Mapping[str, Any], n: int) -> bool:
    """Return False if message `n` is an assistant message that is not to be trained.

    That is so if it has "weight": 0 (OpenAI) or "loss": false (ms-swift). The result is True for
    all other messages, although those of other roles are never trained. Raises ValueError if a
    weight has another value, if two weights contradict each other, or if a message of another role
    asks to be trained.
    """
    is_assistant = message["role"] == "assistant"
    weights: set[bool] = set()
    for key in _WEIGHTS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(
                f'"{key}" of message {n} must be 0, 1, false or true, got {str(value)[:40]!r}'
            )
        if value and not is_assistant:
            raise ValueError(
                f'"{key}" of message {n} must be 0 or absent: only what the assistant says is '
                "trained"
            )
        weights.add(bool(value))
    if len(weights) > 1:
        raise ValueError(
            f'"weight" and "loss" of message {n} contradict each other; keep one of them'
        )
    return not is_assistant or False not in weights
