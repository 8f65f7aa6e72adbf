"""Translates the fields of a request into the engine's Sampling: the one place that knows both sets of names."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanochat.common import UserError
from nanochat.engine import MOST_SAMPLES, sample_settings
from nanochat.generate.sampling import (
    LONGEST_STOP,
    MOST_ALTERNATIVES,
    MOST_BIAS,
    MOST_BIASES,
    MOST_STOPS,
    Sampling,
)
from nanochat.serve.routes.fields import (
    ApiError,
    Limits,
    flag,
    integer,
    invalid,
    kind,
    mapping,
    number,
    tokens,
)

# OpenAI's fields that every generating route reads, and the ones that vLLM adds.
OPENAI = {
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "n",
}
VLLM = {"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"}
READ = frozenset(OPENAI | VLLM | {"response_format", "stream", "stream_options"})
LARGEST_SEED = 2**63 - 1
# Log-probabilities that one answer may list, those of alternatives too. Each takes up to 600 bytes
# before it is sent, so one answer takes at most 160 MB. A reply of 4,096 tokens with 20 alternatives
# has 86,016 of them.
MOST_SCORES = 1 << 18


@dataclass(frozen=True)
class Defaults:
    """What the server uses where a request leaves the choice to it."""

    temperature: float
    min_p: float
    top_k: int  # 0 samples from the whole vocabulary
    max_tokens: int


@dataclass(frozen=True)
class Wanted:
    """How a request wants its replies: the settings of each, how many, and how they are sent."""

    sampling: Sampling  # max_tokens is the server's default where the request gives none
    max_tokens: int | None  # as the request gives it
    n: int
    stream: bool
    include_usage: bool  # send a last chunk that holds only the usage
    continuous_usage: bool  # send the usage so far in every chunk

    def requests(self, prompt: list[int], context: int) -> list[tuple[list[int], Sampling]]:
        """The engine's requests for one prompt: n replies, none longer than the context has room for."""
        longest = max(1, min(self.sampling.max_tokens, context - len(prompt)))
        first = replace(self.sampling, max_tokens=longest)
        others = [sample_settings(first, prompt, number) for number in range(1, self.n)]
        return [(prompt, sampling) for sampling in (first, *others)]


def read_wanted(
    fields: Mapping[str, Any],
    limits: Limits,
    defaults: Defaults,
    max_tokens: int | None,
    **more: Any,
) -> Wanted:
    """Check the fields of READ. `more` is what only one route knows, under Sampling's names. ApiError 400."""
    options = mapping(fields, "stream_options")

    def given(name: str, low: float, high: float, default: float) -> float:
        value = number(fields, name, low, high)
        return default if value is None else value

    top_k = integer(fields, "top_k", 0, limits.vocabulary)
    seed = integer(fields, "seed", 0, LARGEST_SEED)
    settings: dict[str, Any] = {
        "temperature": given("temperature", 0, 2, defaults.temperature),
        "top_k": (defaults.top_k if top_k is None else top_k) or None,
        "max_tokens": max_tokens or defaults.max_tokens,
        "seed": secrets.randbits(31) if seed is None else seed,
        "top_p": given("top_p", 1e-6, 1, 1.0),
        "min_p": given("min_p", 0, 1, defaults.min_p),
        "repetition_penalty": given("repetition_penalty", 0.001, 1000, 1.0),
        "presence_penalty": given("presence_penalty", -2, 2, 0.0),
        "frequency_penalty": given("frequency_penalty", -2, 2, 0.0),
        "logit_bias": _biases(fields, limits),
        "stop": _stops(fields),
        "stop_tokens": tuple(
            _few(tokens(fields.get("stop_token_ids", []), "stop_token_ids", limits))
        ),
        "min_tokens": integer(fields, "min_tokens", 0, limits.context) or 0,
        "ignore_eos": flag(fields, "ignore_eos"),
        "schema": read_format(fields.get("response_format"), "response_format"),
        **more,
    }
    try:
        sampling = Sampling(**settings)
    except UserError as refusal:  # fields that do not fit together
        raise ApiError(400, "invalid_value", str(refusal)) from None
    return Wanted(
        sampling,
        max_tokens,
        integer(fields, "n", 1, MOST_SAMPLES) or 1,
        flag(fields, "stream"),
        flag(options, "include_usage"),
        flag(options, "continuous_usage_stats"),
    )


def read_format(value: Any, name: str) -> str | None:
    """The JSON schema, as text, that a response_format asks for; None where the reply is free text."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid(f"{name} must be an object, got {kind(value)}", name)
    wanted = value.get("type")
    if wanted == "text":
        return None
    if wanted == "json_object":
        return '{"type": "object"}'
    if wanted != "json_schema":
        raise invalid(f'{name}.type must be "text", "json_object" or "json_schema"', f"{name}.type")
    inner = value.get("json_schema", value)  # the responses route has the schema beside the type
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise invalid(f"{name} must hold a JSON schema, an object under the name schema", name)
    return json.dumps(schema)


def alternatives(fields: Mapping[str, Any], name: str) -> int | None:
    """How many likeliest tokens a request wants to see beside each token; None if the field is absent."""
    return integer(fields, name, 0, MOST_ALTERNATIVES)


def check_scores(scores: int, lower: str) -> None:
    """Bound the answer before the engine starts: ApiError 400 for more than MOST_SCORES log-probabilities.

    `scores` is the product of replies, tokens and alternatives; `lower` names the fields to lower.
    """
    if scores > MOST_SCORES:
        text = (
            f"an answer may list at most {MOST_SCORES:,} log-probabilities (replies x tokens x likeliest tokens, with "
            f"the token itself), and this one would list {scores:,}: lower {lower}"
        )
        raise ApiError(400, "too_many_logprobs", text, "logprobs")


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    value = fields.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise invalid(f"stop must be a string or a list of strings, got {kind(value)}", "stop")
    if len(stops) > MOST_STOPS:
        raise invalid(
            f"stop may hold at most {MOST_STOPS} strings, got {len(stops):,}: send fewer", "stop"
        )
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= LONGEST_STOP:
            raise invalid(f"stop must hold strings of 1 to {LONGEST_STOP} characters", "stop")
    return tuple(stops)


def _few(stops: list[int]) -> list[int]:
    if len(stops) > MOST_STOPS:
        raise invalid(
            f"stop_token_ids may hold at most {MOST_STOPS} tokens, got {len(stops):,}: send fewer",
            "stop_token_ids",
        )
    return stops


def _biases(fields: Mapping[str, Any], limits: Limits) -> tuple[tuple[int, float], ...]:
    given = mapping(fields, "logit_bias")
    if len(given) > MOST_BIASES:
        raise invalid(
            f"logit_bias may hold at most {MOST_BIASES:,} tokens, got {len(given):,}", "logit_bias"
        )
    found = []
    for token, bias in given.items():
        if not (
            token.isascii()
            and token.isdigit()
            and len(token) < 12
            and int(token) < limits.vocabulary
        ):
            text = f"logit_bias must map token ids to numbers: tokens go from 0 to {limits.vocabulary - 1:,}"
            raise invalid(text, "logit_bias")
        value = number({"logit_bias": bias}, "logit_bias", -MOST_BIAS, MOST_BIAS)
        if value is None:
            raise invalid("logit_bias must map token ids to numbers, got null", "logit_bias")
        found.append((int(token), value))
    return tuple(found)
