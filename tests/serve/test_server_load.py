"""The server with several clients: at the same time, in a queue, leaving early, and with a failing engine."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from nanochat.data.conversation import Part
from nanochat.serve import app as web_app
from nanochat.serve import listening
from nanochat.serve.models import Loadable
from tests.support.fake_engine import CHAT, SETTINGS, FakeEngine, ask, eventually, running
from tests.support.raw_client import connect, post

REPLIES = {"hello": ["你好，世界"], "sum": [Part("python", "37*48"), Part("python_output", "1776")]}


# --- leaving -------------------------------------------------------------------------------------


@pytest.fixture
def gated() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine(REPLIES, slots=1, gated=True)
    with running(engine, settings=replace(SETTINGS, waiting=1)) as url:
        yield engine, url


def free(url: str) -> int:
    return httpx.get(f"{url}/health").json()["free_slots"]


def test_first_words_come_before_the_last_are_made(gated):
    engine, url = gated
    with httpx.stream("POST", url + CHAT, json=ask("hello", stream=True)) as response:
        lines = response.iter_lines()
        assert "assistant" in next(lines)
        engine.allow(3)
        assert "你" in next(line for line in lines if "content" in line)
        assert free(url) == 0
        engine.allow(100)
        assert "[DONE]" in list(lines)[-2]


def test_client_that_leaves_a_stream_frees_its_slot(gated):
    engine, url = gated
    with httpx.stream("POST", url + CHAT, json=ask("hello", stream=True)) as response:
        engine.allow(3)
        next(line for line in response.iter_lines() if "你" in line)
    eventually(lambda: free(url) == 1)
    assert engine.seen[0].cancelled
    assert engine.seen[0].said < 16


def hang_up(url: str, body: dict[str, Any], before: Callable[[], None]) -> None:
    """Send a request, and leave without waiting for the answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
    before()
    connection.close()


def test_client_that_leaves_before_a_whole_answer_frees_its_slot(gated):
    engine, url = gated
    hang_up(url, ask("hello"), before=lambda: eventually(lambda: free(url) == 0))
    eventually(lambda: free(url) == 1)
    assert engine.seen[0].cancelled


def test_client_that_leaves_the_queue_is_not_answered(gated):
    engine, url = gated

    def chats() -> int:
        return httpx.get(f"{url}/health").json()["chats"]

    with httpx.stream("POST", url + CHAT, json=ask("hello", stream=True)):
        hang_up(url, ask("later"), before=lambda: eventually(lambda: chats() == 2))
        eventually(lambda: chats() == 1)
    engine.allow(1000)
    eventually(lambda: free(url) == 1)
    assert httpx.post(url + CHAT, json=ask("hello")).status_code == 200
    assert [bytes(seen.prompt[2:-2]) for seen in engine.seen] == [b"hello", b"hello"]  # "later" never reached it


def test_full_queue_is_refused_with_a_time_to_come_back(gated):
    engine, url = gated
    with httpx.stream("POST", url + CHAT, json=ask("hello", stream=True)):
        with httpx.stream("POST", url + CHAT, json=ask("hello", stream=True)) as second:
            assert second.status_code == 200  # it waits in the queue
            third = httpx.post(url + CHAT, json=ask("hello"))
            assert (third.status_code, third.json()["error"]["code"]) == (429, "queue_full")
            assert int(third.headers["retry-after"]) > 0
        eventually(lambda: httpx.get(f"{url}/health").json()["chats"] == 1)
    eventually(lambda: free(url) == 1)
    engine.allow(1000)
    assert httpx.post(url + CHAT, json=ask("hello")).status_code == 200


def test_address_that_fills_the_queue_gives_way_to_another():
    engine = FakeEngine(REPLIES, slots=1, gated=True)
    with running(engine, settings=replace(SETTINGS, waiting=2)) as url, contextlib.ExitStack() as stack:
        crowd = [connect(url, own="127.0.0.2") for _ in range(3)]
        for number, client in enumerate(crowd, 1):
            stack.enter_context(client)
            client.sendall(post(ask("hello")))
            eventually(lambda number=number: httpx.get(f"{url}/health").json()["chats"] == number)
        eventually(lambda: free(url) == 0)
        with connect(url, own="127.0.0.2") as fourth:
            fourth.sendall(post(ask("hello")))
            assert b" 429 " in fourth.recv(65536)
        other = stack.enter_context(connect(url, own="127.0.0.3"))
        other.sendall(post(ask("hello")))
        assert b" 429 " in crowd[2].recv(65536)  # the newest of the crowd
        engine.allow(1000)
        for client in (*crowd[:2], other):
            assert b" 200 " in client.recv(65536)


def test_failing_engine_is_told_without_its_words_and_the_next_chat_works(capfd):
    engine = FakeEngine(REPLIES, fail=True)
    with running(engine) as url:
        response = httpx.post(url + CHAT, json=ask("hello"))
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
        engine.fail = True
        text = httpx.post(url + CHAT, json=ask("hello", stream=True)).text
        assert '"engine_failed"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert "device is gone" not in response.text + text
        assert httpx.post(url + CHAT, json=ask("hello")).status_code == 200
    assert "device is gone" in capfd.readouterr().err


def test_what_is_said_is_never_logged(capfd):
    with running(FakeEngine({"my secret": ["its answer"]})) as url:
        assert "its answer" in httpx.post(url + CHAT, json=ask("my secret")).text
        httpx.post(url + CHAT, json=ask("my secret", n=2))
        httpx.post(url + CHAT, json=ask("my secret" * 1000))
        for fields in ({"input": "my secret"}, {"input": "x", "instructions": ["my secret"]}):
            httpx.post(f"{url}/v1/responses", json=fields)
        for path in ("/v1/completions", "/tokenize"):
            httpx.post(url + path, json={"prompt": "my secret"})
    out, err = capfd.readouterr()
    assert "secret" not in out + err and "its answer" not in out + err


def test_many_clients_that_come_and_go_leave_no_slot_taken():
    engine = FakeEngine(REPLIES, slots=3)
    with running(engine, settings=replace(SETTINGS, waiting=100)) as url:

        def visit(number: int) -> None:
            with httpx.stream("POST", url + CHAT, json=ask("hello", stream=True)) as response:
                lines = response.iter_lines()
                for _ in range(number % 7):
                    next(lines, None)

        visitors = [threading.Thread(target=visit, args=(i,)) for i in range(30)]
        for visitor in visitors:
            visitor.start()
        for visitor in visitors:
            visitor.join()
        eventually(lambda: free(url) == 3 and httpx.get(f"{url}/health").json()["chats"] == 0)


def test_stopped_server_lets_answers_end_and_then_ends_them(capfd, monkeypatch):
    monkeypatch.setattr(listening, "DRAIN_SECONDS", 0.2)
    engine = FakeEngine(REPLIES, slots=2, gated=True)
    app = web_app.create_app([Loadable(engine, engine.tokenizer, SETTINGS)], SETTINGS)  # type: ignore[arg-type]
    http_server = listening.Server(app)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(http_server.serve(sockets=[listener])))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with httpx.stream("POST", url + CHAT, json=ask("hello", stream=True)) as response:
        lines = response.iter_lines()
        next(lines)
        http_server.should_exit = True
        engine.allow(3)
        rest = [line for line in lines if line]
    thread.join(timeout=30)
    assert not thread.is_alive() and not any(each.alive for each in app.threads)
    assert "你" in rest[0]
    assert '"code":"server_stopping"' in rest[-2] and rest[-1] == "data: [DONE]"
    assert capfd.readouterr().err == ""
