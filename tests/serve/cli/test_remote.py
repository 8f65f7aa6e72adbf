"""The terminal chat with a server: replies in pieces, a stop in the middle, history, and what goes wrong."""

import base64
import contextlib
import gzip
import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from nanochat.common import UserError
from nanochat.data.conversation import Part, system, user
from nanochat.serve.cli import remote as remote_module
from nanochat.serve.cli import terminal
from nanochat.serve.cli.remote import Remote
from scripts import chat_cli
from scripts.chat_cli import Chat, Config
from tests.support.fake_engine import SETTINGS, ByteTokenizer, FakeEngine, eventually, running

REPLIES = {"sum": ["37 × 48 = ", Part("python", "37*48"), Part("python_output", "1776"), "1776"], "hello": ["你好"]}
KEY = "sk-1"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(REPLIES)


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with running(engine, settings=replace(SETTINGS, api_key=KEY)) as url:
        yield url


def said(remote: Remote, *texts: str) -> list[Part]:
    return [*remote.reply([user(text) for text in texts], {"max_tokens": 50}, lambda: False)]


def test_reply_comes_in_parts_with_its_end_and_length(url):
    remote = Remote(url + "/", KEY)
    parts = said(remote, "sum")
    assert "".join(part.text for part in parts if part.kind == "text") == "37 × 48 = 1776"
    assert [part for part in parts if part.kind != "text"] == [Part("python", "37*48"), Part("python_output", "1776")]
    assert (remote.finish, remote.tokens > 0, remote.model) == ("stop", True, "nanochat-sft-d4")
    assert Remote(url + "/v1", KEY).url == remote.url == url + "/v1"


def test_a_proxy_that_cannot_be_used_is_named(monkeypatch):
    refusal = UserError("https_proxy names a SOCKS proxy", exit_code=2)

    def refuse(*_: object, **__: object) -> None:
        raise refusal

    monkeypatch.setattr(remote_module.net, "request", refuse)
    with pytest.raises(UserError) as told:
        Remote("http://example.org", "")
    assert told.value is refusal


def test_thoughts_come_apart_and_go_back_with_the_chat():
    reply = {"why": ["<think>\nBecause.\n</think>\n\nSo."]}
    engine = FakeEngine(reply, tokenizer=ByteTokenizer(thought_marks=("<think>", "</think>")))
    with running(engine) as url:
        out = io.StringIO()
        chat = Chat(Remote(url, ""), chat_cli.Sampling(), "en", out, io.StringIO(), thinks=False)
        assert chat_cli.reply(chat, "why")
        assert out.getvalue() == "So.\n"
        assert chat.messages[-1].fields == {"reasoning_content": "Because."}
        body = chat.speaker._body(chat.messages, {})
        assert body["messages"][-1] == {"role": "assistant", "content": "So.", "reasoning_content": "Because."}
        assert chat_cli.reply(chat, "next")


def test_a_server_that_leaves_the_first_messages_out_is_heard():
    with running(FakeEngine({}, length=100)) as url:
        notes = io.StringIO()
        chat = Chat(Remote(url, ""), chat_cli.Sampling(), "en", io.StringIO(), notes)
        for _ in range(2):
            assert chat_cli.reply(chat, "one two three")
        assert "no longer sees" not in notes.getvalue()
        assert chat_cli.reply(chat, "four " * 8)
        assert "the model no longer sees the first 4 messages" in notes.getvalue()
        assert chat_cli.reply(chat, "next") and chat.speaker.forgotten


def test_stop_frees_the_servers_slot(url, engine):
    def health() -> dict[str, Any]:
        return httpx.get(f"{url}/health").json()

    engine.gated = True
    remote = Remote(url, KEY)
    assert [*remote.reply([user("hello")], {}, lambda: health()["chats"] == 1)] == []
    assert remote.finish is None
    eventually(lambda: health()["free_slots"] == engine.slots)
    assert health()["chats"] == 0


def test_terminal_chat_keeps_the_turns_and_asks_for_its_settings(url, engine, monkeypatch):
    out, notes = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("NANOCHAT_API_KEY", KEY)
    chat: Chat = chat_cli.open_chat(Config(url=url, system="be brief", lang="en", seed=7, max_tokens=60), notes)
    assert chat_cli.reply(chat, "sum") and chat_cli.reply(chat, "hello")
    assert out.getvalue() == "37 × 48 = 1776\n你好\n" and "[37*48 = 1776]" in notes.getvalue()
    call = (Part("python", "37*48"), Part("python_output", "1776"))
    heard = engine.seen[-1].prompt  # the model sees its calls, as in a chat with a model that is loaded here
    start, end = (engine.tokenizer.special(f"python_{place}") for place in ("start", "end"))
    assert bytes(heard[heard.index(start) + 1 : heard.index(end)]) == b"37*48"
    assert [message.text for message in chat.messages] == ["be brief", "sum", "37 × 48 = 1776", "hello", "你好"]
    assert call[0] in chat.messages[2].parts and chat.messages[0] == system("be brief")
    first, second = (seen.sampling for seen in engine.seen)
    assert (first.seed, second.seed, first.temperature, first.max_tokens) == (7, 8, SETTINGS.temperature, 60)
    chat_cli.command(chat, "/temp 0")
    chat_cli.reply(chat, "hello")
    assert (engine.seen[-1].sampling.temperature, engine.seen[-1].sampling.min_p) == (0, SETTINGS.min_p)
    assert "nanochat-sft-d4" in notes.getvalue() and "tokens/s" in notes.getvalue()


def test_a_server_hears_only_what_the_user_set_and_its_own_defaults_are_shown():
    engine, notes = FakeEngine(REPLIES, length=256), io.StringIO()
    settings = replace(SETTINGS, temperature=1.0, min_p=0.5, top_k=9)
    with running(engine, settings=settings) as url:
        chat = chat_cli.open_chat(Config(url=url, lang="en"), notes)
        chat_cli.reply(chat, "hello")
        first = engine.seen[-1].sampling
        assert (first.temperature, first.min_p, first.top_k, first.max_tokens) == (1.0, 0.5, 9, 128)
        with pytest.raises(UserError, match="/max must be from 1 to 1,000,000,000, got"):
            chat_cli.command(chat, "/max 99999999999")
        with pytest.raises(UserError, match="/temp must be"):
            chat_cli.command(chat, "/temp -1")
        chat_cli.command(chat, "/temp")
        assert "temperature: 1; top-k: 9; longest reply in tokens: 128\n" in notes.getvalue()
        chat_cli.command(chat, "/help")
        assert "(now 1)" in notes.getvalue() and "(now 9)" in notes.getvalue() and "(now 128)" in notes.getvalue()
        assert chat.changed == set()
        chat_cli.command(chat, "/max 512")
        assert "at most 192 tokens here, because the server's context of 256 tokens" in notes.getvalue()
        chat_cli.command(chat, "/topk 7")
        chat_cli.reply(chat, "hello")
        last = engine.seen[-1].sampling
        assert (last.temperature, last.top_k, last.max_tokens) == (1.0, 7, 192)


def test_another_makers_server_is_not_told_settings_and_tells_none():
    notes = io.StringIO()
    listing = b'{"data": [{"id": "gpt", "owned_by": "someone", "context_length": 16}]}'
    chat = chat_cli.open_chat(Config(url=answering(listing), lang="en"), notes)
    assert set(chat.settings.values()) == {None}
    chat_cli.command(chat, "/max 4000")
    unsaid = "the server's default"
    assert f"temperature: {unsaid}; top-k: {unsaid}; longest reply in tokens: 4000\n" in notes.getvalue()


def refusal(url: str, key: str = KEY) -> str:
    with pytest.raises(UserError) as caught:
        said(Remote(url, key), "hello")
    return str(caught.value)


def answering(content: bytes, kind: str = "application/json") -> str:
    """The address of a server that gives every request the same answer."""
    listener = socket.create_server(("127.0.0.1", 0))
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"

    def serve() -> None:
        for _ in range(2):
            with listener.accept()[0] as client:
                client.recv(65536)
                client.sendall(head.encode() + content)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_failure_in_the_middle_of_a_reply_is_told_in_the_servers_words(url, engine):
    remote, engine.fail = Remote(url, KEY), True
    with pytest.raises(UserError, match=f"^{remote.url} failed: ") as caught:
        said(remote, "hello")
    assert "--url" not in str(caught.value)


def test_what_goes_wrong_is_one_message_with_the_next_step(url):
    assert "--api_key" in refusal(url, "wrong")
    assert "begin with http://" in refusal("127.0.0.1:8000")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "no server answers" in refusal(f"http://127.0.0.1:{port}")
    assert "names no model" in refusal(answering(b"{}"))
    assert "no JSON" in refusal(answering(b"<html>"))
    remote = Remote(url, KEY)
    with pytest.raises(UserError, match="status 400"):
        [*remote.reply([user("")], {}, lambda: False)]


# --- servers that are not trusted ----------------------------------------------------------------

LISTING = {"data": [{"id": "gpt", "owned_by": "nanochat"}]}


def whole_request(client: socket.socket) -> bytes:
    """The bytes of a request with its body: closing a socket with something unread would reset the connection."""
    received = client.recv(65536)
    while received:
        head, end, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if end and len(body) >= int(length[1] if length else 0):
            break
        more = client.recv(65536)
        if not more:
            break
        received += more
    return received


@contextlib.contextmanager
def scripted(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """The address of a server that gives these answers, one a connection, and the heads of the requests to it."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                for answer in answers:
                    with listener.accept()[0] as client:
                        requests.append(whole_request(client))
                        client.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", requests


def answer(content: bytes, *headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", "Connection: close", *headers, "\r\n"]).encode() + content


def listing(**fields: Any) -> bytes:
    return answer(json.dumps({"data": [{**LISTING["data"][0], **fields}]}).encode())


def said_by(*answers: bytes) -> tuple[Remote, list[Part]]:
    with scripted(*answers) as (host, _):
        remote = Remote(f"http://{host}", "")
        return remote, said(remote, "hello")


ODD_EVENTS = [
    "5", "[]", "[" * 100_000, '{"choices": 5}', '{"choices": {"a": 1}}', '{"choices": [5]}', '{"error": 5, "choices": 1}',
    '{"choices": [{"delta": 5}]}', '{"choices": [{"delta": {"content": 5}}]}', '{"choices": [{"finish_reason": ["x"]}]}',
    '{"choices": [{"delta": {"tool": "x"}}]}', '{"choices": [{"delta": {"tool": {"expression": 5}}}]}',
    '{"choices": [{"delta": {"content": ["x"]}}]}', "1" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("event", ODD_EVENTS)
def test_an_event_of_an_odd_type_is_refused_in_one_message(event):
    with pytest.raises(UserError, match=r"a chat completion|failed: "):
        said_by(listing(), answer(f"data: {event}\n\n".encode()))


@pytest.mark.parametrize("result", [None, "", "1776"])
def test_a_calculation_that_was_cut_off_has_no_result(result):
    call = {"expression": "37*48", "result": result}
    event = json.dumps({"choices": [{"delta": {"tool": call}, "finish_reason": "length"}]})
    with scripted(listing(), answer(f"data: {event}\n\n".encode())) as (host, _):
        notes = io.StringIO()
        chat = Chat(Remote(f"http://{host}", ""), chat_cli.Sampling(), "en", io.StringIO(), notes)
        chat_cli.reply(chat, "sum")
    kept = chat.speaker._more(chat.messages[-1])
    assert kept == {"parts": [{"type": "tool", **call}]}
    assert ("[37*48 ...]" in notes.getvalue()) == (result is None)


@pytest.mark.parametrize("tokens", [-45, "x", 1e999, [1], 10**12, True])
def test_an_odd_length_of_the_reply_is_not_shown(tokens):
    event = json.dumps({"usage": {"completion_tokens": tokens}, "choices": [{"delta": {"content": "hi"}}]})
    remote, parts = said_by(listing(), answer(f"data: {event}\n\ndata: [DONE]\n\n".encode()))
    assert (remote.tokens, parts) == (0, [Part("text", "hi")])


WORDS = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'


@pytest.mark.parametrize(
    ("end", "finish"),
    [
        (b"data: [DONE]\n\n", "stop"),
        (b"data: [DONE]", "stop"),
        (b"data:[DONE]\n\n", "stop"),
        (b"data:[DONE]", "stop"),
        (b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n', "length"),
    ],
)
def test_a_reply_ends_with_a_reason_or_with_done(end, finish):
    remote, parts = said_by(listing(), answer(WORDS + end))
    assert (remote.finish, parts) == (finish, [Part("text", "hi")])


def test_a_length_that_the_server_does_not_say_is_not_shown():
    """It said 0 tokens, 0 tokens/s, as for every reply that Ctrl-C stopped."""
    with scripted(listing(), answer(WORDS + b"data: [DONE]\n\n")) as (host, _):
        notes = io.StringIO()
        chat = Chat(Remote(f"http://{host}", ""), chat_cli.Sampling(), "en", io.StringIO(), notes)
        assert chat_cli.reply(chat, "hello")
    assert notes.getvalue() == ""


@pytest.mark.parametrize("end", [b"", b"data: [DO", b": comment\n\n"])
def test_a_reply_without_a_reason_or_done_ended_too_early(end):
    with pytest.raises(UserError, match=r"ended the reply too early \(the server closed"):
        said_by(listing(), answer(WORDS + end))


@pytest.mark.parametrize("name", [5, None, "", "x" * 10_000, {"a": 1}])
def test_a_model_without_a_name_is_refused(name):
    with pytest.raises(UserError, match="names no model"):
        said_by(listing(id=name))


@pytest.mark.parametrize("value", [-5, True, "x", 1e999, 10**400, None, 0.5])
def test_odd_settings_and_contexts_count_as_unknown(value):
    odd = {"defaults": {"max_tokens": value, "top_k": value}, "context_length": value}
    with scripted(listing(**odd)) as (host, _):
        remote = Remote(f"http://{host}", "")
    assert remote.context is None and remote.settings({})["max_tokens"] is None


@pytest.mark.parametrize("first", [True, False], ids=["listing", "reply"])
def test_compressed_bodies_are_not_unpacked(first):
    bomb = answer(gzip.compress(b" " * (64 << 20)), "Content-Encoding: gzip")
    with pytest.raises(UserError, match=r"no JSON|compressed"):
        said_by(*([bomb] if first else [listing(), bomb]))


def test_lines_and_bodies_without_an_end_are_refused(monkeypatch):
    monkeypatch.setattr(remote_module, "LINE_BYTES", 1000)
    monkeypatch.setattr(remote_module, "JSON_BYTES", 1000)
    with pytest.raises(UserError, match="bytes a line"):
        said_by(listing(), answer(b"data: " + b"x" * 2000))
    with pytest.raises(UserError, match="no JSON"):
        said_by(answer(b" " * 10_000))
    monkeypatch.setattr(remote_module, "REPLY_BYTES", 5000)
    with pytest.raises(UserError, match="in all"):
        said_by(listing(), answer(b": comment\n" * 1000))


def test_a_password_in_the_url_is_sent_and_never_repeated():
    refused = b"HTTP/1.1 418 I'm a teapot\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    for kept in (listing(), refused):
        with scripted(kept, refused) as (host, heads), pytest.raises(UserError) as caught:
            said(Remote(f"http://user:s3cret%21@{host}", ""), "hello")
        assert "s3cret" not in str(caught.value) and host in str(caught.value)
        assert base64.b64encode(b"user:s3cret!") in heads[0]
    for url in (
        "http://user:s3cret@127.0.0.1:1",
        "http://user:s3cret@[::1",
        "http://u:s3cret@h:x/",
        "ftp://u:s3cret@h",
    ):
        with pytest.raises(UserError) as caught:
            Remote(url, "")
        assert "s3cret" not in str(caught.value)


def test_neither_netrc_nor_a_proxy_changes_what_a_server_on_this_machine_gets(tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password s3cret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for key in (KEY, ""):
        with scripted(listing()) as (host, heads):
            Remote(f"http://{host}", key)
        assert b"Basic" not in heads[0] and (KEY.encode() in heads[0]) is bool(key)


def test_a_redirect_is_not_followed():
    moved = b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with pytest.raises(UserError, match="another address"):
        said_by(moved)


def test_a_reply_cannot_change_the_direction_of_text_or_control_the_terminal():
    assert terminal.harmless("a\u202eb\u2066\x1b[31m\ud800") == "a\ufffdb\ufffd\ufffd[31m\ufffd"
