"""Markdown tables of plans, for people."""

from collections.abc import Iterable, Sequence

from nanochat.planner.cards import Rates, rates_of
from nanochat.planner.plan import BETWEEN_SERVERS, OF_COUNTED, OF_PUBLISHED, Plan, batch_of, plan_of
from nanochat.planner.published import FITTED, RUNS, spread
from nanochat.planner.work import size_of
from nanochat.platforms.base import Chip
from nanochat.train import sizes

DEPTHS = (12, 16, 20, 24, 32)
CARDS = (1, 8, 16, 32, 64, 128)
VOCABULARIES = (32_768, 65_536)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def rounded(value: float) -> str:
    """A prediction in three digits at most: more would say more than is known."""
    digits = len(f"{value:.0f}") - 3
    return f"{round(value, -digits) if digits > 0 else value:,.0f}"


def cells(plan: Plan, chip: Chip) -> list[str]:
    """What a row of the table of plans says of one run."""
    if plan.memory > chip.memory_gib * 2**30:
        return ["does not fit", *["-"] * 3, f"{plan.memory / 2**30:.0f}", f"{plan.disk / 1e9:,.0f}"]
    speed = ["-", "-", "-"]
    if plan.step is not None and plan.hours is not None:
        mfu = "-" if plan.mfu is None else f"{100 * plan.mfu:.0f} %"
        speed = [
            f"{rounded(plan.step.tokens_per_second)} ± {plan.within} %",
            mfu,
            f"{plan.hours:,.1f}",
        ]
    return [str(plan.rows), *speed, f"{plan.memory / 2**30:.0f}", f"{plan.disk / 1e9:,.0f}"]


def of_plans(
    chips: Iterable[Chip],
    cards: Iterable[int],
    depths: Iterable[int],
    vocab_size: int,
    measured: dict[str, Rates],
) -> str:
    """Every run of some depths on some cards. `measured` has the rates of chips that were measured, by name."""
    rows = []
    for chip in chips:
        rates = measured.get(chip.name) or rates_of(chip)
        for ranks in cards:
            for depth in depths:
                size = size_of(depth, vocab_size)
                plan = plan_of(
                    size, chip, ranks, batch_of(size, ranks), rates, chip.name in measured
                )
                rows.append([chip.name, str(ranks), f"d{depth}", *cells(plan, chip)])
    return markdown(
        [
            "chip",
            "cards",
            "depth",
            "rows",
            "predicted tokens/s",
            "MFU",
            "hours",
            "GiB a card",
            "GB of disk",
        ],
        rows,
    )


def of_rows(chips: Iterable[Chip], depths: Iterable[int], vocabularies: Sequence[int]) -> str:
    """For each chip: how many rows of a pass its memory holds, for each vocabulary."""
    depths, rows = tuple(depths), []
    for chip in chips:
        found = []
        for depth in depths:
            models = (size_of(depth, vocab_size) for vocab_size in vocabularies)
            fit = (
                sizes.rows_that_fit(chip.memory_gib * 2**30, size.shape, size.parameters)
                for size in models
            )
            found.append(" / ".join(map(str, fit)))
        rows.append([chip.name, f"{chip.memory_gib:g}", *found])
    return markdown(["chip", "GiB", *(f"d{depth}" for depth in depths)], rows)


def of_published() -> str:
    """What the roofline says of the runs that others have published."""
    rows = [
        [
            run.who,
            f"d{run.depth}",
            f"{run.ranks} x {run.card}",
            rounded(run.tokens_per_second),
            f"{100 * run.mfu(run.tokens_per_second):.1f} %",
            rounded(run.predicted()),
            f"{100 * run.mfu(run.predicted()):.1f} %",
            f"{100 * run.off:+.1f} %",
        ]
        for run in RUNS
    ]
    table = markdown(
        ["who", "depth", "cards", "published tokens/s", "MFU", "predicted tokens/s", "MFU", "off"],
        rows,
    )
    fitted = f"{len(FITTED)} constant was" if len(FITTED) == 1 else f"{len(FITTED)} constants were"
    return (
        f"{table}\n\n{fitted} fitted to these {len(RUNS)} runs; the root mean square of the errors is "
        f"{100 * spread():.0f} %.\nBy judgement, predictions name ± {OF_PUBLISHED} % for cards that were measured, "
        f"± {OF_COUNTED} % for others, and {BETWEEN_SERVERS} % more between servers."
    )
