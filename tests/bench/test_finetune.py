"""The benchmark of fine-tuning: its figures, its processes, and what it refuses."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.finetune import __main__ as finetune
from bench.finetune.__main__ import SHAPES, Config, Shape
from bench.finetune.matmuls import multiplier, products
from nanochat.models.lora import LoraConfig, add_adapters
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen

TINY: dict[str, Any] = {
    "n_layer": 4,
    "n_embd": 32,
    "n_head": 2,
    "n_kv_head": 1,
    "head_dim": 16,
    "rotary_dim": 0,
    "n_hidden": 48,
    "vocab_size": 300,
    "delta_key_heads": 1,
    "delta_value_heads": 2,
    "delta_key_dim": 8,
    "delta_value_dim": 8,
}


def on_meta(shape: QwenConfig) -> Qwen:
    with torch.device("meta"):
        return Qwen(shape)


@pytest.mark.slow
def test_both_sides_train_the_same_model() -> None:
    """As many parameters on both sides, and a loss near that of chance, log 300 = 5.70."""
    cfg = Config(quick=True, against=("transformers",), steps=1)
    for family, rank in (("qwen3.5", 2), ("qwen3.5", 0), ("smollm2", 2)):
        shape = replace(SHAPES[family], **TINY)
        results = finetune.measure(shape, rank, "float32", (1, 8), cfg)
        ours = results["ours"]
        theirs = results["transformers"]
        assert ours.parameters == theirs.parameters
        assert all(5.2 < loss < 6.2 for loss in ours.losses + theirs.losses)


@pytest.mark.parametrize("rank", [2, 0])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_the_bare_products_have_the_flops_of_the_model(family: Shape, rank: int) -> None:
    """In rows of two windows, half of the keys are as many as the model counts for each query."""
    model = on_meta(replace(SHAPES[family], **TINY, sequence_len=16))
    if rank:
        add_adapters(model, LoraConfig(rank))
    flops = 0
    for product in products(model, (2, 32)):
        multiplications = 3 if product.trained else 2
        size = product.rows * product.inputs * product.outputs
        flops += 2 * size * multiplications * max(product.heads, 1)
    assert flops == model.flops_per_token() * 2 * 32
    multiplier(model, (2, 32), torch.float32)()


@pytest.mark.slow
def test_it_prints_one_json_object(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finetune, "SMALL", TINY)
    monkeypatch.setattr(finetune, "QUICK_BATCH", (1, 8))
    finetune.main(Config(quick=True, shapes=("qwen3",)))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for mode in ("lora", "full"):
        assert set(result[f"qwen3 {mode}"]) == {"tokens_per_cpu_second", "peak_gb"}
