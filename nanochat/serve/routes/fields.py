"""Reads the fields of a request body, and refuses them as OpenAI does: an error that names the field and the rule."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# Fields that clients send for their own records; they change no answer.
IGNORED = frozenset(
    {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "request_id"}
)


class ApiError(Exception):
    """A refused request: the HTTP status, and the reason as OpenAI's error JSON."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after: int | None = None,
    ):
        """`retry_after` is in seconds."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        """The error JSON."""
        kind = ERROR_TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


@dataclass(frozen=True)
class Limits:
    """What a request may ask for: the name of the model, its context and its vocabulary, both in tokens."""

    model: str
    context: int
    vocabulary: int


def read_fields(
    value: Any, limits: Limits, known: Collection[str], neutral: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The fields of a decoded body without those that are null.

    `neutral` names fields for features that the route lacks, with the values that change nothing. ApiError 400 for
    any other value of such a field and for a field that is not known, and 404 for another model.
    """
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object, got " + kind(value))
    fields = {
        name: given for name, given in value.items() if given is not None and name not in IGNORED
    }
    for name, given in fields.items():
        if name in neutral:
            if given not in neutral[name]:
                text = f"this route does not support {name}: leave {name} out"
                raise ApiError(400, "unsupported_parameter", text, name)
        elif name not in known and name != "model":
            text = f"there is no parameter {name[:80]!r}: check the spelling, or leave it out"
            raise ApiError(400, "unknown_parameter", text, name[:80])
    model = fields.get("model", limits.model)
    if model != limits.model:
        text = f"this server has only the model {limits.model!r}: ask for that, or leave model out"
        raise ApiError(404, "model_not_found", text, "model")
    return fields


def invalid(message: str, param: str | None = None) -> ApiError:
    """The refusal of a value."""
    return ApiError(400, "invalid_value", message, param)


def missing(name: str, what: str) -> ApiError:
    """The refusal of a request without a field that it needs; `what` says what to send."""
    return ApiError(400, "missing_required_parameter", f"{name} is required: send {what}", name)


def kind(value: Any) -> str:
    """The type of a JSON value in words. The value itself may be private and is not repeated."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def number(fields: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number from `low` to `high`; None if the field is absent."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(f"{name} must be a number from {low} to {high}, got {kind(value)}", name)
    if not low <= value <= high:  # also false for NaN
        got = (
            f"{value:g}"
            if isinstance(value, float) and math.isfinite(value)
            else "a number out of range"
        )
        raise invalid(f"{name} must be from {low} to {high}, got {got}", name)
    return float(value)


def integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """A whole number from `low` to `high`; None if the field is absent."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(
            f"{name} must be a whole number from {low} to {high}, got {kind(value)}", name
        )
    if not low <= value <= high:
        got = value if abs(value) < 1e18 else "a number out of range"
        raise invalid(f"{name} must be from {low} to {high}, got {got}", name)
    return value


def flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false; `default` if the field is absent."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {kind(value)}", name)
    return default if value is None else value


def truncates(fields: Mapping[str, Any]) -> bool:
    """Whether the oldest messages may be left out if the whole chat does not fit."""
    truncation = fields.get("truncation", "disabled")
    if truncation not in ("auto", "disabled"):
        raise invalid('truncation must be "auto" or "disabled"', "truncation")
    return truncation == "auto"


def mapping(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object; empty if the field is absent."""
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise invalid(f"{name} must be an object, got {kind(value)}", name)
    return value


def is_tokens(value: Any) -> bool:
    """Whether a value is a list of whole numbers."""
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    )


def tokens(value: Any, name: str, limits: Limits) -> list[int]:
    """A list of tokens of the vocabulary. ApiError 400 for anything else."""
    if not is_tokens(value):
        raise invalid(f"{name} must be a list of token ids, got {kind(value)}", name)
    wrong = next((token for token in value if not 0 <= token < limits.vocabulary), None)
    if wrong is not None:
        got = wrong if abs(wrong) < 1e18 else "a number out of range"
        raise invalid(
            f"{name} holds token {got}: the model's tokens go from 0 to {limits.vocabulary - 1:,}",
            name,
        )
    return value
