"""Fine-tuning an adapter on a base in 4 bits: it learns, resumes, says what it was trained on, and is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.huggingface.adapter import read_adapter
from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.checkpoint_manager.load import load_model
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.models.nf4 import nf4_matrices
from nanochat.models.qwen.model import Qwen
from nanochat.runtime.tracking import read_metrics
from nanochat.serve.chosen import ModelFlags, choose, load_adapters
from scripts import finetune
from tests.scripts.test_finetune import config, losses
from tests.scripts.test_finetune import models as models  # fixtures: published models and conversations, and few words
from tests.scripts.test_finetune import short_replay as short_replay
from tests.support.ranks import Pool
from tests.support.tiny_model import on_cpu

FLAGS: dict[str, Any] = {"base_bits": 4, "learning_rate": 1e-2, "num_iterations": 12}
ON_THE_PUBLISHED_BASE = "trained on its base in 4 bits"


def adapter_file(step: int) -> Path:
    return checkpoint_dir("tune", "made") / f"step_{step:06d}" / "adapter_model.safetensors"


@pytest.mark.slow
def test_an_adapter_learns_on_4_bits_and_a_stopped_run_ends_with_the_same_bits(
    models: Path, base_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune.train(config(models, **FLAGS, eval_every=12), on_cpu())
    assert losses()[-1] < losses()[0] - 0.1
    straight = adapter_file(12).read_bytes()
    figures = [line["general_perplexity"] for line in read_metrics(checkpoint_dir("tune", "made")) if "val_bpb" in line]
    shutil.rmtree(base_folder)
    finetune.train(config(models, **FLAGS, eval_every=12, stop_at=5), on_cpu())
    with pytest.raises(UserError, match="--base_bits: 4 before, 16 now"):
        finetune.train(config(models, **{**FLAGS, "base_bits": 16}, eval_every=12), on_cpu())
    torch.manual_seed(99)
    finetune.train(config(models, **FLAGS, eval_every=12), on_cpu())
    assert adapter_file(12).read_bytes() == straight and len(figures) == 2

    meta = json.loads((adapter_file(12).parent / "meta.json").read_text())
    assert meta["base"]["bits"] == 4
    capsys.readouterr()
    published = load_model("tune", "made", None, on_cpu())
    assert capsys.readouterr().out.count(ON_THE_PUBLISHED_BASE) == 1
    served_as_trained(models / "qwen3", adapter_file(12).parent, published.model)
    assert ON_THE_PUBLISHED_BASE not in capsys.readouterr().out
    read_adapter(load_qwen(models / "qwen3", on_cpu()), adapter_file(12).parent)
    assert capsys.readouterr().out.count(ON_THE_PUBLISHED_BASE) == 1
    with pytest.raises(UserError, match="another base"):
        read_adapter(load_qwen(models / "llama3", on_cpu()), adapter_file(12).parent)


def served_as_trained(base: Path, adapter: Path, published: Qwen) -> None:
    """With --weights nf4, the adapter alone and among others has the logits of the run that trained it."""
    tokens, on_4_bits = torch.arange(12)[None], ModelFlags(model=base, weights="nf4")
    run = choose(ModelFlags(source="tune", model_tag="made", weights="nf4"), on_cpu().in_format("float32")).loaded.model
    alone = choose(on_4_bits, on_cpu().in_format("float32"), adapter).loaded.model
    first = choose(on_4_bits, on_cpu().in_format("float32"))
    among = load_adapters(first, {"mine": adapter}, on_cpu())
    assert among is not None and nf4_matrices(run) and nf4_matrices(alone)
    with torch.no_grad():
        expected = run(tokens)
        for other in (first.loaded.model, published):
            assert (other(tokens) - expected).abs().max() > 1e-2
        torch.testing.assert_close(alone(tokens), expected, rtol=1e-5, atol=1e-5)
        with among.rows([0]):
            torch.testing.assert_close(first.loaded.model(tokens), expected, rtol=1e-5, atol=1e-5)


def test_4_bits_below_no_adapter_are_refused(models: Path) -> None:
    with pytest.raises(UserError, match=r"--base_bits=4.*--lora_rank=0"):
        config(models, base_bits=4, lora_rank=0)


@pytest.mark.parametrize("flag", [{"lora_alpha": 8.0}, {"lora_targets": ("q_proj",)}, {"rslora": True}])
def test_flags_of_an_adapter_without_one_are_refused(models: Path, flag: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"--{next(iter(flag))} shapes an adapter, and --lora_rank=0"):
        config(models, lora_rank=0, **flag)


def test_experts_in_4_bits_are_refused(models: Path) -> None:
    with pytest.raises(UserError, match="cannot hold the experts of qwen3-moe"):
        finetune.train(config(models, "qwen3-moe", base_bits=4), on_cpu())
    with pytest.raises(UserError, match="cannot hold the experts of qwen3-moe"):
        choose(ModelFlags(model=models / "qwen3-moe", weights="nf4"), on_cpu().in_format("float32"))


def a_run(compute: Compute, models: Path, flags: dict[str, Any]) -> None:
    finetune.train(config(models, **flags), compute)


@pytest.mark.ranks
def test_two_ranks_learn_on_4_bits_what_one_learns(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    flags = {"base_bits": 4, "family": "qwen3.5", "checkpoint_activations": True}
    finetune.train(config(models, **flags), on_cpu())
    alone = losses()
    for mode in ("grad", "full"):
        monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / mode))
        pool.run(2, a_run, models, {**flags, "shard": mode})
        assert losses() == pytest.approx(alone, abs=1e-4), mode
