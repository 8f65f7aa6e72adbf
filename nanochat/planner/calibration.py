"""The speed of the reader's own cards: the file that `python check_npu.py --bench` writes, and the planner reads."""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from nanochat.common import UserError, base_dir, read_json, write_json
from nanochat.device import MEASURE
from nanochat.planner.cards import LINK, RATINGS, SHAPES, Rates, rates_of
from nanochat.platforms.base import Chip

FORMAT, VERSION = "nanochat card bench", 1
NAME = "card_bench.json"
NETWORK, SERVER = (
    25e9,
    8,
)  # of a card that no table knows: 200 Gbit/s to other servers, eight cards in one


@dataclass(frozen=True)
class Bench:
    """What was measured on one kind of card. Every speed is an average over seconds of work without a pause."""

    chip: str  # its name in the table of chips, or "SoC N"
    cards: int  # of this host
    number_format: str  # bfloat16 or float16
    matmul_tflops: float  # the best of several shapes of this project's models
    full_tflops: float  # the same in fp32
    attention_tflops: float  # causal, forward and backward
    vector_gb_per_s: float  # read and written by an element-wise operator
    launch_us: float  # of the host for one operator
    link_gb_per_s: float | None  # that a card sends in all_reduce; None with one card
    seconds: float  # how long each measurement ran, at least
    torch: str
    driver_package: str  # version of the vendor's package for torch
    toolkit: str  # version of the vendor's toolkit


def path_of() -> Path:
    """Where the file is: in the base folder."""
    return base_dir() / NAME


def save(bench: Bench, path: Path) -> None:
    """Write the file, atomically."""
    write_json(path, {"format": FORMAT, "version": VERSION, **asdict(bench)})


def _problem(held: Any) -> str:
    """What is wrong with the content of a file; "" if nothing is."""
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        return f'it is not a "{FORMAT}"'
    if held.get("version") != VERSION:
        return f"its version is {held.get('version')!r}, and this code reads version {VERSION}"
    for field in fields(Bench):
        if field.name not in held:
            return f"{field.name} is missing"
        value = held[field.name]
        if field.name == "link_gb_per_s" and value is None:
            continue
        if field.type is str:
            if not isinstance(value, str) or len(value) > 100 or not value.isprintable():
                return f"{field.name} must be a short text, got {str(value)[:40]!r}"
            continue
        number = isinstance(value, int if field.type is int else int | float) and not isinstance(
            value, bool
        )
        if not number or not math.isfinite(value) or value <= 0:
            return f"{field.name} must be a number above 0, got {str(value)[:40]!r}"
    return ""


def read(path: Path) -> Bench | None:
    """The measurements in a file; None if there is no file. UserError if it is not a whole file of this version."""
    if not path.exists():
        return None
    held = read_json(path)
    if problem := _problem(held):
        raise UserError(f"{path} cannot be used: {problem}. Delete it, or measure again: {MEASURE}")
    return Bench(**{field.name: held[field.name] for field in fields(Bench)})


def rates_from(bench: Bench) -> Rates:
    """The rates of the cards that were measured. The network is not measured: it is that of the data sheet."""
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


def rates_for(chip: Chip, bench: Bench | None) -> tuple[Rates | None, str]:
    """The speed of a kind of card and where it comes from: measured on this host's cards, or by the data sheet."""
    if bench is not None and bench.chip == chip.name:
        return rates_from(bench), f"measured on your cards, {NAME}"
    return rates_of(chip), "data sheet and shares that others have measured"
