"""Direct preference optimisation of published models: it widens margins, resumes, and does not depend on the split."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.load import load_model
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.runtime.tracking import read_metrics
from nanochat.train import preferences
from scripts import finetune
from tests.emulated_npu.worker import run_ranks, skip_without_compiler
from tests.scripts.test_finetune import models as models  # fixtures: published models, and few own words
from tests.scripts.test_finetune import short_replay as short_replay
from tests.support.flags import configured
from tests.support.ranks import Pool
from tests.support.tiny_model import on_cpu


def config(models: Path, family: str = "qwen3", **given: Any) -> finetune.Config:
    flags = {"max_length": 120, "target_examples_per_step": 4, "num_iterations": 4, "learning_rate": 3e-3,
             "compile": False, "out_tag": "made", "device_batch_size": 2, "model": models / family, "loss": "dpo",
             "data": (str(models / "pairs.jsonl"),), "dpo_sft_weight": 0.1}  # fmt: skip
    return configured(finetune.Config, **{**flags, **given})


def lines(tag: str = "made") -> list[dict[str, Any]]:
    """The figures of the steps, without those of the validation before the first one."""
    return [line for line in read_metrics(checkpoint_dir("tune", tag)) if line["step"]]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "rank"), [("qwen3", 8), ("qwen3", 0), ("qwen3.5", 8)])
def test_preferred_answers_become_likelier_than_the_others(models: Path, family: str, rank: int) -> None:
    rate = 1e-2 if rank else 1e-3
    flags = {"lora_rank": rank, "num_iterations": 12, "learning_rate": rate, "eval_every": 12, "dpo_sft_weight": 0.0}
    finetune.train(config(models, family, **flags), on_cpu())
    first, *_, last = lines()
    assert first["loss"] == pytest.approx(0.693147, abs=1e-4) and first["margin"] == pytest.approx(0, abs=1e-3)
    assert last["loss"] < 0.6 and last["accuracy"] > 0.8 and last["margin"] > 0.1
    assert last["val_loss"] < 0.65 and last["val_accuracy"] > 0.6 and last["val_margin"] > 0
    assert "val_bpb" not in last
    assert load_model("tune", "made", None, on_cpu()).model is not None


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_with_the_same_bits_and_without_a_reference(
    models: Path, base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"lora_rank": 4, "lora_dropout": 0.1}
    finetune.train(config(models, **flags), on_cpu())
    file = checkpoint_dir("tune", "made") / "step_000004" / "adapter_model.safetensors"
    straight = file.read_bytes()
    shutil.rmtree(base_folder)
    finetune.train(config(models, **flags, stop_at=2), on_cpu())
    monkeypatch.delattr(preferences, "row_scores")  # nothing may score answers again
    finetune.train(config(models, **flags), on_cpu())
    assert file.read_bytes() == straight


@pytest.mark.ranks
@pytest.mark.parametrize(("rank", "mode"), [(0, "full"), (4, "grad")])
def test_two_ranks_learn_what_one_learns(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool, rank: int, mode: str
) -> None:
    flags = {"lora_rank": rank, "learning_rate": 3e-3 if rank else 3e-4, "eval_every": 2}
    finetune.train(config(models, **flags), on_cpu())
    alone = lines()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "ranks"))
    pool.run(2, a_run, models, {**flags, "shard": mode})
    for one, two in zip(alone, lines(), strict=True):
        for name in ("loss", "accuracy", "margin", *(["val_loss", "val_margin"] if "val_loss" in one else [])):
            assert two[name] == pytest.approx(one[name], abs=1e-4), name


@pytest.mark.slow
def test_micro_batches_do_not_change_what_is_learned(models: Path) -> None:
    finetune.train(config(models, out_tag="one", device_batch_size=1), on_cpu())
    finetune.train(config(models, out_tag="four", device_batch_size=4), on_cpu())
    one, four = (lines(tag) for tag in ("one", "four"))
    for a, b in zip(one, four, strict=True):
        for name in ("loss", "grad_norm", "accuracy", "margin", "chosen_reward"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name


def a_run(compute: Compute, models: Path, flags: dict[str, Any]) -> None:
    finetune.train(config(models, **flags), compute)


@pytest.mark.npu
@pytest.mark.ranks
def test_dpo_on_two_npus_measures_and_learns_what_one_cpu_does(models: Path, tmp_path: Path) -> None:
    skip_without_compiler()
    flags = {"lora_rank": 4, "num_iterations": 3, "eval_every": 2}
    finetune.train(config(models, **flags), on_cpu())
    alone = lines()
    run_ranks(2, a_run, models, flags, NANOCHAT_BASE_DIR=str(tmp_path / "npu"))
    together = [line for line in read_metrics(tmp_path / "npu" / "tuned_checkpoints" / "made") if line["step"]]
    assert "val_loss" in alone[-1]
    for one, two in zip(alone, together, strict=True):
        names = [name for name in ("loss", "margin", "val_loss", "val_margin") if name in one]
        assert names and all(two[name] == pytest.approx(one[name], abs=1e-4) for name in names), (one, two)


def test_what_cannot_be_trained_is_named_before_the_first_step(models: Path) -> None:
    for flags, rule in (
        ({"data": (str(models / "chats.jsonl"),)}, 'line 1: a pair of answers needs the keys "chosen" and "rejected"'),
        ({"dpo_beta": -1.0}, "the beta of DPO must be above 0, got -1"),
        ({"max_length": 8}, "into rows of 8 tokens in the training conversations of"),
    ):
        with pytest.raises(UserError, match=rule):
            finetune.train(config(models, **flags), on_cpu())
        assert not list(checkpoint_dir("tune", "made").glob("step_*"))


def test_the_learning_rate_follows_from_what_is_learned() -> None:
    rates = []
    for loss in ("answers", "dpo"):
        for rank in (8, 0):
            cfg = configured(finetune.Config, model=Path("m"), data=("d",), loss=loss, lora_rank=rank)
            rates.append(cfg.rate(576, 100, own_words=True))
    assert rates == pytest.approx([1.4e-3, 1e-4, 1.4e-3 / 30, 5e-6])


def test_a_base_in_4_bits_or_with_another_config_is_its_own_reference(models: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(models / "qwen3", tmp_path / "qwen3")
    settings = json.loads((copy / "config.json").read_text())
    flags = {"num_iterations": 1, "lora_rank": 2, "model": copy}
    finetune.train(config(models, **flags), on_cpu())
    finetune.train(config(models, **flags, base_bits=4, out_tag="packed"), on_cpu())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    (copy / "config.json").write_text(json.dumps({**settings, "rope_scaling": yarn}))
    finetune.train(config(models, **flags, out_tag="longer"), on_cpu())
    for tag in ("made", "packed", "longer"):
        assert lines(tag)[0]["margin"] == pytest.approx(0, abs=1e-4)
