"""Gives the tokenizer of a published model the interface of our own tokenizer.

The tokenizer is read from tokenizer.json. The chat template turns conversations into text; see
chat_format.py.
"""

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from nanochat.checkpoint_manager.huggingface import answers
from nanochat.checkpoint_manager.huggingface.chat_format import QUESTION, ChatFormat, plain_message
from nanochat.checkpoint_manager.huggingface.folders import COMPANIONS, read_object, refuse_pointer
from nanochat.checkpoint_manager.huggingface.generation import (
    add_end,
    listed_ends,
    sampling_defaults,
)
from nanochat.checkpoint_manager.huggingface.quantised import drop_setting
from nanochat.checkpoint_manager.huggingface.segments import BEGIN, END, Segment, SpecialTokens
from nanochat.checkpoint_manager.huggingface.vocabulary import read_vocabulary
from nanochat.common import UserError, fsync_path, sha256_of, tr
from nanochat.data.bpe import letters_for_bytes
from nanochat.data.conversation import Conversation
from nanochat.tokenizer import Rendered

FILE_NAME = "tokenizer.json"
SPM_NAME = "tokenizer.model"  # the same vocabulary in SentencePiece's own format
# Spellings of the token that ends a turn, in formats where another token ends a whole text.
ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")
# Roles of our own tokenizer that published models lack, in the order in which they get free rows of
# the embedding. The calculator's marks come first.
ROWLESS = (
    "output_start",
    "output_end",
    "python_start",
    "python_end",
    "user_start",
    "user_end",
    "assistant_start",
)


class FolderTokenizer:
    """The tokenizer of a published model, read from the model's folder.

    `vocab_size` is the number of rows of the model's embedding, which is usually larger than the
    vocabulary. `bos` is the token that begins a text: the publisher's own or, for lack of one, the
    token that ends a document or a reply. `adds_bos` says whether the publisher's tokenizer puts
    `bos` before plain texts. `stops` are the tokens that end a reply. `strips_space` says whether a
    text is decoded without the space in front of its first word. `specials` are the special tokens,
    as a dict from spelling to ID.
    """

    marks_begin = False  # a conversation begins with its template's first token
    takes_options = True  # chat templates have variables
    border: int | None = None  # a conversation that is too long keeps its beginning

    def __init__(self, folder: Path, vocab_size: int):
        """Read the tokenizer in a folder.

        Raises UserError if tokenizer.json is missing or of an unknown kind, if a file is damaged,
        if a token has no row in the embedding, or if no token ends a reply.
        """
        path = folder / FILE_NAME
        if not path.is_file() and (folder / SPM_NAME).is_file():
            raise UserError(
                tr(
                    "{folder} has its tokenizer only as {spm_name}, which this program does not read. "
                    "Copy the publisher's {file_name} beside it",
                    folder=folder,
                    spm_name=SPM_NAME,
                    file_name=FILE_NAME,
                )
            )
        if not path.is_file():
            raise UserError(
                tr(
                    "{folder} has no {file_name}. Copy the model again, with its tokenizer",
                    folder=folder,
                    file_name=FILE_NAME,
                )
            )
        refuse_pointer(path)
        self.folder = folder
        self.vocab_size = vocab_size
        self.hash = sha256_of(path)
        self._names = self._read_names()
        self.chat_format = ChatFormat(folder, self._names)
        ends = [self._names.get(name, "") for name in ("bos_token", "eos_token")]
        chats = " ".join([self.chat_format.source or "", *ends])
        reply_ends = {self._names.get("eos_token", ""), *listed_ends(folder)}
        vocabulary = read_vocabulary(path, vocab_size, chats, reply_ends)
        self._tokenizer = vocabulary.tokenizer
        self._pieces = vocabulary.sentence_pieces
        self._added = vocabulary.added
        self.specials = vocabulary.specials
        self._special_tokens = SpecialTokens(vocabulary.specials)
        self._last = vocabulary.last
        self.stops = self._read_stops()
        bos_candidates = (
            self.named("bos_token"),
            self.specials.get("<|endoftext|>"),
            min(self.stops),
        )
        self.bos = next(token for token in bos_candidates if token is not None)
        self.strips_space = self._pieces is not None and self._pieces.strips_space
        self.adds_bos = self._tokenizer.encode("").ids == [self.bos]
        self.stops |= {self.bos, self.special("assistant_end")}

    # --- files -----------------------------------------------------------------------------------

    def save(self, folder: Path) -> Path:
        """Copy the tokenizer and configuration files to a folder.

        generation_config.json also lists the token that ends a reply. Returns the path of the new
        tokenizer.json.
        """
        for name in COMPANIONS:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)
                if name == "config.json":
                    drop_setting(folder / name)
                fsync_path(folder / name)
        add_end(folder, self.special("assistant_end"))
        return folder / FILE_NAME

    def _read_names(self) -> dict[str, str]:
        """Return a dict from token names in tokenizer_config.json (eos_token, ...) to spellings."""
        spellings = {}
        for name, value in read_object(self.folder / "tokenizer_config.json").items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                spellings[name] = text
        return spellings

    def named(self, name: str) -> int | None:
        """Return the token that the publisher calls `name`, such as eos_token, or None."""
        return self._added.get(self._names.get(name, ""))

    def _read_stops(self) -> frozenset[int]:
        """Return the tokens that end a reply, according to the publisher.

        They are the end tokens that generation_config.json lists, or config.json if that file lists
        none, the eos_token of tokenizer_config.json, and the tokens of ENDS_OF_TURN. Raises
        UserError if the model has none of them.
        """
        # Tokens beyond the embedding are left out, because the model cannot choose them.
        stops = set(listed_ends(self.folder)).intersection(range(self.vocab_size))
        ends_of_turn = [self.specials.get(spelling) for spelling in ENDS_OF_TURN]
        named = (self.named("eos_token"), *ends_of_turn)
        stops.update(token for token in named if token is not None)
        if not stops:
            raise UserError(
                tr(
                    "{folder} names no token that ends a reply. Copy the model again from "
                    "its source",
                    folder=self.folder,
                )
            )
        return frozenset(stops)

    @cached_property
    def sampling(self) -> dict[str, float]:
        """The publisher's settings for chats, from generation_config.json; a top_k of 0 means all.

        Raises UserError if one of them is not a number, or is out of range.
        """
        return sampling_defaults(self.folder)

    @cached_property
    def chat_hash(self) -> str:
        """A hash of what makes tokens of a conversation: vocabulary, template, names and ends."""
        facts = (
            self.hash,
            self.chat_format.source,
            sorted(self._names.items()),
            sorted(self.stops),
        )
        return sha256(repr(facts).encode()).hexdigest()

    # --- what the chat template can write; see ChatFormat ----------------------------------------

    @property
    def takes_system(self) -> bool:
        """Whether conversations may begin with a system message."""
        return self.chat_format.takes_system

    @property
    def takes_tools(self) -> bool:
        """Whether a prompt may name the functions that the model may call."""
        return self.chat_format.takes_tools

    @property
    def call_format(self) -> str | None:
        """The form of the model's calls of functions, or None if the server does not read it."""
        return self.chat_format.call_format

    @property
    def thought_marks(self) -> tuple[str, str] | None:
        """The marks around the model's thoughts, or None if it has none."""
        return self.chat_format.thought_marks

    @property
    def thinks_by_default(self) -> bool | None:
        """Whether the model thinks unless it is told not to, or None if there is no switch."""
        return self.chat_format.thinks_by_default

    # --- text ------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        A special token that is spelled out in the text is encoded as ordinary text.
        """
        valid_text = text.encode("utf-8", "replace").decode()
        return self._tokenizer.encode(valid_text, add_special_tokens=False).ids

    def encode_after(self, text: str, mark: bool) -> list[int]:
        """Return the tokens of a text that follows a special token if `mark`, else other text."""
        return self.encode(text) if self._pieces is None else self._pieces.encode_after(text, mark)

    def encode_reply(self, text: str) -> list[int]:
        """Return the tokens of words with which the reply to a prompt begins."""
        if not text:
            return []
        if self._pieces is None:
            return self.encode(self._own_space + text)
        space, after_mark = self._before_reply
        return self._pieces.encode_after(space + text, after_mark)

    @cached_property
    def _before_reply(self) -> tuple[str, bool]:
        """The white space that the template writes before a reply, and whether it follows a mark."""
        prompt = self.chat_format.text([QUESTION], reply=True)
        after_mark = any(prompt.endswith(text) for text in self.specials)
        following = self.chat_format.text(
            [QUESTION, plain_message("assistant", "an_answer")], reply=False
        ).removeprefix(prompt)
        space = following.partition("an_answer")[0]
        return "" if space.strip() else space, after_mark

    def encode_batch(self, texts: Sequence[str], threads: int | None = None) -> list[list[int]]:
        """Return the tokens of each text.

        `threads`, which our own tokenizer has too, has no effect here.
        """
        return [self.encode(text) for text in texts]

    def encode_joined(
        self, texts: Sequence[str], threads: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all texts, one text after another, and the number in each text.

        `threads`, which our own tokenizer has too, has no effect here: the library uses all cores.
        """
        valid_texts = [text.encode("utf-8", "replace").decode() for text in texts]
        encodings = self._tokenizer.encode_batch_fast(valid_texts, add_special_tokens=False)
        lengths = np.array([len(encoding.ids) for encoding in encodings], np.int64)
        tokens = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return np.concatenate([np.zeros(0, np.uint32), *tokens]), lengths

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """The bytes of each token by its ID, which are empty for an unused row of the embedding."""
        byte_of = {letter: byte for byte, letter in enumerate(letters_for_bytes())}
        spellings = dict.fromkeys(range(self.vocab_size), b"")
        for text, token in self._tokenizer.get_vocab().items():
            if self._pieces is not None:
                spellings[token] = self._pieces.spelled(text)
            elif text in self._added:
                spellings[token] = text.encode()
            else:
                spellings[token] = bytes(byte_of[letter] for letter in text)
        return spellings

    def token_bytes(self) -> np.ndarray:
        """Return the length of each token in bytes, as an int32 array (V,).

        Added tokens, such as special ones, have length 0, because they stand for no text.
        """
        lengths = np.array([len(self._bytes[token]) for token in range(self.vocab_size)], np.int32)
        lengths[list(self._added.values())] = 0
        return lengths

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of a sequence of tokens, in which a special token gives its spelling.

        Raises KeyError if a token is outside the embedding.
        """
        return b"".join(self._bytes[token] for token in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of tokens, with U+FFFD for bytes that are invalid UTF-8.

        With `strips_space`, a space at the beginning is left out.
        """
        text = self.decode_bytes(ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_space else text

    def special(self, role: str) -> int:
        """Return the token for a role of our own tokenizer, such as `assistant_end`.

        Returns -1 if the model has neither such a token nor a free row in the embedding. Raises
        KeyError if the role is unknown.
        """
        return self._roles[role]

    @cached_property
    def _roles(self) -> dict[str, int]:
        """The token for each role: the model's own, else an unused row of the embedding, else -1.

        A model exported with our own tokenizer has tokens for all roles.
        """
        roles: dict[str, int] = dict.fromkeys(ROWLESS, -1)
        free_rows = range(self.vocab_size - 1, self._last, -1)
        roles |= zip(ROWLESS, free_rows, strict=False)
        roles["bos"] = self.bos
        roles["assistant_end"] = self._end_of_turn()
        for role in (*ROWLESS, "assistant_end"):
            spelling = f"<|{role}|>"
            if spelling in self.specials:
                roles[role] = self.specials[spelling]
        return roles

    def _end_of_turn(self) -> int:
        """Return the token that ends the assistant's turn.

        It is the first of ENDS_OF_TURN that the chat template has, else the publisher's eos_token,
        else the first token that generation_config.json or config.json lists as an end, and else
        the smallest of `stops`.
        """
        template = self.chat_format.source
        for spelling in ENDS_OF_TURN:
            end = self.specials.get(spelling)
            if end is not None and (template is None or spelling in template):
                return end
        eos = self.named("eos_token")
        if eos is not None:
            return eos
        usable_ends = (end for end in listed_ends(self.folder) if end in self.stops)
        return next(usable_ends, min(self.stops))

    # --- conversations ---------------------------------------------------------------------------

    def _tokens(self, segments: Iterable[Segment]) -> Rendered:
        """Return the tokens of the segments of a conversation, and the mask of the trained ones."""
        if self._pieces is not None:
            return Rendered(*self._pieces.rendered(segments))
        ids: list[int] = []
        mask: list[int] = []
        for segment in segments:
            tokens = self.encode(segment.text) if segment.token is None else [segment.token]
            ids += tokens
            mask += [int(segment.trained)] * len(tokens)
        return Rendered(ids, mask)

    def render(self, conversation: Conversation) -> Rendered:
        """Return a whole conversation as tokens, with a mask of the tokens to train on.

        These are the assistant's words, calls and reasoning and the special token that ends its
        turn, except in the first `prompt_turns` turns and in turns with `trained=False`. Raises
        UserError if the template refuses the conversation or cannot write it, or leaves out all
        words to train on.
        """
        if not self.chat_format.takes_system:
            conversation = answers.without_system(conversation)
        if self.chat_format.takes_one_call:
            conversation = answers.with_single_calls(conversation)
        last = conversation.messages[-1]
        thinks = last.role == "assistant" and last.trained and "</think>" in last.text
        if thinks and not self.chat_format.writes_thoughts:
            raise answers.lost_thoughts(self.folder)
        if conversation.needs_template:
            return self._render_with_calls(conversation)
        messages = []
        has_trained_turn = False
        for number, message in enumerate(conversation.messages):
            text = self._special_tokens.safe(message.text)
            is_reply = message.role == "assistant"
            if is_reply and message.trained and number >= conversation.prompt_turns:
                text = answers.with_ends(text, BEGIN, END)
                has_trained_turn = True
            messages.append(plain_message(message.role, text))
        text = self._after_space.sub(f"\\1{END}", self.chat_format.text(messages, reply=False))
        for own in self._own_beginnings:
            text = text.replace(f"{own}{BEGIN}", f"{BEGIN}{own}")
        rendered = self._tokens(self._special_tokens.segments(text))
        if has_trained_turn and not any(rendered.mask):
            raise answers.silent_template(self.folder)
        return rendered

    @cached_property
    def _after_space(self) -> re.Pattern[str]:
        """Matches END and the white space between it and a token that ends a reply.

        Such white space, as in the template of Llama 2, is part of what the model has to write.
        """
        ends = "|".join(map(re.escape, self._ends)) or "(?!)"
        return re.compile(f"{END}(\\s+)(?={ends})")

    @cached_property
    def _ends(self) -> list[str]:
        """The spellings of the special tokens that end a reply."""
        return [text for text, token in self.specials.items() if token in self.stops]

    @cached_property
    def _own_space(self) -> str:
        """White space that the model has to write before its words, since prompts end before it.

        DeepSeek-LLM's template, for example, ends a prompt with "Assistant:" and writes a space
        before the words. A vocabulary of SentencePiece treats that space in its own way.
        """
        return self._before_reply[0] if self._pieces is None else ""

    @cached_property
    def _own_beginnings(self) -> tuple[str, ...]:
        """What templates write before words of the assistant, and the model has to write itself."""
        opens_thoughts = self.chat_format.opening.endswith(answers.OPENING)
        return (self._own_space,) if opens_thoughts else (self._own_space, answers.OPENING)

    def _render_with_calls(self, conversation: Conversation) -> Rendered:
        """Return what render() does, for a conversation with calls, reasoning or options."""
        self.chat_format.check(conversation)
        options = answers.safe_options(conversation.options, self._special_tokens.safe)
        marked = []
        for number, turn in enumerate(conversation.messages):
            is_trained = turn.role == "assistant" and turn.trained
            index = number if is_trained and number >= conversation.prompt_turns else None
            marked.append(answers.template_message(turn, self._special_tokens.safe, index))
        plain = json.loads(answers.without_marks(json.dumps(marked, ensure_ascii=False)))
        text = self.chat_format.text(plain, reply=False, **options)
        marked_text = self.chat_format.text(marked, reply=False, **options)
        if answers.without_marks(marked_text) != text:
            raise UserError(
                tr(
                    "the chat template in {folder} rewrites what the assistant says, so the "
                    "words to train on cannot be found in its text; use another template",
                    folder=self.folder,
                )
            )
        spans = answers.spans(
            marked_text,
            conversation.messages,
            self.chat_format.opening,
            self._ends,
            self._own_beginnings,
            self.chat_format.call_beginning,
        )
        if marked != plain and not spans:
            raise answers.silent_template(self.folder)
        segments: list[Segment] = []
        position = 0
        for span in [*spans, answers.Span(len(text), len(text))]:
            segments += self._special_tokens.segments(text[position : span.start])
            segments += self._special_tokens.segments(text[span.start : span.end], trained=True)
            position = span.end
        return self._tokens(segments)

    def render_prompt(self, conversation: Conversation) -> list[int]:
        """Return the prompt of a conversation as tokens.

        A final assistant turn is left out, and the text that opens the reply is added.
        """
        prompt = conversation.prompt
        if not self.chat_format.takes_system:
            prompt = answers.without_system(prompt)
        return self._prompt(prompt)

    def render_as_sent(self, conversation: Conversation) -> list[int] | None:
        """Return the tokens of a prompt with all turns of a conversation, in any order of roles.

        Unlike in training data, several turns in a row may have the same role, and a system turn
        may come later. Returns None if the template refuses such turns or leaves out one of them.
        """
        probes = [
            plain_message(turn.role, f"Turn {number}.")
            for number, turn in enumerate(conversation.messages)
        ]
        try:
            text = self.chat_format.text(probes, reply=True)
            if any(probe["content"] not in text for probe in probes):
                return None
            return self._prompt(conversation)
        except UserError:
            return None

    def _prompt(self, conversation: Conversation) -> list[int]:
        if self.chat_format.takes_one_call:
            conversation = answers.with_single_calls(conversation)
        safe = self._special_tokens.safe
        messages = [answers.template_message(turn, safe) for turn in conversation.messages]
        variables = answers.safe_options(conversation.options, safe)
        text = self.chat_format.text(messages, reply=True, **variables)
        return self._tokens(self._special_tokens.segments(text)).ids
