"""The pictures of the README: small, complete, and drawn from what a run left."""

import json
from pathlib import Path

import pytest
from PIL import Image

from dev import pictures


def test_the_pictures_are_there_and_small() -> None:
    names = {file.name for file in pictures.FOLDER.iterdir()}
    assert names == {
        f"{name}{theme.suffix}.png"
        for name in ("chat", "compare", "curves", "runs", "tokenizer")
        for theme in pictures.THEMES
    }
    assert pictures.size() <= pictures.MOST_BYTES


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The base folder of a run of all stages, and a folder for its pictures."""
    for folder, key in (("base", "val_bpb"), ("mid", "val_bpb"), ("chatsft", "val_bpb"), ("chatrl", "accuracy")):
        lines = [{"step": step, "smooth_loss": 4 / step, "reward": 0.5, key: 0.4} for step in range(1, 31)]
        file = tmp_path / f"{folder}_checkpoints" / "d2" / "metrics.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    monkeypatch.setattr(pictures, "FOLDER", tmp_path / "docs" / "pictures")
    pictures.FOLDER.mkdir(parents=True)
    return tmp_path


def test_curves_are_drawn_of_every_stage_in_light_and_dark(run: Path) -> None:
    pictures.curves(run, None)
    light, dark = (Image.open(pictures.FOLDER / f"curves{theme.suffix}.png") for theme in pictures.THEMES)
    assert light.size == dark.size and light.mode == dark.mode == "P"
    assert light.convert("RGB").getpixel((0, 0)) == (255, 255, 255) != dark.convert("RGB").getpixel((0, 0))
    (run / "base_checkpoints" / "d2" / "metrics.jsonl").unlink()
    pictures.curves(run, "d2")  # the stages that are there


def test_bars_are_drawn_from_the_last_line_of_the_benchmark(run: Path, tmp_path: Path) -> None:
    said = tmp_path / "bench.txt"
    said.write_text('train mixed 16,384 ours\n{"train_vs_rustbpe": 12.5, "threads": 1}\n', encoding="utf-8")
    pictures.tokenizer(said)
    assert (pictures.FOLDER / "tokenizer-dark.png").exists()
    said.write_text('{"mb": 22.0}\n', encoding="utf-8")
    with pytest.raises(SystemExit, match="compares with nobody"):
        pictures.tokenizer(said)


def test_rows_of_the_table_have_accuracy_and_interval(tmp_path: Path) -> None:
    assert "needs a finished run" in pictures.results(tmp_path)[0]
    score = {"accuracy": 0.977, "low": 0.963, "high": 0.986}
    (tmp_path / "report").mkdir()
    sections = {"sft_eval": {"tasks": {"tinyworld_zh": score}}, "rl_eval": {"tasks": {"mental": score}}}
    (tmp_path / "report" / "report.json").write_text(json.dumps({"sections": sections}), encoding="utf-8")
    assert pictures.results(tmp_path) == [
        "| after SFT |  | 97.7 % (96.3–98.6) |  |  |",
        "| after RL |  |  |  | 97.7 % (96.3–98.6) |",
    ]
