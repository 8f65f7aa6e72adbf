"""Draws the finished rungs of the ladder: bits per byte against FLOPs, ours beside the baseline's.

python -m dev.ladder_picture    # writes docs/pictures/ladder.png and ladder-dark.png
"""

import math
import sys
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from statistics import fmean, stdev
from typing import Any

from bench.multiplier.curves import t95
from bench.multiplier.ladder import (
    RUNGS,
    Record,
    Rung,
    RungFigures,
    current,
    figures,
    in_words,
    read_records,
    whole_seeds,
)
from dev.pictures import THEMES, Theme, picture, plain

COLOURS = {3: "base", 4: "mid", 6: "sft"}  # depth -> the stage whose colour it takes
PANEL = (4.6, 3.4)  # inches
CAP = 3  # points, of the ends of an interval


def spread(values: Sequence[float]) -> float:
    """Return half the width of Student's interval of 95 % for the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    return t95(len(values)) * stdev(values) / math.sqrt(len(values))


def draw_rung(
    axes: Any, rung: Rung, result: RungFigures, seeds: Sequence[Sequence[Record]], theme: Theme
) -> None:
    """Draw the baseline's curve with its band, our runs, and the distance between them.

    Each of `seeds` is our run, then the baseline's runs from short to long.
    """
    colour = theme.stages[COLOURS[rung.depth]]
    runs = list(zip(*seeds, strict=True))  # our runs of all seeds, then the baseline's by length
    flops = [of_length[0].flops for of_length in runs]
    means = [fmean(run.bits_per_byte for run in of_length) for of_length in runs]
    widths = [spread([run.bits_per_byte for run in of_length]) for of_length in runs]

    axes.plot(flops[1:], means[1:], color=colour, linewidth=1.4)
    low = [mean - width for mean, width in zip(means, widths, strict=True)]
    high = [mean + width for mean, width in zip(means, widths, strict=True)]
    axes.fill_between(flops[1:], low[1:], high[1:], color=colour, alpha=0.18, linewidth=0)
    axes.errorbar(flops[:1], means[:1], widths[:1], color=colour, marker="o", capsize=CAP)
    if result.flops is not None:
        reached = [flops[0], flops[0] * result.flops.mean]
        axes.plot(reached, [means[0]] * 2, color=theme.soft, linewidth=1, linestyle=":")
    axes.annotate(
        f"d{rung.depth}: {in_words(result.flops)}",
        (flops[0], low[0]),
        (0, -12),
        textcoords="offset points",
        color=colour,
        fontsize=8.5,
    )


def draw(records: Sequence[Record], theme: Theme) -> Any:
    """Return a figure with one panel for each text that has a finished rung."""
    from matplotlib.figure import Figure

    rungs = {(rung.text, rung.depth): rung for rung in RUNGS}
    counted = current(records)
    by_text = [
        (text, list(of_text)) for text, of_text in groupby(figures(records), attrgetter("text"))
    ]
    width, height = PANEL
    figure = Figure((width * len(by_text), height), layout="constrained", facecolor=theme.page)
    for axes, (text, results) in zip(
        figure.subplots(1, len(by_text), squeeze=False)[0], by_text, strict=True
    ):
        for result in results:
            rung = rungs[text, result.depth]
            draw_rung(axes, rung, result, whole_seeds(rung, counted), theme)
        plain(axes, theme, f"{text}: bits per byte of rows held out")
        axes.set_xscale("log")  # which also takes back plain()'s whole numbers
        axes.tick_params(which="minor", colors=theme.soft, labelsize=8, length=0)
        axes.set_xlabel("FLOPs; lines: baseline, dots: ours")
        axes.margins(x=0.12, y=0.15)
    return figure


def main() -> None:
    """Draw the ladder for light pages and for dark ones."""
    records = read_records()
    if not figures(records):
        sys.exit("no rung has a whole seed yet: python -m bench.multiplier --ladder --upstream DIR")
    for theme in THEMES:
        picture(f"ladder{theme.suffix}", draw(records, theme))


if __name__ == "__main__":
    main()
