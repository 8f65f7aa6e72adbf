"""Accepting connections when the process may open no more files, and how many connections it can afford."""

import asyncio
import errno
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from nanochat.serve import listening
from nanochat.serve.connections import Caps
from nanochat.serve.listening import OWN_FILES, App, affordable, raise_open_files
from tests.support.fake_engine import FakeEngine, running


@pytest.fixture
def few_files() -> Iterator[int]:
    """Lets this process open only 900 files unless it raises the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, hard))
    yield 900
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_leave_files_for_the_rest_of_the_process(few_files: int) -> None:
    assert affordable(Caps()).connections == few_files - OWN_FILES
    assert affordable(Caps(connections=10)).connections == 10


def test_the_limit_of_open_files_is_raised_as_far_as_the_system_allows(few_files: int) -> None:
    raise_open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard != few_files


def test_answers_on_a_kept_connection_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Nagle's algorithm, the body of every answer waits 40 ms until the client has confirmed its head."""
    opening, delays = listening.Server._open, []

    async def look(server: listening.Server, accepted: socket.socket) -> None:
        delays.append(not accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await opening(server, accepted)

    monkeypatch.setattr(listening.Server, "_open", look)
    with running(FakeEngine()) as url:
        httpx.get(f"{url}/health", timeout=30)
    assert delays == [False]


def test_a_header_of_a_client_does_not_change_its_address() -> None:
    clients = []

    def noted(app: ASGIApp) -> ASGIApp:
        async def note(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                clients.append((scope["client"][0], scope["scheme"]))
            await app(scope, receive, send)

        return note

    forged = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}
    with running(FakeEngine(), wrap=noted) as url:
        httpx.get(f"{url}/health", headers=forged, timeout=30)
    assert clients == [("127.0.0.1", "http")]


def failing_accepts(monkeypatch: pytest.MonkeyPatch, failure: OSError) -> list[OSError]:
    """Let accepting a connection fail five times; returns the failures that are still to come."""
    accept, failures = asyncio.SelectorEventLoop.sock_accept, [failure] * 5

    async def failing(loop: asyncio.SelectorEventLoop, listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return await accept(loop, listener)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", failing)
    return failures


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
def test_accepting_pauses_when_there_are_no_more_files_and_one_line_says_so(
    number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failures = failing_accepts(monkeypatch, OSError(number, "no more"))
    with running(FakeEngine()) as url:
        assert httpx.get(f"{url}/health", timeout=30).json()["status"] == "ok"
    assert not failures
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: a connection was not accepted (")


def test_a_client_that_leaves_before_it_is_accepted_is_nothing_to_report(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failures = failing_accepts(monkeypatch, ConnectionAbortedError(errno.ECONNABORTED, "gone"))
    with running(FakeEngine()) as url:
        assert httpx.get(f"{url}/health", timeout=30).json()["status"] == "ok"
    assert not failures and capfd.readouterr().err == ""


STUCK = """
import socket, sys, time
from nanochat.serve import listening
from nanochat.serve.models import Loadable
from nanochat.serve.app import create_app
from tests.support.fake_engine import SETTINGS, FakeEngine
listening.STOP_SECONDS = 0.25
engine = FakeEngine()
engine.step = lambda: time.sleep(1000)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
listening.serve(create_app([Loadable(engine, engine.tokenizer, SETTINGS)], SETTINGS), listener)
"""


@pytest.mark.slow
def test_a_server_ends_although_a_thread_of_it_never_does() -> None:
    command = [sys.executable, "-c", STUCK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stderr is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        asked = {"messages": [{"role": "user", "content": "hello"}]}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=httpx.Timeout(60, read=0.5))
        server.send_signal(signal.SIGTERM)
        try:
            assert server.wait(30) == 1
        finally:
            server.kill()
        assert "did not stop within" in server.stderr.read()


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """An application whose answers never end."""
    if scope["type"] != "http":
        raise RuntimeError("no lifespan")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})


def test_clients_that_hang_while_the_server_stops_leave_no_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listening, "DRAIN_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = listening.Server(App(endless, [], Caps()))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        for client in clients:
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert client.recv(8)
        server.should_exit = True
        thread.join(30)
        for client in clients:
            client.close()
    said = capfd.readouterr().err
    assert not thread.is_alive()
    assert "Cancel 3 running task(s)" in said and "Traceback" not in said, said
