"""The figures of a stage while it trains, and the clock that says when to save."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanochat import device
from nanochat.common import UserError, log, warn
from nanochat.device import Compute
from nanochat.runtime import parallel
from nanochat.runtime.progress import duration
from nanochat.train.update import Outcome

BAD_STEPS = 10  # skipped updates in a row after which a run stops
STATE = (
    "smooth_loss",
    "smooth_weight",
    "seconds",
    "cpu_seconds",
    "bad_in_a_row",
    "skipped",
)  # kept in checkpoints


def due(step: int, every: int, last: bool) -> bool:
    """Whether something that happens every `every` steps and at the end happens at this step; `every` <= 0 is never."""
    return every > 0 and (last or (step > 0 and step % every == 0))


def expected_seconds(tokens: float, flops_per_token: int, peak: float, mfu: float) -> float:
    """Seconds to train on `tokens` tokens at the share `mfu` of `peak`, the FLOP/s over all ranks."""
    return tokens * flops_per_token / (mfu * peak)


@dataclass
class Meter:
    """Running figures of a stage; checkpoints keep the fields that STATE names."""

    steps: int  # of the whole run
    tokens_per_step: int
    flops_per_token: int
    peak: float  # FLOP/s over all ranks
    usual_mfu: float  # share of the peak that steps are expected to reach before the first one was measured
    smooth_loss: float = 0.0  # exponential average, not yet debiased
    smooth_weight: float = 0.0
    seconds: float = 0.0  # spent in steps, over all runs of this stage
    cpu_seconds: float = 0.0  # of this rank's process, over all runs of this stage
    bad_in_a_row: int = 0
    skipped: int = 0
    _recent: list[float] = field(default_factory=list)

    @staticmethod
    def start(
        steps: int,
        tokens_per_step: int,
        flops_per_token: int,
        compute: Compute,
        state: Mapping[str, Any],
    ) -> "Meter":
        """A new meter, or the one that a checkpoint's state holds."""
        peak, source = device.peak_flops(compute)
        log(f"mfu is measured against {peak / 1e12:.3g} TFLOP/s a rank ({source})")
        return Meter(
            steps,
            tokens_per_step,
            flops_per_token,
            peak * compute.world_size,
            compute.platform.usual_mfu(),
            **state.get("meter", {}),
        )

    def tick(
        self, step: int, outcome: Outcome, seconds: float, cpu_seconds: float, lrm: float
    ) -> dict[str, Any]:
        """Take in a step (counted from 1) and return its line for metrics.jsonl.

        UserError after ten skipped updates in a row.
        """
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds
        self._recent = [*self._recent[-19:], seconds]
        if outcome.skipped:
            self._count_skipped(step, outcome)
        else:
            self.bad_in_a_row = 0
            self.smooth_loss = 0.9 * self.smooth_loss + 0.1 * outcome.loss
            self.smooth_weight = 0.9 * self.smooth_weight + 0.1
        speed = self.tokens_per_step / seconds
        return {
            "step": step,
            "loss": outcome.loss,
            "smooth_loss": self.smooth,
            "grad_norm": outcome.grad_norm,
            "lrm": lrm,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "tokens_per_second": speed,
            "mfu": 100 * speed * self.flops_per_token / self.peak,
            "total_seconds": self.seconds,
            "skipped": outcome.skipped,
        }

    def _count_skipped(self, step: int, outcome: Outcome) -> None:
        self.skipped += 1
        self.bad_in_a_row += 1
        warn(
            f"step {step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}: {outcome.reason}, update skipped"
        )
        if self.bad_in_a_row >= BAD_STEPS:
            raise UserError(
                f"{BAD_STEPS} updates in a row were skipped, the last at step {step} ({outcome.reason}). The newest "
                "checkpoint holds the parameters from before these updates. Lower the learning rates, or look for bad "
                "data near this step, then type the same command again."
            )

    @property
    def smooth(self) -> float:
        """The debiased average loss."""
        return self.smooth_loss / self.smooth_weight if self.smooth_weight else float("nan")

    def expected(self, step: int) -> float:
        """Seconds left after `step` updates, before this process has taken a step: at the pace of the earlier run, or
        at the usual MFU of such a device."""
        if step:
            return (self.steps - step) * self.seconds / step
        return expected_seconds(
            self.steps * self.tokens_per_step, self.flops_per_token, self.peak, self.usual_mfu
        )

    def eta(self, step: int) -> float:
        """Seconds left, at the pace of the last twenty steps."""
        return (self.steps - step) * sum(self._recent) / max(len(self._recent), 1)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of the figures."""
        return {name: getattr(self, name) for name in STATE}


def step_line(line: dict[str, Any], steps: int, eta: float) -> str:
    """A step in the published format, with the step's own loss behind the running mean, and the time left."""
    step = line["step"]
    return (
        f"step {step:05d}/{steps:05d} ({100 * step / steps:.2f}%) | "
        f"loss: {line['smooth_loss']:.3f} (this step: {line['loss']:.3f}) | "
        f"lrm: {line['lrm']:.2f} | dt: {1000 * line['seconds']:.1f}ms | tok/sec: {line['tokens_per_second']:,.0f} | "
        f"mfu: {line['mfu']:.2f} | total time: {duration(line['total_seconds'])} | eta: {duration(eta)}"
    )


def step_note(line: dict[str, Any], steps: int, eta: float) -> str:
    """A step as the terminal shows it beside the progress bar."""
    pace = f"{line['tokens_per_second']:,.0f} tok/s, {duration(eta)} left"
    loss = f"{line['smooth_loss']:.3f} (this step {line['loss']:.3f})"
    return f"{line['step']}/{steps} loss {loss} {pace}"


def listed(figures: Mapping[str, float]) -> str:
    """Figures by name, as a step's line prints them."""
    return " | ".join(f"{name}: {value:.4f}" for name, value in figures.items())


class SaveClock:
    """Says when to save by time: every minute, but less often where saving would take over three percent of a run."""

    def __init__(self, seconds: float = 60.0):
        self.seconds, self.cost, self.last = seconds, 0.0, time.monotonic()

    def due(self, compute: Compute, busy: bool = False, failed: bool = False) -> bool:
        """Whether a save is due: never while the last one is still `busy`, at once if it `failed`, since the next one
        reports that. Rank 0 decides for all ranks."""
        wait = max(self.seconds, 30 * self.cost)
        by_time = self.seconds > 0 and not busy and time.monotonic() - self.last >= wait
        return bool(parallel.agree(int(failed or by_time), compute))

    def saved(self, cost: float) -> None:
        """Note that a save cost `cost` seconds of training and has just ended."""
        self.cost, self.last = cost, time.monotonic()
