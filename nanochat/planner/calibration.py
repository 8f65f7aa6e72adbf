"""Reads and writes the measured speed of your own cards, from `python check_npu.py --bench`."""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from nanochat.common import UserError, base_dir, read_json, tr, write_json
from nanochat.device import MEASURE
from nanochat.planner.cards import LINK, RATINGS, SHAPES, Rates, rates_of
from nanochat.platforms.base import Chip

FORMAT = "nanochat card bench"
VERSION = 1
NAME = "card_bench.json"
# Assumed for a card that is in no table: 200 Gbit/s to other servers, eight cards in a server.
NETWORK = 25e9
SERVER = 8


@dataclass(frozen=True)
class Bench:
    """Measurements of one kind of card.

    Every speed is an average over at least `seconds` of continuous work. The names of the fields
    are the keys in the file.
    """

    chip: str  # its name in the table of chips, or "SoC N"
    cards: int  # number of cards of this host
    number_format: str  # bfloat16 or float16
    matmul_tflops: float  # the best over several shapes of this project's models
    full_tflops: float  # the same in fp32
    attention_tflops: float  # causal, forward and backward
    vector_gb_per_s: float  # read and written by an element-wise operator
    launch_us: float  # time that the host takes to launch one operator
    link_gb_per_s: float | None  # sent by each card in all_reduce; None with one card
    seconds: float  # how long each measurement ran, at least
    torch: str
    driver_package: str  # version of the vendor's package for torch
    toolkit: str  # version of the vendor's toolkit


def path_of() -> Path:
    """Return the path of the measurements file, which is in the base folder."""
    return base_dir() / NAME


def save(bench: Bench, path: Path) -> None:
    """Write the measurements to a file atomically."""
    write_json(path, {"format": FORMAT, "version": VERSION, **asdict(bench)})


def _problem(content: Any) -> str:
    """Return a description of the first problem in a file's content, or "" if there is none."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return f'it is not a "{FORMAT}"'
    if content.get("version") != VERSION:
        return f"its version is {content.get('version')!r}, and this code reads version {VERSION}"
    for field in fields(Bench):
        if field.name not in content:
            return f"{field.name} is missing"
        value = content[field.name]
        if field.name == "link_gb_per_s" and value is None:
            continue
        if field.type is str and not _is_short_text(value):
            return f"{field.name} must be a short text, got {str(value)[:40]!r}"
        if field.type is not str and not _is_positive(value, field.type is int):
            return f"{field.name} must be a number above 0, got {str(value)[:40]!r}"
    return ""


def _is_short_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 100 and value.isprintable()


def _is_positive(value: Any, integer: bool) -> bool:
    types = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, types):
        return False
    return math.isfinite(value) and value > 0


def read(path: Path) -> Bench | None:
    """Return the measurements in a file, or None if there is no file.

    Raises UserError if the file is incomplete, invalid or of another version.
    """
    if not path.exists():
        return None
    content = read_json(path)
    problem = _problem(content)
    if problem:
        raise UserError(
            tr(
                "{path} cannot be used: {problem}. Delete it, or measure again: {measure}",
                path=path,
                problem=problem,
                measure=MEASURE,
            )
        )
    return Bench(**{field.name: content[field.name] for field in fields(Bench)})


def rates_from(bench: Bench) -> Rates:
    """Return the rates of the measured cards.

    Rates that are not measured, such as that of the network, come from the data sheet or, for
    unknown cards, from assumptions.
    """
    rating = RATINGS.get(bench.chip)
    network = LINK * (rating.network if rating else NETWORK)
    return Rates(
        matmul=SHAPES * 1e12 * bench.matmul_tflops,
        full=SHAPES * 1e12 * bench.full_tflops,
        attention=1e12 * bench.attention_tflops,
        vector=1e9 * bench.vector_gb_per_s,
        link=1e9 * bench.link_gb_per_s if bench.link_gb_per_s else network,
        network=network,
        launch=1e-6 * bench.launch_us,
        server=rating.server if rating else max(bench.cards, SERVER),
    )


def is_measured(chip: Chip, bench: Bench | None) -> bool:
    """Return whether `bench` has the speed of this kind of card."""
    return bench is not None and bench.chip == chip.name


def rates_for(chip: Chip, bench: Bench | None) -> tuple[Rates | None, str]:
    """Return the rates of a kind of card, or None if unknown, and a phrase that names their source.

    The rates are measured if `bench` is of the same kind of card, and otherwise follow from the
    data sheet.
    """
    if bench is not None and bench.chip == chip.name:
        return rates_from(bench), tr("measured on your cards, {file}", file=NAME)
    return rates_of(chip), tr("data sheet and shares that others have measured")
