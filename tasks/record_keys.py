"""Which keys of training records are honoured, harmless or refused: one table for all layouts.

The table holds the keys of the tools in VERSIONS and of well-known data sets. docs/data.md shows
it. A key that it does not hold is refused.
"""

import difflib
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanochat.common import tr, visible

# The versions of the tools whose keys the table holds.
VERSIONS = {
    "OpenAI": "fine-tuning API, OpenAPI document 2.3.0",
    "TRL": "1.16.0",
    "ms-swift": "4.6.0",
    "LLaMA-Factory": "0.9.5",
    "Axolotl": "0.19.0",
}
Rule = Literal["honoured", "pairs", "harmless", "refused"]


@dataclass(frozen=True)
class Row:
    """Keys that have one meaning and one rule.

    honoured: the layouts that have such a key read it; beside other layouts it is refused.
    pairs: --loss=dpo reads it, and conversations pass over it.
    harmless: it is passed over.
    refused: it is refused unless its value is empty. `text` says why, and what to do.
    """

    names: str
    tools: str  # those that know the keys, or "data sets"
    rule: Rule
    text: Callable[[], str]

    @property
    def keys(self) -> list[str]:
        """The keys, which `names` holds with spaces between them."""
        return self.names.split()


ALL = "OpenAI, TRL, ms-swift, LLaMA-Factory, Axolotl"


def reads_no_media() -> str:
    """Return why images, videos and sounds are refused, as the end of a sentence."""
    return tr("a text model reads no images, videos or sounds; leave such records out")


def _marks() -> str:
    return tr(
        '"weight": 0, "loss": false or "train": false on an assistant message leaves that '
        "answer out of training; use one of them"
    )


# The keys of a record.
RECORD = (
    Row("messages conversations conversation", ALL, "honoured", lambda: tr("the messages")),
    Row(
        "system system_prompt",
        "ms-swift, LLaMA-Factory, Axolotl",
        "honoured",
        lambda: tr("the system message"),
    ),
    Row("tools", ALL, "honoured", lambda: tr("the functions that the assistant may call")),
    Row("functions", "OpenAI", "honoured", lambda: tr("the same in OpenAI's old form")),
    Row(
        "chat_template_kwargs",
        "TRL, ms-swift",
        "honoured",
        lambda: tr("variables of the model's chat template, such as enable_thinking"),
    ),
    Row(
        "instruction query question prompt INSTRUCTION",
        "TRL, ms-swift, LLaMA-Factory, Axolotl",
        "honoured",
        lambda: tr("the question"),
    ),
    Row(
        "input",
        "ms-swift, LLaMA-Factory, Axolotl",
        "honoured",
        lambda: tr(
            "more of the question, on a line of its own; without an instruction, the question"
        ),
    ),
    Row(
        "output response answer completion generation RESPONSE",
        "TRL, ms-swift, LLaMA-Factory, Axolotl",
        "honoured",
        lambda: tr("the answer"),
    ),
    Row(
        "history",
        "ms-swift, LLaMA-Factory",
        "honoured",
        lambda: tr("earlier questions and answers, all of them trained"),
    ),
    Row(
        "chosen rejected rejected_response rejected_messages",
        "TRL, ms-swift, LLaMA-Factory, Axolotl",
        "pairs",
        lambda: tr("the answers of a pair"),
    ),
    Row(
        "label kto_tag",
        "TRL, ms-swift, LLaMA-Factory",
        "harmless",
        lambda: tr("true or a text; false, numbers and lists are refused"),
    ),
    Row(
        "parallel_tool_calls channel",
        "OpenAI, ms-swift",
        "harmless",
        lambda: tr("has no part in what is trained here"),
    ),
    Row(
        "text",
        "data sets",
        "harmless",
        lambda: tr("repeats the record as one text beside another layout"),
    ),
    Row(
        "id idx index uid uuid guid custom_id conv_id conversation_id message_id prompt_id "
        "question_id parent_id session_id hash conversation_hash md5 sha256",
        "data sets",
        "harmless",
        lambda: tr("identify the record"),
    ),
    Row(
        "source src origin dataset dataset_name data_source subset split file filename path url "
        "link title author model model_name generator country state hashed_ip license licence "
        "copyright language lang date time timestamp created created_at updated_at",
        "data sets",
        "harmless",
        lambda: tr("say where the record is from"),
    ),
    Row(
        "category categories subcategory type task task_type task_name topic domain subject "
        "difficulty level tag tags keyword keywords labels score scores score_chosen "
        "score_rejected chosen_score rejected_score chosen_rating rejected_rating rating quality "
        "reward toxic toxicity redacted turn turns num_turns length num_tokens n",
        "data sets",
        "harmless",
        lambda: tr("describe the record"),
    ),
    Row(
        "metadata meta info extra extra_info header headers note notes comment comments remark "
        "annotations openai_moderation detoxify_moderation",
        "data sets",
        "harmless",
        lambda: tr("notes of any form"),
    ),
    Row(
        "image images video videos audio audios objects ref_audios audio_codes rejected_images "
        "rejected_videos rejected_audios rejected_objects",
        "TRL, ms-swift, LLaMA-Factory, Axolotl",
        "refused",
        reads_no_media,
    ),
    Row(
        "system_message",
        "data sets",
        "refused",
        lambda: tr(
            'the system message of a record belongs under "system"; rename the key, or remove it'
        ),
    ),
    Row(
        "context documents article",
        "Axolotl",
        "refused",
        lambda: tr(
            'write this text into the question (Alpaca\'s "input" is appended to it), or remove the key'
        ),
    ),
    Row(
        "enable_thinking",
        "data sets",
        "refused",
        lambda: tr('variables of the chat template belong under "chat_template_kwargs"'),
    ),
    Row(
        "weight loss loss_weight loss_scale sample_weight train training trainable",
        "data sets",
        "refused",
        lambda: tr(
            "a record has no weight; give the whole file one, as FILE:2, or repeat the record"
        ),
    ),
    Row(
        "completions",
        "TRL",
        "refused",
        lambda: tr("stepwise supervision is another way of training; leave such records out"),
    ),
    Row(
        "input_ids attention_mask completion_mask assistant_masks seq_lengths segments",
        "TRL, Axolotl",
        "refused",
        lambda: tr(
            "tokens and text without a chat format cannot be trained here; give the messages"
        ),
    ),
    Row(
        "margin rejected_tools preferred_output non_preferred_output",
        "OpenAI, ms-swift",
        "refused",
        lambda: tr('a pair of answers needs "prompt", "chosen" and "rejected" with the same tools'),
    ),
    Row(
        "teacher_prompt teacher_images",
        "ms-swift",
        "refused",
        lambda: tr("distillation from a teacher is another way of training; remove the key"),
    ),
    Row(
        "positive_messages negative_messages positive_images negative_images positive_videos "
        "negative_videos positive_audios negative_audios positive_tools negative_tools "
        "positive_objects negative_objects",
        "ms-swift",
        "refused",
        lambda: tr("embeddings are another way of training; leave such records out"),
    ),
    Row(
        "questions kinds options target_probs question_ids criteria omnijev_column_keys "
        "omnijev_video choices",
        "ms-swift, Axolotl",
        "refused",
        lambda: tr("a choice must be written as a question and its answer"),
    ),
    Row(
        "reflection corrected revision critiques solution explanation summary "
        "unanswerable_question message_1 message_2",
        "Axolotl",
        "refused",
        lambda: tr('write what the model should say under "output", or remove the key'),
    ),
)
# The keys of a message.
MESSAGE = (
    Row("role from", ALL, "honoured", lambda: tr("who speaks")),
    Row("content value", ALL, "honoured", lambda: tr("a text, or a list of text parts")),
    Row(
        "human user assistant gpt bot",
        "ms-swift",
        "honoured",
        lambda: tr("a question and its answer in one object"),
    ),
    Row(
        "weight loss loss_weight train training",
        "OpenAI, ms-swift, LLaMA-Factory, Axolotl",
        "honoured",
        lambda: tr("0 or false on an assistant message: the answer is read and not trained"),
    ),
    Row("tool_calls", ALL, "honoured", lambda: tr("the functions that the assistant calls")),
    Row("function_call", "OpenAI", "honoured", lambda: tr("the same in OpenAI's old form")),
    Row("tool_call_id", "OpenAI, TRL", "honoured", lambda: tr("the call that a tool answers")),
    Row(
        "name",
        "OpenAI, TRL",
        "honoured",
        lambda: tr("the name of a tool; of other speakers passed over"),
    ),
    Row(
        "reasoning_content reasoning thinking",
        "TRL, ms-swift, Axolotl",
        "honoured",
        lambda: tr("what the assistant thinks before it answers"),
    ),
    Row(
        "id idx index uid message_id timestamp time date model tokens language lang metadata meta "
        "info tags score scores rating toxic redacted header turn_identifier markdown",
        "data sets",
        "harmless",
        lambda: tr("notes"),
    ),
    Row(
        "image images video videos audio audios objects image_url",
        "OpenAI, TRL, ms-swift",
        "refused",
        reads_no_media,
    ),
    Row("refusal", "OpenAI", "refused", lambda: tr('write the refusal under "content"')),
    Row("loss_scale mask masked", "ms-swift", "refused", _marks),
    Row(
        "train_detail training_detail reasoning_training_detail prefix",
        "Axolotl",
        "refused",
        lambda: tr("parts of an answer cannot be left out of training; {marks}", marks=_marks()),
    ),
)
# Values that ask for nothing; LLaMA-Factory writes "[]" for no tools.
EMPTY = (None, "", "[]", "{}", [], {})
WEIGHTS = ("weight", "loss", "loss_weight", "train", "training")
# How the cells of a table spell false, and numbers.
_FALSE = ("false", "f", "no", "n", "off")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?")


_RECORD = {key: row for row in RECORD for key in row.keys}
_MESSAGE = {key: row for row in MESSAGE for key in row.keys}


def check_record(
    record: Mapping[str, Any],
    layout: Container[str],
    pairs: bool = False,
) -> None:
    """Raise ValueError if a record has a key that is neither read nor harmless.

    `layout` holds the keys that are read. `pairs` says whether the record is a pair of answers.
    """
    for key, value in record.items():
        if key in layout:
            continue
        if key in ("label", "kto_tag"):
            _check_label(key, value)
        elif value not in EMPTY and not (key in WEIGHTS and value == 1):
            _check(key, value, _RECORD, "", pairs)


def check_message(message: Mapping[str, Any], n: int) -> None:
    """Raise ValueError if message `n` has a key that is neither read nor harmless."""
    for key, value in message.items():
        if value not in EMPTY:
            _check(key, value, _MESSAGE, tr(" of message {n}", n=n), True)


def _marks_good_answer(label: Any) -> bool:
    """Return whether a label is true or a text, in a table too, whose cells are all texts."""
    if not isinstance(label, str):
        return label is None or label is True
    word = label.strip().casefold()
    return word not in _FALSE and not word.startswith("[") and not _NUMBER.fullmatch(word)


def _check_label(key: str, value: Any) -> None:
    if not _marks_good_answer(value):
        raise ValueError(
            tr(
                'the key "{key}" cannot be honoured: it must be true or a text, got '
                "{value!r}. An answer that is marked as undesirable or belongs to a class "
                "would be trained like a good one; leave such records out",
                key=key,
                value=str(value)[:40],
            )
        )


def _check(
    key: str,
    value: Any,
    table: Mapping[str, Row],
    place: str,
    pairs: bool,
) -> None:
    """Raise ValueError unless a key that no layout reads may stay in its record or message.

    `pairs` says whether the keys of honoured rows are read by then.
    """
    row = table.get(key)
    if row is None:
        near = difflib.get_close_matches(key, table, n=3) or list(table)[:8]
        names = ", ".join(near)
        raise ValueError(
            tr(
                'the key "{key}"{place} is unknown; known are {names} and others '
                '(docs/data.md). Remove the key, or put what it holds under "metadata"',
                key=visible(key[:40]),
                place=place,
                names=names,
            )
        )
    if row.rule == "refused":
        raise ValueError(
            tr(
                'the key "{key}"{place} cannot be honoured: {text}',
                key=key,
                place=place,
                text=row.text(),
            )
        )
    if row.rule == "honoured" and table is _RECORD:
        raise ValueError(
            tr(
                'the key "{key}" ({text}) is not read in this layout: other keys of the record '
                'hold the conversation already, such as "output" or "messages". Keep one of the '
                "two",
                key=key,
                text=row.text(),
            )
        )
    if row.rule == "pairs" and pairs:
        raise ValueError(
            tr(
                'the key "{key}" is not read beside the other answers of the pair; keep two '
                "answers",
                key=key,
            )
        )


def is_trained(message: Mapping[str, Any], n: int) -> bool:
    """Return False if message `n` is an assistant message that is not to be trained.

    That is so if one of the keys in WEIGHTS is 0 or false. The result is True for all other
    messages, although those of other roles are never trained. Raises ValueError if a weight has
    another value, if two weights contradict each other, or if a message of another role asks to be
    trained.
    """
    is_assistant = message["role"] == "assistant"
    weights: dict[str, bool] = {}
    for key in WEIGHTS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(
                tr(
                    '"{key}" of message {n} must be 0, 1, false or true, got {value!r}',
                    key=key,
                    n=n,
                    value=str(value)[:40],
                )
            )
        if value and not is_assistant:
            raise ValueError(
                tr(
                    '"{key}" of message {n} must be 0 or absent: only what the assistant '
                    "says is trained",
                    key=key,
                    n=n,
                )
            )
        weights[key] = bool(value)
    if len(set(weights.values())) > 1:
        names = tr(" and ").join(f'"{key}"' for key in weights)
        raise ValueError(
            tr("{names} of message {n} contradict each other; keep one of them", names=names, n=n)
        )
    return not is_assistant or False not in weights.values()
