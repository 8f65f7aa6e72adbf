"""Whether fine-tuning fits a card's memory, and the nearest setting that does."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from nanochat.common import UserError, log, tr, warn
from nanochat.device import Compute
from nanochat.models.lora import LoraConfig
from nanochat.models.qwen.model import Qwen
from nanochat.planner.forecast import Memory, Tuning, forecast
from nanochat.platforms.base import Chip
from nanochat.runtime import parallel
from nanochat.runtime.progress import amount
from nanochat.train.fit.memory import SHARE, reachable

SHORTEST = 256  # tokens of a row; the search for a setting that fits goes no lower
# A step whose rough upper bound stays below this share of the memory is not forecast, which takes seconds.
PLAIN = 0.5
ROUGH = (
    80  # bytes for each token, layer and channel, twice what the largest of the known models takes
)


def flags_of(tuning: Tuning) -> str:
    """The flags of scripts.finetune that say what a tuning says, as far as its memory depends on them."""
    flags = [f"--device_batch_size={tuning.rows}", f"--max_length={tuning.shape.sequence_len}"]
    if tuning.lora is None:
        flags.append("--lora_rank=0")
    elif tuning.lora.rank != LoraConfig.rank:
        flags.append(f"--lora_rank={tuning.lora.rank}")
    if tuning.offload_activations:
        flags.append("--offload_activations")
    elif tuning.checkpoint_activations:
        flags.append("--checkpoint_activations")
    if tuning.ranks > 1:
        flags.append(f"--shard={tuning.shard}")
    return " ".join(flags)


def remedies(tuning: Tuning) -> Iterator[Tuning]:
    """Settings that take less memory, each less than the one before; what changes the result of training comes last.

    Fewer rows in a pass and activations computed again only take time; then the ranks share the parameters; then rows
    are shorter, and at last an adapter is trained instead of every parameter.
    """
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
    while tuning.shape.sequence_len >= 2 * SHORTEST:
        tuning = replace(
            tuning, shape=replace(tuning.shape, sequence_len=tuning.shape.sequence_len // 2)
        )
        yield tuning
    if tuning.lora is None:
        yield replace(tuning, lora=LoraConfig())


def nearest(
    tuning: Tuning, budget: float, of: Callable[[Tuning], Memory] = forecast
) -> Tuning | None:
    """The first of the remedies that fits into `budget` bytes; None if none does."""
    return next((less for less in remedies(tuning) if of(less).peak <= budget), None)


def refusal(
    tuning: Tuning, memory: Memory, budget: float, of: Callable[[Tuning], Memory] = forecast
) -> UserError:
    """The error for a step that does not fit, with the nearest setting that does."""
    fits = nearest(tuning, budget, of)
    if fits is None:
        next_step = tr(
            "No setting of one row and {tokens} tokens fits: take a smaller model, or more cards with "
            "--shard=full.",
            tokens=SHORTEST,
        )
    else:
        next_step = tr("The nearest setting that fits: {flags}", flags=flags_of(fits))
    return UserError(
        tr(
            "a step of fine-tuning would take {peak} of each card, and {budget} are there ({flags}). {next_step}",
            peak=amount(memory.peak, "B"),
            budget=amount(budget, "B"),
            flags=flags_of(tuning),
            next_step=next_step,
        ),
        exit_code=2,
    )


def _surely_fits(tuning: Tuning, model: Qwen, budget: float) -> bool:
    """Whether a rough upper bound settles that a step fits: the state, the activations and the logits of a chunk."""
    c, tokens = tuning.shape, tuning.rows * tuning.shape.sequence_len
    trained = sum(parameter.numel() for _, parameter in parallel.trained(model))
    frozen = model.parameter_counts()["total"] - trained
    widest = max(c.n_embd, c.n_hidden / 2)
    bound = (
        24 * trained + 4 * frozen + ROUGH * tokens * c.n_layer * widest + 12 * 1024 * c.vocab_size
    )
    return bound < PLAIN * budget


def check_fits(
    tuning: Tuning, model: Qwen, compute: Compute, of: Callable[[Tuning], Memory] = forecast
) -> None:
    """UserError, before any weights are loaded, if a step would not fit the memory of a card; it names the nearest
    setting that does. Every rank must call this. The model may still be on meta."""
    shared = (
        parallel.ranks_per_host(compute) if compute.platform.is_host else 1
    )  # ranks in one memory
    there = parallel.least(
        int(reachable(compute) / shared), compute
    )  # other processes may hold more of one card
    budget = SHARE * there
    if _surely_fits(tuning, model, budget):
        return
    refused: UserError | None = None
    if compute.main:  # forecasts are processes that take seconds, and are the same for every rank
        refused = _refused(tuning, budget, there, of)
    if not parallel.agree(int(refused is None), compute):
        raise refused or UserError(
            "the step does not fit the memory; rank 0 says what would", exit_code=2
        )


def _refused(
    tuning: Tuning, budget: float, there: int, of: Callable[[Tuning], Memory]
) -> UserError | None:
    """The error for a step that does not fit, or None, having logged what the step takes."""
    try:
        memory = of(tuning)
    except UserError as failure:  # the step itself will tell whether it fits
        warn(str(failure))
        return None
    if memory.peak > budget:
        return refusal(tuning, memory, budget, of)
    log(
        f"memory: {amount(memory.peak, 'B')} of each card's {amount(there, 'B')} (forecast); weights, masters and "
        f"moments are {amount(memory.held, 'B')} of that"
    )
    return None


def print_forecast(tuning: Tuning, name: str, chip: Chip) -> None:
    """Print the flags of a step of fine-tuning, and on standard error what it takes. UserError if it does not fit."""
    memory, there = forecast(tuning), chip.memory_gib * 2**30
    if memory.peak > SHARE * there:
        raise refusal(tuning, memory, SHARE * there)
    words = (
        f"{chip.name} x {tuning.ranks}: a step of {name} takes {amount(memory.peak, 'B')} of each card's "
        f"{amount(there, 'B')}; weights, masters and moments are {amount(memory.held, 'B')} of that"
    )
    print(words, file=sys.stderr)
    print(flags_of(tuning))
