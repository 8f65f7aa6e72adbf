"""Writes a Modelfile, from which Ollama makes a model of a GGUF file.

Ollama before June 2026 does not read the chat template in a GGUF file: it needs the format of chats
in the notation of Go. Such a template is written only for models whose own template writes exactly
ChatML or the format of Llama 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanochat.checkpoint_manager.huggingface.template import chatml
from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.common import UserError
from nanochat.tokenizer import Tokenizer

# Name of a setting in generation_config.json -> its name in a Modelfile.
PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
QUOTES = '"""'  # around texts of several lines in a Modelfile
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class ChatFormat:
    """A format in which every turn is a role and a content between marks."""

    begin: str  # before the role
    middle: str  # between role and content
    end: str  # after the content

    def text(self, messages: Messages) -> str:
        """Return a conversation as text that ends with the opening of the assistant's turn."""
        turns = [self._opening(message["role"]) + message["content"] for message in messages]
        return self.end.join([*turns, self._opening("assistant")])

    def template(self) -> str:
        """Return the template in Go's notation that writes what text() returns."""
        turn = self._opening("{{ .Role }}") + "{{ .Content }}" + self.end
        return "{{- range .Messages }}" + turn + "{{ end }}" + self._opening("assistant")

    def system(self, text: str, question: Messages) -> str | None:
        """Return the content of the system turn that precedes a question in `text`.

        Returns None if nothing or something else precedes the question.
        """
        opening = self._opening("system")
        closing = self.end + self.text(question)
        if not text.startswith(opening) or not text.endswith(closing):
            return None
        return text[len(opening) : -len(closing)]

    def _opening(self, role: str) -> str:
        return self.begin + role + self.middle


FORMATS = (
    ChatFormat("<|im_start|>", "\n", "<|im_end|>\n"),  # ChatML: Qwen, SmolLM
    ChatFormat("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),  # Llama 3
)
QUESTION = ({"role": "user", "content": "Q"},)
SYSTEM = {"role": "system", "content": "S"}
# A template that leaves thoughts of earlier turns out cannot be written in Go's notation.
THOUGHT = {"role": "assistant", "content": "<think>\nT\n</think>\n\nA"}
CHATS: tuple[Messages, ...] = (
    QUESTION,
    (SYSTEM, *QUESTION),
    (*QUESTION, {"role": "assistant", "content": "A"}, *QUESTION),
    (SYSTEM, *QUESTION, THOUGHT, *QUESTION),
)


@dataclass(frozen=True)
class ChatLines:
    """What a Modelfile says about chats."""

    template: str  # in Go's notation
    system: str  # the system message of chats that have none; may be empty


def chat_lines(tokenizer: Tokenizer | FolderTokenizer) -> ChatLines | None:
    """Return the chat template for Ollama, or None if it would not write what ours does."""
    if not isinstance(tokenizer, FolderTokenizer):
        return None
    texts = [_rendered(tokenizer, messages) for messages in CHATS]
    if texts[0] is None:
        return None
    for chat_format in FORMATS:
        system = chat_format.system(texts[0], QUESTION) or ""
        if QUOTES in system:
            continue
        default = [{"role": "system", "content": system}] if system else []
        expected = []
        for messages in CHATS:
            has_system = messages[0]["role"] == "system"
            expected.append(chat_format.text(messages if has_system else [*default, *messages]))
        if texts == expected:
            return ChatLines(chat_format.template(), system)
    return None


def _rendered(tokenizer: FolderTokenizer, messages: Messages) -> str | None:
    """Return a conversation as text, without the begin mark that llama.cpp adds by itself.

    Returns None if the template fails, or does not write the mark that llama.cpp adds.
    """
    try:
        if tokenizer.chat_format.template is None:
            text = chatml(messages, reply=True)
        else:
            text = tokenizer.chat_format.template.render(messages, reply=True)
    except UserError:
        return None
    mark = tokenizer.decode([tokenizer.bos]) if tokenizer.adds_bos else ""
    return text.removeprefix(mark) if text.startswith(mark) else None


def modelfile_path(path: Path) -> Path:
    """Return the path of the Modelfile of a GGUF file, which is beside that file."""
    return path.with_name(path.name.removesuffix(".gguf") + ".Modelfile")


def modelfile(path: Path, tokenizer: Tokenizer | FolderTokenizer, chats: ChatLines | None) -> str:
    """Return the content of the Modelfile of the GGUF file at `path`.

    Raises UserError if a value of the publisher's generation_config.json is out of range.
    """
    lines = [f"FROM ./{path.name}"]
    if chats is not None:
        lines.append(f"TEMPLATE {QUOTES}{chats.template}{QUOTES}")
        if chats.system:
            lines.append(f"SYSTEM {QUOTES}{chats.system}{QUOTES}")
    for stop in sorted(tokenizer.stops):
        mark = tokenizer.decode([stop]) if stop >= 0 else ""
        if mark:
            lines.append(f'PARAMETER stop "{mark}"')
    if isinstance(tokenizer, FolderTokenizer):
        for name, value in tokenizer.sampling.items():
            lines.append(f"PARAMETER {PARAMETERS[name]} {value:g}")
    return "\n".join(lines) + "\n"
