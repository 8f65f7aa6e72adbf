"""The server over real HTTP: answers, streams, refusals, safety headers and allowed hosts."""

import json
import select
import time
from collections.abc import Iterator
from importlib.resources import as_file, files
from typing import Any

import httpx
import pytest

from nanochat import __version__
from nanochat.data.conversation import Part
from nanochat.serve.app import ASSETS, PAGES
from nanochat.serve.listening import HEADERS, host_allowed
from tests.support.fake_engine import CHAT, ByteTokenizer, FakeEngine, ask, eventually, running
from tests.support.raw_client import connect, head, post, until_closed

CALL = ["37 × 48 = ", Part("python", "37*48"), Part("python_output", "1776"), "1776"]
REPLIES = {"hello": ["你好，世界"], "sum": CALL}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(REPLIES, slots=4, length=200)


@pytest.fixture(scope="module")
def client(engine) -> Iterator[httpx.Client]:
    with running(engine) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def events(response: httpx.Response) -> list[Any]:
    """The JSON of every event. The last event must be [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_whole_answer(client):
    body = client.post(CHAT, json=ask("hello")).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "nanochat-sft-d4"
    assert abs(body["created"] - time.time()) < 60
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "你好，世界"}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    counts = {"prompt_tokens": 9, "completion_tokens": 16, "total_tokens": 25}
    details = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}
    assert body["usage"] == counts | details


def test_programs_read_english_refusals(client, monkeypatch):
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    answer = client.post(CHAT, json=ask("hello", min_tokens=3, response_format={"type": "json_object"}))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].isascii()


def test_streamed_answer_is_the_same_in_pieces_of_whole_characters(client):
    response = client.post(CHAT, json=ask("hello", stream=True))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(response)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in middle) == "你好，世界"
    assert [choice["finish_reason"] for choice in middle] == [None] * len(middle)
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert [chunk.get("usage") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["completion_tokens"] == 16
    alone = events(client.post(CHAT, json=ask("hello", stream=True, stream_options={"include_usage": True})))
    assert "usage" not in alone[-2]
    assert (alone[-1]["choices"], alone[-1]["usage"]["total_tokens"]) == ([], 25)


def test_answer_that_was_given_back_reaches_the_model_with_its_tool_call(client, engine):
    message = client.post(CHAT, json=ask("sum")).json()["choices"][0]["message"]
    client.post(CHAT, json={"messages": [*ask("sum")["messages"], message, *ask("hello")["messages"]]})
    tokenizer = ByteTokenizer()
    call = [*tokenizer.marked("python", "37*48"), *tokenizer.marked("output", "1776")]
    prompt = engine.seen[-1].prompt
    assert any(prompt[i : i + len(call)] == call for i in range(len(prompt)))


def test_answer_stops_at_max_tokens_with_the_reason(client):
    body = client.post(CHAT, json=ask("hello", max_tokens=4)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == "你\ufffd"


def test_sampling_is_as_asked_or_as_the_server_was_started(client, engine):
    client.post(CHAT, json=ask("hello", temperature=0, top_k=0, max_tokens=20, seed=5))
    sampling = engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.seed) == (0, None, 20, 5)
    client.post(CHAT, json=ask("hello"))
    sampling = engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.6, 50, 200 - 9)
    seeds = {engine.seen[-1].sampling.seed for _ in range(3) if client.post(CHAT, json=ask("hello"))}
    assert len(seeds) == 3


def test_models_and_health(client):
    models = client.get("/v1/models").json()
    (model,) = models["data"]
    assert models["object"] == "list"
    assert (model["id"], model["object"], model["stage"], model["tag"]) == ("nanochat-sft-d4", "model", "sft", "d4")
    assert (model["step"], model["context_length"], model["max_model_len"]) == (300, 200, 200)
    assert model["capabilities"] == {"system_message": False, "tools": False}
    assert model["vocab_size"] == ByteTokenizer.vocab_size
    defaults = {"temperature": 0.6, "min_p": 0.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
    assert model["defaults"] == {**defaults, "max_tokens": 512, "enable_thinking": None}
    eventually(lambda: client.get("/health").json()["free_slots"] == 4)
    expected = {"status": "ok", "version": __version__, "slots": 4, "free_slots": 4, "chats": 0}
    assert client.get("/health").json() == expected


# --- what does not fit ---------------------------------------------------------------------------


def test_an_answer_ends_with_the_context_and_a_chat_that_fills_it_is_refused_with_numbers(client):
    body = client.post(CHAT, json=ask("x" * 120, max_tokens=100)).json()
    assert (body["choices"][0]["finish_reason"], body["usage"]["total_tokens"]) == ("length", 200)
    response = client.post(CHAT, json=ask("x" * 196, max_tokens=100))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert error["message"].count("200") == 2


def test_oldest_exchanges_are_left_out_only_when_the_client_allows_it(client):
    exchange = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "def"}]
    fields = {"messages": [*exchange * 30, *ask("hello")["messages"]], "max_tokens": 50}
    assert client.post(CHAT, json=fields).status_code == 400
    fields["truncation"] = "auto"
    # 1 + 10 per exchange + 8 for the question and the reply's start mark + 50 must be at most 200
    assert client.post(CHAT, json=fields).json()["truncated_messages"] == 2 * (30 - 14)
    assert events(client.post(CHAT, json={**fields, "stream": True}))[0]["truncated_messages"] == 2 * (30 - 14)


def test_a_shortened_chat_leaves_room_for_a_reply_without_a_limit_too(client):
    """It left room for one token, so that most replies were a few tokens long."""
    exchange = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "def"}]
    question = ask("y" * 40)["messages"]
    for path, field in ((CHAT, "messages"), ("/v1/responses", "input")):
        body = client.post(path, json={field: [*exchange * 30, *question], "truncation": "auto"}).json()
        assert "y" * 40 in json.dumps(body) and body.get("status", "completed") == "completed"
        assert body.get("choices", [{"finish_reason": "stop"}])[0]["finish_reason"] == "stop"


def test_endless_body_is_refused_while_it_comes(client):
    with connect(str(client.base_url)) as plain:
        plain.sendall(head(transfer_encoding="chunked"))
        for _ in range(10_000):
            plain.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
            if select.select([plain], [], [], 0)[0]:
                break
        assert b" 413 " in until_closed(plain).partition(b"\r\n")[0]
    assert client.get("/health").json()["chats"] == 0


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b"[]", "application/json; charset=utf-8", 400, "invalid_value"),
        (json.dumps(ask("hello")).encode(), "text/plain", 415, "unsupported_media_type"),
        (json.dumps(ask("hello", modalities=["audio"])).encode(), "application/json", 400, "unsupported_parameter"),
        (json.dumps(ask(" ")).encode(), "application/json", 400, "empty_prompt"),
    ],
)
def test_bad_bodies_get_openais_error(client, content, kind, status, code):
    response = client.post(CHAT, content=content, headers={"Content-Type": kind})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_half_a_surrogate_pair_in_a_name_is_refused_like_any_name(client):
    response = client.post(CHAT, content=rb'{"\ud800": 1}', headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unknown_parameter", "\ufffd")


def test_connection_is_kept_for_the_next_request_after_an_answer_to_a_whole_one(client):
    with connect(str(client.base_url)) as plain:
        for body in (ask("hello"), ask("hello", n=0), ask("hello", stream=True)):
            plain.sendall(post(body))
            received = b""
            while not received.endswith((b"}", b"\r\n0\r\n\r\n")):
                received += plain.recv(65536)
        plain.sendall(head("/health", "GET", connection="close"))
        assert b'"ok"' in until_closed(plain)


def test_unknown_routes_and_methods_get_openais_error(client):
    for method, path, status in [("GET", "/nothing", 404), ("GET", CHAT, 405), ("GET", "/assets/../server.py", 404)]:
        response = client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["code"] == "not_found"
    assert f"{CHAT} answers POST only" in client.get(CHAT).json()["error"]["message"]
    for path in ("/docs", "/redoc", "/openapi.json", "/assets/index.html", "/assets/%2e%2e%2fserver.py"):
        assert client.get(path).status_code == 404


# --- safety --------------------------------------------------------------------------------------


def test_every_response_has_the_safety_headers(client):
    responses = [client.get(path) for path in ("/", "/health", "/v1/models", "/nothing", "/assets/app.js")]
    responses += [client.post(CHAT, json=body) for body in (ask("hello"), ask("hello", stream=True), ask(""))]
    responses += [client.get("/", headers={"Host": "evil.example"})]
    responses += [client.get("/v1/models", headers={"Origin": "https://chat.example.org"})]
    for response in responses:
        assert {name: response.headers.get(name) for name in HEADERS} == HEADERS
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert "server" not in response.headers
    assert client.options(CHAT, headers={"Origin": "http://evil.example"}).status_code == 405


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:80", "10.0.0.7:8000", "[::1]:8000", "gpu1:80"]
)
def test_host_of_this_server_is_answered(host):
    assert host_allowed(host, ("gpu1",))


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil"])
def test_name_that_another_site_may_have_pointed_here_is_refused(client, host):
    assert not host_allowed(host, ("gpu1",))
    if host:
        response = client.get("/health", headers={"Host": host})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")


def test_page_and_its_files_are_served(client):
    with as_file(files("nanochat.serve") / "web") as folder:
        assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")} == {*PAGES, *ASSETS}
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for name, kind in ASSETS.items():
        response = client.get(f"/assets/{name}")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kind)
