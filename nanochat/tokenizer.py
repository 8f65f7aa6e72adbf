"""Text to tokens and back, and conversations to tokens with masks. A vocabulary is one JSON file."""

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from nanochat.common import UserError, base_dir, read_json, write_atomic, write_json
from nanochat.data import bpe
from nanochat.data.conversation import Conversation, Message, user

# How text is cut into pieces before merging. To add a pattern, add it here: `--pattern NAME` then accepts it. A pattern
# must match every character of any text; a test checks that.
_ENDINGS, _WORD = r"'(?i:[sdmt]|ll|ve|re)", r"[^\r\n\p{L}\p{N}]?+"
_PAIR = r"|\p{N}{1,2}"
_REST = r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
PATTERNS = {
    # The shape of GPT-4's pattern, but at most two digits to a piece, so that numbers do not fill a small vocabulary.
    "nanochat": _ENDINGS + "|" + _WORD + r"\p{L}+" + _PAIR + _REST,
    # A run of Han letters is a separate piece, so that no punctuation mark sticks to it.
    "han": _ENDINGS + r"|\p{Han}+|" + _WORD + r"(?:(?!\p{Han})\p{L})+" + _PAIR + _REST,
    # The same, with at most four letters in a piece.
    "han4": _ENDINGS + r"|\p{Han}{1,4}|" + _WORD + r"(?:(?!\p{Han})\p{L})+" + _PAIR + _REST,
    # The pieces of Qwen2 and 3, where each digit is a piece: programs that know those models by name, such as llama.cpp
    # and Ollama, split text like this. Spelled so that rustbpe knows it by hand.
    "qwen2": _ENDINGS + "|" + _WORD + r"\p{L}+|\p{N}{1,1}" + _REST,
}
DEFAULT_PATTERN = "nanochat"

# The roles of the special tokens. All other files ask for a token by its role; only this file and tokenizer.json know
# how the token is spelled.
ROLES = (
    "bos",
    "user_start",
    "user_end",
    "assistant_start",
    "assistant_end",
    "python_start",
    "python_end",
    "output_start",
    "output_end",
)

FORMAT = "nanochat-tokenizer"
VERSION = 1
FILE_NAME = "tokenizer.json"
BYTES = 256
MOST_TOKENS = (1 << 31) - 1  # that rustbpe numbers
# fancy-regex, which tiktoken and the published rustbpe use, keeps one backtracking entry per character of a run of
# spaces and gives up near a million. So longer texts are cut here first, with every encoder, and only the pieces beside
# a cut can differ from those of the uncut text.
LONGEST_TEXT = 200_000


def tokenizer_dir(corpus_name: str) -> Path:
    """The folder of the tokenizer that was trained on a corpus."""
    return base_dir() / "tokenizer" / corpus_name


@dataclass(frozen=True)
class Rendered:
    """A conversation as tokens; `mask` is 1 for each token that the assistant is trained to write, 0 elsewhere."""

    ids: list[int]
    mask: list[int]


class Tokenizer:
    """A vocabulary: byte sequences in order of rank, then the special tokens."""

    def __init__(
        self,
        ranks: Sequence[bytes],
        pattern: str,
        regex: str,
        specials: dict[str, str] | None = None,
    ):
        """`ranks[i]` holds the bytes of token i; `specials` maps each role to the spelling of its token."""
        self.pattern = pattern
        self.regex = regex
        self._ranks = list(ranks)
        self._spellings = specials or {role: f"<|{role}|>" for role in ROLES}
        self._ids = {role: len(ranks) + i for i, role in enumerate(self._spellings)}
        self.vocab_size = len(ranks) + len(self._ids)
        self.bos = self._ids["bos"]
        self.stops = frozenset(
            {self._ids["assistant_end"], self.bos}
        )  # any of these tokens ends a reply
        self.marks_begin = True  # every text and conversation begins with bos
        self.takes_system = self.takes_tools = (
            False  # no mark of their own: system text goes in front of a question
        )
        self.border: int | None = self._ids["user_start"]  # where a conversation may be cut
        self.hash = _digest(self._content())
        self._encoder = bpe.encoder(ranks, regex)
        self._bytes = dict(enumerate(ranks))
        self._bytes.update(
            (number, self._spellings[role].encode()) for role, number in self._ids.items()
        )

    # --- training and files ----------------------------------------------------------------------

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        pattern: str = DEFAULT_PATTERN,
        progress: Callable[[str, int], None] | None = None,
    ) -> "Tokenizer":
        """Learn a vocabulary of exactly `vocab_size` tokens, including the special tokens.

        `progress` is called with ("read", texts so far) and ("merge", tokens so far), unless the published rustbpe is
        installed.

        UserError if the pattern is unknown, if the size is too small for the bytes and the special tokens, if a text
        is not valid Unicode, or if the texts do not give that many merges.
        """
        if pattern not in PATTERNS:
            raise UserError(
                f"--pattern must be one of {', '.join(PATTERNS)}, got {pattern!r}", exit_code=2
            )
        smallest = BYTES + len(ROLES)
        if vocab_size < smallest:
            raise UserError(
                f"the vocabulary must hold at least {smallest} tokens ({BYTES} bytes and {len(ROLES)} special "
                f"tokens), got {vocab_size}; choose a larger --vocab_size",
                exit_code=2,
            )
        if vocab_size > MOST_TOKENS:
            raise UserError(
                f"--vocab_size must be at most {MOST_TOKENS:,}, got {vocab_size:,}", exit_code=2
            )
        ranks = bpe.train(_checked(texts), vocab_size - len(ROLES), PATTERNS[pattern], progress)
        largest = len(ranks) + len(ROLES)
        if largest < vocab_size:
            raise UserError(
                f"the text is too small for a vocabulary of {vocab_size:,}: it gives at most {largest:,} tokens. "
                f"Use --vocab_size {largest} or less, or add more text."
            )
        return cls(ranks, pattern, PATTERNS[pattern])

    def save(self, folder: Path) -> Path:
        """Write `tokenizer.json` into a folder and return its path."""
        path = folder / FILE_NAME
        write_json(path, {**self._content(), "sha256": self.hash})
        return path

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json` from a folder. UserError if it is missing (code 2) or damaged."""
        path = folder / FILE_NAME
        make = f"python -m scripts.tok_train --data {quote(folder.name)}"
        if not path.exists():
            raise UserError(f"there is no tokenizer at {path}. Train it first: {make}", 2)
        again = f"Delete the file and train the tokenizer again: {make}"
        try:
            content = read_json(path)
        except UserError as failure:
            raise UserError(f"{path} is damaged: {failure.__cause__}. {again}") from failure
        try:
            expected = content.pop("sha256")
            if content["format"] != FORMAT or content["version"] != VERSION:
                raise UserError(
                    f"{path} has format {content['format']} {content['version']}, but this program reads "
                    f"{FORMAT} {VERSION}. {again}"
                )
            if _digest(content) != expected:
                raise UserError(
                    f"{path} is damaged: its content does not have the SHA-256 {expected}. {again}"
                )
            ranks = [base64.b64decode(token, validate=True) for token in content["ranks"]]
            return cls(ranks, content["pattern"], content["regex"], content["specials"])
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as failure:
            raise UserError(f"{path} is damaged: {failure!r}. {again}") from failure

    def export(self, folder: Path) -> list[Path]:
        """Write the vocabulary in the formats of other libraries, and return the paths.

        `vocabulary.tiktoken` holds the tokens for tiktoken, which also needs the split pattern `self.regex`;
        `huggingface/tokenizer.json` is complete for the tokenizers library. Both give the same tokens as `encode`.
        """
        specials = {self._spellings[role]: number for role, number in self._ids.items()}
        contents = {
            folder / "vocabulary.tiktoken": bpe.tiktoken_file(self._ranks),
            folder / "huggingface" / FILE_NAME: bpe.huggingface_json(
                self._ranks, self.regex, specials
            ),
        }
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
        return list(contents)

    def _content(self) -> dict[str, Any]:
        """Everything that defines this vocabulary; `hash` is its digest."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "pattern": self.pattern,
            "regex": self.regex,
            "specials": self._spellings,
            "ranks": [base64.b64encode(token).decode() for token in self._ranks],
        }

    # --- text ------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. A special token that is spelled out in the text is encoded as ordinary text.

        Half of a surrogate pair, which a browser can send, becomes U+FFFD.
        """
        if len(text) <= LONGEST_TEXT:
            return self._encoder.encode(text)
        return [token for piece in _pieces(text) for token in self._encoder.encode(piece)]

    def encode_batch(self, texts: Sequence[str], threads: int | None = None) -> list[list[int]]:
        """The tokens of each text, encoded in parallel by threads that release the GIL."""
        if all(len(text) <= LONGEST_TEXT for text in texts):
            return self._encoder.encode_batch(texts, threads or cores())
        return [self.encode(text) for text in texts]

    def encode_joined(
        self, texts: Sequence[str], threads: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of `encode_batch` in one array of an unsigned type, text after text, and the number of tokens of
        each text, int64 (texts,). This repository's rustbpe makes the array without Python lists."""
        pieces = [[text] if len(text) <= LONGEST_TEXT else list(_pieces(text)) for text in texts]
        tokens, lengths = self._encoder.encode_joined(
            [piece for some in pieces for piece in some], threads or cores()
        )
        if len(lengths) == len(texts):
            return tokens, lengths
        of_texts = np.zeros(len(texts), np.int64)
        np.add.at(
            of_texts, np.repeat(np.arange(len(texts)), [len(some) for some in pieces]), lengths
        )
        return tokens, of_texts

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of tokens; a special token gives its spelling. KeyError for a number outside the vocabulary."""
        return b"".join(map(self._bytes.__getitem__, ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens. Bytes that are not valid UTF-8, such as half a character, become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def special(self, role: str) -> int:
        """The token of a role, such as `assistant_end`. KeyError for an unknown role."""
        return self._ids[role]

    def token_bytes(self) -> np.ndarray:
        """The length of every token in bytes, int32 (V,); 0 for special tokens, which stand for no text."""
        return np.array(
            [len(token) for token in self._ranks] + [0] * len(self._ids), dtype=np.int32
        )

    # --- conversations ---------------------------------------------------------------------------

    def render(self, conversation: Conversation) -> Rendered:
        """A whole conversation as tokens, with a mask of the tokens that the assistant is trained to write.

        The assistant is trained to write its words, its tool calls with both marks, and the end mark. It is not
        trained to write its start mark, which the program adds, the output of a tool, the turns that are given, or
        turns that are not to be trained. UserError if the turns are not in order.
        """
        ids, mask = [self.bos], [0]
        turns = _turns(conversation)
        given = conversation.given - (len(conversation.messages) - len(turns))

        def add(tokens: Sequence[int], trained: int) -> None:
            ids.extend(tokens)
            mask.extend([trained] * len(tokens))

        def around(kind: str, text: str) -> list[int]:
            return [self.special(f"{kind}_start"), *self.encode(text), self.special(f"{kind}_end")]

        for n, message in enumerate(turns):
            if message.role == "user":
                add(around("user", message.text), 0)
                continue
            trained = int(message.trained and n >= given)
            add([self.special("assistant_start")], 0)
            for part in message.parts:
                if part.kind == "text":
                    add(self.encode(part.text), trained)
                elif part.kind == "python":
                    add(around("python", part.text), trained)
                else:
                    add(around("output", part.text), 0)
            add([self.special("assistant_end")], trained)
        return Rendered(ids, mask)

    def render_prompt(self, conversation: Conversation) -> list[int]:
        """The prompt of a model: the conversation without a last assistant turn, then the mark that opens the reply."""
        if not any(message.role == "user" for message in conversation.messages):
            raise UserError(
                "a prompt needs a user turn, got a conversation without one; add what the user says"
            )
        return [*self.render(conversation.prompt).ids, self.special("assistant_start")]

    def render_as_sent(self, conversation: Conversation) -> None:
        """None: unlike templates of published models, this format has no place for turns in another order."""


def cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _digest(content: dict[str, Any]) -> str:
    """The SHA-256 of a vocabulary's content; the layout of the file does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces that are short enough for the regular expression."""
    return (text[start : start + LONGEST_TEXT] for start in range(0, len(text), LONGEST_TEXT))


def _checked(texts: Iterable[str]) -> Iterator[str]:
    """Check that training texts are strings of valid Unicode, and cut long ones into pieces."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(
                f"training texts must be strings, but document {number} is {type(text).__name__}. Convert or remove it."
            )
        check_unicode(text, f"document {number}")
        yield from _pieces(text)


def check_unicode(text: str, name: str) -> None:
    """Raise UserError if a training text holds half of a surrogate pair."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        raise UserError(
            f"training text must be valid Unicode, but {name} has half of a surrogate pair "
            f"(U+{ord(text[failure.start]):04X}) at character {failure.start}. Remove that character and try again."
        ) from None


def _turns(conversation: Conversation) -> tuple[Message, ...]:
    """The turns, with a system turn merged into the user turn after it. UserError unless user and assistant alternate,
    beginning with the user."""
    messages = conversation.messages
    if not messages:
        raise UserError("a conversation needs at least one turn, got none; add a user turn")
    if messages[0].role == "system":
        if len(messages) < 2 or messages[1].role != "user":
            raise UserError(
                f"a system turn must be followed by a user turn, got {_roles(messages)}; reorder the turns"
            )
        messages = (user(f"{messages[0].text}\n\n{messages[1].text}"), *messages[2:])
    for i, message in enumerate(messages):
        if message.role != ("user", "assistant")[i % 2]:
            raise UserError(
                f"after an optional system turn, user and assistant alternate, got {_roles(messages)}; reorder them"
            )
    return messages


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(message.role for message in messages)
