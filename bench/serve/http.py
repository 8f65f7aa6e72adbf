"""Requests to a chat server in bytes: a client that misbehaves cannot use a library's."""

import json
import math
from collections.abc import Sequence
from typing import Any

CHATS = "/v1/chat/completions"
CLOSE = "connection: close\r\n"


def request(body: bytes = b"", length: int | None = None, more: str = "") -> bytes:
    """Return the bytes of a request for a chat.

    `length` announces another length than the body has, and `more` holds further headers.
    """
    content_length = len(body) if length is None else length
    lines = [
        f"POST {CHATS} HTTP/1.1",
        "host: 127.0.0.1",
        "content-type: application/json",
        f"content-length: {content_length}",
    ]
    head = "".join(f"{line}\r\n" for line in lines)
    return f"{head}{more}\r\n".encode() + body


def question(text: str, **fields: Any) -> bytes:
    """Return the body of a chat with one question."""
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of them does not exceed; NaN of none."""
    if not values:
        return math.nan
    rank = max(math.ceil(share * len(values)), 1)
    return sorted(values)[rank - 1]
