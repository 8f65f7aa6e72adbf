"""Turns the tokens of a reply into text, calculator calls and answers, all at once or while the reply streams."""

import codecs
from collections.abc import Iterable

from nanochat.data.conversation import Kind, Part
from nanochat.tokenizer import Tokenizer

_OPENS: dict[str, Kind] = {"python_start": "python", "output_start": "python_output"}
_CLOSES = (
    "bos",
    "user_start",
    "user_end",
    "assistant_start",
    "assistant_end",
    "python_end",
    "output_end",
)


class TextStream:
    """Turns the tokens of a reply into parts, token by token.

    Text comes as soon as its characters are whole; a calculator call or answer comes when it is complete.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._marks: dict[int, Kind] = {
            tokenizer.special(role): kind for role, kind in _OPENS.items()
        }
        self._marks |= {tokenizer.special(role): "text" for role in _CLOSES}
        self._marks |= dict.fromkeys(tokenizer.stops, "text")
        self._kind: Kind = "text"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._call = ""

    @property
    def kind(self) -> Kind:
        """What the reply is in the middle of."""
        return self._kind

    def is_mark(self, token: int) -> bool:
        """Whether a token is a mark, which stands for no text."""
        return token in self._marks

    def push(self, token: int) -> list[Part]:
        """Add a token; return the parts that the token completes, often none."""
        if token in self._marks:
            parts = self.flush()
            self._kind = self._marks[token]
            return parts
        text = self._decoder.decode(self._tokenizer.decode_bytes([token]))
        if self._kind == "text":
            return [Part("text", text)] if text else []
        self._call += text
        return []

    def flush(self) -> list[Part]:
        """End the reply; return what is left of it. Half a character becomes U+FFFD."""
        text = self._call + self._decoder.decode(b"", final=True)
        self._call = ""
        return [Part(self._kind, text)] if text else []


def reply_parts(tokens: Iterable[int], tokenizer: Tokenizer) -> list[Part]:
    """The parts of a whole reply, in order: text, calculator calls and their answers."""
    stream = TextStream(tokenizer)
    parts: list[Part] = []
    for part in [part for token in tokens for part in stream.push(token)] + stream.flush():
        if parts and part.kind == "text" == parts[-1].kind:
            parts[-1] = Part("text", parts[-1].text + part.text)
        else:
            parts.append(part)
    return parts
