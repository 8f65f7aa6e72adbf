"""What stages and evaluations read is known before a run, and where this machine gets it."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from nanochat.common import UserError
from nanochat.data.tinyworld import world as tinyworld
from tasks import arc, gsm8k, mmlu
from tasks.mixtures import CURRICULA
from tasks.needs import repos, warn_of_missing, whereabouts
from tasks.published import Published

DATA = Path(__file__).parent.parent / "support" / "files" / "tasks"


@pytest.mark.parametrize("name", CURRICULA)
def test_a_curriculum_names_exactly_what_it_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_TASK_DIR", str(DATA))
    read: set[Published] = set()
    real = Published.files
    monkeypatch.setattr(Published, "files", lambda self, folder: read.add(self) or real(self, folder))
    for conversations in ("mid_conversations", "sft_conversations"):
        make = getattr(tinyworld, conversations)
        monkeypatch.setattr(tinyworld, conversations, lambda seed, make=make: make(seed, 100))
    curriculum = CURRICULA[name]
    for make in curriculum.conversations.values():
        make(42)
    curriculum.rl()
    for make in curriculum.measures(True).values():
        make()
    assert read == set(curriculum.needs())


class Hub(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200 if "gsm8k" in self.path else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    yield Hub.asked
    server.shutdown()


def test_a_data_set_is_found_in_the_task_folder_then_in_the_cache_then_on_the_hub(
    hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mmlu" / "all").mkdir(parents=True)
    (tmp_path / "mmlu" / "all" / "test-00000-of-00001.parquet").touch()
    cached = tmp_path / "cache" / "allenai___ai2_arc" / "ARC-Easy" / "0.0.0" / "1234"
    cached.mkdir(parents=True)
    (cached / "ai2_arc-test.arrow").touch()
    monkeypatch.setenv("NANOCHAT_TASK_DIR", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    found = whereabouts(
        [
            mmlu.source("all", "test"),
            mmlu.source("auxiliary_train", "train"),  # a copy that lacks this split hides the hub's
            arc.source("ARC-Easy", "test"),
            arc.source("ARC-Easy", "train"),
            gsm8k.source("train"),
            gsm8k.source("test"),
        ]
    )
    assert list(found.values()) == ["NANOCHAT_TASK_DIR", "", "cache", "", "hub", "hub"]
    assert hub == ["/api/datasets/allenai/ai2_arc", "/api/datasets/openai/gsm8k"]  # each once


def test_a_proxy_that_cannot_be_used_is_named_and_the_hub_is_not_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UserError("https_proxy names a SOCKS proxy")

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("nanochat.data.sources.net.request", refuse)
    assert set(repos("fineweb").values()) == {""}
    assert capsys.readouterr().err.count("SOCKS") == 1


def test_an_unreachable_hub_is_asked_once_and_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: ClassVar[list[str]] = []

    def refuse(url: str) -> bool:
        asked.append(url)
        raise OSError("no network")

    monkeypatch.setattr("tasks.needs.answers", refuse)
    assert set(repos("fineweb").values()) == {""} and len(asked) == 1
    warn_of_missing("fineweb")
    said = capsys.readouterr().err
    assert "HuggingFaceTB/smol-smoltalk" in said and "hf download openai/gsm8k " in said
    assert "NANOCHAT_TASK_DIR" in said and "HF_ENDPOINT" in said
    warn_of_missing("tinyworld")
    monkeypatch.setenv("NANOCHAT_TASK_DIR", str(DATA))
    warn_of_missing("fineweb")
    assert not capsys.readouterr().err, "nothing is missing"
