"""Several models on one server: a request names the one that answers, and each has its own slots."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import pytest

from nanochat.common import UserError
from nanochat.serve.app import create_app
from nanochat.serve.models import Announced, Loadable
from tests.support.fake_engine import CHAT, SETTINGS, ByteTokenizer, FakeEngine, ask, eventually, running
from tests.support.raw_client import connect, post

OTHER = Announced(model="nanochat-rl-d4", stage="rl", tag="d4", step=20, temperature=0.0, max_tokens=7)


@dataclass(frozen=True)
class Two:
    """The address of a server with two models, and their engines."""

    url: str
    first: FakeEngine
    second: FakeEngine


@pytest.fixture
def two() -> Iterator[Two]:
    first = FakeEngine({"hello": "one"}, slots=2)
    second = FakeEngine({"hello": "two"}, slots=3, gated=True, tokenizer=ByteTokenizer(takes_system=True))
    with running(first, beside=[Loadable(second, second.tokenizer, OTHER)]) as url:  # type: ignore[arg-type]
        yield Two(url, first, second)


def said(url: str, **fields: object) -> str:
    return httpx.post(url + CHAT, json=ask("hello", **fields)).json()["choices"][0]["message"]["content"]


def test_a_request_names_the_model_that_answers(two: Two) -> None:
    two.second.allow(1000)
    assert said(two.url) == said(two.url, model=SETTINGS.model) == "one"
    assert said(two.url, model=OTHER.model) == "two"
    (seen,) = two.second.seen
    assert (seen.sampling.temperature, seen.sampling.max_tokens) == (0.0, 7)  # each has its own defaults


def test_both_are_listed_and_described_by_name(two: Two) -> None:
    listed = httpx.get(f"{two.url}/v1/models").json()["data"]
    assert [each["capabilities"]["system_message"] for each in listed] == [False, True]
    assert [(each["id"], each["stage"], each["defaults"]["max_tokens"]) for each in listed] == [
        (SETTINGS.model, "sft", 512), (OTHER.model, "rl", 7),
    ]  # fmt: skip
    assert httpx.get(f"{two.url}/v1/models/{OTHER.model}").json() == listed[1]
    tokens = httpx.get(f"{two.url}/tokenizer_info", params={"model": OTHER.model}).json()
    assert tokens["vocab_size"] == ByteTokenizer.vocab_size


@pytest.mark.parametrize("slash", ["/", "%2F"])
def test_a_model_whose_name_has_a_slash_is_described(slash: str) -> None:
    name = "Qwen/Qwen3-0.6B"
    with running(FakeEngine(), settings=replace(SETTINGS, model=name)) as url:
        answer = httpx.get(f"{url}/v1/models/{name.replace('/', slash)}")
        assert (answer.status_code, answer.json().get("id")) == (200, name)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("GET", "/v1/models/gpt-5", None), ("GET", "/v1/models/openai/gpt-5", None), ("GET", "/tokenizer_info?model=gpt-5", None),
     ("POST", CHAT, ask("hello", model="gpt-5")), ("POST", "/tokenize", {"prompt": "a", "model": "gpt-5"}),
     ("POST", CHAT, ask("hello", model=["gpt-5"]))],
)  # fmt: skip
def test_another_name_is_answered_with_those_that_are(two: Two, method: str, path: str, body: object) -> None:
    answer = httpx.request(method, two.url + path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert SETTINGS.model in error["message"] and OTHER.model in error["message"]


def test_one_model_stands_still_and_the_other_answers(two: Two) -> None:
    with httpx.stream("POST", two.url + CHAT, json=ask("hello", model=OTHER.model, stream=True), timeout=30):
        eventually(lambda: httpx.get(f"{two.url}/health").json()["chats"] == 1)
        assert said(two.url) == "one"
        eventually(lambda: httpx.get(f"{two.url}/health").json()["free_slots"] == 4)
        health = httpx.get(f"{two.url}/health").json()
        assert (health["slots"], health["status"]) == (5, "ok")
        metrics = httpx.get(f"{two.url}/metrics").text
    assert f'vllm:num_requests_running{{model_name="{OTHER.model}"}} 1.0' in metrics
    assert f'vllm:num_requests_running{{model_name="{SETTINGS.model}"}} 0.0' in metrics
    assert f'vllm:request_success_total{{finished_reason="stop",model_name="{SETTINGS.model}"}} 1.0' in metrics


def test_the_requests_of_an_address_are_counted_over_all_models() -> None:
    first, second = FakeEngine({"hello": "one"}, gated=True), FakeEngine({"hello": "two"}, gated=True)
    other = Loadable(second, second.tokenizer, OTHER)  # type: ignore[arg-type]
    settings = replace(SETTINGS, per_address=1)
    with running(first, settings=settings, beside=[other]) as url, connect(url, own="127.0.0.2") as client:
        client.sendall(post(ask("hello")))
        eventually(lambda: httpx.get(f"{url}/health").json()["chats"] == 1)
        for name in (SETTINGS.model, OTHER.model):
            with connect(url, own="127.0.0.2") as another:
                another.sendall(post(ask("hello", model=name)))
                assert b" 429 " in another.recv(65536)
        with connect(url, own="127.0.0.3") as neighbour:
            neighbour.sendall(post(ask("hello")))
            eventually(lambda: httpx.get(f"{url}/health").json()["chats"] == 2)


def test_two_models_of_one_name_are_refused() -> None:
    engine = FakeEngine()
    one = Loadable(engine, engine.tokenizer, OTHER)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="two models would have the name 'nanochat-rl-d4'"):
        create_app([one, one], SETTINGS)


def test_adapters_share_the_slots_and_the_line_of_their_base() -> None:
    base, slow = FakeEngine({"hello": "base"}), FakeEngine({"hello": "other"}, gated=True)
    pip = Loadable(base, base.tokenizer, replace(OTHER, model="pip"), adapter="own-name")  # type: ignore[arg-type]
    beside = [pip, Loadable(slow, slow.tokenizer, OTHER)]  # type: ignore[arg-type]
    with running(base, beside=beside) as url:
        names = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
        assert names == [SETTINGS.model, "pip", OTHER.model]
        for asked in ({}, {"model": "pip"}, {"model": "pip", "n": 2}):
            assert httpx.post(url + CHAT, json=ask("hello", **asked)).status_code == 200
        assert [seen.sampling.adapter for seen in base.seen] == ["", "own-name", "own-name", "own-name"]
        health = httpx.get(f"{url}/health").json()
        assert (health["slots"], health["free_slots"]) == (4, 4)  # of two engines, not of three models
        metrics = httpx.get(f"{url}/metrics").text
    assert 'vllm:request_success_total{finished_reason="stop",model_name="pip"} 3.0' in metrics
    assert 'vllm:num_requests_running{model_name="pip"}' not in metrics  # the base tells it
