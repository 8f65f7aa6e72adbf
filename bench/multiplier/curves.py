"""The arithmetic of compute multipliers: what a baseline spends to reach a loss, and an interval over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

# Student's t for a two-sided interval of 95 %, by degrees of freedom; larger samples use the last value.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Point:
    """The end of one run."""

    cost: float  # FLOPs or CPU seconds
    bits_per_byte: float


@dataclass(frozen=True)
class Cost:
    """What a baseline spends to reach a loss."""

    amount: float
    extrapolated: bool  # the loss lies outside the baseline's measured range


@dataclass(frozen=True)
class Interval:
    """The geometric mean of the seeds' multipliers, its standard error, and its interval of 95 % by Student's t."""

    mean: float
    error: float | None  # of the mean; None with a single seed
    low: float | None
    high: float | None
    extrapolated: bool  # at least one seed's multiplier is

    @property
    def words(self) -> str:
        """The interval for a table; a question mark follows what was extrapolated."""
        mark = "?" if self.extrapolated else ""
        return f"{self.mean:.3f}{mark}" + ("" if self.error is None else f" ± {self.error:.3f}")

    def helps(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low is not None and self.low > 1


def improving(points: Sequence[Point]) -> list[Point]:
    """The points in the order of their cost, without those that are no better than a cheaper one."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: point.cost):
        if not kept or point.bits_per_byte < kept[-1].bits_per_byte:
            kept.append(point)
    return kept


def cost_to_reach(points: Sequence[Point], goal: float) -> Cost | None:
    """What the baseline spends until its curve reaches `goal` bits per byte; None if it has no slope.

    The curve is piecewise linear between the logarithms of cost and loss, in which power laws are straight lines.
    Beyond either end of the curve, its nearest segment is continued.
    """
    curve = improving(points)
    if len(curve) < 2:
        return None
    before, after = next(
        ((a, b) for a, b in pairwise(curve) if b.bits_per_byte <= goal <= a.bits_per_byte),
        (curve[0], curve[1]) if goal > curve[0].bits_per_byte else (curve[-2], curve[-1]),
    )
    slope = math.log(after.cost / before.cost) / math.log(
        before.bits_per_byte / after.bits_per_byte
    )
    amount = before.cost * (before.bits_per_byte / goal) ** slope
    return Cost(amount, not curve[-1].bits_per_byte <= goal <= curve[0].bits_per_byte)


def interval(multipliers: Sequence[float], extrapolated: bool) -> Interval:
    """The interval of one multiplier per seed; all arithmetic is between logarithms."""
    logs = [math.log(value) for value in multipliers]
    mean = math.exp(fmean(logs))
    if len(logs) < 2:
        return Interval(mean, None, None, None, extrapolated)
    error = stdev(logs) / math.sqrt(len(logs))
    reach = T95[min(len(logs) - 2, len(T95) - 1)] * error
    return Interval(
        mean, mean * error, mean * math.exp(-reach), mean * math.exp(reach), extrapolated
    )


def multiplier(ours: Sequence[Point], baseline: Sequence[Sequence[Point]]) -> Interval | None:
    """The multiplier of `ours`, one run per seed, over a baseline with one curve per seed, in the same order.

    None if the curve of a seed has no slope.
    """
    ratios, extrapolated = [], False
    for point, curve in zip(ours, baseline, strict=True):
        needed = cost_to_reach(curve, point.bits_per_byte)
        if needed is None:
            return None
        ratios.append(needed.amount / point.cost)
        extrapolated |= needed.extrapolated
    return interval(ratios, extrapolated)
