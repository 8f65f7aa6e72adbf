"""A server with a tiny real model, for tests of what the routes say."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from nanochat.engine import Engine
from nanochat.tokenizer import Tokenizer
from tests.support.fake_engine import SETTINGS, ServerSettings, running
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer


@dataclass
class Served:
    """The server's address, a client of it, and what it serves; `alone` is another engine with the same model."""

    url: str
    client: httpx.Client
    tokenizer: Tokenizer
    alone: Engine

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Post JSON."""
        return self.client.post(path, json=body)

    def ok(self, path: str, **body: Any) -> Any:
        """The JSON of an answer that must be 200."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """OpenAI's error object of an answer that must have a status."""
        response = self.post(path, **body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@contextlib.contextmanager
def serving(
    length: int = 160, slots: int = 4, settings: ServerSettings = SETTINGS, loaded: tuple[Any, Any] | None = None
) -> Iterator[Served]:
    """Serve a tiny model in fp32 on a free port: our own, or the `loaded` model with its tokenizer."""
    tokenizer = tiny_tokenizer() if loaded is None else loaded[1]
    model = tiny_gpt(tokenizer.vocab_size, length) if loaded is None else loaded[0]
    engine, alone = Engine(model, tokenizer, slots, spare_slots=2), Engine(model, tokenizer, 1)
    settings = replace(settings, max_tokens=20)
    with running(engine, tokenizer, settings) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield Served(url, client, tokenizer, alone)
