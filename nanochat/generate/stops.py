"""Finds stop strings in a reply while the reply streams, over the borders of tokens."""

from collections.abc import Sequence

from nanochat.data.conversation import Part
from nanochat.generate.reply import TextStream
from nanochat.tokenizer import Tokenizer


class StopText:
    """Passes text on, except the end of the text so far if a stop string may begin there."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._longest = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text that can be shown and, once one is complete, the stop string found first."""
        text = self._held + text
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self._held = ""
            return text[:place], stop
        longest = min(self._longest, len(text))
        held = next((n for n in range(longest, 0, -1) if text[-n:] in self._beginnings), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """The text that is still held back, when nothing more can follow it."""
        held, self._held = self._held, ""
        return held


class StoppedReply:
    """Turns the tokens of a reply into parts as TextStream does, up to the first stop string.

    Stop strings are looked for in text only. A calculator call ends the text before it, so no stop string spans one.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._stream, self._text = TextStream(tokenizer), StopText(stops)

    def push(
        self, token: int, last: bool, armed: bool = True
    ) -> tuple[tuple[Part, ...], str | None]:
        """Add a token; return the parts that can be shown and the stop string if the text has reached one.

        With `last` the reply ends here, and nothing stays held back. Unless `armed`, stop strings pass as text.
        """
        shown: list[Part] = []
        for part in [*self._stream.push(token), *(self._stream.flush() if last else [])]:
            if part.kind != "text":
                shown += [*self._words(self._text.flush()), part]
                continue
            text, stop = self._text.push(part.text) if armed else (part.text, None)
            shown += self._words(text)
            if stop is not None:
                return tuple(shown), stop
        if last:
            shown += self._words(self._text.flush())
        return tuple(shown), None

    @staticmethod
    def _words(text: str) -> list[Part]:
        return [Part("text", text)] if text else []
