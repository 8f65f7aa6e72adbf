"""What one client does must not stop the chats of others: sockets that wait, bodies that grow, readers that do not."""

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from nanochat.data.conversation import Part
from nanochat.serve.connections import Caps
from tests.support.fake_engine import CHAT, SETTINGS, FakeEngine, ServerSettings, ask, eventually, running
from tests.support.raw_client import connect, has_answer, head, is_closed, is_reset, post, until_closed

PATIENT = Caps(idle=600, headers=600, body=600, read=600, leave=600)  # so that no deadline helps


def settings(caps: Caps, waiting: int = 64) -> ServerSettings:
    return replace(SETTINGS, caps=caps, waiting=waiting)


@contextlib.contextmanager
def clients(url: str, count: int, sent: bytes = b"", receive_bytes: int | None = None) -> Iterator[list[socket.socket]]:
    """So many connections on which these bytes were sent."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(connect(url, receive_bytes)) for _ in range(count)]
        for client in opened:
            with contextlib.suppress(ConnectionError):  # the server may have closed it already
                client.sendall(sent)
        yield opened


def works(url: str) -> None:
    """A new client is told that the server is well, and gets an answer to a chat."""
    assert httpx.get(f"{url}/health", timeout=30).json()["status"] == "ok"
    answer = httpx.post(url + CHAT, json=ask("hello"), timeout=30)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == "hello"


SILENCES = {
    "nothing": b"",
    "half of the headers": head(content_length=9)[:-2],
    "half of the body": head(content_length=9) + b"{",
}


@pytest.mark.parametrize("sent", SILENCES.values(), ids=SILENCES)
def test_more_connections_than_the_server_holds(sent: bytes) -> None:
    """T21. Injects: three times as many connections as the server holds, all of which send nothing, half of their
    headers or half of their body. Must follow: the server closes the ones that have waited longest, and a new client
    gets its answers.

    注入：建立三倍于上限的连接，它们什么都不发，或者只发一半请求头、一半请求体。必须：服务关闭等得最久的连接，
    新的客户端照常得到回答。
    """
    caps = replace(PATIENT, connections=20)
    with running(FakeEngine(), settings=settings(caps)) as url, clients(url, 60, sent) as opened:
        works(url)
        eventually(lambda: sum(map(is_closed, opened)) >= 40)
        closed = list(map(is_closed, opened))  # on a busy machine neighbours may begin to wait in another order
        assert all(closed[:15]) and sum(closed[:30]) > sum(closed[30:]) and not all(closed[-5:])
        works(url)


def test_one_address_does_not_take_all_connections() -> None:
    """T22. Injects: one address opens more connections than one address is allowed. Must follow: only connections from
    this address are closed; connections from other addresses stay open.

    注入：同一个地址建立的连接超过单个地址的上限。必须：只关闭这个地址的连接，别的地址不受影响。
    """
    caps = replace(PATIENT, per_address=10)
    with running(FakeEngine(), settings=settings(caps)) as url, connect(url, own="127.0.0.2") as other:
        with clients(url, 40) as opened:
            works(url)
            eventually(lambda: sum(map(is_closed, opened)) >= 30)
            assert not is_closed(other)
        other.sendall(head("/health", "GET", connection="close"))
        assert b'"ok"' in until_closed(other)


@pytest.mark.parametrize("sent", SILENCES.values(), ids=SILENCES)
def test_clients_that_never_finish(sent: bytes) -> None:
    """T23. Injects: clients that connect and send nothing, or stop in the middle of their headers or of their body.
    Must follow: each connection is closed at its deadline, and a client that had begun a request is told why with
    status 408.

    注入：客户端连上后什么都不发，或者在请求头、请求体中途停下。必须：到期即关闭连接；已经开始发送的，用 408 说明原因。
    """
    caps = replace(PATIENT, idle=0.1, headers=0.1, body=0.1)
    with running(FakeEngine(), settings=settings(caps)) as url, clients(url, 5, sent) as opened:
        for client in opened:
            received = until_closed(client)
            assert received == b"" if not sent else b"408 Request Timeout" in received and b"too long" in received
        works(url)


@pytest.mark.parametrize("begun", [b"", head(content_length=100_000)], ids=["headers", "body"])
def test_clients_that_send_byte_by_byte(begun: bytes) -> None:
    """T24. Injects: a client that sends its headers or its body byte by byte, and never stops. Must follow: the
    deadline of the whole request closes the connection, however recent its last byte is.

    注入：客户端逐字节发送请求头或请求体，永不停止。必须：到整体期限就关闭，不管最后一个字节刚刚到达。
    """
    with running(FakeEngine(), settings=settings(replace(PATIENT, headers=0.3, body=0.3))) as url:
        with connect(url) as client:
            client.sendall(begun)
            client.settimeout(0.01)  # so long it listens between two bytes
            received = b""
            while not received:
                client.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    received = client.recv(65536)
            assert received.startswith(b"HTTP/1.1 408")
        works(url)


@pytest.mark.slow
def test_clients_that_do_not_read() -> None:
    """T25. Injects: as many clients as there are places ask for long answers and read nothing. Must follow: their
    places are free as soon as the answers are complete, and their connections close at the deadline.

    注入：占满全部名额的客户端索要很长的回答，却一个字节也不读。必须：回答一生成完就让出名额；到期关闭连接。
    """
    call = [Part("python", "1"), Part("python_output", "1")]  # 6 tokens, which make 370 bytes
    engine = FakeEngine({"long": call * 1500}, slots=4, length=10_000)
    question = post(ask("long", stream=True, max_tokens=9990, stream_options={"continuous_usage_stats": True}))
    with (
        running(engine, settings=settings(replace(PATIENT, read=8), waiting=2)) as url,  # s: a busy host needs 3
        clients(url, 6, question, receive_bytes=16384) as opened,
    ):
        eventually(lambda: len(engine.seen) == 6)
        eventually(lambda: httpx.get(f"{url}/health").json()["chats"] == 0)
        works(url)
        assert not any(seen.cancelled for seen in engine.seen)
        eventually(lambda: all(map(is_reset, opened)))
        assert not any(b"[DONE]" in until_closed(client) for client in opened)


def test_large_prompts() -> None:
    """T26. Injects: 200 requests of 173 kB at once, with thousands of messages or one endless word. Must follow: a
    health check and a small chat are answered before the large requests; no request with too many messages is encoded.

    注入：同时发来 200 个 173 kB 的请求，内容是几千条消息，或者一个没有尽头的词。必须：健康检查和小请求先得到回答；
    消息过多的请求在编码之前就被拒绝。
    """
    turns = [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(4001)]
    crowd, word = post({"messages": turns}), post(ask("x" * 173_000))
    engine = FakeEngine()
    encoded: list[int] = []
    plain = engine.tokenizer.encode
    engine.tokenizer.encode = lambda text: encoded.append(len(text)) or plain(text)  # type: ignore[method-assign]
    with (
        running(engine, settings=settings(PATIENT)) as url,
        clients(url, 100, crowd) as some,
        clients(url, 100, word) as others,
    ):
        works(url)
        for client in (*some, *others):
            assert client.recv(65536).split(b" ", 2)[1] in (b"400", b"429")
    assert 1 not in encoded
    assert 173_000 in encoded


def test_unfinished_bodies_hold_little_memory() -> None:
    """T27. Injects: unfinished bodies that together are forty times as large as the server holds. Must follow: the
    oldest are refused with status 429, and a chat whose body is complete is answered.

    注入：未发完的请求体合计是上限的四十倍。必须：用 429 拒绝最早的；请求体完整的对话照常得到回答。
    """
    unfinished = head(content_length=200_000) + b"x" * 100_000
    caps = replace(PATIENT, unfinished_bytes=250_000, leave=0.1)
    with running(FakeEngine(), settings=settings(caps)) as url, clients(url, 100, unfinished) as opened:
        works(url)
        eventually(lambda: sum(map(has_answer, opened)) >= 90)  # which ones depends on the order in which bytes arrive
        assert not all(map(has_answer, opened))
        for client in filter(has_answer, opened):
            assert b"429 Too Many Requests" in until_closed(client)


LEAVES = {
    "in the headers": head(content_length=9)[:-2],
    "in the body": head(content_length=9) + b"{",
    "in a body of chunks": head(transfer_encoding="chunked") + b"5\r\nhello",
    "after a broken chunk": head("/health", "GET", transfer_encoding="chunked") + b"zzz\r\n",
    "before the answer": post(ask("hello")),
    "in the answer": post(ask("hello", stream=True)),
    "after what is not HTTP": b"\x16\x03\x01\x02\x00\x01\x00",
}


@pytest.mark.parametrize("sent", LEAVES.values(), ids=LEAVES)
def test_clients_that_leave(sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """T28. Injects: clients that disconnect during the headers, during the body, before or during the answer, or after
    bytes that are not HTTP. Must follow: nothing is written to the log, and no place stays occupied.

    注入：客户端在请求头、请求体、回答之前或回答中途离开，或者发来不是 HTTP 的字节。必须：日志里什么也不写，
    名额全部归还。
    """
    with running(FakeEngine(slots=2), settings=settings(PATIENT)) as url:
        with clients(url, 20, sent):
            pass
        eventually(lambda: httpx.get(f"{url}/health").json()["chats"] == 0)
        works(url)
    assert capfd.readouterr().err == ""


ENDLESS = {
    "413": head(content_length=10**12),
    "415": head(content_type="text/plain", content_length=10**12),
    "403": head(host="evil.example", content_length=10**12),
    "404": head("/nothing", content_length=10**12),
    "405": head("/health", content_length=10**12),
    "200": head("/health", "GET", content_length=10**12),
    "413 ": head(transfer_encoding="chunked") + b"fffffffff\r\n",
}


@pytest.mark.parametrize(("status", "sent"), ENDLESS.items())
def test_endless_bodies_after_an_early_answer(status: str, sent: bytes) -> None:
    """T29. Injects: an endless body after a request that is answered before its body is read. Must follow: the client
    can read the answer, and the server stops reading and closes.

    注入：服务在请求体之前就已经回答，客户端仍无休止地发送请求体。必须：客户端能读到回答；服务不再读取，并关闭连接。
    """
    with running(FakeEngine(), settings=settings(replace(PATIENT, leave=0.3))) as url, connect(url) as client:
        client.sendall(sent)
        count = 0
        with contextlib.suppress(ConnectionError):
            for _ in range(4096):  # 256 MB
                client.sendall(b"x" * 65536)
                count += 65536
        assert count < 1 << 25  # what the server swallows, and the buffers of two sockets
        assert until_closed(client).startswith(b"HTTP/1.1 " + status.strip().encode())
        works(url)


def test_bodies_in_crumbs_and_with_two_lengths() -> None:
    """T30. Injects: a body in chunks of one byte, which costs a thousand times as much as the same body in one piece,
    and a body with two lengths. Must follow: status 400, and the connection closes.

    注入：请求体切成每块一个字节，处理代价高上千倍；请求体带有两种长度。必须：返回 400 并关闭连接。
    """
    content = json.dumps(ask("hello")).encode()
    with running(FakeEngine(), settings=settings(replace(PATIENT, leave=0.1))) as url:
        for sent in (
            head(transfer_encoding="chunked") + b"1\r\nx\r\n" * 10_000,
            head(content_length=len(content), transfer_encoding="chunked")
            + b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content),
        ):
            with connect(url) as client:
                client.sendall(sent)
                assert until_closed(client).startswith(b"HTTP/1.1 400")
        works(url)
