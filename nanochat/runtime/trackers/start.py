"""What a tracker is told when it starts."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Start:
    """The run to show: its name, the folder of its stage, its settings, and the step that it resumes from.

    `mode` is what the user wrote after the tracker's name, such as offline; empty: the tracker's own choice.
    """

    name: str
    folder: Path
    settings: dict[str, Any]
    step: int
    mode: str = ""


class Shown(Protocol):
    """A tracker in its own process, made from a Start. Each method may raise anything that its library raises."""

    def log(self, figures: dict[str, Any]) -> None:
        """Show the figures of one step, which stands in `step`."""
        ...

    def close(self) -> None:
        """Send what has not been sent yet, and end."""
        ...


def numbers(figures: dict[str, Any]) -> dict[str, float]:
    """The figures that are finite numbers, without the step itself; True counts as 1."""
    return {
        name: float(value)
        for name, value in figures.items()
        if name != "step" and isinstance(value, bool | int | float) and math.isfinite(value)
    }
