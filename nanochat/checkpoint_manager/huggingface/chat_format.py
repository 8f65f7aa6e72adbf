"""The chat template of a published model: the texts that it writes, and what it can write.

What a template can write is found by rendering short conversations with it.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.huggingface import answers
from nanochat.checkpoint_manager.huggingface.template import (
    ChatTemplate,
    Messages,
    chatml,
    read_source,
)
from nanochat.common import UserError, tr
from nanochat.data.conversation import Conversation

# A question and an answer, for questions to a template.
QUESTION = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}


def plain_message(role: str, text: str) -> dict[str, str]:
    """Return a message in the form that chat templates expect."""
    return {"role": role, "content": text}


class ChatFormat:
    """The format of a model's chats: its chat template or, without one, ChatML."""

    def __init__(self, folder: Path, names: Mapping[str, str]):
        """Read the template in a model's folder once it is needed.

        `names` are the spellings of tokens that the template may use, such as eos_token.
        """
        self.folder = folder
        self._names = names

    @property
    def source(self) -> str | None:
        """The Jinja source of the model's chat template, or None if there is none.

        Raises UserError if the template cannot be read.
        """
        return read_source(self.folder)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The model's chat template; None: there is none, and ChatML is used."""
        source = self.source
        return None if source is None else ChatTemplate(source, self._names, str(self.folder))

    # --- texts -----------------------------------------------------------------------------------

    def text(self, messages: Messages, reply: bool, **options: Any) -> str:
        """Return messages as text in the format of the chat template or, without one, in ChatML."""
        if self.template is None:
            return chatml(messages, reply)
        if self._needs_short_ids:
            messages = answers.with_short_ids(messages)
        return self.template.render(messages, reply, **options)

    def _tried(self, messages: Messages, reply: bool, **options: Any) -> str:
        """Return what text() does, or an empty text if the chat template refuses the messages."""
        try:
            return self.text(messages, reply, **options)
        except UserError:
            return ""

    @cached_property
    def _needs_short_ids(self) -> bool:
        """Whether the chat template refuses calls with IDs of any length, as Mistral's do."""
        assert self.template is not None
        try:
            self.template.render(answers.PROBE_CHAT, reply=False)
        except UserError:
            return True
        return False

    # --- what the template can write -------------------------------------------------------------

    @cached_property
    def takes_system(self) -> bool:
        """Whether the chat template writes a system message as such, in prompts and in whole chats.

        False if the template fails on it, drops it, or puts its text into the user's turn, before
        the user's own text and a blank line. Mistral's templates do so in the last message only.
        """
        for turns, reply in (([QUESTION], True), ([QUESTION, ANSWER], False)):
            text = self._tried([plain_message("system", "a_rule"), *turns], reply)
            merged = self._tried([plain_message("user", "a_rule\n\nQ"), *turns[1:]], reply)
            if "a_rule" not in text or text == merged:
                return False
        return True

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template tells the model which functions it may call."""
        return "a_tool" in self._tried([QUESTION], reply=True, tools=[answers.PROBE_TOOL])

    @cached_property
    def takes_calls(self) -> bool:
        """Whether the chat template writes calls of functions and their results."""
        return "a_tool" in self.written_call and "a_result" in self.written_call

    @cached_property
    def takes_results(self) -> bool:
        """Whether the chat template writes results, be it only of calls that are given as text.

        SmolLM3's template has such a form. A template that writes any name of a role has none.
        """
        if self.takes_calls:
            return True
        chat = [QUESTION, ANSWER, answers.PROBE_CHAT[-1]]
        names_role = re.search("[\"']tool[\"']", self.source or "")
        return names_role is not None and "a_result" in self._tried(chat, reply=True)

    @cached_property
    def call_format(self) -> str | None:
        """The form in which the chat template writes calls, if the server reads that form."""
        if not self.takes_tools or not self.takes_calls:
            return None
        prompt = self._tried(answers.PROBE_CHAT[:1], reply=True)
        return answers.call_format(self.written_call.removeprefix(prompt))

    @cached_property
    def thought_marks(self) -> tuple[str, str] | None:
        """The marks around the thoughts of the model, or None if its template knows none."""
        source = self.source or ""
        return next((marks for marks in answers.THOUGHT_MARKS if marks[1] in source), None)

    @cached_property
    def thinks_by_default(self) -> bool | None:
        """Whether the model thinks if a request leaves out the template's `enable_thinking`.

        None if the template writes the same prompt with true and with false, or fails: then there
        is no switch.
        """
        if "enable_thinking" not in (self.source or ""):
            return None
        try:
            without = self.text([QUESTION], reply=True, enable_thinking=False)
            if self.text([QUESTION], reply=True, enable_thinking=True) == without:
                return None
            return self.text([QUESTION], reply=True) != without
        except UserError:
            return None

    @cached_property
    def written_call(self) -> str:
        """What the chat template writes for a call and its result; empty if it refuses them."""
        return self._tried(answers.PROBE_CHAT, reply=True)

    @cached_property
    def takes_one_call(self) -> bool:
        """Whether the chat template writes one call of a reply and no second one, as Llama's."""
        return self.takes_calls and "b_tool" not in self._tried(answers.PROBE_CALLS, reply=True)

    @cached_property
    def takes_reasoning(self) -> bool:
        """Whether the chat template writes the reasoning of the last reply."""
        reply = {**ANSWER, **dict.fromkeys(answers.REASONING, "a_reason")}
        return "a_reason" in self._tried([QUESTION, reply], reply=False)

    @cached_property
    def opening(self) -> str:
        """What the chat template writes before a reply, such as <|im_start|>assistant."""
        return self.text([QUESTION], reply=True).removeprefix(self.text([QUESTION], reply=False))

    @cached_property
    def call_beginning(self) -> str:
        """What the chat template writes between a prompt and a call's name, or an empty text."""
        prompt = self._tried(answers.PROBE_CHAT[:1], reply=True)
        text = self._tried(answers.PROBE_CHAT[:2], reply=False)
        beginning, name, _ = text.removeprefix(prompt).partition("a_tool")
        return beginning if name and text.startswith(prompt) else ""

    @cached_property
    def writes_thoughts(self) -> bool:
        """Whether the chat template writes thoughts in the text of the last reply, or fails."""
        reply = plain_message("assistant", f"{answers.OPENING}a_thought\n</think>\n\nA")
        try:
            return "a_thought" in self.text([QUESTION, reply], reply=False)
        except UserError:
            return True

    def check(self, conversation: Conversation) -> None:
        """Raise UserError if the chat template has no place for what a conversation holds."""
        needed = set(conversation.options)
        for message in conversation.messages:
            needed |= {"tool results"} if message.role == "tool" else set(message.fields)
        source = self.source or ""
        supported = {key for key in conversation.options if key != "tools" and key in source}
        if self.takes_tools:
            supported.add("tools")
        if self.takes_calls:
            supported.add("tool_calls")
        if self.takes_results:
            supported.add("tool results")
        if self.takes_reasoning:
            supported.add("reasoning_content")
        unsupported = sorted(needed - supported)
        if unsupported:
            raise UserError(
                tr(
                    "the chat template in {folder} does not write {field!r}. Leave such "
                    "records out, or fine-tune a model whose template writes them",
                    folder=self.folder,
                    field=unsupported[0],
                )
            )
