"""Measures fine-tuning on one CPU thread, beside transformers and peft: tokens per CPU second, and peak memory.

python -m bench.finetune --quick                          # ours alone on small shapes, within 50 seconds
python -m bench.finetune --against transformers           # minutes; transformers and peft must be installed

Random weights of small Qwen3 and Qwen3.5 shapes, random tokens. Every side is a process of its own; the two sides of a
row take turns, one step each, so that a busy machine slows them equally. The last line is JSON.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from nanochat import device
from nanochat.checkpoint_manager.huggingface.config import published
from nanochat.common import UserError, log, run
from nanochat.models.lora import LoraConfig
from nanochat.models.qwen.config import QwenConfig

ROOT = Path(__file__).resolve().parent.parent.parent
RANK = 8
SHARED: dict[str, Any] = {
    "sequence_len": 2048,
    "vocab_size": 32_768,
    "n_layer": 8,
    "n_embd": 512,
    "n_hidden": 1536,
    "tied": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {**SHARED, "n_head": 8, "n_kv_head": 4, "head_dim": 64},
    "qwen3.5": {
        **SHARED,
        "n_head": 4,
        "n_kv_head": 2,
        "head_dim": 128,
        "rotary_dim": 32,
        "layers": "DDDA",
        "zero_centred": 1,
        "output_gate": 1,
        "delta_key_heads": 8,
        "delta_value_heads": 8,
        "rope_theta": 10_000_000.0,
    },
}
SMALL = {
    "n_layer": 4,
    "n_embd": 256,
    "n_hidden": 768,
    "vocab_size": 4096,
    "delta_key_heads": 2,
    "delta_value_heads": 2,
}


@dataclass(frozen=True)
class Config:
    """Print speed and memory of fine-tuning as a table, and one JSON object on the last line."""

    quick: bool = False
    """small shapes, few steps, ours alone and not compiled, so that it ends within 50 seconds"""
    against: tuple[Literal["transformers"], ...] = ()
    """what to measure beside ours: transformers, with peft's adapters"""
    families: tuple[Literal["qwen3", "qwen3.5"], ...] = ("qwen3", "qwen3.5")
    """shapes to measure"""
    steps: int = 3
    """timed steps of each side; more steps give steadier medians"""
    rows: int = 4
    """rows of a step"""
    tokens: int = 512
    """tokens of a row"""
    checkpoint_activations: bool = False
    """compute each layer again in the backward pass, on both sides"""
    compile: bool = True
    """compile our step, as scripts.finetune does where the run is long enough to repay it; transformers' Trainer does
    not compile unless it is asked to"""


@dataclass
class Measured:
    """What was measured of one side."""

    parameters: int
    seconds: list[float] = field(default_factory=list)  # CPU seconds of each timed step
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def add(self, answer: dict[str, Any], timed: bool = True) -> None:
        """Take over what the process answered."""
        self.seconds += answer["seconds"] if timed else []
        self.losses += answer["losses"]
        self.peak_bytes = answer["peak_bytes"]


@contextlib.contextmanager
def process(task: dict[str, Any]) -> Iterator[Any]:
    """A side in its own process; gives a function that sends a line, or none, and returns the answer."""
    alone = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    own = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(ROOT),
        "NANOCHAT_DEVICE": "cpu",
        "NANOCHAT_DTYPE": task["dtype"],
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        command = [sys.executable, "-m", "bench.finetune.side", json.dumps(task)]
        side = subprocess.Popen(
            command,
            env=alone | own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
        )
        assert side.stdin is not None and side.stdout is not None

        def ask(steps: int | None = None) -> dict[str, Any]:
            if steps is not None:
                with contextlib.suppress(
                    BrokenPipeError
                ):  # what follows says why the process has ended
                    print(steps, file=side.stdin, flush=True)
            assert side.stdout is not None
            if line := side.stdout.readline():
                return json.loads(line)
            code = side.wait()
            errors.seek(0)
            words = [words for words in errors.read().splitlines() if words.strip()][-5:]
            raise UserError(
                f"{task['side']} ended with code {code}; its last lines:\n  " + "\n  ".join(words)
            )

        try:
            yield ask
        finally:
            side.kill()
            side.communicate()


def measure(
    sides: list[str],
    shape: QwenConfig,
    rank: int,
    dtype: str,
    cfg: Config,
    targets: tuple[str, ...] = LoraConfig.targets,
) -> dict[str, Measured]:
    """Let the sides take turns of one step; the first step of each is not timed."""
    task = {
        "shape": asdict(shape),
        "published": published(shape),
        "rank": rank,
        "dtype": dtype,
        "rows": cfg.rows,
        "tokens": cfg.tokens,
        "targets": list(targets),
        "checkpoints": cfg.checkpoint_activations,
        "compile": cfg.compile,
    }
    with contextlib.ExitStack() as stack:
        started = {side: stack.enter_context(process({**task, "side": side})) for side in sides}
        measured = {}
        for side, ask in started.items():
            ready = ask()
            measured[side] = Measured(ready["parameters"])
            measured[side].add(ready, timed=False)
        for _ in range(cfg.steps):
            for side, ask in started.items():
                measured[side].add(ask(1))
    return measured


def speed(measured: Measured, tokens: int) -> float:
    """Tokens per CPU second of the median step."""
    return tokens / median(measured.seconds)


def table(name: str, measured: dict[str, Measured], tokens: int) -> str:
    """One line for each side, and how ours compares."""
    lines = [
        f"{name:<14}{side:<14}{speed(m, tokens):>10,.0f} tokens/CPU s{m.peak_bytes / 1e9:>8.2f} GB"
        f"  {m.parameters:,} parameters, loss {m.losses[0]:.3f} -> {m.losses[-1]:.3f}"
        for side, m in measured.items()
    ]
    if len(measured) == 2:
        mine, other = measured.values()
        faster, memory = (
            speed(mine, tokens) / speed(other, tokens),
            mine.peak_bytes / other.peak_bytes,
        )
        lines.append(f"{'':<14}{'ours / theirs':<14}{faster:>10.2f}{memory:>21.2f}")
    return "\n".join(lines)


def check(cfg: Config) -> None:
    """UserError (code 2) for flags that cannot be measured."""
    for flag, value in (("--steps", cfg.steps), ("--rows", cfg.rows), ("--tokens", cfg.tokens)):
        if value < 1:
            raise UserError(f"{flag} must be at least 1, got {value}", exit_code=2)
    if cfg.tokens > SHARED["sequence_len"]:
        raise UserError(
            f"--tokens must be at most {SHARED['sequence_len']:,}, got {cfg.tokens:,}", exit_code=2
        )
    if cfg.quick and cfg.against:
        raise UserError("--quick measures ours alone; leave out --quick or --against", exit_code=2)
    for name in (*cfg.against, *(["peft"] if cfg.against else [])):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"{name} is not installed for {sys.executable}: `pip install {name}`", exit_code=2
            )


def main(cfg: Config) -> None:
    """Measure and print."""
    check(cfg)
    dtype = str(device.compute_init("cpu").platform.best_dtype()[0]).removeprefix("torch.")
    small = SMALL if cfg.quick else {}
    if cfg.quick:
        cfg = Config(
            True,
            (),
            cfg.families,
            2,
            2,
            min(cfg.tokens, 256),
            cfg.checkpoint_activations,
            compile=False,
        )
    tokens = cfg.rows * cfg.tokens
    log(f"{cfg.rows} rows of {cfg.tokens} tokens, {dtype}, one thread, median of {cfg.steps} steps")
    result: dict[str, Any] = {"benchmark": "finetune", "dtype": dtype, "quick": cfg.quick}
    for family in cfg.families:
        shape = QwenConfig(**{**SHAPES[family], **small})
        for mode, rank in (("lora", RANK), ("full", 0)):
            measured = measure(["ours", *cfg.against], shape, rank, dtype, cfg)
            name = f"{family} {mode}"
            log(table(name, measured, tokens))
            mine = measured["ours"]
            about = {
                "tokens_per_cpu_second": round(speed(mine, tokens), 1),
                "peak_gb": round(mine.peak_bytes / 1e9, 3),
            }
            for side in cfg.against:
                other = measured[side]
                about[f"vs_{side}"] = round(speed(mine, tokens) / speed(other, tokens), 3)
                about[f"memory_vs_{side}"] = round(mine.peak_bytes / other.peak_bytes, 3)
            result[name] = about
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)
