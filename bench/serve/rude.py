"""Clients that misbehave, one for every way that was ever found to work.

Each ends with an OSError when the server closes the connection, as it should, or after a minute.
"""

import json
import random
import socket
import time
from collections.abc import Callable, Mapping

from bench.serve.http import CHATS, CLOSE, question, request

HOLD_SECONDS = 60  # longer than any deadline of the server
LARGE = 173_000  # bytes
LARGE_MESSAGES = (1, 999, 4001)  # of a large prompt: one, as many as may be, and too many
HEAD = b" HTTP/1.1\r\nhost: 127.0.0.1\r\n"
CHUNKED = "transfer-encoding: chunked\r\n"


def connect(port: int, seconds: float = HOLD_SECONDS, receive_bytes: int = 0) -> socket.socket:
    """Connect to the server of a port, with a time limit and a receive buffer of so many bytes."""
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(seconds)
    client.connect(("127.0.0.1", port))
    return client


def send(port: int, message: bytes, seconds: float = HOLD_SECONDS) -> None:
    """Send a message, and read what comes until the server closes."""
    with connect(port, seconds) as client:
        client.sendall(message)
        while client.recv(1 << 16):
            pass


def drip(port: int, beginning: bytes) -> None:
    """Send a request byte by byte after its beginning."""
    end = time.monotonic() + HOLD_SECONDS
    with connect(port) as client:
        client.sendall(beginning)
        while time.monotonic() < end:
            client.sendall(b"x")
            time.sleep(0.5)


def not_reading(port: int) -> None:
    """Ask for a long answer, come back if the server is busy, and read nothing but the status."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = question("Tell me everything.", stream=True, max_tokens=600, stream_options=usage)
    status = b"429"
    while status == b"429":
        with connect(port, receive_bytes=4096) as client:
            client.sendall(request(body))
            status = client.recv(12, socket.MSG_WAITALL)[-3:]
            if status == b"200":
                time.sleep(HOLD_SECONDS)
        time.sleep(1)


def large_prompt(messages: int) -> bytes:
    """Return a request of 173 kB with so many messages."""
    text = "x" * (LARGE // messages - 40)
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": text} for number in range(messages)]
    return request(json.dumps({"messages": turns}).encode(), more=CLOSE)


def leaving(port: int) -> None:
    """Leave in the body, before the answer or in it."""
    message = request(question("Tell me everything.", stream=True, max_tokens=200))
    end = random.choice((40, len(message) - 5, len(message)))
    with connect(port, seconds=0.5) as client:
        client.sendall(message[:end])
        client.recv(300)


def endless(port: int) -> None:
    """Send a body without end after a request that is refused at once."""
    more = random.choice(("", "x-path: 1\r\n"))
    with connect(port) as client:
        client.sendall(request(length=10**12, more=more))
        while True:
            client.sendall(b"x" * 65536)


def nonsense_messages() -> tuple[bytes, ...]:
    """Return what is not HTTP, and what different programs read differently."""
    tiny = question("hi", temperature=1e-50, top_k=0, max_tokens=8)
    chunks = b"content-type: application/json\r\n" + CHUNKED.encode() + b"\r\n1\r\nx\r\n" * 20_000
    return (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        request(rb'{"\ud800": 1}'),
        request(b"5\r\nhello\r\n0\r\n\r\n", more=CHUNKED),
        b"GET /health" + HEAD + CHUNKED.encode() + b"\r\nzzz\r\n",
        b"POST " + CHATS.encode() + HEAD + chunks,
        b"GET /health" + HEAD + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
        request(tiny, more=CLOSE),
    )


CONDUCTS: Mapping[str, Callable[[int], None]] = {  # what each does to the server of a port
    "idle": lambda port: send(port, b""),
    "slow headers": lambda port: drip(port, b"GET /health" + HEAD + b"x: "),
    "slow body": lambda port: drip(port, request(length=100_000)),
    "not reading": not_reading,
    "large": lambda port: send(port, large_prompt(random.choice(LARGE_MESSAGES))),
    "unfinished": lambda port: send(port, request(b"x" * 200_000, length=250_000)),
    "leaving": leaving,
    "endless": endless,
    "nonsense": lambda port: send(port, random.choice(nonsense_messages()), seconds=5),
}
