"""Plain sockets to a server, for clients that do what no HTTP library does."""

import json
import select
import socket
from typing import Any

from tests.support.fake_engine import CHAT


def connect(url: str, receive_bytes: int | None = None, own: str = "127.0.0.1") -> socket.socket:
    """A connection from an own address, with a receive buffer of so many bytes. Reads fail after 30 seconds."""
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(30)
    client.bind((own, 0))
    client.connect((host, int(port)))
    return client


def head(path: str = CHAT, method: str = "POST", **headers: Any) -> bytes:
    """The head of a request; `content_length=3` becomes `content-length: 3`. Its body is JSON if not said otherwise."""
    given = {"host": "127.0.0.1", "content_type": "application/json", **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in given.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "\r\n"]).encode()


def post(body: dict[str, Any]) -> bytes:
    """A whole chat request."""
    content = json.dumps(body).encode()
    return head(content_length=len(content)) + content


def until_closed(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    received = b""
    try:
        while piece := client.recv(65536):
            received += piece
    except ConnectionError:
        pass  # it closed with a reset
    return received


def has_answer(client: socket.socket) -> bool:
    """Whether the server has sent something that is not read yet, or has closed the connection."""
    return bool(select.select([client], [], [], 0)[0])


def is_closed(client: socket.socket) -> bool:
    """Whether the server has closed a connection on which it sends nothing."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        client.settimeout(30)


def is_reset(client: socket.socket) -> bool:
    """Whether the server has ended a connection on which there is more to read."""
    poll = select.poll()
    poll.register(client, 0)  # errors are always reported
    return bool(poll.poll(0))
