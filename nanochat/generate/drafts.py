"""Guesses the next tokens of replies, so that one pass of the model checks several of them.

The engine feeds guessed tokens together with the pending ones, and draws a token at each position
as it does without drafts. A guess counts if and only if it equals that token: drafts change the
time of a reply, not its tokens. Ngrams guesses what followed the same words earlier in the chat,
and SmallerModel what a smaller model of the same tokenizer would say.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from nanochat.common import UserError, tr
from nanochat.generate.reply import Event
from nanochat.generate.request import Request
from nanochat.tokenizer import Tokenizer

# Tokens of one reply in a pass with guesses. There are only two lengths, so that few shapes are
# compiled. The longer one is used after STREAK passes in which every guess was right.
SHORT = 4
LONG = 8
STREAK = 2
# Tokens of all replies in a pass. Checking more takes longer than it saves, so that with three
# replies at once nothing is guessed.
MOST_TOKENS = 8
DRAFTED_CHATS = MOST_TOKENS // SHORT
MOST_PAUSE = 32  # passes without guesses, after guesses that were all wrong
NGRAMS = (3, 2)  # the lengths of word sequences that are looked up, the longest first
READ_AHEAD = 512  # tokens of prompts that the smaller model reads between two passes


class Guesser(Protocol):
    """Guesses the next tokens of replies (Protocol)."""

    def guess(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return, for each request, at most counts[i] tokens that may follow its tokens."""
        ...


@dataclass
class Record:
    """How good the guesses for one reply have been."""

    streak: int = 0  # how many passes in a row had only right guesses
    pause: int = 0  # how many more passes run without guesses
    next_pause: int = 1  # how long the pause is after the next guesses that are all wrong


class Drafts:
    """Decides how many tokens to guess for each reply, and counts how many were right."""

    def __init__(self, guesser: Guesser):
        self.guessed = 0
        self.right = 0
        self._guesser = guesser
        self._records: WeakKeyDictionary[Request, Record] = WeakKeyDictionary()

    def chunks(self, requests: Sequence[Request], room: int) -> list[list[int]] | None:
        """Return the pending and guessed tokens to feed each request, or None if none is guessed.

        `room` is how many tokens the cache can take in every row.
        """
        max_columns = min(MOST_TOKENS // len(requests), room)
        if max_columns < min(SHORT, room) or any(request.grammar for request in requests):
            return None
        pending = [request.tokens[request.cached :] for request in requests]
        counts = []
        for request, tokens in zip(requests, pending, strict=True):
            record = self._records.setdefault(request, Record())
            columns = min(LONG if record.streak >= STREAK else SHORT, max_columns)
            remaining = request.sampling.max_tokens - request.generated - 1
            count = max(0, min(columns - len(tokens), remaining))
            counts.append(0 if record.pause else count)
            record.pause = max(0, record.pause - 1)
        guesses = self._guesser.guess(requests, counts) if any(counts) else [[] for _ in requests]
        if not any(guesses) and max(map(len, pending)) == 1:
            return None
        pairs = zip(pending, guesses, strict=True)
        return [[*tokens, *guess][:max_columns] for tokens, guess in pairs]

    def check(
        self,
        requests: Sequence[Request],
        chunks: Sequence[Sequence[int]],
        advance: Callable[[list[int], int], list[Event]],
    ) -> list[Event]:
        """Return the events of tokens that were fed together, up to each row's first wrong guess.

        chunks[i] are the tokens that requests[i] was fed: pending ones, then guesses. The engine's
        `advance(rows, column)` counts the token in a column of some rows, and draws the tokens that
        follow it.
        """
        starts = [request.cached for request in requests]
        pending = [len(request.tokens) - request.cached for request in requests]
        events: list[Event] = []
        rows = list(range(len(requests)))  # the rows in which every token so far was right
        column = 0
        while rows:
            events += advance(rows, column)
            column += 1
            ended = {event.request for event in events if event.finish}
            right_rows = []
            for row in rows:
                was_fed = requests[row].number not in ended and column < len(chunks[row])
                if was_fed and chunks[row][column] == requests[row].tokens[starts[row] + column]:
                    right_rows.append(row)
            rows = right_rows
        for row, (request, chunk) in enumerate(zip(requests, chunks, strict=True)):
            guessed = len(chunk) - pending[row]
            right = request.cached - starts[row] - pending[row]
            self._note(request, guessed, right)
        return events

    def _note(self, request: Request, guessed: int, right: int) -> None:
        """Count how many of the tokens guessed for a request were right, and adapt to it."""
        if guessed <= 0:
            return
        self.guessed += guessed
        self.right += right
        record = self._records[request]
        record.streak = record.streak + 1 if right == guessed else 0
        if right:
            record.next_pause = 1
        else:
            record.pause = record.next_pause
            record.next_pause = min(2 * record.next_pause, MOST_PAUSE)


# --- guessers ------------------------------------------------------------------------------------


class Ngrams:
    """Guesses what followed the last tokens of a chat where they occurred before."""

    def __init__(self) -> None:
        # for each request: the end of the latest occurrence of each sequence, and how many
        # tokens were looked at
        self._ends: WeakKeyDictionary[Request, dict[tuple[int, ...], int]] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def guess(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Implement Guesser.guess."""
        pairs = zip(requests, counts, strict=True)
        return [self._following(request)[:count] if count else [] for request, count in pairs]

    def _following(self, request: Request) -> list[int]:
        """Return LONG tokens that followed the latest occurrence of the last tokens, or []."""
        tokens = request.tokens
        ends = self._ends.setdefault(request, {})
        for end in range(self._seen.get(request, 1), len(tokens)):
            for length in NGRAMS:
                ends[tuple(tokens[max(0, end - length) : end])] = end
        self._seen[request] = len(tokens)
        for length in NGRAMS:
            end = ends.get(tuple(tokens[-length:]))
            if end is not None:
                following = tokens[end : end + LONG]
                return following * (LONG // len(following) + 1)  # the text may repeat itself
        return []


class SmallerModel:
    """Guesses what a smaller model would say, with the same random numbers as the larger one."""

    def __init__(self, engine: Any):  # an engine.Engine of the smaller model
        self._engine = engine
        self._running: dict[int, Request] = {}  # by the number in the smaller model's engine

    def guess(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Implement Guesser.guess.

        There are no guesses for a request whose tokens the smaller model is still reading.
        """
        engine = self._engine
        for number, request in list(self._running.items()):
            if request not in requests:
                engine.cancel(number)
                del self._running[number]
        guesses: dict[Request, list[int]] = {request: [] for request in requests}
        stale = set(self._running.values())  # these began at an earlier token
        for request, count in zip(requests, counts, strict=True):
            if count and request not in stale and len(request.tokens) < engine.length:
                self._running[self._submit(request, count)] = request
        end = engine.prompt_tokens_read + READ_AHEAD
        while engine.busy and engine.prompt_tokens_read < end:
            for event in engine.step():
                request = self._running[event.request]
                if request not in stale:
                    guesses[request].append(event.token)
                if event.finish:
                    del self._running[event.request]
        return [guesses[request] for request in requests]

    def _submit(self, request: Request, count: int) -> int:
        """Let the smaller model continue a request with `count` tokens; return their number."""
        sampling = replace(
            request.sampling,
            max_tokens=count,
            ignore_eos=True,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias=(),
            stop=(),
            stop_tokens=(),
            min_tokens=0,
            logprobs=0,
            prompt_logprobs=None,
            schema=None,
            adapter="",
        )
        generator = random.Random()
        generator.setstate(request.random.getstate())
        return self._engine.submit(request.tokens, sampling, generator)


def check_tokenizer(tokenizer: Tokenizer, other: Tokenizer, name: str) -> None:
    """Raise UserError (exit code 2) unless the draft model `name` has the target's tokenizer."""
    same = tokenizer.vocab_size == other.vocab_size and tokenizer.specials == other.specials
    if same:
        tokens = range(tokenizer.vocab_size)
        same = all(tokenizer.decode_bytes([i]) == other.decode_bytes([i]) for i in tokens)
    if not same:
        raise UserError(
            tr(
                "--draft {name}: this model has another tokenizer ({other:,} tokens, not "
                "{size:,}), so its tokens mean other texts. Name a smaller model with the same "
                "tokenizer, or give --draft ngram",
                name=name,
                other=other.vocab_size,
                size=tokenizer.vocab_size,
            ),
            exit_code=2,
        )
