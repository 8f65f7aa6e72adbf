"""Reads the fields of a request body, and refuses bad ones with errors in OpenAI's format.

The second half of the file translates the sampling fields, under OpenAI's and vLLM's names, into
the engine's Sampling.
"""

import json
import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanochat.common import UserError
from nanochat.generate.sampling import (
    LONGEST_STOP,
    MOST_ALTERNATIVES,
    MOST_BIAS,
    MOST_BIASES,
    MOST_STOPS,
    Sampling,
    sample_settings,
)

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# The routes of Anthropic's format, and its types of errors where they differ from OpenAI's.
ANTHROPIC = "/v1/messages"
ANTHROPIC_TYPES = {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}
OVERLOADED = 529  # Anthropic's status in place of 503
# Fields that change no answer here: records of the client, and wishes about speed, price and style
# that OpenAI's own models honour.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "service_tier",
        "prediction",
        "priority",
        "verbosity",
        "reasoning",
        "reasoning_effort",
    }
)
# Fields that Open WebUI uses itself, and that some of its versions also send on.
OPEN_WEBUI = frozenset(
    {
        "background_tasks",
        "chat_id",
        "features",
        "files",
        "id",
        "model_item",
        "session_id",
        "task",
        "title",
        "tool_ids",
        "tool_servers",
        "variables",
    }
)
# OpenAI's sampling fields that the completion routes read, and the ones that vLLM adds.
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
# vLLM's fields that have one value here, which is also vLLM's default.
VLLM_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
LARGEST_SEED = 2**63 - 1
# Characters of all stop strings of a request. Every reply keeps all beginnings of each of them.
LONGEST_STOPS = 4096
LOWEST_TOP_P = 1e-6  # which only the likeliest token reaches, as with 0
NO_LIMIT = -1  # in a field that bounds something; several servers and clients write it so
# The formats of texts that the grammar of replies knows. In a JSON schema, other formats are notes.
FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "unknown",
        "uri",
        "uuid",
    }
)
# Keywords of JSON schemas that hold values and no schemas.
VALUES = frozenset({"const", "default", "enum", "example", "examples"})
# Log-probabilities that one answer may list, including those of alternatives. Each takes up to 600
# bytes before it is sent, so one answer takes at most 160 MB. A reply of 4,096 tokens with 20
# alternatives has 86,016 of them.
MOST_SCORES = 1 << 18
MOST_SAMPLES = 128  # most replies to one prompt, and most prompts of one request


class ApiError(Exception):
    """An error response to a request: its HTTP status, headers and body in OpenAI's format."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after: int | None = None,
    ):
        """Create the error; `param` names the bad field, and `retry_after` is in seconds."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response, a dict in OpenAI's format."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": str(self),
            "type": ERROR_TYPES.get(self.status, default),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The body of the response, a dict in Anthropic's format."""
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        types = ERROR_TYPES | ANTHROPIC_TYPES
        error = {"type": types.get(self.status, default), "message": str(self)}
        return {"type": "error", "error": {**error, "details": {"error_code": self.code}}}

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the body of the response, in the format of the route at `path`."""
        return self.anthropic_body if path.startswith(ANTHROPIC) else self.body

    def status_for(self, path: str) -> int:
        """Return the status of the response, in the format of the route at `path`."""
        overloaded = path.startswith(ANTHROPIC) and self.status == 503
        return OVERLOADED if overloaded else self.status


@dataclass(frozen=True)
class Limits:
    """The model that a request may name, and the sizes of its context and vocabulary in tokens."""

    model: str
    context: int
    vocabulary: int


@dataclass(frozen=True)
class Defaults:
    """A model's default generation settings, for the fields that a request leaves out."""

    temperature: float
    min_p: float
    top_k: int  # 0 samples from the whole vocabulary
    max_tokens: int
    top_p: float = 1.0
    repetition_penalty: float = 1.0


# --- one field -----------------------------------------------------------------------------------


def read_fields(
    value: Any,
    names: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
) -> dict[str, Any]:
    """Check a decoded body, and return a dict of its fields, without ignored and null ones.

    `names` are the fields that the route reads. `neutral` maps each unsupported field to the values
    that are accepted because they change nothing. The field `model` has been read already. Raises
    ApiError (400) if the body is not an object or has a field that is unknown or not supported.
    """
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object, got " + kind(value))
    fields: dict[str, Any] = {}
    for name, content in value.items():
        if content is not None and (name in names or name not in IGNORED | OPEN_WEBUI):
            fields[name] = content
    for name, content in fields.items():
        if name in neutral:
            if content not in neutral[name]:
                text = f"this route does not support {name}: leave {name} out"
                raise ApiError(400, "unsupported_parameter", text, name)
        elif name not in names and name != "model":
            text = f"there is no parameter {name[:80]!r}: check the spelling, or leave it out"
            raise ApiError(400, "unknown_parameter", text, name[:80])
    return fields


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return an ApiError (400) for an invalid value of the field `param`."""
    return ApiError(400, "invalid_value", message, param)


def missing(name: str, advice: str) -> ApiError:
    """Return an ApiError (400) for a missing required field; `advice` says what to send."""
    return ApiError(400, "missing_required_parameter", f"{name} is required: send {advice}", name)


def kind(value: Any) -> str:
    """Return a JSON value's type in words, for errors about a value that may be private."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def number(
    fields: Mapping[str, Any],
    name: str,
    low: float,
    high: float,
) -> float | None:
    """Return the field `name` as a float, or None if it is absent or null.

    Raises ApiError (400) if it is not a number from `low` to `high`.
    """
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(f"{name} must be a number from {low} to {high}, got {kind(value)}", name)
    if not low <= value <= high:  # also false for NaN
        value_text = "a number out of range"
        if isinstance(value, float) and math.isfinite(value):
            value_text = f"{value:g}"
        raise invalid(f"{name} must be from {low} to {high}, got {value_text}", name)
    return float(value)


def integer(
    fields: Mapping[str, Any],
    name: str,
    low: int,
    high: int,
) -> int | None:
    """Return the integer field `name`, or None if it is absent or null.

    A number such as 50.0 counts as an integer, because some languages write every number so. Raises
    ApiError (400) if the field is not an integer from `low` to `high`.
    """
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        text = f"{name} must be a whole number from {low} to {high}, got {kind(value)}"
        raise invalid(text, name)
    if not low <= value <= high:
        text = f"{name} must be from {low} to {high}, got {_printable(value)}"
        raise invalid(text, name)
    return value


def upper_bound(
    fields: Mapping[str, Any],
    name: str,
    most: int,
    low: int = 1,
) -> int | None:
    """Return the upper bound that the field `name` sets, or None if it is absent or null.

    The bound is at most `most`, which -1 and all larger numbers stand for. Raises ApiError (400) if
    the field is any other number below `low`, or no integer.
    """
    if fields.get(name) == NO_LIMIT:
        return most
    bound = integer(fields, name, low, LARGEST_SEED)
    return None if bound is None else min(bound, most)


def _printable(value: int) -> int | str:
    """Return a number for an error message, or words if it has too many digits."""
    return value if abs(value) < 1e18 else "a number out of range"


def flag(
    fields: Mapping[str, Any],
    name: str,
    default: bool = False,
) -> bool:
    """Return the boolean field `name`, or `default` if it is absent or null.

    Raises ApiError (400) for any other value.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {kind(value)}", name)
    return default if value is None else value


def truncates(fields: Mapping[str, Any]) -> bool:
    """Return whether `truncation` lets the oldest messages be dropped if the chat does not fit.

    Raises ApiError (400) if its value is unknown.
    """
    truncation = fields.get("truncation", "disabled")
    if truncation not in ("auto", "disabled"):
        raise invalid('truncation must be "auto" or "disabled"', "truncation")
    return truncation == "auto"


def mapping(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object field `name` as a dict, which is empty if the field is absent.

    Raises ApiError (400) if the field is not an object.
    """
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise invalid(f"{name} must be an object, got {kind(value)}", name)
    return value


def is_tokens(value: Any) -> bool:
    """Return whether a value is a list that holds nothing but integers."""
    if not isinstance(value, list):
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def token_ids(value: Any, name: str, limits: Limits) -> list[int]:
    """Return the value of the field `name`, after checking that it is a list of token IDs.

    Raises ApiError (400) if it is not, or if an ID is outside the vocabulary.
    """
    if not is_tokens(value):
        raise invalid(f"{name} must be a list of token ids, got {kind(value)}", name)
    for token in value:
        if not 0 <= token < limits.vocabulary:
            last = limits.vocabulary - 1
            text = (
                f"{name} holds token {_printable(token)}: the model's tokens go from 0 to {last:,}"
            )
            raise invalid(text, name)
    return value


# --- settings of replies -------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplySettings:
    """The settings of a request's replies: how to sample them, how many, and how to send them."""

    sampling: Sampling  # its max_tokens is the server's default if the request has none
    max_tokens: int | None  # as in the request
    n: int
    stream: bool
    include_usage: bool  # send a last chunk that holds only the usage
    continuous_usage: bool  # send the usage so far in every chunk

    def reply_room(self, context: int) -> int:
        """Return how many tokens of a context a chat that may be shortened leaves to the reply.

        They are those of the request or, if it names no limit, the server's default, but then at
        most half of the context.
        """
        if self.max_tokens is not None and self.max_tokens < context:
            return self.max_tokens
        return max(1, min(self.sampling.max_tokens, context // 2))

    def requests(self, prompt: list[int], context: int) -> list[tuple[list[int], Sampling]]:
        """Return `n` engine requests for one prompt, which differ only in their seeds.

        Replies are also limited to the room left in the context, but not to less than 1 token.
        """
        room = context - len(prompt)
        max_tokens = max(1, min(self.sampling.max_tokens, room))
        first = replace(self.sampling, max_tokens=max_tokens)
        requests = [(prompt, first)]
        for sample in range(1, self.n):
            requests.append((prompt, sample_settings(first, prompt, sample)))
        return requests


def read_settings(
    fields: Mapping[str, Any],
    limits: Limits,
    defaults: Defaults,
    max_tokens: int | None,
    **more: Any,
) -> ReplySettings:
    """Check the generation fields that routes share, and return the settings of the replies.

    `more` holds settings that only some routes have, under Sampling's names. Raises ApiError (400)
    for invalid values.
    """
    options = mapping(fields, "stream_options")

    def number_or(
        name: str,
        low: float,
        high: float,
        default: float,
    ) -> float:
        value = number(fields, name, low, high)
        return default if value is None else value

    top_k = upper_bound(fields, "top_k", limits.vocabulary, low=0)
    if top_k is None:
        top_k = defaults.top_k
    seed = integer(fields, "seed", -1, LARGEST_SEED)
    if seed is None or seed == NO_LIMIT:
        seed = secrets.randbits(31)
    settings: dict[str, Any] = {
        "temperature": number_or("temperature", 0, 2, defaults.temperature),
        "top_k": top_k or None,
        "max_tokens": max_tokens or defaults.max_tokens,
        "seed": seed,
        "top_p": max(LOWEST_TOP_P, number_or("top_p", 0, 1, defaults.top_p)),
        "min_p": number_or("min_p", 0, 1, defaults.min_p),
        "repetition_penalty": number_or(
            "repetition_penalty", 0.001, 1000, defaults.repetition_penalty
        ),
        "presence_penalty": number_or("presence_penalty", -2, 2, 0.0),
        "frequency_penalty": number_or("frequency_penalty", -2, 2, 0.0),
        "logit_bias": _biases(fields, limits),
        "stop": _stops(fields),
        "stop_tokens": _stop_tokens(fields, limits),
        "min_tokens": integer(fields, "min_tokens", 0, limits.context) or 0,
        "ignore_eos": flag(fields, "ignore_eos"),
        "schema": read_format(fields.get("response_format"), "response_format"),
        **more,
    }
    try:
        sampling = Sampling(**settings)
    except UserError as refusal:  # fields that do not fit together
        raise ApiError(400, "invalid_value", str(refusal)) from None
    return ReplySettings(
        sampling=sampling,
        max_tokens=max_tokens,
        n=integer(fields, "n", 1, MOST_SAMPLES) or 1,
        stream=flag(fields, "stream"),
        include_usage=flag(options, "include_usage"),
        continuous_usage=flag(options, "continuous_usage_stats"),
    )


def read_format(value: Any, name: str) -> str | None:
    """Return the JSON schema (as text) that a response format asks for, or None for free text.

    `value` is the format, and `name` its field. Raises ApiError (400) if the format is invalid.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid(f"{name} must be an object, got {kind(value)}", name)
    format_type = value.get("type")
    if format_type == "text":
        return None
    if format_type == "json_object":
        return '{"type": "object"}'
    if format_type != "json_schema":
        raise invalid(f'{name}.type must be "text", "json_object" or "json_schema"', f"{name}.type")
    # On the responses route, the schema is next to the type.
    schema_holder = value.get("json_schema", value)
    schema = schema_holder.get("schema") if isinstance(schema_holder, dict) else None
    if not isinstance(schema, dict):
        raise invalid(f"{name} must hold a JSON schema, an object under the name schema", name)
    return schema_text(schema)


def schema_text(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema as text, without the `format` of texts that the grammar does not know.

    By JSON Schema's rules, such a format is a note that no text has to meet.
    """
    copy = json.loads(json.dumps(schema))
    values = [copy]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            text_format = value.get("format")
            if isinstance(text_format, str) and text_format not in FORMATS:
                del value["format"]
            values += [content for key, content in value.items() if key not in VALUES]
    return json.dumps(copy)


def alternatives(fields: Mapping[str, Any], name: str) -> int | None:
    """Return the field `name`, which says how many likely tokens to list at each position.

    Returns None if the field is absent. Raises ApiError (400) if it is invalid.
    """
    return integer(fields, name, 0, MOST_ALTERNATIVES)


def check_scores(scores: int, lower: str) -> None:
    """Raise ApiError (400) if an answer would list more than MOST_SCORES log-probabilities.

    This bounds the answer before the engine starts. `scores` is the most that the answer can list,
    and `lower` names the fields to lower.
    """
    if scores > MOST_SCORES:
        text = (
            f"an answer may list at most {MOST_SCORES:,} log-probabilities (replies x tokens x "
            f"likeliest tokens, with the token itself), and this one would list {scores:,}: lower "
            f"{lower}"
        )
        raise ApiError(400, "too_many_logprobs", text, "logprobs")


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the different stop strings of a request, without empty ones.

    Raises ApiError (400) if they are not valid.
    """
    value = fields.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise invalid(f"stop must be a string or a list of strings, got {kind(value)}", "stop")
    for stop in stops:
        if not isinstance(stop, str) or len(stop) > LONGEST_STOP:
            raise invalid(f"stop must hold strings of at most {LONGEST_STOP} characters", "stop")
    different = tuple(dict.fromkeys(stop for stop in stops if stop))
    if len(different) > MOST_STOPS:
        text = f"stop may hold at most {MOST_STOPS} strings, got {len(different):,}: send fewer"
        raise invalid(text, "stop")
    characters = sum(map(len, different))
    if characters > LONGEST_STOPS:
        text = (
            f"all strings of stop together may have at most {LONGEST_STOPS:,} characters, got "
            f"{characters:,}: send fewer or shorter ones"
        )
        raise invalid(text, "stop")
    return different


def _stop_tokens(fields: Mapping[str, Any], limits: Limits) -> tuple[int, ...]:
    """Return the stop tokens of a request, or raise ApiError (400) if they are not valid."""
    name = "stop_token_ids"
    stops = token_ids(fields.get(name, []), name, limits)
    if len(stops) > MOST_STOPS:
        text = f"{name} may hold at most {MOST_STOPS} tokens, got {len(stops):,}: send fewer"
        raise invalid(text, name)
    return tuple(stops)


def _biases(fields: Mapping[str, Any], limits: Limits) -> tuple[tuple[int, float], ...]:
    """Return the (token, bias) pairs in `logit_bias`, or raise ApiError (400) if one is invalid."""
    values = mapping(fields, "logit_bias")
    if len(values) > MOST_BIASES:
        text = f"logit_bias may hold at most {MOST_BIASES:,} tokens, got {len(values):,}"
        raise invalid(text, "logit_bias")
    biases = []
    for token, value in values.items():
        digits = token.isascii() and token.isdigit() and len(token) < 12
        if not digits or int(token) >= limits.vocabulary:
            last = limits.vocabulary - 1
            text = f"logit_bias must map token ids to numbers: tokens go from 0 to {last:,}"
            raise invalid(text, "logit_bias")
        bias = number({"logit_bias": value}, "logit_bias", -MOST_BIAS, MOST_BIAS)
        if bias is None:
            raise invalid("logit_bias must map token ids to numbers, got null", "logit_bias")
        biases.append((int(token), bias))
    return tuple(biases)
