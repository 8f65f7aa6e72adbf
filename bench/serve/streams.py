"""Clients that stream chats from any server with OpenAI's routes, and what they count."""

import http.client
import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.serve.http import CHATS, percentile
from nanochat.common import UserError

WORDS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi".split()
)
QUESTION_WORDS = 24
SECONDS = 300  # after which a client gives up
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}  # fields of a request


class StatusError(UserError):
    """A server answered with another status than 200."""

    def __init__(self, status: int, words: str):
        super().__init__(f"a server answered {status}: {words}")
        self.status = status


@dataclass
class Reply:
    """What a client saw of one streamed reply."""

    first_seconds: float = 0.0  # from the request to the first text, of a thought or an answer
    first_tokens: int = 0  # as the server counts them with the first text, if it does
    tokens: int = 0  # as the server counts them
    prompt_tokens: int = 0

    def add(self, event: dict[str, Any], seconds: float) -> None:
        """Follow an event that came so many seconds after the request."""
        usage = event.get("usage")
        if usage:
            self.tokens = usage["completion_tokens"]
            self.prompt_tokens = usage.get("prompt_tokens", 0)
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            if not self.first_seconds and (delta.get("content") or delta.get("reasoning_content")):
                self.first_seconds = seconds
                self.first_tokens = self.tokens


@dataclass
class Load:
    """What was measured of one side with one number of chats, over all rounds."""

    seconds: list[float] = field(default_factory=list)  # CPU seconds of the server, each round
    tokens: list[int] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)  # of every chat

    @property
    def speed(self) -> float:
        """Tokens per CPU second in the median round."""
        rounds = zip(self.tokens, self.seconds, strict=True)
        return median(tokens / seconds for tokens, seconds in rounds)

    @property
    def first_p95(self) -> float:
        """Seconds to the first text that 95 % of the chats did not exceed."""
        return percentile(self.first_seconds, 0.95)


def body(model: str, number: int, tokens: int, words: int = QUESTION_WORDS, **fields: Any) -> bytes:
    """Return the body of a greedy chat that streams, with a question that no other number has."""
    question = " ".join(random.Random(number).choices(WORDS, k=words))
    request = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
        **STREAMED,
        **fields,
    }
    return json.dumps(request).encode()


def ask(port: int, chat: bytes, clock: Callable[[], float] = time.perf_counter) -> Reply:
    """Stream one reply to its end, timed by `clock`, which returns seconds.

    Raises StatusError if the server refuses, and UserError if it does not count the tokens.
    """
    reply = Reply()
    start = clock()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("POST", CHATS, chat, {"content-type": "application/json"})
    with connection.getresponse() as response:
        if response.status != 200:
            words = response.read(500).decode(errors="replace")
            raise StatusError(response.status, words)
        for line in response:
            content = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and content != b"[DONE]":
                reply.add(json.loads(content), clock() - start)
    if not reply.prompt_tokens:  # a reply may be empty, but no prompt is
        raise UserError("a server ended a reply without its usage, so its tokens cannot be counted")
    return reply


def ask_all(port: int, chats: Sequence[bytes]) -> list[Reply]:
    """Stream replies all at once."""
    with ThreadPoolExecutor(len(chats)) as pool:
        return list(pool.map(lambda chat: ask(port, chat), chats))
