"""Chat templates, which turn conversations into text in the format that a model was trained on."""

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.huggingface.folders import read_object
from nanochat.common import UserError, tr
from nanochat.platforms.child import Child

SECONDS = 10.0  # time limit for one conversation
MAX_CHARACTERS = 1 << 20  # in a template
CHILD = Path(__file__).with_name("template_child.py")
# A template that writes the same text as chatml(), for programs that need one.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Messages = Sequence[Mapping[str, Any]]  # each with a role and a content


def chatml(messages: Messages, reply: bool) -> str:
    """Return a conversation as ChatML text, for models that have no template.

    If `reply` is true, the text ends with the opening of the assistant's turn.
    """
    text = ""
    for message in messages:
        text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    if reply:
        text += "<|im_start|>assistant\n"
    return text


def read_source(folder: Path) -> str | None:
    """Return the Jinja source of the chat template in a model's folder, or None if there is none.

    Raises UserError if the template cannot be read.
    """
    path = folder / "chat_template.jinja"
    try:
        source = path.read_text(encoding="utf-8") if path.exists() else None
        if not source:
            path = folder / "tokenizer_config.json"
            source = read_object(folder / path.name).get("chat_template")
        if isinstance(source, list):  # several templates, of which the default is for chats
            templates = {item["name"]: item["template"] for item in source}
            source = templates.get("default")
        if source is not None and not isinstance(source, str):
            raise TypeError(tr("it is {value}, expected a text", value=reprlib.repr(source)))
    except (OSError, UnicodeDecodeError, KeyError, TypeError) as failure:
        reason = f"{type(failure).__name__}: {failure}"
        raise UserError(
            tr(
                "the chat template in {path} cannot be read ({reason}). Copy the model "
                "again from its source",
                path=path,
                reason=reason,
            )
        ) from failure
    return source or None


class ChatTemplate:
    """A model's Jinja chat template, rendered in a child process with limited time and memory."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: str):
        """Prepare to render a template from its Jinja source.

        `tokens` are variables that the template may use, such as eos_token. `where` names the
        template in error messages. Raises UserError if the source is too long.
        """
        if len(source) > MAX_CHARACTERS:
            raise UserError(
                tr(
                    "the chat template in {where} has {characters:,} characters, at most "
                    "{max_characters:,} are read",
                    where=where,
                    characters=len(source),
                    max_characters=MAX_CHARACTERS,
                )
            )
        self._child = Child(CHILD, {"template": source, "tokens": dict(tokens)})
        self._where = where

    def render(self, messages: Messages, reply: bool, **options: Any) -> str:
        """Render a conversation, and return its text.

        If `reply` is true, the template should end the text with the opening of the assistant's
        turn. `options` are further variables for the template. Raises UserError if the template
        fails, refuses the conversation, or takes too much time or memory.
        """
        # transformers sets these two where there are none, and templates compare them with none.
        absent = {"tools": None, "documents": None}
        variables = {
            "messages": list(messages),
            "add_generation_prompt": reply,
            **absent,
            **options,
        }
        answer = self._child.ask(variables, SECONDS)
        if answer is None:
            raise UserError(
                tr(
                    "the chat template in {where} takes more than {seconds:.0f} seconds or "
                    "too much memory. Remove it to use ChatML",
                    where=self._where,
                    seconds=SECONDS,
                )
            )
        if "text" not in answer:
            raise UserError(
                tr(
                    "the chat template in {where} fails: {error}. Remove it to use ChatML",
                    where=self._where,
                    error=answer["error"],
                )
            )
        return answer["text"]
