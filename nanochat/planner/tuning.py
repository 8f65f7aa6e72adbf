"""Checks whether fine-tuning fits a card, and if not, finds the nearest settings that do."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from nanochat.common import UserError, log, tr, warn
from nanochat.device import Compute
from nanochat.models.lora import LoraConfig
from nanochat.models.nf4 import BITS
from nanochat.models.qwen.model import Qwen
from nanochat.planner.forecast import Memory, Tuning, forecasts
from nanochat.platforms.base import Chip
from nanochat.runtime import parallel, progress
from nanochat.train.fit.memory import SHARE, reachable

SHORTEST = 256  # the fewest tokens per row that the search for a setting tries
# A step is not forecast, which takes seconds, if its rough upper bound is below this share of the
# memory.
SURE_SHARE = 0.5
# Bytes per token, layer and channel: twice those of the largest published family.
ROUGH_BYTES = 80
# Yields the memory of each step, in order, and computes the next one only when it is asked for.
Memories = Callable[[Sequence[Tuning]], Iterator[Memory]]


def flags_of(tuning: Tuning) -> str:
    """Return the settings that affect memory, as a string of flags for scripts.finetune."""
    flags = [f"--device_batch_size={tuning.rows}", f"--max_length={tuning.shape.sequence_len}"]
    if tuning.lora is None:
        flags.append("--lora_rank=0")
    elif tuning.lora.rank != LoraConfig.rank:
        flags.append(f"--lora_rank={tuning.lora.rank}")
    if tuning.base_bits == BITS:
        flags.append(f"--base_bits={BITS}")
    if tuning.offload_activations:
        flags.append("--offload_activations")
    elif tuning.checkpoint_activations:
        flags.append("--checkpoint_activations")
    if tuning.ranks > 1:
        flags.append(f"--shard={tuning.shard}")
    return " ".join(flags)


def announced_forecasts(tunings: Sequence[Tuning]) -> Iterator[Memory]:
    """Yield what forecasts() does, and say before each on standard error what is forecast.

    A forecast takes seconds.
    """
    memories = forecasts(tunings)
    for tuning in tunings:
        flags = flags_of(tuning)
        title = tr("forecasting the memory of {ranks} x {flags}", ranks=tuning.ranks, flags=flags)
        print(title, file=sys.stderr, flush=True)
        yield next(memories)


def announced_forecast(tuning: Tuning) -> Memory:
    """Return what announced_forecasts() yields for one step."""
    (memory,) = announced_forecasts([tuning])
    return memory


def remedies(tuning: Tuning) -> Iterator[Tuning]:
    """Yield settings that should take less and less memory, each with a further change.

    First come changes that only cost time: fewer rows per pass, then recomputing activations, then
    offloading them, then sharding the parameters. Changes that affect what is learned come last: a
    base in 4 bits below an adapter, then shorter rows, and finally an adapter instead of training
    every parameter, at first on the base as it is. Experts cannot be held in 4 bits.
    """
    fits_4_bits = not tuning.shape.has_experts
    while tuning.rows > 1:
        tuning = replace(tuning, rows=tuning.rows // 2, several_passes=True)
        yield tuning
    if not tuning.checkpoint_activations:
        tuning = replace(tuning, checkpoint_activations=True)
        yield tuning
    if not (tuning.offload_activations or tuning.on_host):
        tuning = replace(tuning, offload_activations=True)
        yield tuning
    if tuning.ranks > 1 and tuning.shard != "full":
        tuning = replace(tuning, shard="full")
        yield tuning
    if tuning.lora is not None and tuning.base_bits != BITS and fits_4_bits:
        tuning = replace(tuning, base_bits=BITS)
        yield tuning
    while tuning.shape.sequence_len >= 2 * SHORTEST:
        half = tuning.shape.sequence_len // 2
        tuning = replace(tuning, shape=replace(tuning.shape, sequence_len=half))
        yield tuning
    if tuning.lora is None:
        yield replace(tuning, lora=LoraConfig())
        if fits_4_bits:
            yield replace(tuning, lora=LoraConfig(), base_bits=BITS)


def nearest(
    tuning: Tuning,
    budget: float,
    memories_of: Memories = announced_forecasts,
) -> Tuning | None:
    """Return the first of remedies() whose peak fits into `budget` bytes, or None if none does."""
    settings = list(remedies(tuning))
    for remedy, memory in zip(settings, memories_of(settings), strict=True):
        if memory.peak <= budget:
            return remedy
    return None


def refusal(
    tuning: Tuning,
    memory: Memory,
    budget: float,
    memories_of: Memories = announced_forecasts,
) -> UserError:
    """Return the error for a step that does not fit, with the nearest settings that fit, if any."""
    remedy = nearest(tuning, budget, memories_of)
    if remedy is None:
        next_step = tr(
            "No setting of one row and {tokens} tokens fits: take a smaller model, or more cards "
            "with --shard=full.",
            tokens=SHORTEST,
        )
    else:
        next_step = tr("The nearest setting that fits: {flags}", flags=flags_of(remedy))
    return UserError(
        tr(
            "a step of fine-tuning would take {peak} of each card, and {budget} are there "
            "({flags}). {next_step}",
            peak=progress.memory(memory.peak),
            budget=progress.memory(budget),
            flags=flags_of(tuning),
            next_step=next_step,
        ),
        exit_code=2,
    )


def _surely_fits(tuning: Tuning, model: Qwen, budget: float) -> bool:
    """Return whether even a rough upper bound on a step's memory fits into half the budget.

    The bound is the sum of the state, the activations and one chunk of logits.
    """
    shape = tuning.shape
    trained = sum(parameter.numel() for _, parameter in parallel.trained(model))
    frozen = model.parameter_counts()["total"] - trained
    tokens = tuning.rows * shape.sequence_len
    width = max(shape.n_embd, shape.n_hidden / 2)
    state = 24 * trained + 4 * frozen
    activations = ROUGH_BYTES * tokens * shape.n_layer * width
    logits = 12 * 1024 * shape.vocab_size
    return state + activations + logits < SURE_SHARE * budget


def check_fits(
    tuning: Tuning,
    model: Qwen,
    compute: Compute,
    memories_of: Memories = announced_forecasts,
    always: bool = False,
) -> None:
    """Raise UserError (exit code 2) if a step is forecast to exceed the memory that a rank may use.

    The error names the nearest settings that fit, if any. Call this on every rank before any
    weights are loaded; the model may still be on meta. Without `always`, a step that surely fits is
    not forecast.
    """
    ranks_in_memory = parallel.ranks_in_memory(compute)
    # Other processes may use more of one card than of another.
    available = parallel.least(int(reachable(compute) / ranks_in_memory), compute)
    budget = SHARE * available
    if not always and _surely_fits(tuning, model, budget):
        return
    error: UserError | None = None
    if compute.main:  # forecasts are processes that take seconds, and are the same for every rank
        error = _forecast_error(tuning, budget, available, memories_of)
    if not parallel.agree(int(error is None), compute):
        raise error or UserError(
            tr("the step does not fit the memory; rank 0 says what would"), exit_code=2
        )


def _forecast_error(
    tuning: Tuning,
    budget: float,
    available: int,
    memories_of: Memories,
) -> UserError | None:
    """Return the error for a step that does not fit, or None; log the memory of one that fits.

    If the memory cannot be forecast, warn and return None.
    """
    try:
        (memory,) = memories_of([tuning])
    except UserError as failure:  # the step itself will show whether it fits
        warn(str(failure))
        return None
    if memory.peak > budget:
        return refusal(tuning, memory, budget, memories_of)
    peak = progress.memory(memory.peak)
    state = progress.memory(memory.state)
    log(
        tr(
            "memory: {peak} of each card's {memory} (forecast); weights, masters and "
            "moments are {state} of that",
            peak=peak,
            memory=progress.memory(available),
            state=state,
        )
    )
    return None


def print_forecast(tuning: Tuning, name: str, chip: Chip) -> None:
    """Print the flags of a fine-tuning step and, on standard error, its memory.

    Raises UserError (exit code 2) if the step does not fit the card.
    """
    memory = announced_forecast(tuning)
    capacity = chip.memory_gib * 2**30
    if memory.peak > SHARE * capacity:
        raise refusal(tuning, memory, SHARE * capacity)
    peak = progress.memory(memory.peak)
    state = progress.memory(memory.state)
    print(
        tr(
            "{chip} x {ranks}: a step of {model} takes {peak} of each card's {memory}; "
            "weights, masters and moments are {state} of that",
            chip=chip.name,
            ranks=tuning.ranks,
            model=name,
            peak=peak,
            memory=progress.memory(capacity),
            state=state,
        ),
        file=sys.stderr,
    )
    print(flags_of(tuning))
