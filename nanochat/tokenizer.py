"""Converts texts to tokens and back, and renders conversations with a mask of trained tokens.

A tokenizer is a vocabulary of byte sequences, learned by byte pair encoding, followed by a few
special tokens that mark who speaks. The whole vocabulary is one file, tokenizer.json. data/bpe.py
chooses the library that learns and applies the merges.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar

import numpy as np

from nanochat.common import UserError, base_dir, tr, write_atomic, write_json
from nanochat.data import bpe, tokenizer_file
from nanochat.data.conversation import Conversation, Message, alternating_turns
from nanochat.data.limits import cores
from nanochat.data.tokenizer_file import FILE_NAME

# The patterns that cut text into pieces before merging. A pattern added here is accepted by
# `--pattern NAME`. It must match every character of any text, which a test checks.
_ENDINGS = r"'(?i:[sdmt]|ll|ve|re)"
_WORD = r"[^\r\n\p{L}\p{N}]?+"
_PAIR = r"|\p{N}{1,2}"
_REST = r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
PATTERNS = {
    # GPT-4's pattern, but with at most two digits in a piece, so that numbers do not fill a small
    # vocabulary.
    "nanochat": _ENDINGS + "|" + _WORD + r"\p{L}+" + _PAIR + _REST,
    # A run of Han letters is a separate piece, so that no punctuation mark sticks to it.
    "han": _ENDINGS + r"|\p{Han}+|" + _WORD + r"(?:(?!\p{Han})\p{L})+" + _PAIR + _REST,
    # The same, with at most four letters in a piece.
    "han4": _ENDINGS + r"|\p{Han}{1,4}|" + _WORD + r"(?:(?!\p{Han})\p{L})+" + _PAIR + _REST,
    # The pattern of Qwen2 and Qwen3, where each digit is a piece. Programs that know those models
    # by name, such as llama.cpp and Ollama, split text in this way. It is written so that rustbpe
    # recognises it and uses its hand-written splitter.
    "qwen2": _ENDINGS + "|" + _WORD + r"\p{L}+|\p{N}{1,1}" + _REST,
}
DEFAULT_PATTERN = "nanochat"

# The roles of the special tokens. Other files ask for a token by its role; only this file and
# tokenizer.json know how it is spelled.
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

BYTES = 256
MOST_TOKENS = (1 << 31) - 1  # the largest vocabulary that rustbpe can number
# The longest text that is encoded in one call, in characters. This file cuts longer texts first,
# whichever encoder is used. fancy-regex, which tiktoken and the published rustbpe use, keeps one
# backtracking entry per character of a run of spaces, and gives up near a million. Only the pieces
# next to a cut can differ from those of the uncut text.
LONGEST_TEXT = 200_000


def tokenizer_dir(corpus_name: str) -> Path:
    """Return the folder of the tokenizer that was trained on a corpus."""
    return base_dir() / "tokenizer" / corpus_name


@dataclass(frozen=True)
class Rendered:
    """A conversation as tokens, with a mask that is 1 for those that the model learns to write."""

    ids: list[int]
    mask: list[int]


class Tokenizer:
    """A vocabulary: byte sequences in the order in which they were learned, then special tokens."""

    # What the tokenizers of published models (checkpoint_manager/huggingface/tokenizer.py) may do
    # differently:
    marks_begin = True  # every conversation begins with bos
    adds_bos = True  # every plain text begins with bos
    takes_system = False  # there is no mark for system text, which goes in front of a question
    takes_tools = False  # there is no mark for the functions that a model may call
    takes_options = False  # there is no chat template that has variables
    thinks_by_default: bool | None = None  # there is no switch for thoughts
    call_format: str | None = None  # there is no format for calls of functions
    thought_marks: tuple[str, str] | None = None  # there are no marks around thoughts
    strips_space = False  # decoding keeps a space at the beginning of a text
    sampling: ClassVar[Mapping[str, float]] = {}  # there are no settings of a publisher for chats

    def __init__(
        self,
        ranks: Sequence[bytes],
        pattern: str,
        regex: str,
        specials: dict[str, str] | None = None,
    ):
        """Create a tokenizer from a learned vocabulary.

        `ranks[i]` holds the bytes of token i. `pattern` is the name of the split pattern, and
        `regex` is its regular expression. `specials` maps each role to the spelling of its token,
        which is <|role|> by default.
        """
        self.pattern = pattern
        self.regex = regex
        self._ranks = list(ranks)
        self._spellings = specials or {role: f"<|{role}|>" for role in ROLES}
        self._ids = {role: len(ranks) + i for i, role in enumerate(self._spellings)}
        self.vocab_size = len(ranks) + len(self._ids)
        self.bos = self._ids["bos"]
        self.stops = frozenset({self._ids["assistant_end"], self.bos})  # each of them ends a reply
        self.border: int | None = self._ids["user_start"]  # conversations may be cut at it
        self.hash = tokenizer_file.digest(self._content())
        self.chat_hash = self.hash  # decides which tokens a conversation becomes
        self._encoder = bpe.encoder(ranks, regex)
        self._bytes = dict(enumerate(ranks))
        for role, token in self._ids.items():
            self._bytes[token] = self._spellings[role].encode()

    # --- training and files ----------------------------------------------------------------------

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        pattern: str = DEFAULT_PATTERN,
        progress: Callable[[str, int], None] | None = None,
    ) -> "Tokenizer":
        """Learn a vocabulary of exactly `vocab_size` tokens, and return its tokenizer.

        `vocab_size` includes the special tokens. Unless the published rustbpe is installed,
        `progress` is called with ("read", texts so far), where the pieces of a long text count
        separately, and ("merge", tokens so far).

        Raises UserError (exit code 2) if the pattern is unknown, or if `vocab_size` is too small
        for the bytes and the special tokens or too large for rustbpe. Raises UserError if rustbpe
        is missing, if a text is not a string of valid Unicode, or if the texts do not yield that
        many merges.
        """
        _check_request(vocab_size, pattern)
        regex = PATTERNS[pattern]
        pieces = (piece for text in bpe.checked(texts) for piece in _pieces(text))
        ranks = bpe.train(pieces, vocab_size - len(ROLES), regex, progress)
        learned_size = len(ranks) + len(ROLES)
        if learned_size < vocab_size:
            raise UserError(
                tr(
                    "the text is too small for a vocabulary of {vocab_size:,}: it gives at "
                    "most {learned_size:,} tokens. Use --vocab_size {learned_size} or less, "
                    "add more text, or read more of each document with a larger --doc_cap.",
                    vocab_size=vocab_size,
                    learned_size=learned_size,
                )
            )
        return cls(ranks, pattern, regex)

    def save(self, folder: Path) -> Path:
        """Write `tokenizer.json` into a folder, and return the path of the file."""
        path = folder / FILE_NAME
        write_json(path, {**self._content(), "sha256": self.hash})
        return path

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Return the tokenizer in a folder's `tokenizer.json`.

        Raises UserError if the file is missing (exit code 2), damaged or of another format.
        """
        path = folder / FILE_NAME
        train_command = f"python -m scripts.tok_train --data {quote(folder.name)}"
        if not path.exists():
            raise UserError(
                tr(
                    "there is no tokenizer at {path}. Train it first: {train_command}",
                    path=path,
                    train_command=train_command,
                ),
                exit_code=2,
            )
        remedy = tr(
            "Delete the file and train the tokenizer again: {train_command}",
            train_command=train_command,
        )
        content = tokenizer_file.read(path, remedy)
        with tokenizer_file.refuses_damage(path, remedy):
            ranks = tokenizer_file.ranks_in(content)
            return cls(ranks, content["pattern"], content["regex"], content["specials"])

    def export(self, folder: Path) -> list[Path]:
        """Write the vocabulary in the formats of other libraries, and return the paths.

        `vocabulary.tiktoken` holds the tokens for tiktoken, which also needs the split pattern
        `self.regex`; `huggingface/tokenizer.json` is complete for the tokenizers library. Both give
        the same tokens as encode() for texts of at most 200,000 characters (LONGEST_TEXT); encode()
        cuts longer ones first.
        """
        huggingface = bpe.huggingface_json(self._ranks, self.regex, self.specials)
        contents = {
            folder / "vocabulary.tiktoken": bpe.tiktoken_file(self._ranks),
            folder / "huggingface" / FILE_NAME: huggingface,
        }
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
        return list(contents)

    def _content(self) -> dict[str, Any]:
        """Return everything that defines this vocabulary; `hash` is its digest."""
        return tokenizer_file.content(self.pattern, self.regex, self._spellings, self._ranks)

    # --- text ------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, treating the spelling of a special token as ordinary text.

        An unpaired surrogate, which a browser can send, becomes U+FFFD.
        """
        if len(text) <= LONGEST_TEXT:
            return self._encoder.encode(text)
        return [token for piece in _pieces(text) for token in self._encoder.encode(piece)]

    def encode_after(self, text: str, mark: bool) -> list[int]:
        """Return the tokens of a text that follows a special token if `mark`, else other text.

        Both cases give the tokens of encode(). Tokenizers of some published models differ.
        """
        return self.encode(text)

    def encode_reply(self, text: str) -> list[int]:
        """Return the tokens of the beginning of a reply, which are those of encode()."""
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str], threads: int | None = None) -> list[list[int]]:
        """Return the tokens of each text, encoded in parallel by threads that release the GIL.

        If any text has more than 200,000 characters (LONGEST_TEXT), all are encoded one by one.
        """
        if _all_short(texts):
            return self._encoder.encode_batch(texts, threads or cores())
        return [self.encode(text) for text in texts]

    def encode_joined(
        self,
        texts: Sequence[str],
        threads: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all texts in one array, and the number of tokens of each text.

        The array has an unsigned type and holds text after text; the counts are int64 (texts,). The
        tokens are those of encode_batch(). This repository's rustbpe creates the array without
        Python lists.
        """
        if _all_short(texts):
            return self._encoder.encode_joined(list(texts), threads or cores())
        pieces: list[str] = []
        text_numbers: list[int] = []  # for each piece, the index of its text
        for number, text in enumerate(texts):
            for piece in _pieces(text):
                pieces.append(piece)
                text_numbers.append(number)
        tokens, piece_lengths = self._encoder.encode_joined(pieces, threads or cores())
        lengths = np.zeros(len(texts), np.int64)
        np.add.at(lengths, text_numbers, piece_lengths)
        return tokens, lengths

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of a sequence of tokens, in which a special token gives its spelling.

        Raises KeyError if a token is not in the vocabulary.
        """
        return b"".join(map(self._bytes.__getitem__, ids))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of tokens, which must be in the vocabulary.

        Bytes that are not valid UTF-8, such as half a character, become U+FFFD.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def special(self, role: str) -> int:
        """Return the ID of the special token for `role`, such as `assistant_end`.

        Raises KeyError if the role is unknown.
        """
        return self._ids[role]

    @property
    def specials(self) -> dict[str, int]:
        """The special tokens, as a dict from spelling to ID."""
        return {self._spellings[role]: token for role, token in self._ids.items()}

    def token_bytes(self) -> np.ndarray:
        """Return the length in bytes of every token, int32 (V,).

        The length of a special token is 0, because it stands for no text.
        """
        lengths = [len(token) for token in self._ranks] + [0] * len(self._ids)
        return np.array(lengths, dtype=np.int32)

    # --- conversations ---------------------------------------------------------------------------

    def render(self, conversation: Conversation) -> Rendered:
        """Return a whole conversation as tokens, with a mask of those that are trained.

        The assistant learns to write its words, its tool calls with both marks, and the end mark.
        It does not learn its start mark (which the program adds), the output of tools, the first
        `prompt_turns` turns, or turns with `trained=False`. Raises UserError if the turns are not
        in order; see alternating_turns().
        """
        turns = alternating_turns(conversation)
        merged_turns = len(conversation.messages) - len(turns)  # 1 if a system turn was merged
        prompt_turns = conversation.prompt_turns - merged_turns
        ids = [self.bos]
        mask = [0]
        for number, message in enumerate(turns):
            trained = message.trained and number >= prompt_turns
            for tokens, mask_value in self._render_turn(message, int(trained)):
                ids.extend(tokens)
                mask.extend([mask_value] * len(tokens))
        return Rendered(ids, mask)

    def _render_turn(self, message: Message, trained: int) -> Iterator[tuple[list[int], int]]:
        """Yield (tokens, mask value) for each piece of a turn, in order."""
        if message.role == "user":
            yield self._enclosed("user", message.text), 0
            return
        yield [self.special("assistant_start")], 0
        for part in message.parts:
            if part.kind == "text":
                yield self.encode(part.text), trained
            elif part.kind == "python":
                yield self._enclosed("python", part.text), trained
            else:
                yield self._enclosed("output", part.text), 0
        yield [self.special("assistant_end")], trained

    def _enclosed(self, kind: str, text: str) -> list[int]:
        return [self.special(f"{kind}_start"), *self.encode(text), self.special(f"{kind}_end")]

    def render_prompt(self, conversation: Conversation) -> list[int]:
        """Return the tokens of a conversation, then the mark that opens a reply.

        A final assistant turn is left out. Raises UserError if the conversation has no user turn or
        its turns are not in order.
        """
        if not any(message.role == "user" for message in conversation.messages):
            raise UserError(
                tr(
                    "a prompt needs a user turn, got a conversation without one; add what "
                    "the user says"
                )
            )
        return [*self.render(conversation.prompt).ids, self.special("assistant_start")]

    def render_as_sent(self, conversation: Conversation) -> None:
        """Return None, because this format cannot express turns in an unusual order.

        The chat templates of published models can.
        """


# --- checks of settings --------------------------------------------------------------------------


def _check_request(vocab_size: int, pattern: str) -> None:
    """Raise UserError (exit code 2) if no tokenizer can be trained with these settings."""
    if pattern not in PATTERNS:
        names = ", ".join(PATTERNS)
        raise UserError(
            tr(
                "--pattern must be one of {names}, got {pattern!r}",
                names=names,
                pattern=pattern,
            ),
            exit_code=2,
        )
    smallest_size = BYTES + len(ROLES)
    if vocab_size < smallest_size:
        raise UserError(
            tr(
                "the vocabulary must hold at least {smallest_size} tokens ({bytes} bytes "
                "and {roles_count} special tokens), got {vocab_size}; choose a larger "
                "--vocab_size",
                smallest_size=smallest_size,
                bytes=BYTES,
                roles_count=len(ROLES),
                vocab_size=vocab_size,
            ),
            exit_code=2,
        )
    if vocab_size > MOST_TOKENS:
        raise UserError(
            tr(
                "--vocab_size must be at most {most_tokens:,}, got {vocab_size:,}",
                most_tokens=MOST_TOKENS,
                vocab_size=vocab_size,
            ),
            exit_code=2,
        )


# --- texts ---------------------------------------------------------------------------------------


def _all_short(texts: Sequence[str]) -> bool:
    return all(len(text) <= LONGEST_TEXT for text in texts)


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces that are short enough for the regular expression."""
    for start in range(0, len(text), LONGEST_TEXT):
        yield text[start : start + LONGEST_TEXT]
