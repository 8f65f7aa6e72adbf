"""The key of the server: which requests need it, and that a wrong one opens nothing."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from nanochat.serve.app import create_app
from nanochat.serve.listening import needs_key
from nanochat.serve.models import Loadable
from tests.support.fake_engine import CHAT, SETTINGS, FakeEngine, ask, running

KEY = "sk-密钥-1"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    settings = replace(SETTINGS, api_key=KEY)
    with running(FakeEngine(), settings=settings) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": b"Bearer " + key.encode()}


def test_right_key_opens_every_route(client):
    assert client.post(CHAT, json=ask("hello"), headers=bearer(KEY)).status_code == 200
    for path in ("/v1/models", "/metrics", "/tokenizer_info"):
        assert client.get(path, headers=bearer(KEY)).status_code == 200


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer", b"Bearer wrong", KEY.encode(), b"Basic " + KEY.encode(), b"\xff\xfe"]
)
def test_without_the_key_nothing_is_answered(client, header):
    headers = {} if header is None else {"Authorization": header}
    for method, path in [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nothing")]:
        response = client.request(method, path, headers=headers)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert KEY not in response.text


def test_every_route_but_the_pages_their_files_and_health_needs_the_key(client, tmp_path):
    engine = FakeEngine()
    settings = replace(SETTINGS, api_key=KEY, runs=tmp_path)
    guard: Any = create_app([Loadable(engine, engine.tokenizer, settings)], settings).asgi  # type: ignore[arg-type]
    routes = {(method, route.path) for route in guard.app.routes for method in route.methods}
    assert ("DELETE", "/v1/responses/{number}") in routes and len(routes) > 15
    free = {path for _, path in routes if not needs_key(path)}
    assert free == {"/", "/runs", "/health", "/assets/{name:path}"}
    for method, path in sorted(routes):
        if path not in free:
            assert client.request(method, re.sub("{.*}", "a", path)).status_code == 401, path


def test_page_and_health_need_no_key(client):
    for path in ("/", "/health", "/assets/app.js"):
        assert client.get(path).status_code == 200
    assert needs_key("/assets") and needs_key("//") and needs_key("/health/")


def test_only_the_pages_of_allowed_sites_may_read_answers():
    site = "https://chat.example.org"
    settings = replace(SETTINGS, api_key=KEY, origins=(site,))
    with running(FakeEngine(), settings=settings) as url, httpx.Client(base_url=url, timeout=30) as client:
        asks = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-stainless-os",
        }
        before = client.options(CHAT, headers={"Origin": site, **asks})  # a browser sends no key with this
        assert before.status_code == 200 and before.headers["access-control-allow-origin"] == site
        assert "x-stainless-os" in before.headers["access-control-allow-headers"]
        answer = client.post(CHAT, json=ask("hello"), headers={"Origin": site, **bearer(KEY)})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, site)
        refused = client.post(CHAT, json=ask("hello"), headers={"Origin": site})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, site)
        other = client.post(CHAT, json=ask("hello"), headers={"Origin": "https://other.org", **bearer(KEY)})
        assert "access-control-allow-origin" not in other.headers
        assert client.options(CHAT, headers={"Origin": "https://other.org", **asks}).status_code == 400
