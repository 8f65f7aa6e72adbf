"""Conversations, and the protocol of a task that asks questions and grades replies."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from nanochat.common import UserError, tr

Role = Literal["system", "user", "assistant", "tool"]
Kind = Literal["text", "python", "python_output"]


@dataclass(frozen=True)
class Part:
    """A piece of a message: text, or an assistant's calculator call or its output."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    User, system and tool turns hold one text part; assistant turns may also hold calculator calls
    and their outputs. A tool turn is the result of a function that the assistant called.
    """

    role: Role
    parts: tuple[Part, ...]
    # Whether the assistant is trained to write this turn. It is not part of the text, so the repr
    # leaves it out.
    trained: bool = field(default=True, repr=False)
    # What only the chat template of a published model can write: tool_calls and reasoning_content
    # of the assistant, name and tool_call_id of a tool.
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    @property
    def text(self) -> str:
        """The text of the turn, without its calculator calls and their outputs."""
        return "".join(part.text for part in self.parts if part.kind == "text")


@dataclass(frozen=True)
class Conversation:
    """A conversation: an optional system turn, then alternating user and assistant turns.

    Conversations for the chat template of a published model may have their turns in another order.
    """

    messages: tuple[Message, ...]
    # The number of turns at the beginning that the assistant is not trained to write. The repr
    # leaves it out, so task names that are made from the repr do not depend on it.
    prompt_turns: int = field(default=0, repr=False)
    # Variables of the chat template of a published model, such as tools.
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    # Where the conversation was read, such as "chats.jsonl, line 3", for error messages.
    origin: str = field(default="", repr=False, compare=False)

    @property
    def needs_template(self) -> bool:
        """Whether only the chat template of a published model can write the conversation.

        That is so if it has tools, calls, results of tools, reasoning or other template variables.
        """
        has_fields = any(turn.fields or turn.role == "tool" for turn in self.messages)
        return bool(self.options) or has_fields

    @property
    def prompt(self) -> "Conversation":
        """The conversation without its last turn if that is the assistant's, else all of it."""
        if self.messages[-1].role == "assistant":
            return replace(self, messages=self.messages[:-1], prompt_turns=0)
        return self


def user(text: str) -> Message:
    """Return a user turn."""
    return Message("user", (Part("text", text),))


def system(text: str) -> Message:
    """Return a system turn, which gives an instruction for the whole conversation."""
    return Message("system", (Part("text", text),))


def assistant(*parts: str | Part) -> Message:
    """Return an assistant turn made of parts, in order; a string becomes a text part."""
    as_parts = [Part("text", part) if isinstance(part, str) else part for part in parts]
    return Message("assistant", tuple(as_parts))


def chat(question: str, *answer: str | Part) -> Conversation:
    """Return a conversation of one question and its answer."""
    return Conversation((user(question), assistant(*answer)))


def alternating_turns(conversation: Conversation) -> tuple[Message, ...]:
    """Return the turns, with a system turn at the beginning merged into the user turn after it.

    Raises UserError if there are no turns, if user and assistant do not then alternate, beginning
    with the user, or if only the template of a published model can write the conversation.
    """
    messages = conversation.messages
    if conversation.needs_template:
        raise UserError(
            tr(
                "this model's chat format has no functions and no reasoning, only the "
                "calculator; leave such conversations out, or fine-tune a published model"
            )
        )
    if not messages:
        raise UserError(tr("a conversation needs at least one turn, got none; add a user turn"))
    if messages[0].role == "system":
        if len(messages) < 2 or messages[1].role != "user":
            raise UserError(
                tr(
                    "a system turn must be followed by a user turn, got {roles}; reorder the turns",
                    roles=_roles(messages),
                )
            )
        merged = user(f"{messages[0].text}\n\n{messages[1].text}")
        messages = (merged, *messages[2:])
    for i, message in enumerate(messages):
        if message.role != ("user", "assistant")[i % 2]:
            raise UserError(
                tr(
                    "after an optional system turn, user and assistant alternate, got "
                    "{roles}; reorder them",
                    roles=_roles(messages),
                )
            )
    return messages


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(message.role for message in messages)


def words(parts: Sequence[Part]) -> str:
    """Return a reply as readable text, with calculator calls and outputs as in `[1+1 = 2]`."""
    formats = {"text": "{}", "python": "[{} = ", "python_output": "{}]"}
    return "".join(formats[part.kind].format(part.text) for part in parts)


@dataclass(frozen=True)
class Cloze:
    """A multiple-choice question for a model that only continues text.

    The text is `intro`, then `examples`, then `question`. The model's answer is the most likely of
    `choices`, each preceded by a space. If the text is too long, examples are dropped, starting
    with the first.
    """

    intro: str
    examples: tuple[str, ...]
    question: str
    choices: tuple[str, ...]
    answer: int  # the index of the right choice


class Task(Protocol):
    """A set of problems, each a conversation that ends with the reference answer.

    In a `choice` task, the reference answer is a letter, and the model answers with the most likely
    of `letters(i)`. In a `generative` task, the model answers in words.
    """

    @property
    def name(self) -> str:
        """The name of the task in reports and on command lines."""
        ...

    @property
    def kind(self) -> Literal["choice", "generative"]:
        """The form of an answer: a letter (`choice`) or words (`generative`)."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Conversation: ...

    def letters(self, i: int) -> tuple[str, ...]:
        """Return the letters to choose from in problem `i`, or () in a generative task."""
        ...

    def grade(self, i: int, reply: str) -> float:
        """Return the score of a reply to problem `i`, from 0 (wrong) to 1 (right).

        In a choice task, `reply` is a letter.
        """
        ...


def merge_texts(*parts: Part) -> tuple[Part, ...]:
    """Return the parts with adjacent texts joined, because a token may span two of them."""
    merged: list[Part] = []
    for is_text, group in itertools.groupby(parts, lambda part: part.kind == "text"):
        if is_text:
            merged.append(Part("text", "".join(part.text for part in group)))
        else:
            merged += group
    return tuple(merged)
