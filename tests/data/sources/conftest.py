"""A base folder, and a server on this machine in place of the hub and of ModelScope."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.file_server import Server


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    for name in ("HF_ENDPOINT", "HF_TOKEN", "MODELSCOPE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "base"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"{server.url}/ms")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
