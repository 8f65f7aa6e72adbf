"""Before a run: all that any stage needs is checked, and everything missing is named at once."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from nanochat.common import UserError
from scripts import preflight
from scripts.preflight import Config
from tests.support.tiny_model import on_cpu

Usage = namedtuple("Usage", "total used free")
DATA = Path(__file__).parent.parent / "support" / "files" / "tasks"
SMALL = {"depth": 2, "model_dim": 64, "head_dim": 32, "max_seq_len": 128, "vocab_size": 512, "tokens": 1e6}


def test_tinyworld_needs_nothing_from_outside(base_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preflight.check(Config(**SMALL), on_cpu())
    said = capsys.readouterr().out
    assert "data  " not in said and f"in {base_folder}" in said
    assert "memory  at least" in said and "to train on 1,000,000 tokens" in said


def test_everything_that_is_missing_is_named_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(url: str) -> bool:
        raise OSError(f"no network to {url}")

    monkeypatch.setattr(preflight, "answers", refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1e12, 0, 1e9))
    with pytest.raises(UserError) as refused:
        preflight.check(Config(**{**SMALL, "data": "fineweb", "shards": 40}), on_cpu())
    said = str(refused.value)
    assert refused.value.exit_code == 2
    for part in ("FineWeb-Edu, 41 shards", "HuggingFaceTB/smol-smoltalk", "has 1.0 GB free", "writes up to 8.2 GB",
                 "hf download cais/mmlu --repo-type dataset --local-dir mmlu", "--data tinyworld"):  # fmt: skip
        assert part in said
    assert "openai/gsm8k: not here" in capsys.readouterr().out


def test_what_a_stopped_run_has_written_is_not_asked_for_again(
    base_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "repos", lambda data: {})
    monkeypatch.setattr(preflight, "answers", lambda url: True)
    config = Config(**{**SMALL, "data": "fineweb", "shards": 2, "model_tag": "d2"})
    needed = preflight.still_to_write(config, 1_000_000)
    for place, size in {"base_data/fineweb/shard_00000.parquet": 50_000_000,
                        "base_data/fineweb/tokens-0a9421ff/train/shard_00000.bin": 40_000_000,
                        "base_checkpoints/d2/step_000010/model.safetensors": 12_000_000,
                        "base_checkpoints/other/step_000010/model.safetensors": 12_000_000}.items():  # fmt: skip
        (base_folder / place).parent.mkdir(parents=True, exist_ok=True)
        with open(base_folder / place, "wb") as file:
            file.truncate(size)
    assert needed - preflight.still_to_write(config, 1_000_000) == 102_000_000, "another run's checkpoints do not count"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1e12, 0, needed - 100_000_000))
    monkeypatch.setattr("nanochat.gpt.GPT.parameter_counts", lambda model: {"total": 1_000_000, "scaling": 1})
    preflight.check(config, on_cpu())
    assert "disk    up to " in capsys.readouterr().out


def test_the_disk_holds_the_stages_of_a_speedrun(base_folder: Path) -> None:
    """Finetuning is no stage of it. Each stage keeps some checkpoints and writes one more."""
    from nanochat.train.flags import StageFlags

    assert preflight.still_to_write(Config(), 1_000) == 4 * (StageFlags.keep + 1) * 12_000


def test_what_was_carried_in_is_enough(
    base_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_TASK_DIR", str(DATA))
    shards = base_folder / "base_data" / "fineweb"
    shards.mkdir(parents=True)
    for number in (0, 1822):
        (shards / f"shard_{number:05d}.parquet").touch()
    preflight.check(Config(**{**SMALL, "data": "fineweb", "shards": 1}), on_cpu())
    said = capsys.readouterr().out
    assert "openai/gsm8k: here, in NANOCHAT_TASK_DIR" in said and "FineWeb-Edu," not in said


def test_a_model_beyond_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanochat.device.memory_total", lambda compute: 1e6)
    with pytest.raises(UserError, match="more memory than there is: take a smaller --depth"):
        preflight.check(Config(**SMALL), on_cpu())


@pytest.mark.parametrize("flags", [{"devices": 0}, {"devices": -1}, {"tokens": float("nan")}, {"tokens": float("inf")}])
def test_numbers_that_no_run_can_have_are_refused(flags: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"--(devices must be at least 1|tokens must be a number)") as refused:
        preflight.check(Config(**{**SMALL, **flags}), on_cpu())
    assert refused.value.exit_code == 2
