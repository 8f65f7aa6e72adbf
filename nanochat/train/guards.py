"""What keeps one bad step from spoiling a run: the loss scale of fp16, and a limit on sudden gradients."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import Any

from nanochat.device import Compute

WINDOW = 128  # steps that a gradient is compared with
SIGMAS = 6.0


@dataclass
class LossScale:
    """The factor that lifts fp16 gradients out of underflow; 1 and constant for other formats."""

    value: float = 1.0
    good_steps: int = 0
    growing: bool = False

    @staticmethod
    def start(compute: Compute, state: Mapping[str, Any]) -> "LossScale":
        """Begin, or go on from what state() kept."""
        fresh = LossScale(65536.0, 0, True) if compute.scaler else LossScale()
        return replace(fresh, **state["scale"]) if "scale" in state and compute.scaler else fresh

    def update(self, finite: bool) -> None:
        """Halve after an overflow, double after 2,000 good steps, as torch's GradScaler does."""
        if not self.growing:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == 2000:
            self.value, self.good_steps = self.value * 2, 0


@dataclass
class Spikes:
    """The gradient norms of the last steps, by which a sudden one is told: more than six sigma above their mean.

    The norm is that of all ranks, so all decide alike. A spike joins the window: where gradients have come to stay
    larger, four of them widen it enough, and training goes on; ten in a row, which stop a run, cannot be all spikes.
    """

    norms: list[float] = field(default_factory=list)

    @staticmethod
    def start(state: Mapping[str, Any]) -> "Spikes":
        """Begin, or go on from what state() kept."""
        return Spikes(list(state.get("norms", [])))

    def found(self, norm: float) -> bool:
        """Whether a finite norm is a spike; takes it in. Before the window is full nothing is."""
        full = len(self.norms) == WINDOW
        spike = full and norm > fmean(self.norms) + SIGMAS * pstdev(self.norms)
        self.norms = [*self.norms[-(WINDOW - 1) :], norm]
        return spike

    def __post_init__(self) -> None:
        assert all(map(math.isfinite, self.norms)) and len(self.norms) <= WINDOW
