"""What counts as one address, and how often a warning is written. tests/faults/test_server.py tests the bounds."""

import socket
from dataclasses import replace

import httpx
import pytest

from nanochat.data.conversation import Part
from nanochat.serve import connections
from nanochat.serve.connections import Caps, Seldom, neighbour
from tests.support.fake_engine import SETTINGS, FakeEngine, ask, eventually, running
from tests.support.raw_client import connect, head, is_reset, post, until_closed


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_ipv6_customer_counts_as_one_address(host: str, address: str) -> None:
    assert neighbour(host) == address


def test_a_client_that_reads_only_after_its_whole_body_is_told_why_it_was_refused() -> None:
    sent = head(content_length=8 << 20, x_forwarded_for="192.0.2.1") + b"x" * (8 << 20)
    with running(FakeEngine()) as url, connect(url) as client:
        client.sendall(sent)
        assert until_closed(client).startswith(b"HTTP/1.1 413")


def test_an_answer_that_comes_before_the_body_announces_that_the_connection_closes() -> None:
    with running(FakeEngine()) as url, connect(url) as client:
        client.sendall(head("/nowhere", content_length=2))
        answer = client.recv(65536)
        client.sendall(b"{}")
        answer += until_closed(client)
        kept = httpx.get(f"{url}/health")
    assert answer.startswith(b"HTTP/1.1 404") and answer.count(b"\r\nconnection: close\r\n") == 1
    assert "connection" not in kept.headers


def test_a_warning_is_repeated_only_after_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(connections.time, "monotonic", lambda: now)
    seldom = Seldom()
    for second in range(121):
        now = 1000.0 + second
        seldom.warn("full")
        seldom.warn("also full")
    lines = capsys.readouterr().err.splitlines()
    assert [lines.count("warning: full"), lines.count("warning: also full")] == [3, 3]


def test_of_too_many_unread_answers_the_oldest_close() -> None:
    engine = FakeEngine({"long": [Part("python", "1"), Part("python_output", "1")] * 1500}, slots=4, length=10_000)
    question = post(ask("long", stream=True, max_tokens=9990, stream_options={"continuous_usage_stats": True}))
    with running(engine, settings=replace(SETTINGS, caps=Caps(read=600, unread=1))) as url:
        clients = [connect(url, receive_bytes=16384) for _ in range(3)]
        for number, client in enumerate(clients, start=1):
            client.sendall(question)
            eventually(lambda number=number: len(engine.seen) == number)
        eventually(lambda: sum(map(is_reset, clients)) == 2)
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        for client in clients:
            client.close()


def test_a_client_that_stops_sending_after_its_request_gets_the_answer() -> None:
    engine = FakeEngine({"hello": ["you"]}, gated=True)
    with running(engine) as url, connect(url) as client:
        client.sendall(post(ask("hello")))
        eventually(lambda: len(engine.seen) == 1)
        client.shutdown(socket.SHUT_WR)
        engine.allow(100)
        received = until_closed(client)
    assert b"HTTP/1.1 200" in received and b"you" in received
    assert not engine.seen[0].cancelled


def test_a_client_that_sends_half_a_request_and_stops_is_closed() -> None:
    with running(FakeEngine()) as url, connect(url) as client:
        client.sendall(head(content_length=9) + b"{")
        client.shutdown(socket.SHUT_WR)
        assert until_closed(client) == b""


@pytest.mark.parametrize("where", ["a header", "many headers", "the path"])
def test_headers_that_are_too_large_are_refused_if_they_come_in_one_read_too(where: str) -> None:
    large = {
        "a header": head("/health", "GET", cookie="x" * 50_000),
        "many headers": head("/health", "GET", **{f"x{i}": "y" * 10 for i in range(2000)}),
        "the path": head("/health?" + "x" * 50_000, "GET"),
    }
    with running(FakeEngine()) as url, connect(url) as client:
        client.sendall(large[where])
        assert until_closed(client).startswith(b"HTTP/1.1 400")
        assert httpx.get(f"{url}/health", headers={"cookie": "x" * 8000}).status_code == 200
