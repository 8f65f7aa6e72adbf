"""The tokenizer.json of a published model, with its chat template, behind the members that our own tokenizer has."""

import re
import reprlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.checkpoint_manager.huggingface.template import ChatTemplate, Messages, chatml
from nanochat.common import UserError, fsync_path, read_json, sha256_of
from nanochat.data.bpe import letters_for_bytes
from nanochat.data.conversation import Conversation, Message, user
from nanochat.tokenizer import Rendered

FILE_NAME = "tokenizer.json"
# What belongs to a published model beside its weights.
BESIDE = (
    FILE_NAME,
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
END_OF_TURN = "<|im_end|>"
# Roles of our own tokenizer that published models do not have, in the order in which they get free rows.
ROWLESS = (
    "output_start",
    "output_end",
    "python_start",
    "python_end",
    "user_start",
    "user_end",
    "assistant_start",
)
# Letters for private use, between which a rendered text shows where a special token was spelled out by a user, and
# where the words of the assistant begin and end. Texts that hold these letters themselves are spelled out too.
OPEN, CLOSE, BEGIN, END = "\ue000", "\ue001", "\ue002", "\ue003"


class FolderTokenizer:
    """The tokenizer of a published model.

    `vocab_size` is the number of rows of the model's embedding, which is usually larger than the vocabulary. `bos`
    begins a text: the publisher's own mark, or, as Qwen has none, the mark that ends a document. `stops` end a reply.
    """

    marks_begin = False  # a conversation begins with its template's first token
    border: int | None = None  # a conversation that is too long is cut to its beginning

    def __init__(self, folder: Path, vocab_size: int):
        """UserError if tokenizer.json is missing, damaged, of an unknown kind, or larger than the embedding."""
        path = folder / FILE_NAME
        if not path.is_file():
            raise UserError(
                f"{folder} has no {FILE_NAME}. Copy the model again, with its tokenizer"
            )
        import tokenizers  # not at the top: only published models need it

        content = read_json(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
            self._added = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
            special = {token["content"] for token in content["added_tokens"] if token["special"]}
            kind = content["decoder"]["type"]
        except Exception as failure:  # the library raises Exception itself
            raise UserError(
                f"{path} is damaged: {failure}. Copy the model again from its source"
            ) from failure
        if kind != "ByteLevel":
            raise UserError(
                f"{path} is a vocabulary of kind {kind}; only byte-level ones are known. Use another model"
            )
        self.vocab_size, self.hash, self.folder = vocab_size, sha256_of(path), folder
        self._last = max(
            self._tokenizer.get_vocab().values()
        )  # kept: get_vocab() copies the whole vocabulary
        if self._last >= vocab_size:
            raise UserError(
                f"{path} has a token {self._last:,}, and the embedding of the model has only {vocab_size:,} rows: they "
                "do not belong together. Copy the model again from its source"
            )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = (
            True  # a special token that is spelled out in a text is ordinary text
        )
        self._specials = {text: self._added[text] for text in special}
        self._split = re.compile(
            "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        )
        self._names = self._read_names()
        self.stops = self._read_stops()
        begins = (self.named("bos_token"), self._specials.get("<|endoftext|>"), min(self.stops))
        self.bos = next(number for number in begins if number is not None)
        self.stops |= {self.bos, self.special("assistant_end")}

    # --- files -----------------------------------------------------------------------------------

    def save(self, folder: Path) -> Path:
        """Copy the publisher's files, with the configuration of the model, into a folder; returns the vocabulary's."""
        for name in BESIDE:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)
                fsync_path(folder / name)
        return folder / FILE_NAME

    def _read(self, name: str) -> Mapping[str, Any]:
        path = self.folder / name
        content = read_json(path) if path.is_file() else {}
        if not isinstance(content, dict):
            raise UserError(
                f"{path} is damaged: it is no object. Copy the model again from its source"
            )
        return content

    def _read_names(self) -> dict[str, str]:
        """The spelling of bos_token, eos_token, ... where the publisher names one."""
        found = {}
        for name, value in self._read("tokenizer_config.json").items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
        return found

    def named(self, name: str) -> int | None:
        """The token that the publisher names, such as eos_token; None if there is none."""
        return self._added.get(self._names.get(name, ""))

    def _read_stops(self) -> frozenset[int]:
        """The publisher's tokens that end a reply: those of generation_config.json, the end of a text and of a turn."""
        given = self._read("generation_config.json").get("eos_token_id", [])
        listed = given if isinstance(given, list) else [given]
        # A token beyond the embedding is left out: the model cannot choose it.
        stops = {
            token for token in listed if isinstance(token, int) and 0 <= token < self.vocab_size
        }
        stops |= {
            number
            for number in (self.named("eos_token"), self._specials.get(END_OF_TURN))
            if number is not None
        }
        if not stops:
            raise UserError(
                f"{self.folder} names no token that ends a reply. Copy the model again from its source"
            )
        return frozenset(stops)

    @property
    def template_source(self) -> str | None:
        """The Jinja text of the chat template of the model, if it has one. UserError if it is damaged."""
        path = self.folder / "chat_template.jinja"
        try:
            source = path.read_text(encoding="utf-8") if path.is_file() else None
            if not source:
                path = self.folder / "tokenizer_config.json"
                source = self._read(path.name).get("chat_template")
            if isinstance(source, list):  # several templates, of which the default one is for chats
                source = {one["name"]: one["template"] for one in source}.get("default")
            if source is not None and not isinstance(source, str):
                raise TypeError(f"it is {reprlib.repr(source)}, expected a text")
        except (UnicodeDecodeError, KeyError, TypeError) as failure:
            raise UserError(
                f"the chat template in {path} cannot be read ({type(failure).__name__}: {failure}). "
                "Copy the model again from its source"
            ) from failure
        return source or None

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template of the model; None where it has none, and ChatML is used."""
        source = self.template_source
        return None if source is None else ChatTemplate(source, self._names, str(self.folder))

    @cached_property
    def takes_system(self) -> bool:
        """Whether the chat template has a place for a system message, beside the first question."""
        question, text = {"role": "user", "content": "Q"}, "S"
        given, merged = (
            [{"role": "system", "content": text}, question],
            [{"role": "user", "content": f"{text}\n\nQ"}],
        )
        try:
            rendered = self._text(given, reply=True)
            return rendered not in (
                self._text([question], reply=True),
                self._text(merged, reply=True),
            )
        except UserError:
            return False

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template tells the model of functions that it may call."""
        if self.template is None:
            return False
        question, tool = (
            {"role": "user", "content": "Q"},
            {"name": "a_tool", "parameters": {"type": "object"}},
        )
        tools = [{"type": "function", "function": {**tool, "description": ""}}]
        try:
            return tool["name"] in self.template.render([question], True, tools=tools)
        except UserError:
            return False

    # --- text ------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. A special token that is spelled out in the text is encoded as ordinary text."""
        return self._tokenizer.encode(
            text.encode("utf-8", "replace").decode(), add_special_tokens=False
        ).ids

    def encode_batch(self, texts: Sequence[str], threads: int | None = None) -> list[list[int]]:
        """The tokens of each text; the library chooses the number of threads."""
        return [self.encode(text) for text in texts]

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """The bytes of every token; rows of the embedding that no token uses have none."""
        byte_of = {letter: byte for byte, letter in enumerate(letters_for_bytes())}
        found = {number: b"" for number in range(self.vocab_size)}
        for text, number in self._tokenizer.get_vocab().items():
            found[number] = (
                text.encode() if text in self._added else bytes(byte_of[letter] for letter in text)
            )
        return found

    def token_bytes(self) -> np.ndarray:
        """The length of every token in bytes, int32 (V,); 0 for special tokens, which stand for no text."""
        added = set(self._added.values())
        return np.array(
            [0 if i in added else len(self._bytes[i]) for i in range(self.vocab_size)], np.int32
        )

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of tokens; a special token gives its spelling. KeyError for a number outside the embedding."""
        return b"".join(map(self._bytes.__getitem__, ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens. Bytes that are not valid UTF-8, such as half a character, become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def special(self, role: str) -> int:
        """The token of a role of our own tokenizer; -1 where the model has neither a token nor a row of the embedding
        left for it. KeyError for an unknown role."""
        return self._roles[role]

    @cached_property
    def _roles(self) -> dict[str, int]:
        """The token of every role: the model's own where it was exported from here, else a row that no token uses. The
        calculator's marks come first, where only some rows are free."""
        known = {"bos": self.bos, "assistant_end": self._specials.get(END_OF_TURN, min(self.stops))}
        rows = range(self.vocab_size - 1, self._last, -1)
        own = {role: f"<|{role}|>" for role in (*ROWLESS, "assistant_end")}
        return {
            **dict.fromkeys(ROWLESS, -1),
            **dict(zip(ROWLESS, rows, strict=False)),
            **known,
            **{
                role: self._added[spelled]
                for role, spelled in own.items()
                if spelled in self._added
            },
        }

    # --- conversations ---------------------------------------------------------------------------

    def _text(self, messages: Messages, reply: bool) -> str:
        return self.template.render(messages, reply) if self.template else chatml(messages, reply)

    @cached_property
    def _spelled(self) -> list[str]:
        return [*self._specials, OPEN, CLOSE, BEGIN, END]

    def _safe(self, text: str) -> str:
        """A text in which every special token that is spelled out is a number between OPEN and CLOSE."""
        pattern = "|".join(
            re.escape(spelled) for spelled in sorted(self._spelled, key=len, reverse=True)
        )
        return re.sub(pattern, lambda found: f"{OPEN}{self._spelled.index(found[0])}{CLOSE}", text)

    def _pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """A rendered text cut at special tokens and at BEGIN and END, and for each piece whether it is one of these."""
        end = 0
        for found in re.finditer(f"{self._split.pattern}|{BEGIN}|{END}", text):
            if found.start() > end:
                yield text[end : found.start()], False
            yield found[0], True
            end = found.end()
        if end < len(text):
            yield text[end:], False

    def _tokens(self, text: str) -> list[int]:
        """The tokens of a piece without special tokens, in which those that were spelled out are spelled again."""
        whole = re.sub(f"{OPEN}(\\d+){CLOSE}", lambda found: self._spelled[int(found[1])], text)
        return self.encode(whole)

    def render(self, conversation: Conversation) -> Rendered:
        """A whole conversation as tokens, with a mask of the tokens that the assistant is trained to write: its words,
        and the mark that ends its turn, but not the turns that are given or not to be trained. UserError if the
        template refuses the conversation or leaves out its words."""
        trains = [
            message.role == "assistant" and message.trained and n >= conversation.prompt_turns
            for n, message in enumerate(conversation.messages)
        ]
        messages = []
        for message, is_trained in zip(conversation.messages, trains, strict=True):
            text = self._safe(message.text)
            messages.append(
                {"role": message.role, "content": _marked(text) if is_trained else text}
            )
        ids: list[int] = []
        mask: list[int] = []
        trained = ending = False
        for piece, cuts in self._pieces(self._text(messages, reply=False)):
            if cuts and piece in (BEGIN, END):
                trained, ending = piece == BEGIN, piece == END
                continue
            tokens = [self._specials[piece]] if cuts else self._tokens(piece)
            ids += tokens
            mask += [int(trained or (ending and cuts))] * len(tokens)
            ending = False
        if not any(mask) and any(trains):
            raise UserError(
                f"the chat template in {self.folder} leaves out what the assistant says. Remove it"
            )
        return Rendered(ids, mask)

    def render_prompt(self, conversation: Conversation) -> list[int]:
        """The prompt of a model: the conversation without a last assistant turn, then what opens the reply."""
        turns = conversation.prompt.messages
        if len(turns) > 1 and turns[0].role == "system" and not self.takes_system:
            turns = (user(f"{turns[0].text}\n\n{turns[1].text}"), *turns[2:])
        return self._prompt(turns)

    def render_as_sent(self, conversation: Conversation) -> list[int] | None:
        """The prompt of a conversation whose turns come in another order than training data's: several of one role, or
        a later system turn. None if the template refuses such turns, or leaves out one of them."""
        probes = [
            {"role": turn.role, "content": f"Turn {i}."}
            for i, turn in enumerate(conversation.messages)
        ]
        try:
            text = self._text(probes, reply=True)
            complete = all(probe["content"] in text for probe in probes)
            return self._prompt(conversation.messages) if complete else None
        except UserError:
            return None

    def _prompt(self, turns: Sequence[Message]) -> list[int]:
        messages = [{"role": turn.role, "content": self._safe(turn.text)} for turn in turns]
        pieces = self._pieces(self._text(messages, reply=True))
        return [
            token
            for piece, cuts in pieces
            for token in ([self._specials[piece]] if cuts else self._tokens(piece))
        ]


def _marked(text: str) -> str:
    """What the assistant says between BEGIN and END. Templates cut thoughts out, or write them in their own way: BEGIN
    stands at every place where what they keep can begin, and the first one that they keep counts."""
    before, thinks, after = text.strip().partition("</think>")
    if thinks:
        thought = before.removeprefix("<think>").strip("\n")
        return f"{BEGIN}<think>\n{BEGIN}{thought}\n</think>\n\n{BEGIN}{after.lstrip()}{END}"
    return f"{BEGIN}{text.strip()}{END}"
