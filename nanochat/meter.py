"""The running figures of a training run, its log lines, and the clock that decides when to save."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanochat import device
from nanochat.common import UserError, log, tr, warn
from nanochat.device import Compute
from nanochat.runtime import parallel
from nanochat.runtime.progress import duration, plain_duration
from nanochat.schedule import expected_seconds
from nanochat.step import Outcome

BAD_STEPS = 10  # skipped updates in a row after which a run stops
RECENT_STEPS = 20  # the number of steps whose pace predicts the time left
# the fields of a Meter that checkpoints keep
STATE = (
    "smooth_loss",
    "smooth_weight",
    "seconds",
    "cpu_seconds",
    "bad_in_a_row",
    "skipped",
)


def due(step: int, every: int, last: bool) -> bool:
    """Return whether an action that is done every `every` steps is due at `step`.

    The action is never due if `every` is 0 or less. Otherwise it is also due at the last step, and
    it is due at step 0 only if that is the last one.
    """
    if every <= 0:
        return False
    return last or (step > 0 and step % every == 0)


@dataclass
class Meter:
    """Measures the loss, speed and time of a run as it trains."""

    steps: int  # number of steps in the whole run
    tokens_per_step: int
    flops_per_token: int
    peak: float  # FLOP/s over all ranks
    usual_mfu: float  # assumed share of the peak until a step has been measured
    smooth_loss: float = 0.0  # exponential moving average, before debiasing
    smooth_weight: float = 0.0
    seconds: float = 0.0  # time spent in steps, over all starts of this run
    cpu_seconds: float = 0.0  # CPU time of this rank's process, over all starts of this run
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
        """Return a new meter, or the one saved in `state`, and log what MFU is measured against."""
        peak, source = device.peak_flops(compute)
        log(
            tr(
                "mfu is measured against {peak:.3g} TFLOP/s a rank ({source})",
                peak=peak / 1e12,
                source=source,
            )
        )
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
        """Count a step (the first is 1), and return its line for metrics.jsonl.

        `lrm` is the factor on the learning rates. Raises UserError if ten updates in a row were
        skipped.
        """
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds
        self._recent = [*self._recent[-(RECENT_STEPS - 1) :], seconds]
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
            tr(
                "step {step}: loss {loss:.4f}, gradient norm {grad_norm:.4f}: {reason}, update skipped",
                step=step,
                loss=outcome.loss,
                grad_norm=outcome.grad_norm,
                reason=outcome.reason,
            )
        )
        if self.bad_in_a_row >= BAD_STEPS:
            raise UserError(
                tr(
                    "{bad_steps} updates in a row were skipped, the last at step {step} "
                    "({reason}). The newest checkpoint holds the parameters from before "
                    "these updates. Lower the learning rates, or look for bad data near this "
                    "step, then begin again with --resume=none, since a run resumes only with "
                    "the same rates and data.",
                    bad_steps=BAD_STEPS,
                    step=step,
                    reason=outcome.reason,
                )
            )

    @property
    def smooth(self) -> float:
        """The debiased running mean of the loss, or NaN if all updates so far were skipped."""
        return self.smooth_loss / self.smooth_weight if self.smooth_weight else float("nan")

    def expected(self, step: int) -> float:
        """Return the seconds left after `step` updates, before this process has measured a step.

        The estimate uses the pace of earlier starts of the run, or else the usual MFU of the
        device.
        """
        if step:
            return (self.steps - step) * self.seconds / step
        tokens = self.steps * self.tokens_per_step
        return expected_seconds(tokens, self.flops_per_token, self.peak, self.usual_mfu)

    def eta(self, step: int) -> float:
        """Return the seconds left after `step` updates, at the pace of the latest steps."""
        return (self.steps - step) * sum(self._recent) / max(len(self._recent), 1)

    def state(self) -> dict[str, float]:
        """Return the figures that a checkpoint saves, by name."""
        return {name: getattr(self, name) for name in STATE}


def step_line(line: Mapping[str, Any], steps: int, eta: float) -> str:
    """Return a step's line for the log.

    The running mean of the loss comes before the loss of this step, and the time left comes last.
    Where fine-tuning replays the model's own words, their loss and that of the data follow.
    """
    step = line["step"]
    own_losses = (
        f"{words}: {line[name]:.3f}"
        for name, words in (("data_loss", "data"), ("own_words_loss", "own words"))
        if name in line
    )
    parts = (
        f"step {step:05d}/{steps:05d} ({100 * step / steps:.2f}%)",
        f"loss: {line['smooth_loss']:.3f} (this step: {line['loss']:.3f})",
        *own_losses,
        f"lrm: {line['lrm']:.2f}",
        f"dt: {1000 * line['seconds']:.1f}ms",
        f"tok/sec: {line['tokens_per_second']:,.0f}",
        f"mfu: {line['mfu']:.2f}",
        f"total time: {plain_duration(line['total_seconds'])}",
        f"eta: {plain_duration(eta)}",
    )
    return " | ".join(parts)


def step_note(line: Mapping[str, Any], steps: int, eta: float) -> str:
    """Return the short text about a step that the terminal shows next to the progress bar."""
    return tr(
        "{step}/{steps} loss {smooth_loss:.3f} (this step {loss:.3f}) "
        "{tokens_per_second:,.0f} tok/s, {time} left",
        step=line["step"],
        steps=steps,
        smooth_loss=line["smooth_loss"],
        loss=line["loss"],
        tokens_per_second=line["tokens_per_second"],
        time=duration(eta),
    )


def listed(figures: Mapping[str, float]) -> str:
    """Return figures as text for the log, each with its name."""
    return " | ".join(f"{name}: {value:.4f}" for name, value in figures.items())


class SaveClock:
    """Decides when it is time to save: every `seconds`, or less often if saving is slow.

    Saves by time take at most about three percent of a run. If `seconds` is 0 or less, there are
    none.
    """

    def __init__(self, seconds: float = 60.0):
        self.seconds = seconds
        self.cost = 0.0  # seconds of training that the last save cost
        self.last = time.monotonic()

    def due(self, compute: Compute, busy: bool = False, failed: bool = False) -> bool:
        """Return whether a save is due, as rank 0 decides for all ranks.

        No save is due while the previous one is still `busy`. If the previous one `failed`, a save
        is due at once, because it reports the failure.
        """
        wait = max(self.seconds, 30 * self.cost)
        by_time = self.seconds > 0 and not busy and time.monotonic() - self.last >= wait
        return bool(parallel.agree(int(failed or by_time), compute))

    def saved(self, cost: float) -> None:
        """Record that a save, which cost `cost` seconds of training, has just ended."""
        self.cost = cost
        self.last = time.monotonic()
