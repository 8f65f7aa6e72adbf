"""Reads the bodies of requests: JSON of a bounded size, in UTF-8."""

import json
import math
import re
from typing import Any

from fastapi import Request

from nanochat.serve.routes.fields import ApiError

BODY_BYTES = 256 * 1024  # largest body of a request
# An escape in JSON text: a surrogate pair, half of one, or any other.
ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


async def read_body(request: Request) -> bytes:
    """Return the body of a request. ApiError 415 if it is not JSON, 413 beyond BODY_BYTES.

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
    """Return the value of a body, which can be written as JSON in UTF-8 again: half of a surrogate pair becomes U+FFFD.

    ApiError 400 if the body is not JSON, or if a number in it is NaN or infinite.
    """
    try:
        # Replaced here, once: some routes send texts of the request back, and such a half would make that fail.
        text = ESCAPE.sub(_without_half, body.decode("utf-8-sig"))
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "the body is not valid JSON in UTF-8") from None


def _without_half(escape: re.Match[str]) -> str:
    """Return an escape, or U+FFFD for half of a surrogate pair."""
    return r"\ufffd" if escape["half"] else escape[0]


def _finite(number: str) -> float:
    """Return a number of a body. ApiError 400 for NaN, Infinity and 1e999, which JSON cannot hold."""
    value = float(number)
    if not math.isfinite(value):
        text = f"the body must be JSON, whose numbers are finite, got {number[:80]}: send a number below 1.8e308, or null"
        raise ApiError(400, "invalid_json", text)
    return value
