"""The benchmark of cleaning: its texts are whole, and every way of preparing is measured."""

from pathlib import Path

import pytest

from bench import clean
from nanochat.data.tinyworld import world


def test_the_chinese_documents_are_the_text_of_tinyworld() -> None:
    joined = "".join(clean.chinese(1))
    assert joined == "\n".join(text for text in world.documents() if not text.isascii())


def test_every_way_of_preparing_has_a_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean, "VOCABULARY", 300)
    speeds = clean.measure(tmp_path / "c", [f"document {n} {n * n}" for n in range(200)])
    assert [*speeds] == ["tokenise", "with --dedup", "with --dedup and --check_against"]
    assert all(speed > 0 for speed in speeds.values())
