"""Answers POST /v1/completions: continues texts or tokens as they are, without chat markup.

Clients write that markup themselves, so that a special token that a prompt spells out is that
token, as for vLLM.

Evaluation harnesses use this route. With `echo` and `logprobs`, it also returns the
log-probabilities of a prompt's tokens.
"""

import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.generate.reply import Alternatives, Event, Scored, TextStream
from nanochat.generate.sampling import Sampling
from nanochat.serve.routes.answers import (
    DONE,
    Choice,
    Work,
    count_usage,
    event,
    finite,
    spelling,
)
from nanochat.serve.routes.fields import (
    MOST_SAMPLES,
    READ,
    VLLM_NEUTRAL,
    ApiError,
    Defaults,
    Limits,
    ReplySettings,
    alternatives,
    check_scores,
    flag,
    invalid,
    is_tokens,
    kind,
    missing,
    read_fields,
    read_settings,
    token_ids,
    upper_bound,
)
from nanochat.serve.routes.tokens import encode_marked, has_marks
from nanochat.tokenizer import Tokenizer

FIELDS = READ | {
    "prompt",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "echo",
    "add_special_tokens",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {"suffix": ("",), **VLLM_NEUTRAL}
MAX_TOKENS = 16  # the limit for a reply by default, as OpenAI has it for this route


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request to /v1/completions."""

    prompts: list[str | list[int]]
    settings: ReplySettings
    echo: bool
    logprobs: bool  # whether to list them for the reply and, with `echo`, the prompt
    prompt_logprobs: int | None  # likely tokens to list at each position of a prompt
    silent: bool  # max_tokens is 0, so only the prompt is of interest
    bos: bool  # put the token that begins a document in front of texts

    def work(self, tokenizer: Tokenizer, limits: Limits) -> Work:
        """Return the engine requests for all prompts, and a function that makes the writer.

        Raises ApiError (400) if a prompt is empty or does not fit into the context, or if the
        answer would list too many log-probabilities.
        """
        prompts = [self._prompt_ids(prompt, tokenizer) for prompt in self.prompts]
        requests = []
        for number, prompt in enumerate(prompts):
            self._check_length(number, prompt, limits)
            requests += self.settings.requests(prompt, limits.context)
        scores = sum(map(self._scores, requests))
        check_scores(scores, "n, max_tokens or logprobs, or send fewer or shorter prompts")
        texts = []
        for prompt, tokens in zip(self.prompts, prompts, strict=True):
            if isinstance(prompt, str) and not has_marks(prompt, tokenizer):
                texts.append(prompt)
            else:
                texts.append(_text(tokens, tokenizer))

        def writer(number: str) -> CompletionWriter:
            return CompletionWriter(f"cmpl-{number}", limits.model, self, prompts, texts, tokenizer)

        return Work(requests, writer, scores)

    def _prompt_ids(self, prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
        """Return the tokens of a prompt, given as a text or as tokens."""
        if not isinstance(prompt, str):
            return prompt
        tokens = encode_marked(prompt, tokenizer)
        return [tokenizer.bos, *tokens] if self.bos and tokenizer.adds_bos else tokens

    def _check_length(
        self,
        number: int,
        prompt: list[int],
        limits: Limits,
    ) -> None:
        """Raise ApiError (400) if `prompt`, at index `number`, is empty or too long to answer."""
        if not prompt:
            text = f"prompt {number} is empty: it must have a token"
            raise ApiError(400, "empty_prompt", text, "prompt")
        if len(prompt) >= limits.context:
            text = (
                f"the model's context holds {limits.context} tokens; prompt {number} has "
                f"{len(prompt)}, which leaves no room for an answer: shorten the prompt"
            )
            raise ApiError(400, "context_length_exceeded", text, "prompt")

    def _scores(self, request: tuple[list[int], Sampling]) -> int:
        """Return the maximum number of log-probabilities listed for a reply and its prompt."""
        prompt, sampling = request
        scores = 0
        if self.logprobs:
            listed = len(prompt) if self.echo else 0
            if not self.silent:
                listed += sampling.max_tokens
            scores += listed * (1 + sampling.logprobs)
        if self.prompt_logprobs is not None:
            scores += len(prompt) * (1 + self.prompt_logprobs)
        return scores


def read_completion(
    value: Any,
    limits: Limits,
    defaults: Defaults,
) -> CompletionRequest:
    """Check a decoded body, and return it as a CompletionRequest.

    Raises ApiError (400) for an invalid body.
    """
    fields = read_fields(value, FIELDS, NEUTRAL)
    max_tokens = upper_bound(fields, "max_tokens", limits.context, low=0)
    if max_tokens is None:
        max_tokens = MAX_TOKENS
    echo = flag(fields, "echo")
    logprobs = alternatives(fields, "logprobs")
    prompt_logprobs = alternatives(fields, "prompt_logprobs")
    if max_tokens == 0 and not echo and prompt_logprobs is None:
        raise invalid("max_tokens may be 0 only with echo or prompt_logprobs", "max_tokens")
    counts = [logprobs if echo else None, prompt_logprobs]
    settings = read_settings(
        fields,
        limits,
        defaults,
        max(1, max_tokens),
        logprobs=logprobs or 0,
        prompt_logprobs=max((count for count in counts if count is not None), default=None),
    )
    prompts = _prompts(fields.get("prompt"), limits)
    replies = len(prompts) * settings.n
    if replies > MOST_SAMPLES:
        text = (
            f"a request may have at most {MOST_SAMPLES} replies, got {replies:,}: send fewer "
            "prompts"
        )
        raise invalid(text, "prompt")
    return CompletionRequest(
        prompts=prompts,
        settings=settings,
        echo=echo,
        logprobs=logprobs is not None,
        prompt_logprobs=prompt_logprobs,
        silent=max_tokens == 0,
        bos=flag(fields, "add_special_tokens", True),
    )


def _prompts(value: Any, limits: Limits) -> list[str | list[int]]:
    """Return a list of the request's prompts, each a text or a list of token IDs.

    `value` is one prompt or a list of them. Raises ApiError (400) if it is invalid or has too many
    prompts.
    """
    if value is None:
        raise missing("prompt", "a text, a list of token ids, or a list of these")
    if isinstance(value, str) or (value and is_tokens(value)):
        value = [value]
    if not isinstance(value, list) or not value:
        text = f"prompt must be a text, a list of token ids, or a list of these, got {kind(value)}"
        raise invalid(text, "prompt")
    if len(value) > MOST_SAMPLES:
        text = f"there may be at most {MOST_SAMPLES} prompts, got {len(value):,}: send fewer"
        raise invalid(text, "prompt")
    prompts = []
    for i, prompt in enumerate(value):
        if isinstance(prompt, str):
            prompts.append(prompt)
        else:
            prompts.append(token_ids(prompt, f"prompt[{i}]", limits))
    return prompts


def _text(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the decoded text of tokens, without special tokens."""
    stream = TextStream(tokenizer)
    return tokenizer.decode([token for token in tokens if not stream.is_mark(token)])


# --- replies -------------------------------------------------------------------------------------


class CompletionWriter:
    """Writes the replies to all prompts of one request.

    The first n replies answer the first prompt, the next n the second, and so on.
    """

    def __init__(
        self,
        number: str,
        model: str,
        request: CompletionRequest,
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
        self._request = request
        self._prompts = prompts
        self._echoes = texts
        self._tokenizer = tokenizer
        count = len(prompts) * request.settings.n
        self._choices = [
            Choice(tokenizer, "all" if request.logprobs else None) for _ in range(count)
        ]
        self._texts = [""] * count
        self._open = count  # replies whose end has not been streamed
        self._scores = [Listed(tokenizer) for _ in range(count)]
        self.stream = request.settings.stream

    @property
    def usage(self) -> dict[str, Any]:
        """The token counts so far; a prompt counts once, however many replies it has."""
        prompt_tokens = sum(map(len, self._prompts))
        reply_tokens = 0
        if not self._request.silent:
            reply_tokens = sum(choice.tokens for choice in self._choices)
        first_replies = self._choices[:: self._request.settings.n]
        cached = sum(choice.reused for choice in first_replies)
        return count_usage(prompt_tokens, reply_tokens, cached)

    def opening(self) -> bytes:
        """Return b"", because streams of this route have no opening chunk."""
        return b""

    def add(self, news: Sequence[tuple[int, Event]]) -> bytes:
        """Process events, each with its reply's index, and return the chunks to stream."""
        texts: dict[int, str] = {}
        for index, token_event in news:
            text = self._echo(index, token_event)
            parts = self._choices[index].add(token_event)
            if not self._request.silent:
                text += "".join(part.text for part in parts)
            texts[index] = texts.get(index, "") + text
        sent = b""
        for index, text in texts.items():
            self._texts[index] += text
            if not self._request.silent:
                for score in self._choices[index].scores():
                    self._scores[index].add(score.token, score.logprob, score.alternatives)
            if self.stream:
                sent += self._chunk(index, text)
        return sent

    def closing(self) -> bytes:
        """Return the end of the stream: a chunk with the usage, if wanted, and [DONE]."""
        if not self._request.settings.include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self.usage}) + DONE

    def failure(self, refusal: ApiError) -> bytes:
        """Return the end of a failed stream: an event with the error, and [DONE]."""
        return event(refusal.body) + DONE

    def body(self) -> dict[str, Any]:
        """Return the whole answer as a dict."""
        choices = [self._choice(index, text) for index, text in enumerate(self._texts)]
        return {**self._head, "choices": choices, "usage": self.usage}

    def _echo(self, index: int, token_event: Event) -> str:
        """Return the prompt's text if the event is a reply's first and `echo` is set, else "".

        In the first case, the prompt's log-probabilities are also added to those of the reply, if
        the request has `logprobs`.
        """
        if not self._request.echo or self._choices[index].tokens:
            return ""
        prompt_index = index // self._request.settings.n
        if self._request.logprobs:
            listed = self._scores[index]
            count = self._request.settings.sampling.logprobs
            listed.add(self._prompts[prompt_index][0], None, ())
            for scored in token_event.prompt_scores:
                listed.add(scored.token, scored.logprob, scored.alternatives[:count])
        return self._echoes[prompt_index]

    def _chunk(self, index: int, text: str) -> bytes:
        """Return a chunk with new text of a reply, or b"" if there is nothing new to send."""
        choice = self._choice(index, text)
        if not (text or choice["logprobs"] or choice["finish_reason"]):
            return b""
        settings = self._request.settings
        body: dict[str, Any] = {**self._head, "choices": [choice]}
        if choice["finish_reason"]:
            self._open -= 1
        if settings.continuous_usage or (self._open == 0 and not settings.include_usage):
            body["usage"] = self.usage
        return event(body)

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        """Return a reply as a dict with `text` and the log-probabilities that were not sent yet."""
        choice = self._choices[index]
        finish = choice.finish
        if finish and self._request.silent:
            finish = "length"
        content = {
            "index": index,
            "text": text,
            "logprobs": self._scores[index].take() if self._request.logprobs else None,
            "finish_reason": finish,
        }
        count = self._request.prompt_logprobs
        if count is not None and (choice.finish or not self.stream):
            scores = [self._ranked(scored, count) for scored in choice.prompt_scores]
            content["prompt_logprobs"] = [None, *scores]
        return content

    def _ranked(self, scored: Scored, count: int) -> dict[str, Any]:
        """Return a prompt token and `count` alternatives as vLLM's dict from ID to description.

        The token has no rank unless it is among the alternatives.
        """
        ranked: dict[str, Any] = {}
        for rank, (token, logprob) in enumerate(scored.alternatives[:count], 1):
            ranked[str(token)] = self._entry(token, logprob, rank)
        key = str(scored.token)
        entry = ranked.get(key) or self._entry(scored.token, scored.logprob, None)
        return {key: entry, **ranked}

    def _entry(
        self,
        token: int,
        logprob: float,
        rank: int | None,
    ) -> dict[str, Any]:
        """Return a dict that describes a token as vLLM does; the likeliest token has `rank` 1."""
        text = spelling(token, self._tokenizer)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}


class Listed:
    """Collects the log-probabilities of tokens, which take() returns in this route's format."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0  # length of the text of all tokens so far
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(
        self,
        token: int,
        logprob: float | None,
        alternatives: Alternatives,
    ) -> None:
        """Add a token; `logprob` is None for the first token of a prompt."""
        text = spelling(token, self._tokenizer)
        top = None
        if logprob is not None:
            logprob = finite(logprob)
            top = {spelling(other, self._tokenizer): finite(value) for other, value in alternatives}
            top.setdefault(text, logprob)
        self._rows.append((text, logprob, top, self._characters))
        if not self._stream.is_mark(token):
            raw = self._tokenizer.decode_bytes([token])
            self._characters += len(self._decoder.decode(raw))

    def take(self) -> dict[str, list[Any]] | None:
        """Return the tokens added since the last call as a dict of lists, or None if none were."""
        rows = self._rows
        self._rows = []
        if not rows:
            return None
        return {
            "tokens": [text for text, _, _, _ in rows],
            "token_logprobs": [logprob for _, logprob, _, _ in rows],
            "top_logprobs": [top for _, _, top, _ in rows],
            "text_offset": [offset for _, _, _, offset in rows],
        }
