"""The processes of bench.train: starts one process per variant, and asks it to train."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from bench.train.rows import ABOUT, ROWS, TOKEN_BYTES
from bench.upstream import shape_for
from nanochat.common import UserError, log, read_json
from nanochat.gpt import GPTConfig

ROOT = Path(__file__).resolve().parent.parent.parent
HELD_OUT = 64  # rows


@dataclass(frozen=True)
class Variant:
    """One process to measure: whose code, in which precision, compiled or not."""

    side: str  # ours, upstream or matmuls
    dtype: str
    compiled: bool = False
    scale: float = 1.0  # factor on upstream's learning rates
    flags: tuple[str, ...] = ()  # of base_train, for our side: rates, decay and schedule
    checkout: Path | None = None  # another checkout of this repository, whose code our side runs

    @property
    def name(self) -> str:
        factor = f", rates x{self.scale:g}" if self.scale != 1 else ""
        given = "".join(f" {flag}" for flag in self.flags) + (
            f" of {self.checkout}" if self.checkout else ""
        )
        return f"{self.side} {'compiled' if self.compiled else 'eager'} {self.dtype}{factor}{given}"


@dataclass(frozen=True)
class Plan:
    """What is measured, how often, and on which rows."""

    shape: GPTConfig
    rows: Path
    rows_per_step: int
    rounds: int
    steps: int  # steps of each variant per round
    warmup: int = 3  # untimed steps before the first round
    horizon: int | None = (
        None  # steps of a run that follows the side's schedule; None: constant rates, for timing
    )
    held_out: int = HELD_OUT  # rows at the end of the file that nothing trains on
    seed: int | None = (
        None  # of the weights and of the rows' order; None: seed 42, and the order of the file
    )
    pass_rows: int | None = (
        None  # rows of a pass of our side; None: one pass computes the whole step, as upstream's do
    )

    @property
    def epochs(self) -> float:
        """How often a run of `horizon` steps reads its text."""
        read = (self.horizon or 0) * self.rows_per_step
        return read / (read_json(self.rows / ABOUT)["rows"] - self.held_out)


def flops_per_token(shape: GPTConfig) -> int:
    """FLOPs per token, forward and backward, of the large matrices and of attention over each layer's window.

    31.46 million for D4. The number depends on the shape alone, so it is the same for our side and for upstream's."""
    layers, width = shape.n_layer, shape.n_embd
    matrices = 12 * layers * width**2 + shape.vocab_size * width
    return 6 * matrices + 12 * width * sum(
        min(window, shape.sequence_len) for window in shape.windows
    )


@dataclass
class Measured:
    """What was measured of a variant over all rounds."""

    parameters: int
    losses: list[float]
    seconds: list[float] = field(default_factory=list)  # CPU seconds of each step
    peak_bytes: int = 0
    compile_seconds: float = (
        0.0  # CPU seconds before the first step, with those of the compiler's processes
    )

    @property
    def step_seconds(self) -> float:
        """CPU seconds of the median step."""
        return median(self.seconds)


class Worker:
    """The process of one variant; it starts at once and runs until `close`."""

    def __init__(self, variant: Variant, plan: Plan, peer: Path | None, errors: TextIO):
        self.variant, self._errors = variant, errors
        task = {
            "side": variant.side,
            "compiled": variant.compiled,
            "shape": shape_for(variant.side, plan.shape),
            "steps": plan.horizon,
            "scale": variant.scale,
            "rows": str(plan.rows / ROWS),
            "token_bytes": str(plan.rows / TOKEN_BYTES),
            "held_out": plan.held_out,
            "rows_per_step": plan.rows_per_step,
            "pass_rows": plan.pass_rows or plan.rows_per_step,
            "warmup": plan.warmup,
            "seed": plan.seed,
            "flags": list(variant.flags),
            "epochs": plan.epochs,
        }
        own_root = ROOT if variant.checkout is None else variant.checkout.resolve()
        home = peer if variant.side == "upstream" and peer is not None else own_root
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        own = {"PYTHONPATH": str(home), "NANOCHAT_DEVICE": "cpu", "NANOCHAT_DTYPE": variant.dtype}
        alone = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        # Upstream decorates its optimizer with torch.compile; only this variable keeps it uncompiled.
        eager = {} if variant.compiled else {"TORCHDYNAMO_DISABLE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(own_root / "bench" / "train" / "side.py"), json.dumps(task)],
            env={**alone, **threads, **own, **eager},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """The process's next answer; UserError with its last lines if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        words = [words for words in self._errors.read().splitlines() if words.strip()][-5:]
        raise UserError(
            f"{self.variant.name} ended with code {code}; its last lines:\n  " + "\n  ".join(words)
        )

    def ask(self, steps: int) -> dict[str, Any]:
        """Take `steps` steps; the answer has their CPU seconds and losses, and the peak memory in bytes."""
        return self._say(steps)

    def bits_per_byte(self) -> float:
        """The current bits per byte of the held-out rows."""
        return self._say("bpb")["bpb"]

    def keep(self, path: Path, about: dict[str, Any]) -> None:
        """Save the training in a file, with what resume() is to give back."""
        self._say({"keep": str(path), "about": about})

    def resume(self, path: Path) -> dict[str, Any]:
        """Continue the training that keep() saved; returns what was saved with it."""
        return self._say({"resume": str(path)})["about"]

    def _say(self, request: int | str | dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() reports why the process has ended
            print(json.dumps(request), file=self._process.stdin, flush=True)
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
    """Start the processes of these variants, all at once; they end with the context."""
    with contextlib.ExitStack() as stack:
        started = []
        for variant in variants:
            errors = stack.enter_context(
                tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
            )
            started.append(Worker(variant, plan, peer, errors))
            stack.callback(started[-1].close)
        yield started


def measure(
    variants: Sequence[Variant], plan: Plan, peer: Path | None = None
) -> dict[Variant, Measured]:
    """Let the variants take turns of `plan.steps` steps, for `plan.rounds` rounds."""
    with workers(variants, plan, peer) as started:
        measured = {}
        for worker in started:
            ready = worker.answer()
            compiling = ready["compile_seconds"]
            measured[worker.variant] = Measured(
                ready["parameters"], ready["losses"], compile_seconds=compiling
            )
            log(
                f"ready: {worker.variant.name}{f', compiled in {compiling:.1f} CPU s' if compiling else ''}"
            )
        for _ in range(plan.rounds):
            for worker in started:
                result, so_far = worker.ask(plan.steps), measured[worker.variant]
                so_far.seconds += result["seconds"]
                so_far.losses += result["losses"]
                so_far.peak_bytes = result["peak_bytes"]
    return measured
