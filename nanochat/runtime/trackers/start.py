"""The data that a tracker starts with, and the interface that every tracker implements."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Start:
    """The data that a tracker starts with: the run's name, folder, settings and last step so far.

    `mode` is what the user wrote after the tracker's name, such as "offline". If it is empty, the
    tracker chooses its mode.
    """

    name: str
    folder: Path
    settings: dict[str, Any]
    step: int
    mode: str = ""


class Shown(Protocol):
    """The interface of a tracker that runs in a process of its own, created from a Start.

    Each method may raise whatever the tracker's library raises.
    """

    def log(self, figures: dict[str, Any]) -> None:
        """Show the metrics of one step, whose index is under the key `step`."""
        ...

    def close(self) -> None:
        """Send everything that has not been sent yet, and end the run."""
        ...


def numbers(figures: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that are finite numbers, as floats, without the step; True counts as 1."""
    finite = {}
    for name, value in figures.items():
        is_number = isinstance(value, bool | int | float) and math.isfinite(value)
        if is_number and name != "step":
            finite[name] = float(value)
    return finite
