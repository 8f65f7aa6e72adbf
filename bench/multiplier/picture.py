"""Draws loss against FLOPs for everything that bench.multiplier compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.common import atomic_path


@dataclass(frozen=True)
class Line:
    """One entry on one text at one depth: the ends of its runs, and the curves that lead there."""

    panel: str
    name: str
    ends: list[
        tuple[float, float, float]
    ]  # FLOPs, mean and standard error of bits per byte, one for each length
    curves: list[list[tuple[float, float]]]  # (FLOPs, bits per byte) along each run


def draw(lines: Sequence[Line], path: Path) -> None:
    """Draw a panel for each text and depth to a PNG file. Both axes are logarithmic, as the multiplier is read off."""
    from matplotlib.figure import Figure  # needs no display and keeps no global state
    from matplotlib.ticker import FuncFormatter, NullFormatter

    panels = list(dict.fromkeys(line.panel for line in lines))
    names = list(dict.fromkeys(line.name for line in lines))
    figure = Figure(figsize=(6.5 * len(panels), 5), layout="constrained")
    grid: Any = figure.subplots(1, len(panels), squeeze=False)
    for axes, panel in zip(grid[0], panels, strict=True):
        for line in (line for line in lines if line.panel == panel):
            colour = f"C{names.index(line.name)}"
            for curve in line.curves:
                axes.plot(*zip(*curve, strict=True), color=colour, alpha=0.15)
            flops, bits, errors = zip(*line.ends, strict=True)
            axes.errorbar(flops, bits, errors, color=colour, marker="o", capsize=3, label=line.name)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="FLOPs of training",
            ylabel="bits per byte",
            title=panel,
        )
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(FuncFormatter(lambda value, _: f"{value:.2g}"))
        # A panel may span less than a power of ten, where there would be no label: the runs' own lengths are labels.
        axes.set_xticks(
            sorted({end[0] for line in lines if line.panel == panel for end in line.ends})
        )
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(True, which="both", alpha=0.2)
        axes.legend(title="ends of runs; faded: the way there")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
