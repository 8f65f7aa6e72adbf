"""Writes tables of plans and of published runs as Markdown."""

from collections.abc import Iterable, Sequence

from nanochat.common import tr
from nanochat.planner.cards import Rates, rates_of
from nanochat.planner.plan import BETWEEN_SERVERS, OF_COUNTED, OF_PUBLISHED, Plan, batch_of, plan_of
from nanochat.planner.published import FITTED, RUNS, spread
from nanochat.planner.work import size_of
from nanochat.platforms.base import Chip
from nanochat.train import sizes

DEPTHS = (12, 16, 20, 24, 32)
CARDS = (1, 8, 16, 32, 64, 128)
VOCABULARIES = (32_768, 65_536)


def plan_head() -> list[str]:
    """Return the head of the table of plans in the user's language."""
    return [
        tr("chip"),
        tr("cards"),
        tr("depth"),
        tr("rows of a pass"),
        tr("predicted tokens/s"),
        "MFU",
        tr("hours"),
        tr("GiB a card"),
        tr("GB of disk"),
    ]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with the header `head`."""
    ruler = ["---"] * len(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ruler, *rows))


def rounded(value: float) -> str:
    """Return a prediction as text: an integer with at most three significant digits.

    More digits would suggest too much precision.
    """
    excess = len(f"{value:.0f}") - 3
    if excess > 0:
        value = round(value, -excess)
    return f"{value:,.0f}"


def cells(plan: Plan, chip: Chip) -> list[str]:
    """Return the cells that follow the depth in a plan's row of the table; see of_plans()."""
    memory = f"{plan.memory / 2**30:.0f}"
    disk = f"{plan.disk / 1e9:,.0f}"
    unknown = ["-", "-", "-"]
    if plan.memory > chip.memory_gib * 2**30:
        return [tr("does not fit"), *unknown, memory, disk]
    if plan.step is None or plan.hours is None:
        return [str(plan.rows), *unknown, memory, disk]
    speed = f"{rounded(plan.step.tokens_per_second)} ± {plan.within} %"
    mfu = "-" if plan.mfu is None else f"{100 * plan.mfu:.0f} %"
    return [str(plan.rows), speed, mfu, f"{plan.hours:,.1f}", memory, disk]


def of_plans(
    chips: Iterable[Chip],
    cards: Iterable[int],
    depths: Iterable[int],
    vocab_size: int,
    measured: dict[str, Rates],
) -> str:
    """Return a table of plans for every chip, number of cards and depth.

    `measured` gives the measured rates of chips, by name; the other rates come from data sheets.
    """
    rows = []
    for chip in chips:
        rates = measured.get(chip.name) or rates_of(chip)
        is_measured = chip.name in measured
        for ranks in cards:
            for depth in depths:
                size = size_of(depth, vocab_size)
                batch = batch_of(size, ranks)
                plan = plan_of(size, chip, ranks, batch, rates, is_measured)
                rows.append([chip.name, str(ranks), f"d{depth}", *cells(plan, chip)])
    return markdown(plan_head(), rows)


def of_rows(
    chips: Iterable[Chip],
    depths: Iterable[int],
    vocabularies: Sequence[int],
) -> str:
    """Return a table of the rows per pass that fit each chip, by depth and vocabulary."""
    depths = tuple(depths)
    rows = []
    for chip in chips:
        row = [chip.name, f"{chip.memory_gib:g}"]
        for depth in depths:
            fitting_rows = []
            for vocab_size in vocabularies:
                size = size_of(depth, vocab_size)
                memory = chip.memory_gib * 2**30
                count = sizes.rows_that_fit(memory, size.shape, size.parameters)
                fitting_rows.append(str(count))
            row.append(" / ".join(fitting_rows))
        rows.append(row)
    return markdown([tr("chip"), "GiB", *(f"d{depth}" for depth in depths)], rows)


def of_published() -> str:
    """Return a table of published runs and the roofline's predictions, and a note on the errors."""
    rows = []
    for run in RUNS:
        predicted = run.predicted()
        row = [run.who, f"d{run.depth}", f"{run.ranks} x {run.card}"]
        for tokens_per_second in (run.tokens_per_second, predicted):
            row.append(rounded(tokens_per_second))
            row.append(f"{100 * run.mfu(tokens_per_second):.1f} %")
        row.append(f"{100 * run.off:+.1f} %")
        rows.append(row)
    table = markdown(
        [
            tr("who"),
            tr("depth"),
            tr("cards"),
            tr("published tokens/s"),
            "MFU",
            tr("predicted tokens/s"),
            "MFU",
            tr("off"),
        ],
        rows,
    )
    fitted = f"{len(FITTED)} constant was" if len(FITTED) == 1 else f"{len(FITTED)} constants were"
    return (
        f"{table}\n\n{fitted} fitted to these {len(RUNS)} runs; the root mean square of the errors "
        f"is {100 * spread():.0f} %.\nBy judgement, predictions name ± {OF_PUBLISHED} % for cards "
        f"that were measured, ± {OF_COUNTED} % for others, and {BETWEEN_SERVERS} % more between "
        "servers."
    )
