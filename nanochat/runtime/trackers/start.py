"""What a tracker gets when it starts, and what it must be able to do."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Start:
    """The run to show: its name, the folder of its stage, its settings, and its first step.

    `mode` is what the user wrote after the tracker's name, such as offline; if it is empty, the
    tracker chooses.
    """

    name: str
    folder: Path
    settings: dict[str, Any]
    step: int
    mode: str = ""


class Shown(Protocol):
    """A tracker in its own process, created from a Start.

    Each method may raise anything that the tracker's library raises.
    """

    def log(self, figures: dict[str, Any]) -> None:
        """Show the figures of one step; the figure `step` is its number."""
        ...

    def close(self) -> None:
        """Send what has not been sent yet, and end."""
        ...


def numbers(figures: dict[str, Any]) -> dict[str, float]:
    """Return the figures that are finite numbers, without the step itself; True counts as 1."""
    finite = {}
    for name, value in figures.items():
        is_number = isinstance(value, bool | int | float) and math.isfinite(value)
        if is_number and name != "step":
            finite[name] = float(value)
    return finite
