"""What a run of a depth on some cards takes: rows of a pass, tokens a second, hours, memory, disk."""

from dataclasses import dataclass

from nanochat import schedule
from nanochat.common import UserError
from nanochat.planner.cards import Rates
from nanochat.planner.programs import program_of
from nanochat.planner.roofline import Step, step_of
from nanochat.planner.work import Size
from nanochat.platforms.base import Chip
from nanochat.train import sizes
from nanochat.train.fit import disk

RATIO = 12.0  # tokens for each scaling parameter, as base_train has it
# Tokens of a step that a preset of speedrun.sh fixes, by depth, and the numbers of cards it takes.
PRESET_TOKENS, PRESET_RANKS = {12: 262_144}, (1, 2, 4, 8, 16)

# How far a prediction may be off, in percent. published.py compares the roofline with five runs; the rest is judgement.
OF_PUBLISHED = 15  # cards and programs that somebody has timed
OF_COUNTED = (
    25  # programs of this project, whose bytes were counted and whose kernels nobody has timed
)
BETWEEN_SERVERS = 15  # more, as no run on several servers was published


@dataclass(frozen=True)
class Plan:
    """One run. What depends on speed is None where no speed is known."""

    size: Size
    ranks: int
    rows_that_fit: int
    rows: int  # of a pass on one card
    passes: int
    tokens: float  # of pretraining
    memory: float  # bytes of one card, at most
    disk: float  # bytes of a whole speedrun, at most
    step: Step | None
    mfu: float | None
    within: int  # percent

    @property
    def hours(self) -> float | None:
        """Hours of pretraining, without evaluation and saving."""
        return None if self.step is None else self.tokens / self.step.tokens_per_second / 3600


def uncertainty(rates: Rates, ranks: int, measured: bool) -> int:
    """Percent by which a prediction may be off."""
    within = OF_PUBLISHED if measured else OF_COUNTED
    return within + (BETWEEN_SERVERS if ranks > rates.server else 0)


def batch_of(size: Size, ranks: int) -> int:
    """Tokens of a step: what the preset of a speedrun fixes, else what training would choose.

    The number is a multiple of one row on every card.
    """
    if ranks in PRESET_RANKS and (fixed := PRESET_TOKENS.get(size.shape.n_layer)):
        return fixed
    unit = size.shape.sequence_len * ranks
    tokens = schedule.batch_tokens(
        RATIO * size.scaling, RATIO * schedule.REFERENCE_SCALING_PARAMETERS
    )
    return max(round(tokens / unit), 1) * unit


def check_trains(chip: Chip) -> None:
    """Raise UserError if a kind of card cannot train."""
    if not chip.trains:
        raise UserError(
            f"{chip.name} cards are for inference only: train elsewhere, then chat here"
        )


def plan_of(
    size: Size, chip: Chip, ranks: int, batch: int, rates: Rates | None, measured: bool = False
) -> Plan:
    """Plan a run on `ranks` cards with `batch` tokens a step. UserError if the cards cannot train or share the step.

    Without `rates` the plan is by memory alone. `measured`: the rates come from the reader's own cards.
    """
    check_trains(chip)
    unit = size.shape.sequence_len * ranks
    if batch % unit or batch < unit:
        raise UserError(
            f"total_batch_size must be a multiple of {unit:,} ({ranks} card(s) x {size.shape.sequence_len} tokens), "
            f"got {batch:,}",
            exit_code=2,
        )
    fit = sizes.rows_that_fit(chip.memory_gib * 2**30, size.shape, size.parameters)
    rows = min(fit, batch // unit)
    while batch // unit % rows:
        rows -= 1
    passes, tokens = batch // unit // rows, RATIO * size.scaling
    shards = min(ranks, rates.server) if rates else ranks
    step = mfu = None
    if rates is not None:
        step = step_of(size, rows, passes, ranks, rates, program_of(chip.name))
        if chip.tflops:
            mfu = step.tokens_per_second * size.flops_per_token / (ranks * chip.tflops * 1e12)
    return Plan(
        size,
        ranks,
        fit,
        rows,
        passes,
        tokens,
        memory=sizes.memory_of(rows, size.shape, size.parameters, shards),
        disk=disk.of_speedrun(size.shape.n_layer, tokens, size.saved, size.shape.vocab_size),
        step=step,
        mfu=mfu,
        within=uncertainty(rates, ranks, measured) if rates else 0,
    )
