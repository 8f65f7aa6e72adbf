"""Compares forecasts of fine-tuning memory and speed with runs that others have published."""

from dataclasses import dataclass, replace
from typing import Any

from nanochat import device
from nanochat.models.lora import LoraConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.planner import tables
from nanochat.planner.cards import rates_of
from nanochat.planner.forecast import Tuning, forecast
from nanochat.planner.tuning_speed import program_for, step_of
from nanochat.runtime import parallel
from nanochat.train.tuning_rules import MOST_STEP_ROWS

QWEN15: dict[str, Any] = {"vocab_size": 151_936, "tied": 0, "qkv_bias": 1, "qk_norm": 0}
QWEN35: dict[str, Any] = {
    "vocab_size": 248_320,
    "layers": "DDDA",
    "head_dim": 256,
    "rotary_dim": 64,
    "zero_centred": 1,
    "output_gate": 1,
}
LLAMA2: dict[str, Any] = {"vocab_size": 32_000, "tied": 0, "qk_norm": 0}
SHAPES = {
    "Llama-2-7B": QwenConfig(
        n_layer=32, n_embd=4096, n_head=32, n_kv_head=32, n_hidden=11_008, **LLAMA2
    ),
    "Llama-2-13B": QwenConfig(
        n_layer=40, n_embd=5120, n_head=40, n_kv_head=40, n_hidden=13_824, **LLAMA2
    ),
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
    gigabytes: float  # memory of each card

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


@dataclass(frozen=True)
class Speed:
    """A published speed of fine-tuning, on rows of `length` tokens, that no launches limited."""

    who: str
    model: str
    length: int
    card: str  # as near as the source names it
    tokens_per_second: float  # speed of each card
    source: str
    adapter: bool = False
    recomputes: bool = False

    def predicted(self) -> float:
        """Return the tokens per second of each card that tuning_speed.py predicts."""
        tuning = Tuning(
            replace(SHAPES[self.model], sequence_len=self.length),
            LoraConfig() if self.adapter else None,
            checkpoint_activations=self.recomputes,
        )
        rates = rates_of(next(chip for chip in device.planned() if chip.name == self.card))
        assert rates is not None, self.card
        step = step_of(tuning, MOST_STEP_ROWS, rates, program_for(tuning, self.card))
        return 1 / (3600 * step.hours(1))


MINDFORMERS = "MindFormers, Atlas 800T A2"
QWEN_PAGE = "gitcode.com/mindspore/mindformers, r1.3.0, research/qwen/qwen.md"
MODELS_PAGE = "mindspore.cn/mindformers, r1.3.2, start/models"
# The pages of MindFormers do not name the chip of an Atlas 800T A2, which may be a 910B1 to 910B3,
# nor what their runs recompute. Qwen-7B and Qwen-14B have nearly the shapes of Qwen1.5.
SPEEDS = (
    Speed(MINDFORMERS, "Qwen1.5-7B", 2048, "910B3", 2955, QWEN_PAGE),
    Speed(MINDFORMERS, "Qwen1.5-14B", 2048, "910B3", 1106, QWEN_PAGE),
    Speed(MINDFORMERS, "Llama-2-7B", 4096, "910B3", 4160, MODELS_PAGE),
    Speed(MINDFORMERS, "Llama-2-13B", 4096, "910B3", 1691, MODELS_PAGE),
    Speed(
        "QwenLM, A100",
        "Qwen1.5-7B",
        2048,
        "A100",
        8 * 2048 / 5.2,
        "github.com/QwenLM/Qwen, README: 5.2 s for 8 rows",
        adapter=True,
        recomputes=True,
    ),
)


def print_speeds() -> None:
    """Print a table of published speeds of fine-tuning beside those that the planner predicts."""
    rows = []
    for speed in SPEEDS:
        predicted = speed.predicted()
        rows.append(
            [
                speed.who,
                speed.model,
                "LoRA" if speed.adapter else "all parameters",
                f"{speed.length:,}",
                tables.rounded(speed.tokens_per_second),
                tables.rounded(predicted),
                f"{predicted / speed.tokens_per_second:.2f}",
            ]
        )
    head = ("who", "model", "trained", "row", "published tokens/s a card", "predicted", "ratio")
    print(tables.markdown(head, rows))
