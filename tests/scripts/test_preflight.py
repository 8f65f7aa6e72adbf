"""Before a run: all that any stage needs is checked, and everything missing is named at once."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from nanochat.checkpoint_manager.families import on_meta
from nanochat.common import UserError
from nanochat.gpt import GPT
from nanochat.planner import expected
from nanochat.planner.cards import rates_of
from nanochat.planner.plan import batch_of, plan_of
from nanochat.planner.work import size_of, size_of_model
from nanochat.platforms.ascend import chips as ascend_chips
from nanochat.platforms.cpu.platform import Cpu
from nanochat.train import sizes
from nanochat.train.fit import disk
from nanochat.train.flags import Family, ShapeFlags
from scripts import preflight
from scripts.preflight import Config
from tests.support.tiny_model import on_cpu, tiny_checkpoint

Usage = namedtuple("Usage", "total used free")
DATA = Path(__file__).parent.parent / "support" / "files" / "tasks"
SMALL = {"depth": 2, "model_dim": 64, "head_dim": 32, "max_seq_len": 128, "vocab_size": 512, "tokens": 1e6}


def test_tinyworld_needs_nothing_from_outside(base_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preflight.check(Config(**SMALL), on_cpu())
    said = capsys.readouterr().out
    assert "data  " not in said and f"in {base_folder}" in said
    assert "memory  at least" in said and "to train on 1,000,000 tokens" in said


@pytest.mark.parametrize("family", ["gpt", "qwen3"])
def test_the_size_is_that_of_the_family(family: Family, capsys: pytest.CaptureFixture[str]) -> None:
    preflight.check(Config(**SMALL, family=family), on_cpu())
    shape = sizes.model_config(ShapeFlags(2, 64, 32, 128, family=family), 512, "tinyworld", on_cpu())
    parameters = on_meta(shape, on_cpu()).parameter_counts()["total"]
    assert f"to train {parameters:,} parameters" in capsys.readouterr().out


def test_the_size_of_upstreams_recipe_is_that_of_upstreams_model(capsys: pytest.CaptureFixture[str]) -> None:
    upstream = {"bigram_rows": 0, "offset_layers": 0}
    flags = {**SMALL, **upstream, "depth": 8, "model_dim": "auto", "head_dim": "auto"}
    preflight.check(Config(**{**flags, "data": "mine", "conversations": "tinyworld"}), on_cpu())
    parameters = size_of(8, 512, upstream=True).parameters
    assert f"to train {parameters:,} parameters" in capsys.readouterr().out


def test_everything_that_is_missing_is_named_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> bool:
        raise OSError(f"no network to {url}")

    monkeypatch.setattr(preflight, "answers", refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1e12, 0, 1e9))
    with pytest.raises(UserError) as refused:
        preflight.check(Config(**{**SMALL, "data": "fineweb", "shards": 40}), on_cpu())
    assert refused.value.exit_code == 2
    for part in ("FineWeb-Edu, 41 shards", "HuggingFaceTB/smol-smoltalk", "has 1.0 GB free", "writes up to 13.7 GB",
                 "hf download cais/mmlu --repo-type dataset --local-dir mmlu", "--data tinyworld"):  # fmt: skip
        assert part in str(refused.value)


def test_a_corpus_is_looked_for_where_the_run_fetches_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def only_modelscope(url: str) -> bool:
        if not url.startswith("https://modelscope.cn/"):
            raise OSError(f"no network to {url}")
        return True

    monkeypatch.setattr(preflight, "answers", only_modelscope)
    flags = {**SMALL, "shards": 4, "host": "modelscope", "conversations": "tinyworld"}
    preflight.check(Config(**flags, data="fineweb-zh-v2.1:0.6,tinyworld:0.4"), on_cpu())
    assert "5 shards: will be downloaded" in capsys.readouterr().out
    with pytest.raises(UserError, match="no copy of FineWeb-Edu on ModelScope is known"):
        preflight.check(Config(**flags, data="fineweb"), on_cpu())


def test_what_a_stopped_run_has_written_is_not_asked_for_again(
    base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "repos", lambda data: {})
    monkeypatch.setattr(preflight, "answers", lambda url: True)
    config = Config(**{**SMALL, "data": "fineweb", "shards": 2, "model_tag": "d2"})
    needed = preflight.still_to_write(config, 12e6)
    for place, size in {"base_data/fineweb/shard_00000.parquet": 50_000_000,
                        "base_data/fineweb/tokens-0a9421ff/train/shard_00000.bin": 40_000_000,
                        "base_checkpoints/d2/step_000010/model.safetensors": 12_000_000,
                        "base_checkpoints/other/step_000010/model.safetensors": 12_000_000}.items():  # fmt: skip
        (base_folder / place).parent.mkdir(parents=True, exist_ok=True)
        with open(base_folder / place, "wb") as file:
            file.truncate(size)
    left = needed - preflight.still_to_write(config, 12e6)
    assert left == pytest.approx(207e6), "another run's checkpoints do not count"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1e12, 0, needed - 200_000_000))
    monkeypatch.setattr(preflight, "saved_bytes", lambda model, rates: 12e6)
    preflight.check(config, on_cpu())


@pytest.mark.parametrize(("depth", "shards"), disk.SHARDS.items())
def test_the_planner_names_the_disk_that_the_preflight_asks_for(base_folder: Path, depth: int, shards: int) -> None:
    size = size_of(depth, 65_536)
    chip = next(chip for chip in ascend_chips.CHIPS if chip.name == "910B3")
    planned = plan_of(size, chip, 8, batch_of(size, 8), rates_of(chip))
    config = Config(data="fineweb", shards=shards, depth=depth, model_tag=f"d{depth}")
    assert preflight.still_to_write(config, size.saved) == pytest.approx(planned.disk)


def test_a_stage_that_is_done_writes_no_more_and_steps_set_aside_are_no_room(base_folder: Path) -> None:
    config = Config(model_tag="d2")
    before = preflight.still_to_write(config, 1e6)
    aside = base_folder / "base_checkpoints" / "d2" / "set-aside-1" / "step_000003" / "model.safetensors"
    aside.parent.mkdir(parents=True)
    aside.write_bytes(bytes(10**6))
    assert preflight.still_to_write(config, 1e6) == before
    tiny_checkpoint("base", step=3)  # of 3 steps
    assert before - preflight.still_to_write(config, 1e6) == pytest.approx(3 * 1.01e6)
    for stage in ("mid", "sft", "rl"):
        tiny_checkpoint(stage, step=3)
    assert preflight.still_to_write(config, 1e6) == 0


def test_the_time_of_another_shape_is_the_planners_too(base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "chip", next(chip for chip in ascend_chips.CHIPS if chip.name == "910B3"))
    compute = on_cpu()
    config = Config(depth=8, max_seq_len=1024, devices=1)
    shape = sizes.model_config(ShapeFlags(8, max_seq_len=1024), 65_536, config.data, compute)
    model = on_meta(shape, compute)
    size = size_of_model(model)
    planned = plan_of(size, Cpu.chip, 1, batch_of(size, 1), rates_of(Cpu.chip))
    assert planned.step is not None and planned.step.tokens % planned.passes == 0
    training = expected.of_model(model, planned.rows, planned.passes, compute)
    assert training == pytest.approx(preflight.seconds_of(config, model, planned.step.tokens, compute))


def test_the_time_on_a_known_card_is_the_planners(base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = next(chip for chip in ascend_chips.CHIPS if chip.name == "910B3")
    size = size_of(12, 65_536)
    planned = plan_of(size, chip, 8, batch_of(size, 8), rates_of(chip))
    monkeypatch.setattr(Cpu, "chip", chip)
    with torch.device("meta"):
        model = GPT(size.shape)
    config = Config(data="fineweb", shards=40, depth=12, devices=8)
    seconds = preflight.seconds_of(config, model, planned.tokens, on_cpu())
    assert planned.hours is not None and seconds == pytest.approx(3600 * planned.hours)


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


def test_a_small_disk_is_told_what_helps_and_no_corpus_that_the_run_has_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1e12, 0, 1e6))
    with pytest.raises(UserError) as refused:
        preflight.check(Config(**SMALL), on_cpu())
    said = str(refused.value)
    assert "Free some space, or set NANOCHAT_BASE_DIR to a folder on another disk" in said
    assert "--data tinyworld" not in said


def test_the_memory_of_a_card_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    preflight.check(Config(**SMALL), on_cpu())
    assert "\n内存    训练" in capsys.readouterr().out
    monkeypatch.setattr(Cpu, "has_own_memory", True)
    preflight.check(Config(**SMALL), on_cpu())
    assert "\n显存    训练" in capsys.readouterr().out


def test_a_model_beyond_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanochat.device.memory_total", lambda compute: 1e6)
    with pytest.raises(UserError, match="more memory than there is: take a smaller --depth"):
        preflight.check(Config(**SMALL), on_cpu())


@pytest.mark.parametrize("flags", [{"devices": 0}, {"tokens": float("nan")}])
def test_numbers_that_no_run_can_have_are_refused(flags: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"--{next(iter(flags))} must be") as refused:
        preflight.check(Config(**{**SMALL, **flags}), on_cpu())
    assert refused.value.exit_code == 2
