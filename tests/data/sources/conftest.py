"""A server on this machine in place of the hub and of ModelScope."""

import threading
from collections.abc import Iterator

import pytest

from tests.support.file_server import Server


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_ENDPOINT", "HF_TOKEN", "MODELSCOPE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"{server.url}/ms")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
