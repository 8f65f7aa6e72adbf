"""What a soak counts, and how it sums up."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed; NaN of no values."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1] if values else math.nan


@dataclass
class Requests:
    """Requests of one kind: the seconds of every answer, how many were told to come back, and why others failed."""

    seconds: list[float] = field(default_factory=list)
    refused: int = 0  # status 429 or 503, with a time to come back
    failures: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        """Counts, and milliseconds of the median, of 95 and 99 percent, and of the slowest answer."""
        shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
        times = {
            f"{name}_ms": round(1e3 * percentile(self.seconds, share)) if self.seconds else None
            for name, share in shares.items()
        }
        counts = {
            "answered": len(self.seconds),
            "refused": self.refused,
            "failed": self.failures.total(),
        }
        return {**counts, **times}


def growth(samples: Sequence[int]) -> int:
    """How much the median of the last fifth of some measurements of memory is above that of the second fifth.

    In the first fifth, a process still takes what it keeps: caches, threads, buffers.
    """
    fifth = max(len(samples) // 5, 1)
    early, late = samples[fifth : 2 * fifth] or samples[:fifth], samples[-fifth:]
    return round(percentile(late, 0.5) - percentile(early, 0.5))
