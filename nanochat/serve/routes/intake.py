"""Takes requests in: reads the body, checks it, and makes the prompt. None of it keeps other clients waiting."""

import asyncio
import bisect
import contextlib
import itertools
import json
import math
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastapi import Request

from nanochat.common import UserError
from nanochat.data.conversation import Conversation, user
from nanochat.generate.sampling import Sampling
from nanochat.serve.line import Line
from nanochat.serve.routes.answers import Writer
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.routes.messages import alternating
from nanochat.tokenizer import Tokenizer

BODY_BYTES = 256 * 1024  # largest body of a request
# An escape in JSON text: a surrogate pair, half of one, or any other.
ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


async def read_body(request: Request) -> bytes:
    """The body of a request. ApiError 415 if it is not JSON, 413 beyond BODY_BYTES.

    The type matters: a browser lets any web site post plain text to this server, but not JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "unsupported_media_type", "Content-Type must be application/json")
    body = bytearray()
    announced = int(request.headers.get("content-length", 0))
    if announced <= BODY_BYTES:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES:
                break
    if max(announced, len(body)) > BODY_BYTES:
        text = f"the body must not be larger than {BODY_BYTES:,} bytes: send a shorter chat"
        raise ApiError(413, "body_too_large", text)
    return bytes(body)


def decode_json(body: bytes) -> Any:
    """The value of a body, which can be written as JSON in UTF-8 again: half of a surrogate pair becomes U+FFFD.

    ApiError 400 if the body is not JSON, or if a number in it is NaN or infinite.
    """
    try:
        # Replaced here, once, since some routes send texts of the request back, which such a half would make fail.
        text = ESCAPE.sub(
            lambda found: r"\ufffd" if found["half"] else found[0], body.decode("utf-8-sig")
        )
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "the body is not valid JSON in UTF-8") from None


def _finite(number: str) -> float:
    """A number of a body. ApiError 400 for NaN, Infinity and 1e999, which JSON cannot hold."""
    value = float(number)
    if not math.isfinite(value):
        text = f"the body must be JSON, whose numbers are finite, got {number[:80]}: send a number below 1.8e308, or null"
        raise ApiError(400, "invalid_json", text)
    return value


class Turns:
    """Lets requests be prepared one at a time, the smallest first; refuses the largest when too many wait.

    Preparing a large request takes a hundred times as long as a usual one, so in any other order a few clients with
    large requests would keep all others waiting.
    """

    def __init__(self, waiting: int):
        """`waiting` is the number of requests that may wait for their turn."""
        self._most = waiting
        self._waiting: list[
            tuple[int, int, asyncio.Future[None]]
        ] = []  # size, arrival, turn; sorted
        self._arrivals = itertools.count()
        self._busy = False

    @contextlib.asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Wait for the turn of a request of so many bytes. Raises asyncio.QueueFull if smaller ones take all places."""
        if self._busy:
            mine = asyncio.get_running_loop().create_future()
            bisect.insort(self._waiting, (size, next(self._arrivals), mine))
            if (
                len(self._waiting) > self._most
                and not (largest := self._waiting.pop()[2]).cancelled()
            ):
                largest.set_exception(asyncio.QueueFull())
            try:
                await mine
            except asyncio.CancelledError:
                if (
                    mine.done() and not mine.cancelled() and not mine.exception()
                ):  # it was this request's turn
                    self._next()
                raise
        self._busy = True
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        self._busy = False
        while self._waiting and not self._busy:
            turn = self._waiting.pop(0)[2]
            if not turn.cancelled():
                turn.set_result(None)
                self._busy = True


@dataclass(eq=False)
class _Turn:
    """A request that waits in AddressTurns."""

    owner: str
    comes: asyncio.Future[None]
    begun = more = False  # it has one part only


class AddressTurns:
    """Lets requests do something long one at a time: addresses take turns, and the one with most requests gives way."""

    def __init__(self, waiting: int):
        """`waiting` is the number of requests that may wait for their turn."""
        self._most = waiting
        self._line: Line[_Turn] = Line()
        self._busy = False
        self._latest = ""  # the address that had the latest turn

    @contextlib.asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for the turn of a request of an address. Raises asyncio.QueueFull if others take all places."""
        if self._busy:
            mine = _Turn(owner, asyncio.get_running_loop().create_future())
            if len(self._line) >= self._most:
                loser = self._line.give_way(owner)
                if loser is None:
                    raise asyncio.QueueFull
                if not loser.comes.cancelled():
                    loser.comes.set_exception(asyncio.QueueFull())
            self._line.add(mine)
            try:
                await mine.comes
            except asyncio.CancelledError:
                waited = self._line.remove(mine)
                if (
                    not waited
                    and mine.comes.done()
                    and not mine.comes.cancelled()
                    and not mine.comes.exception()
                ):
                    self._next()  # it was this request's turn
                raise
        self._busy, self._latest = True, owner
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        self._busy = False
        while not self._busy and (turn := self._line.next()) is not None:
            if turn.owner == self._latest:  # another address comes first, if one waits
                turn = self._line.next() or turn
            self._line.done_with(turn)
            if not turn.comes.cancelled():
                turn.comes.set_result(None)
                self._busy = True


class Work(NamedTuple):
    """What a request asks of the engine, and the writer of its answer, which gets the answer's id."""

    requests: list[tuple[list[int], Sampling]]
    writer: Callable[[str], Writer]


def answerable(conversation: Conversation) -> Conversation:
    """The chat in the order of training data, with an empty last turn of the user if the assistant spoke last."""
    plain = alternating(conversation)
    return (
        Conversation((*plain.messages, user("")))
        if plain.messages[-1].role == "assistant"
        else plain
    )


def whole_prompt(
    conversation: Conversation, tokenizer: Tokenizer, field: str = "messages"
) -> list[int]:
    """The tokens of a chat and of what opens the reply. ApiError 400 if a template refuses the chat.

    Only a published model's template may have a place for messages in another order than training data's.
    """
    plain = answerable(conversation)
    sent = None if plain == conversation else tokenizer.render_as_sent(conversation)
    try:
        return tokenizer.render_prompt(plain) if sent is None else sent
    except UserError:  # its text names the folder of the model
        text = f"the chat template of this model refuses {field}: send other messages, or ask /v1/completions"
        raise ApiError(400, "invalid_value", text, field) from None


def make_prompt(
    conversation: Conversation,
    max_tokens: int | None,
    truncate: bool,
    tokenizer: Tokenizer,
    context: int,
    field: str = "messages",
) -> tuple[list[int], int]:
    """The tokens of the prompt, and how many of the oldest messages were dropped to make it fit.

    Messages are dropped only with `truncate`. ApiError 400 if the prompt, together with `max_tokens`, the length of the
    answer that was asked for, exceeds the context; it names the `field` that the messages came in.
    """
    answer = max_tokens or 1
    room = context - answer
    messages = answerable(conversation).messages
    if (
        messages != conversation.messages
        and len(prompt := whole_prompt(conversation, tokenizer, field)) <= room
    ):
        return prompt, 0
    system = messages[: messages[0].role == "system"]
    turns = messages[len(system) :]

    def rendered(dropped: int) -> list[int]:
        return whole_prompt(Conversation((*system, *turns[dropped:])), tokenizer, field)

    dropped = 0
    if truncate:  # render from the end, each message once, no further than the context reaches
        dropped = len(turns) - 1
        held = len(rendered(dropped))
        while dropped and held <= room:
            held += len(tokenizer.render(Conversation(turns[dropped - 2 : dropped])).ids) - 1
            dropped -= 2 if held <= room else 0
    prompt = rendered(dropped)
    while (
        len(prompt) > room and truncate and dropped < len(turns) - 1
    ):  # a system message merges with the first
        dropped += 2
        prompt = rendered(dropped)
    if len(prompt) <= room:
        return prompt, dropped
    rest = (
        f"and max_tokens asks for {answer} more"
        if max_tokens
        else "which leaves no room for an answer"
    )
    text = f"the model's context holds {context} tokens; the messages have {len(prompt)}, {rest}: shorten the chat"
    raise ApiError(400, "context_length_exceeded", text, field)
