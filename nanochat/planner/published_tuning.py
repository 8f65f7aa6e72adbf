"""Compares forecasts of fine-tuning memory with runs that others have published."""

from dataclasses import dataclass
from typing import Any

from nanochat.models.lora import LoraConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.planner.forecast import Tuning, forecast
from nanochat.runtime import parallel

QWEN15: dict[str, Any] = {"vocab_size": 151_936, "tied": 0, "qkv_bias": 1, "qk_norm": 0}
QWEN35: dict[str, Any] = {
    "vocab_size": 248_320,
    "layers": "DDDA",
    "head_dim": 256,
    "rotary_dim": 64,
    "zero_centred": 1,
    "output_gate": 1,
}
SHAPES = {
    "Qwen1.5-7B": QwenConfig(
        n_layer=32, n_embd=4096, n_head=32, n_kv_head=32, n_hidden=11_008, **QWEN15
    ),
    "Qwen1.5-14B": QwenConfig(
        n_layer=40, n_embd=5120, n_head=40, n_kv_head=40, n_hidden=13_696, **QWEN15
    ),
    "Qwen3.5-0.8B": QwenConfig(
        n_layer=24, n_embd=1024, n_head=8, n_kv_head=2, n_hidden=3584, **QWEN35
    ),
    "Qwen3.5-2B": QwenConfig(
        n_layer=24, n_embd=2048, n_head=8, n_kv_head=2, n_hidden=6144, **QWEN35
    ),
    "Qwen3.5-4B": QwenConfig(
        n_layer=32,
        n_embd=2560,
        n_head=16,
        n_kv_head=4,
        n_hidden=9216,
        delta_value_heads=32,
        **QWEN35,
    ),
    "Qwen3.5-9B": QwenConfig(
        n_layer=32,
        n_embd=4096,
        n_head=16,
        n_kv_head=4,
        n_hidden=12_288,
        tied=0,
        delta_value_heads=32,
        **QWEN35,
    ),
    "Qwen3.5-27B": QwenConfig(
        n_layer=64,
        n_embd=5120,
        n_head=24,
        n_kv_head=4,
        n_hidden=17_408,
        tied=0,
        delta_value_heads=48,
        **QWEN35,
    ),
}


@dataclass(frozen=True)
class Run:
    """A published run with an adapter of rank 8, rows of 2,048 tokens and recomputed activations.

    Unsloth moves the inputs of layers to host memory, so its runs are forecast with offloading.
    """

    who: str
    model: str
    ranks: int
    shard: parallel.Sharding  # ours, for what the run calls DDP, ZeRO-2 or ZeRO-3
    gigabytes: float  # of each card

    def forecast(self) -> float:
        """Return the forecast memory of each card, in GB."""
        tuning = Tuning(
            SHAPES[self.model],
            LoraConfig(),
            rows=1,
            several_passes=True,
            checkpoint_activations=True,
            offload_activations=self.who == UNSLOTH,
            shard=self.shard,
            ranks=self.ranks,
        )
        return forecast(tuning).peak / 1e9


SWIFT = "ms-swift, 910B3"
UNSLOTH = "Unsloth, bf16"
RUNS = (
    Run(SWIFT, "Qwen1.5-7B", 1, "none", 28),
    Run(SWIFT, "Qwen1.5-7B", 4, "none", 22),
    Run(SWIFT, "Qwen1.5-7B", 4, "grad", 28),
    Run(SWIFT, "Qwen1.5-7B", 4, "full", 22),
    Run(SWIFT, "Qwen1.5-7B", 8, "none", 22),
    Run(SWIFT, "Qwen1.5-14B", 1, "none", 45),
    Run(SWIFT, "Qwen1.5-14B", 8, "none", 51),
    Run(SWIFT, "Qwen1.5-14B", 8, "grad", 49),
    Run(SWIFT, "Qwen1.5-14B", 8, "full", 31),
    Run(UNSLOTH, "Qwen3.5-0.8B", 1, "none", 3),
    Run(UNSLOTH, "Qwen3.5-2B", 1, "none", 5),
    Run(UNSLOTH, "Qwen3.5-4B", 1, "none", 10),
    Run(UNSLOTH, "Qwen3.5-9B", 1, "none", 22),
    Run(UNSLOTH, "Qwen3.5-27B", 1, "none", 56),
)


def print_published() -> None:
    """Print a table of all runs, each as soon as its memory has been forecast."""
    run_columns = f"{'published by':<18}{'model':<15}{'cards':>6}{'--shard':>9}"
    print(f"{run_columns}{'theirs, GB':>12}{'here, GB':>10}")
    for run in RUNS:
        name = f"{run.who:<18}{run.model:<15}{run.ranks:>6}{run.shard:>9}"
        print(f"{name}{run.gigabytes:>12.0f}{run.forecast():>10.1f}", flush=True)
