"""POST /v1/completions: continues texts or tokens as they are, without the marks of a chat.

Evaluation harnesses use this route: with `echo` and `logprobs` it tells how likely the model finds a given text.
"""

import codecs
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.engine import MOST_SAMPLES, Event
from nanochat.generate.reply import Alternatives, Scored, TextStream
from nanochat.generate.sampling import Sampling
from nanochat.serve.routes.answers import DONE, event
from nanochat.serve.routes.choices import Choice, count_usage, finite, spelling
from nanochat.serve.routes.fields import (
    ApiError,
    Limits,
    flag,
    integer,
    invalid,
    is_tokens,
    kind,
    missing,
    read_fields,
)
from nanochat.serve.routes.fields import tokens as read_tokens
from nanochat.serve.routes.intake import Work
from nanochat.serve.routes.sampling import (
    READ,
    Defaults,
    Wanted,
    alternatives,
    check_scores,
    read_wanted,
)
from nanochat.tokenizer import Tokenizer

KNOWN = READ | {"prompt", "max_tokens", "logprobs", "prompt_logprobs", "echo", "add_special_tokens"}
NEUTRAL: dict[str, tuple[Any, ...]] = {"suffix": ("",), "best_of": (1,)}
MAX_TOKENS = 16  # of a reply where the request does not say; OpenAI's value for this route


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request."""

    prompts: list[str | list[int]]
    wanted: Wanted
    echo: bool
    logprobs: bool  # of the reply, and with echo of the prompt
    prompt_logprobs: bool
    silent: bool  # max_tokens is 0: only the prompt is of interest
    bos: bool  # put the mark of a document's beginning in front of texts

    def work(self, tokenizer: Tokenizer, limits: Limits) -> Work:
        """The prompts as requests to the engine, and the writer of the replies. ApiError 400 if one does not fit."""
        wanted, answer = self.wanted, self.wanted.max_tokens or 1
        start = [tokenizer.bos] if self.bos and tokenizer.marks_begin else []
        prompts = [
            [*start, *tokenizer.encode(item)] if isinstance(item, str) else item
            for item in self.prompts
        ]
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ApiError(
                    400, "empty_prompt", f"prompt {number} is empty: it must have a token", "prompt"
                )
            if len(prompt) + answer > limits.context:
                text = (
                    f"the model's context holds {limits.context} tokens; prompt {number} has {len(prompt)}, and "
                    f"{answer} more are asked for: shorten the prompt"
                )
                raise ApiError(400, "context_length_exceeded", text, "prompt")
        requests = [
            request for prompt in prompts for request in wanted.requests(prompt, limits.context)
        ]
        check_scores(
            sum(map(self._scores, requests)),
            "n, max_tokens or logprobs, or send fewer or shorter prompts",
        )
        texts = [item if isinstance(item, str) else _text(item, tokenizer) for item in self.prompts]

        def writer(number: str) -> CompletionWriter:
            return CompletionWriter(f"cmpl-{number}", limits.model, self, prompts, texts, tokenizer)

        return Work(requests, writer)

    def _scores(self, request: tuple[list[int], Sampling]) -> int:
        """How many log-probabilities the answer lists of one reply and of its prompt."""
        prompt, sampling = request
        reply = 0 if self.silent else sampling.max_tokens
        listed = len(prompt) * self.echo + reply if self.logprobs else 0
        ranked = len(prompt) if self.prompt_logprobs else 0
        return listed * (1 + sampling.logprobs) + ranked * (1 + (sampling.prompt_logprobs or 0))


def read_completion(value: Any, limits: Limits, defaults: Defaults) -> CompletionRequest:
    """Check a decoded body. ApiError (400, or 404 for an unknown model) that names the field."""
    fields = read_fields(value, limits, KNOWN, NEUTRAL)
    max_tokens = integer(fields, "max_tokens", 0, limits.context)
    max_tokens = MAX_TOKENS if max_tokens is None else max_tokens
    echo, logprobs = flag(fields, "echo"), alternatives(fields, "logprobs")
    of_prompt = alternatives(fields, "prompt_logprobs")
    if max_tokens == 0 and not echo and of_prompt is None:
        raise invalid("max_tokens may be 0 only with echo or prompt_logprobs", "max_tokens")
    scored = [count for count in (logprobs if echo else None, of_prompt) if count is not None]
    more = {"logprobs": logprobs or 0, "prompt_logprobs": max(scored) if scored else None}
    wanted = read_wanted(fields, limits, defaults, max(1, max_tokens), **more)
    prompts = _prompts(fields.get("prompt"), limits)
    if (replies := len(prompts) * wanted.n) > MOST_SAMPLES:
        raise invalid(
            f"a request may have at most {MOST_SAMPLES} replies, got {replies:,}: send fewer prompts",
            "prompt",
        )
    return CompletionRequest(
        prompts,
        wanted,
        echo,
        logprobs is not None,
        of_prompt is not None,
        max_tokens == 0,
        flag(fields, "add_special_tokens", True),
    )


def _prompts(given: Any, limits: Limits) -> list[str | list[int]]:
    """The prompts of a request: a text, a list of tokens, or a list of these."""
    if given is None:
        raise missing("prompt", "a text, a list of token ids, or a list of these")
    if isinstance(given, str) or (given and is_tokens(given)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise invalid(
            f"prompt must be a text, a list of token ids, or a list of these, got {kind(given)}",
            "prompt",
        )
    if len(given) > MOST_SAMPLES:
        raise invalid(
            f"there may be at most {MOST_SAMPLES} prompts, got {len(given):,}: send fewer", "prompt"
        )
    return [
        item if isinstance(item, str) else read_tokens(item, f"prompt[{i}]", limits)
        for i, item in enumerate(given)
    ]


def _text(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of tokens, without marks."""
    stream = TextStream(tokenizer)
    return tokenizer.decode([token for token in tokens if not stream.is_mark(token)])


# --- replies -------------------------------------------------------------------------------------


class CompletionWriter:
    """Writes the replies to the prompts of one request; n replies to the first prompt, then n to the second."""

    def __init__(
        self,
        number: str,
        model: str,
        asked: CompletionRequest,
        prompts: list[list[int]],
        texts: list[str],
        tokenizer: Tokenizer,
    ):
        self._head = {
            "id": number,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._asked, self._prompts, self._echoes, self._tokenizer = asked, prompts, texts, tokenizer
        count = len(prompts) * asked.wanted.n
        self._choices = [Choice(tokenizer, "all" if asked.logprobs else None) for _ in range(count)]
        self._texts = [""] * count
        self._scores = [Listed(tokenizer) for _ in range(count)]
        self.stream = asked.wanted.stream

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts so far. A prompt counts once, however many replies it has."""
        tokens = 0 if self._asked.silent else sum(choice.tokens for choice in self._choices)
        cached = sum(choice.reused for choice in self._choices[:: self._asked.wanted.n])
        return count_usage(sum(map(len, self._prompts)), tokens, cached)

    def opening(self) -> bytes:
        """Nothing: the first chunk of a reply is its first text."""
        return b""

    def add(self, news: Sequence[tuple[int, Event]]) -> bytes:
        """Follow events; return the chunks of what they add."""
        grown: dict[int, str] = {}
        for place, item in news:
            choice = self._choices[place]
            if choice.tokens == 0:
                grown[place] = self._begin(place, item)
            text = "".join(part.text for part in choice.add(item))
            grown[place] = grown.get(place, "") + ("" if self._asked.silent else text)
        sent = b""
        for place, text in grown.items():
            self._texts[place] += text
            if not self._asked.silent:
                for said in self._choices[place].scores():
                    self._scores[place].add(said.token, said.logprob, said.alternatives)
            if self.stream:
                sent += self._chunk(place, text)
        return sent

    def closing(self) -> bytes:
        """The usage, if the client wants it alone, and the end of the stream."""
        alone = self._asked.wanted.include_usage
        return (event({**self._head, "choices": [], "usage": self.usage}) if alone else b"") + DONE

    def failure(self, refusal: ApiError) -> bytes:
        """The error, and the end of the stream."""
        return event(refusal.body) + DONE

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(place, self._texts[place]) for place in range(len(self._choices))]
        return {**self._head, "choices": choices, "usage": self.usage}

    def _begin(self, place: int, first: Event) -> str:
        """The echo of a reply's prompt."""
        if not self._asked.echo:
            return ""
        if self._asked.logprobs:
            listed, count = self._scores[place], self._asked.wanted.sampling.logprobs
            listed.add(self._prompt(place)[0], None, ())
            for scored in first.prompt_scores:
                listed.add(scored.token, scored.logprob, scored.alternatives[:count])
        return self._echoes[place // self._asked.wanted.n]

    def _prompt(self, place: int) -> list[int]:
        return self._prompts[place // self._asked.wanted.n]

    def _chunk(self, place: int, text: str) -> bytes:
        choice = self._choice(place, text)
        if not (text or choice["logprobs"] or choice["finish_reason"]):
            return b""
        body: dict[str, Any] = {**self._head, "choices": [choice]}
        last = all(other.finish for other in self._choices) and not self._asked.wanted.include_usage
        if last or self._asked.wanted.continuous_usage:
            body["usage"] = self.usage
        return event(body)

    def _choice(self, place: int, text: str) -> dict[str, Any]:
        choice = self._choices[place]
        found = {
            "index": place,
            "text": text,
            "logprobs": self._scores[place].take() if self._asked.logprobs else None,
            "finish_reason": "length" if self._asked.silent and choice.finish else choice.finish,
        }
        if (
            self._asked.prompt_logprobs
            and choice.prompt is not None
            and (choice.finish or not self.stream)
        ):
            found["prompt_logprobs"] = [None, *(self._ranked(scored) for scored in choice.prompt)]
        return found

    def _ranked(self, scored: Scored) -> dict[str, Any]:
        """A token of the prompt and its alternatives in vLLM's form: by id, with the rank where it is known."""
        found = {
            str(token): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": spelling(token, self._tokenizer),
            }
            for rank, (token, logprob) in enumerate(scored.alternatives, 1)
        }
        own = {
            "logprob": finite(scored.logprob),
            "rank": None,
            "decoded_token": spelling(scored.token, self._tokenizer),
        }
        return {str(scored.token): found.get(str(scored.token), own), **found}


class Listed:
    """Log-probabilities of tokens as this route lists them, until take() takes them."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0  # of all tokens so far
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(self, token: int, logprob: float | None, alternatives: Alternatives) -> None:
        """Add a token; the first one of a prompt has no log-probability."""
        top = None
        if logprob is not None:
            top = {spelling(other, self._tokenizer): finite(value) for other, value in alternatives}
            top.setdefault(spelling(token, self._tokenizer), finite(logprob))
        self._rows.append(
            (spelling(token, self._tokenizer), logprob and finite(logprob), top, self._characters)
        )
        if not self._stream.is_mark(token):
            self._characters += len(self._decoder.decode(self._tokenizer.decode_bytes([token])))

    def take(self) -> dict[str, list[Any]] | None:
        """The tokens since the last call; None if there are none."""
        rows, self._rows = self._rows, []
        if not rows:
            return None
        return dict(
            zip(
                ("tokens", "token_logprobs", "top_logprobs", "text_offset"),
                _columns(rows),
                strict=True,
            )
        )


def _columns(rows: list[tuple[Any, ...]]) -> Iterator[list[Any]]:
    return (list(column) for column in zip(*rows, strict=True))
