"""Training speed on one CPU thread, ours beside upstream nanochat's, in CPU seconds of one run.

python -m bench.train --quick            # within 50 seconds, uncompiled, no peer
python -m bench.train --upstream DIR     # DIR: a checkout of karpathy/nanochat
python -m bench.train --make-rows DIR    # the rows it trains on; --rows DIR uses them again

Every variant is a process of its own; they take turns, a few steps each, so that a busy machine slows all alike.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch

from bench.ranks import D4, wire_bytes_per_parameter
from bench.train_rows import check_rows, make_rows, standard_library
from nanochat import device, host
from nanochat.common import UserError, base_dir, log, run
from nanochat.gpt import GPTConfig
from nanochat.optim import Rates

ROOT = Path(__file__).resolve().parent.parent
STEP_TOKENS = 4096
QUICK_TEXT = 2_000_000  # characters: enough for a vocabulary of 4,096, in a second


@dataclass(frozen=True)
class Variant:
    """One process to measure."""

    side: str  # ours, upstream or matmuls
    dtype: str
    compiled: bool = False

    @property
    def name(self) -> str:
        return f"{self.side} {'compiled' if self.compiled else 'eager'} {self.dtype}"


@dataclass(frozen=True)
class Plan:
    """What is measured, how often, on which rows."""

    shape: GPTConfig
    rows: Path
    rows_per_step: int
    rounds: int
    steps: int  # of each variant in a round
    warmup: int = 3  # steps before the first round, untimed


@dataclass
class Measured:
    """A variant's figures over all rounds."""

    parameters: int
    losses: list[float]
    seconds: list[float] = field(default_factory=list)  # CPU seconds of each step
    peak_bytes: int = 0

    @property
    def step_seconds(self) -> float:
        """CPU seconds of a step, the median."""
        return median(self.seconds)


def flops_per_token(shape: GPTConfig) -> int:
    """Of all large matrices and of attention over the whole row, forward and backward: 31.46 million for D4."""
    layers, width = shape.n_layer, shape.n_embd
    matrices = 12 * layers * width**2 + shape.vocab_size * width
    return 6 * matrices + 12 * layers * width * shape.sequence_len


# --- one process for each variant ------------------------------------------------------------------


class Worker:
    """A variant's process: started on entering, ended on leaving."""

    def __init__(self, variant: Variant, plan: Plan, peer: Path | None, errors: TextIO):
        self.variant, self._errors = variant, errors
        task = {
            "side": variant.side,
            "compiled": variant.compiled,
            "shape": asdict(plan.shape),
            "rates": {**asdict(Rates()), "weight_decay": 0.05},  # about what a short run decays by, the same for both
            "rows": str(plan.rows / "rows.npy"),
            "rows_per_step": plan.rows_per_step,
            "warmup": plan.warmup,
        }
        home = peer if variant.side == "upstream" and peer is not None else ROOT
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        own = {"PYTHONPATH": str(home), "NANOCHAT_DEVICE": "cpu", "NANOCHAT_DTYPE": variant.dtype}
        alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        # Upstream decorates its optimizer with torch.compile, so only this variable makes it eager.
        eager = {} if variant.compiled else {"TORCHDYNAMO_DISABLE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "bench" / "train_side.py"), json.dumps(task)],
            env={**alone, **threads, **own, **eager},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """The process's next line; UserError with its last words if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        words = [words for words in self._errors.read().splitlines() if words.strip()][-5:]
        raise UserError(f"{self.variant.name} ended with code {code}:\n  " + "\n  ".join(words))

    def ask(self, steps: int) -> dict[str, Any]:
        """Take so many steps; CPU seconds and loss of each, and the most memory held."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() tells why it has ended
            print(steps, file=self._process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@contextlib.contextmanager
def workers(variants: Sequence[Variant], plan: Plan, peer: Path | None) -> Iterator[list[Worker]]:
    """The processes of some variants, all started at once."""
    with contextlib.ExitStack() as stack:
        started = []
        for variant in variants:
            errors = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            started.append(Worker(variant, plan, peer, errors))
            stack.callback(started[-1].close)
        yield started


def measure(variants: Sequence[Variant], plan: Plan, peer: Path | None = None) -> dict[Variant, Measured]:
    """Let the variants take turns, `plan.steps` steps each, for `plan.rounds` rounds."""
    with workers(variants, plan, peer) as started:
        measured = {}
        for worker in started:
            ready = worker.answer()
            measured[worker.variant] = Measured(ready["parameters"], ready["losses"])
            log(f"ready: {worker.variant.name}")
        for _ in range(plan.rounds):
            for worker in started:
                result, so_far = worker.ask(plan.steps), measured[worker.variant]
                so_far.seconds += result["seconds"]
                so_far.losses += result["losses"]
                so_far.peak_bytes = result["peak_bytes"]
    return measured


# --- figures ----------------------------------------------------------------------------------------


def fastest(measured: Mapping[Variant, Measured], side: str) -> Variant:
    """The variant of a side with the fewest CPU seconds a step."""
    return min((v for v in measured if v.side == side), key=lambda v: measured[v].step_seconds)


def matmul_speed(measured: Mapping[Variant, Measured], plan: Plan) -> float:
    """FLOP/s of the bf16 matmuls of these shapes, each weighted by its FLOPs."""
    bare = next(measured[v] for v in measured if v.side == "matmuls")
    return 6 * bare.parameters * plan.rows_per_step * plan.shape.sequence_len / bare.step_seconds


def figures(measured: Mapping[Variant, Measured], plan: Plan) -> dict[str, Any]:
    """The JSON object: ours at its fastest, against the matmuls' speed and, where it ran, against upstream.

    `vs_` are ratios of tokens per CPU second; upstream's default is eager fp32, its best the fastest variant of it.
    `memory_vs_upstream` is the ratio of peak resident sizes, of the fastest variant of either side.
    """
    tokens = plan.rows_per_step * plan.shape.sequence_len
    best = fastest(measured, "ours")
    own = measured[best]
    peak = matmul_speed(measured, plan)
    result: dict[str, Any] = {
        "benchmark": "train",
        "variant": best.name,
        "tokens_per_cpu_second": round(tokens / own.step_seconds, 1),
        "share_of_matmul_peak": round(flops_per_token(plan.shape) * tokens / (own.step_seconds * peak), 4),
        "matmul_gflops": round(peak / 1e9, 1),
    }
    if any(v.side == "upstream" for v in measured):
        theirs = measured[fastest(measured, "upstream")]
        default = measured[Variant("upstream", "float32")]
        result["vs_upstream_default"] = round(default.step_seconds / own.step_seconds, 3)
        result["vs_upstream_best"] = round(theirs.step_seconds / own.step_seconds, 3)
        result["memory_vs_upstream"] = round(own.peak_bytes / theirs.peak_bytes, 3)
    return result


def table(measured: Mapping[Variant, Measured], plan: Plan) -> str:
    """A line for each variant."""
    tokens = plan.rows_per_step * plan.shape.sequence_len
    peak = matmul_speed(measured, plan)
    lines = [
        f"{'variant':<28}{'CPU s/step':>11}{'tokens/CPU s':>14}{'of matmuls':>12}{'peak MB':>9}{'parameters':>12}  loss"
    ]
    for variant, m in measured.items():
        if variant.side == "matmuls":
            lines.append(f"{'matmuls ' + variant.dtype:<28}{m.step_seconds:>11.3f}{peak / 1e9:>20.1f} GFLOP/s")
            continue
        speed = tokens / m.step_seconds
        share = f"{100 * speed * flops_per_token(plan.shape) / peak:.1f} %"
        lines.append(
            f"{variant.name:<28}{m.step_seconds:>11.3f}{speed:>14,.0f}{share:>12}{m.peak_bytes / 1e6:>9.0f}"
            f"{m.parameters:>12,}  {m.losses[0]:.3f} -> {m.losses[-1]:.3f} in {len(m.losses)} steps"
        )
    return "\n".join(lines)


# --- command line -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Training speed on one CPU thread: a table, and as the last line one JSON object."""

    quick: bool = False
    """ours alone, uncompiled, few rounds: ends within 50 seconds"""
    upstream: Path | None = None
    """a checkout of karpathy/nanochat to run beside ours"""
    make_rows: Path | None = None
    """only write the rows to this folder"""
    rows: Path | None = None
    """train on the rows of this folder; default: made anew in a temporary one"""
    rounds: int = 8
    """turns of each variant, two steps each"""


def check(cfg: Config) -> None:
    """Refuse what cannot be measured."""
    if cfg.quick and cfg.upstream is not None:
        raise UserError("--quick measures ours alone; leave out --quick or --upstream", exit_code=2)
    if cfg.rounds < 1:
        raise UserError(f"--rounds must be at least 1, got {cfg.rounds}", exit_code=2)
    if cfg.upstream is None:
        return
    if not cfg.upstream.is_dir():
        raise UserError(
            f"--upstream must name a folder with a checkout of karpathy/nanochat, got {cfg.upstream}, which is no "
            "folder. Clone it, and give the clone's folder.",
            exit_code=2,
        )
    missing = [name for name in ("nanochat/gpt.py", "nanochat/optim.py") if not (cfg.upstream / name).is_file()]
    if missing:
        raise UserError(
            f"--upstream must name a checkout of karpathy/nanochat of 2026, got {cfg.upstream}, which has no "
            f"{' and no '.join(missing)}. Give the folder that holds its README.",
            exit_code=2,
        )


def variants(cfg: Config, compiler_missing: str) -> list[Variant]:
    """What to measure; compiled ones only where there is a compiler."""
    chosen = [Variant("matmuls", "bfloat16"), Variant("ours", "float32"), Variant("ours", "bfloat16")]
    compiled = not cfg.quick and not compiler_missing
    if compiled:
        chosen.append(Variant("ours", "bfloat16", True))
    if cfg.upstream is not None:
        chosen.append(Variant("upstream", "float32"))
        chosen += [Variant("upstream", "bfloat16", True)] if compiled else [Variant("upstream", "bfloat16")]
    if compiler_missing and not cfg.quick:
        log(f"nothing is compiled: {compiler_missing}")
    return chosen


def main(cfg: Config) -> None:
    """Make the rows, or measure on them."""
    check(cfg)
    length, vocab_size = D4.sequence_len, D4.vocab_size
    if cfg.make_rows is not None:
        about = make_rows(cfg.make_rows, vocab_size, length, standard_library())
        log(f"{about['rows']:,} rows of {about['row_tokens']} tokens in {cfg.make_rows}: {about['text']}")
        print(json.dumps({"benchmark": "train", **about}))
        return
    torch.set_num_threads(1)
    host.use_compile_cache(base_dir() / "compile_cache")  # of both sides, in the base folder
    compute = device.compute_init("cpu")
    chosen = variants(cfg, device.compiler_missing(compute))
    with tempfile.TemporaryDirectory() as temporary:
        rows = cfg.rows or Path(temporary)
        if cfg.rows is not None:
            about = check_rows(rows, vocab_size, length)
        else:
            about = make_rows(rows, vocab_size, length, standard_library(QUICK_TEXT if cfg.quick else None))
        log(f"{about['rows']:,} rows of {about['row_tokens']} tokens: {about['text']}")
        plan = Plan(D4, rows, STEP_TOKENS // length, cfg.rounds, steps=2)
        if cfg.quick:
            plan = replace(plan, rounds=3, steps=1, warmup=1)
        measured = measure(chosen, plan, cfg.upstream.resolve() if cfg.upstream else None)
    log(
        f"4 layers, 256 channels, one thread each, median of {plan.rounds * plan.steps} steps of {STEP_TOKENS:,} tokens"
    )
    log(table(measured, plan))
    wire = round(wire_bytes_per_parameter(), 3)  # four ranks, counted
    print(json.dumps({**figures(measured, plan), "wire_bytes_per_parameter": wire}), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)
