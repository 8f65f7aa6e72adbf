"""The arithmetic of compute multipliers: what a baseline spends to reach a loss, over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Literal, Protocol

# Student's t for a two-sided interval of 95 %, by degrees of freedom; more use the last value.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Point:
    """The end of one run."""

    cost: float  # FLOPs or CPU seconds
    bits_per_byte: float


class Finished(Protocol):
    """What a finished run has spent, and what it has reached (Protocol)."""

    @property
    def flops(self) -> float: ...

    @property
    def seconds(self) -> float: ...

    @property
    def bits_per_byte(self) -> float: ...


@dataclass(frozen=True)
class Interval:
    """The geometric mean of the seeds' multipliers, and its interval of 95 %."""

    mean: float
    error: float | None  # standard error of the mean; None with a single seed
    low: float | None
    high: float | None
    extrapolated: bool  # at least one seed's multiplier is

    @property
    def words(self) -> str:
        """The interval for a table; a question mark follows what was extrapolated."""
        words = f"{self.mean:.3f}"
        if self.extrapolated:
            words += "?"
        if self.error is not None:
            words += f" ± {self.error:.3f}"
        return words


def improving(points: Sequence[Point]) -> list[Point]:
    """Return the points by their cost, without those that are no better than a cheaper one."""
    curve: list[Point] = []
    for point in sorted(points, key=lambda point: point.cost):
        if not curve or point.bits_per_byte < curve[-1].bits_per_byte:
            curve.append(point)
    return curve


def cost_to_reach(points: Sequence[Point], goal: float) -> tuple[float, bool] | None:
    """Return what the baseline spends to reach `goal` bits per byte, and whether that is a guess.

    The curve is piecewise linear between the logarithms of cost and loss, in which power laws are
    straight lines. Beyond either end of the curve, its nearest segment is continued: a guess. None
    if the curve has no slope.
    """
    curve = improving(points)
    if len(curve) < 2:
        return None
    before, after = curve[-2:]
    for start, end in pairwise(curve):
        if goal >= end.bits_per_byte:
            before, after = start, end
            break
    cost_ratio = math.log(after.cost / before.cost)
    loss_ratio = math.log(before.bits_per_byte / after.bits_per_byte)
    amount = before.cost * (before.bits_per_byte / goal) ** (cost_ratio / loss_ratio)
    inside = curve[-1].bits_per_byte <= goal <= curve[0].bits_per_byte
    return amount, not inside


def t95(count: int) -> float:
    """Return Student's t for an interval of 95 % around the mean of `count` values, at least two."""
    return T95[min(count - 1, len(T95)) - 1]


def interval(multipliers: Sequence[float], extrapolated: bool) -> Interval:
    """Return the interval of one multiplier per seed; all arithmetic is between logarithms."""
    logs = [math.log(value) for value in multipliers]
    mean = math.exp(fmean(logs))
    if len(logs) < 2:
        return Interval(mean, None, None, None, extrapolated)
    error = stdev(logs) / math.sqrt(len(logs))
    factor = math.exp(t95(len(logs)) * error)
    return Interval(mean, mean * error, mean / factor, mean * factor, extrapolated)


def multiplier(ours: Sequence[Point], baseline: Sequence[Sequence[Point]]) -> Interval | None:
    """Return the multiplier of our runs, one per seed, over a baseline with one curve per seed.

    None if the curve of a seed has no slope.
    """
    ratios = []
    extrapolated = False
    for point, curve in zip(ours, baseline, strict=True):
        needed = cost_to_reach(curve, point.bits_per_byte)
        if needed is None:
            return None
        amount, is_beyond = needed
        ratios.append(amount / point.cost)
        extrapolated |= is_beyond
    return interval(ratios, extrapolated)


def multiplier_of(
    cost: Literal["flops", "seconds"], seeds: Sequence[Sequence[Finished]]
) -> Interval | None:
    """Return multiplier() in FLOPs or in CPU seconds; each seed is our run, then the baseline's."""
    ends = [[Point(getattr(run, cost), run.bits_per_byte) for run in seed] for seed in seeds]
    return multiplier([seed[0] for seed in ends], [seed[1:] for seed in ends])
