"""Plans a pretraining run: rows per pass, tokens per second, hours, memory and disk space."""

from dataclasses import dataclass

from nanochat import schedule
from nanochat.common import UserError, tr
from nanochat.planner.cards import Rates
from nanochat.planner.programs import program_of
from nanochat.planner.roofline import Step, step_of
from nanochat.planner.work import Program, Size
from nanochat.platforms.base import Chip
from nanochat.train import sizes
from nanochat.train.fit import disk

RATIO = 12.0  # training tokens per scaling parameter, as in base_train
# The tokens per step that the presets of speedrun.sh fix, by depth, and the numbers of cards for
# which they do.
PRESET_TOKENS = {12: 262_144}
PRESET_RANKS = (1, 2, 4, 8, 16)

# How far a prediction may be off, in percent. published.py compares the roofline with five runs;
# the rest is judgement.
OF_PUBLISHED = 15  # for cards and programs that somebody has timed
OF_COUNTED = 25  # for programs of this project that were counted in bytes but not timed
BETWEEN_SERVERS = 15  # in addition for several servers, since no such run was published


@dataclass(frozen=True)
class Plan:
    """The plan of a pretraining run; `step`, `mfu` and `hours` are None where they are unknown."""

    size: Size
    ranks: int
    rows_that_fit: int
    rows: int  # rows of a pass on one card
    passes: int
    tokens: float  # tokens of pretraining
    memory: float  # bytes of one card, at most
    disk: float  # bytes of a whole speedrun, at most
    step: Step | None
    mfu: float | None
    within: int  # percent by which the prediction may be off

    @property
    def hours(self) -> float | None:
        """The hours of pretraining, without evaluation and saving, or None if unknown."""
        if self.step is None:
            return None
        return self.tokens / self.step.tokens_per_second / 3600


def uncertainty(rates: Rates, ranks: int, measured: bool) -> int:
    """Return the percentage by which a prediction may be off, which is less for `measured` rates."""
    within = OF_PUBLISHED if measured else OF_COUNTED
    if ranks > rates.server:
        within += BETWEEN_SERVERS
    return within


def batch_of(size: Size, ranks: int, ratio: float = RATIO) -> int:
    """Return the number of tokens per step: speedrun.sh's preset, or else what training chooses.

    The run trains on `ratio` tokens per scaling parameter. Without a preset that the cards can
    share equally, the number is a multiple of one row on every card.
    """
    unit = size.shape.sequence_len * ranks
    preset = PRESET_TOKENS.get(size.shape.n_layer, 0)
    if ranks in PRESET_RANKS and preset and preset % unit == 0:
        return preset
    reference_tokens = RATIO * schedule.REFERENCE_SCALING_PARAMETERS
    tokens = schedule.batch_tokens(ratio * size.scaling, reference_tokens)
    return schedule.shared_tokens(tokens, unit)


def check_trains(chip: Chip) -> None:
    """Raise UserError if cards of this kind are for inference only."""
    if not chip.trains:
        raise UserError(
            tr(
                "{name} cards are for inference only: train elsewhere, then chat here",
                name=chip.name,
            )
        )


def plan_of(
    size: Size,
    chip: Chip,
    ranks: int,
    batch: int,
    rates: Rates | None,
    measured: bool = False,
    ratio: float = RATIO,
    program: Program | None = None,
) -> Plan:
    """Return the plan of a run on `ranks` cards with `batch` tokens per step.

    The run trains on `ratio` tokens per scaling parameter. `program` is the code that the cards
    run, if it is not their usual one. Without `rates`, the plan is based on memory alone.
    `measured` says whether the rates were measured on your own cards. Raises UserError if the cards
    cannot train, or (exit code 2) if they cannot share a step equally.
    """
    check_trains(chip)
    unit = size.shape.sequence_len * ranks
    if batch % unit or batch < unit:
        raise UserError(
            tr(
                "total_batch_size must be a multiple of {unit:,} ({ranks} card(s) x "
                "{sequence_len} tokens), got {batch:,}",
                unit=unit,
                ranks=ranks,
                sequence_len=size.shape.sequence_len,
                batch=batch,
            ),
            exit_code=2,
        )
    fitting_rows = sizes.rows_that_fit(chip.memory_gib * 2**30, size.shape, size.parameters)
    rows_of_card = batch // unit  # rows of a step
    rows = min(fitting_rows, rows_of_card)
    while rows_of_card % rows:
        rows -= 1
    passes = rows_of_card // rows
    tokens = ratio * size.scaling
    shards = min(ranks, rates.server) if rates else ranks
    step = None
    mfu = None
    if rates is not None:
        step = step_of(size, rows, passes, ranks, rates, program or program_of(chip.name))
        if chip.tflops:
            mfu = step.tokens_per_second * size.flops_per_token / (ranks * chip.tflops * 1e12)
    return Plan(
        size=size,
        ranks=ranks,
        rows_that_fit=fitting_rows,
        rows=rows,
        passes=passes,
        tokens=tokens,
        memory=sizes.memory_of(rows, size.shape, size.parameters, shards),
        disk=disk.of_speedrun(size.shape.n_layer, tokens, size.saved, size.shape.vocab_size),
        step=step,
        mfu=mfu,
        within=uncertainty(rates, ranks, measured) if rates else 0,
    )
