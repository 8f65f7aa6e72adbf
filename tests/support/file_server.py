"""A file server on this machine that truncates, stalls, refuses, redirects and lies, for tests of downloads."""

import hashlib
import random
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONTENT = random.Random(0).randbytes(900_000)
SHA = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves the body in `files` under its path, CONTENT under every other path.

    `faults` says what goes wrong with each request in turn.
    """

    server: "Server"

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers.items())))
            fault = self.server.faults.pop(0) if self.server.faults else None
            self.server.active += 1
            self.server.most_active = max(self.server.most_active, self.server.active)
        try:
            (fault or Handler.whole)(self)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with self.server.lock:
                self.server.active -= 1

    def whole(
        self, body: bytes | None = None, ranges: bool = True, etag: str = '"one"', upto: int | None = None
    ) -> None:
        """Send the file or the range that was asked for, but only `upto` bytes."""
        body = self.server.files.get(self.path, CONTENT) if body is None else body
        asked = self.headers.get("Range")
        matches = self.headers.get("If-Range", etag) == etag
        if asked and ranges and matches:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(body):
                self.answer(416, b"", {"Content-Range": f"bytes */{len(body)}"})
                return
            headers = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}", "ETag": etag}
            self.answer(206, body[start:], headers, upto)
        else:
            self.answer(200, body, {"ETag": etag}, upto)

    def answer(self, status: int, body: bytes, headers: dict[str, str], upto: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:upto])

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[Callable[[Handler], None] | None] = []
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.lock = threading.Lock()
        self.active = self.most_active = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def truncate(handler: Handler) -> None:
    handler.whole(upto=300_000)


def stall(handler: Handler) -> None:
    handler.whole(upto=500_000)
    time.sleep(1)  # longer than the patience of the client, which drops the connection


def status(code: int, headers: dict[str, str] | None = None) -> Callable[[Handler], None]:
    return lambda handler: handler.answer(code, b"no", headers or {})
