"""Prints which published models can be fine-tuned on how many cards: flags, memory and time.

A forecast of memory takes seconds, and the table may need 210 of them. The forecasts of the default
table are in recipes.json beside this file, which `python -m nanochat.planner --write_recipes`
writes. For other models and settings, the command forecasts the memory while you wait.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nanochat.common import read_json, tr, write_json
from nanochat.models.lora import LoraConfig
from nanochat.models.nf4 import BITS
from nanochat.models.qwen.config import QwenConfig
from nanochat.planner.cards import Rates
from nanochat.planner.forecast import Memory, Tuning, forecasts
from nanochat.planner.plan import check_trains
from nanochat.planner.tables import markdown
from nanochat.planner.tuning import announced_forecast, flags_of
from nanochat.planner.tuning_speed import program_for, rows_of_step, step_of, with_fitting_rows
from nanochat.platforms.base import Chip
from nanochat.runtime.progress import Progress
from nanochat.train.fit.memory import SHARE

PATH = Path(__file__).with_name("recipes.json")
CARDS = (1, 2, 4, 8)
SMALL_GIB = (16, 32)  # memory of the cards in the table for a base in 4 bits
TOKENS = 10_000_000
CONVERSATION = 500  # tokens that a conversation is assumed to have in the notes of the table
# A run may take this many times the predicted hours; published_tuning.py has the runs of others.
LEAST = 0.9
MOST = 1.7
QWEN3: dict[str, Any] = {"vocab_size": 151_936, "head_dim": 128, "n_kv_head": 8, "tied": 0}
MODELS: Mapping[str, QwenConfig] = {
    "Qwen3-0.6B": QwenConfig(
        n_layer=28, n_embd=1024, n_head=16, n_hidden=3072, **{**QWEN3, "tied": 1}
    ),
    "Qwen3-4B": QwenConfig(
        n_layer=36, n_embd=2560, n_head=32, n_hidden=9728, **{**QWEN3, "tied": 1}
    ),
    "Qwen2.5-7B": QwenConfig(
        n_layer=28,
        n_embd=3584,
        n_head=28,
        n_kv_head=4,
        n_hidden=18_944,
        vocab_size=152_064,
        tied=0,
        qkv_bias=1,
        qk_norm=0,
    ),
    "Qwen3-14B": QwenConfig(n_layer=40, n_embd=5120, n_head=40, n_hidden=17_408, **QWEN3),
    "Qwen3-32B": QwenConfig(n_layer=64, n_embd=5120, n_head=64, n_hidden=25_600, **QWEN3),
}


def head() -> list[str]:
    """Return the head of the table in the user's language."""
    return [
        tr("model"),
        tr("cards"),
        tr("LoRA: flags"),
        tr("GiB a card"),
        tr("time"),
        tr("time with DPO"),
        tr("all parameters: flags"),
        tr("GiB a card"),
        tr("time"),
    ]


def settings(
    shape: QwenConfig, lora: LoraConfig | None, ranks: int, bits: int = 16
) -> Iterator[Tuning]:
    """Yield the settings to try for a model, in order: none, recomputing, then a sharded model.

    All train whole rows, one in a pass, and learn the same. `bits` are those of a base below an
    adapter.
    """
    first = Tuning(shape, lora, several_passes=True, ranks=ranks, base_bits=bits)
    recomputing = replace(first, checkpoint_activations=True)
    unsharded = (first, recomputing, replace(recomputing, offload_activations=True))
    yield from unsharded
    if ranks > 1:
        for tuning in unsharded:
            yield replace(tuning, shard="full")


def short_flags(tuning: Tuning) -> str:
    """Return the flags that fine-tuning needs beyond its defaults, which may be none."""
    flags = []
    if tuning.base_bits == BITS:
        flags.append(f"--base_bits={BITS}")
    if tuning.offload_activations:
        flags.append("--offload_activations")
    elif tuning.checkpoint_activations:
        flags.append("--checkpoint_activations")
    if tuning.ranks > 1 and tuning.shard != "grad":
        flags.append(f"--shard={tuning.shard}")
    return " ".join(flags)


# --- the memory of the default table -------------------------------------------------------------


def assumptions() -> dict[str, Any]:
    """Return what the numbers of recipes.json depend on: shapes and settings."""
    return {
        "shapes": {name: _changed(shape) for name, shape in MODELS.items()},
        "adapter": {**asdict(LoraConfig()), "targets": list(LoraConfig.targets)},
        "rows": Tuning(QwenConfig(), None).rows,
        "dtype": Tuning(QwenConfig(), None).dtype,
    }


def _changed(shape: QwenConfig) -> dict[str, Any]:
    """Return the fields of a shape that differ from their defaults, so that new fields may come."""
    defaults = asdict(QwenConfig())
    return {name: value for name, value in asdict(shape).items() if value != defaults[name]}


def key_of(name: str, tuning: Tuning) -> str:
    """Return the name of a forecast in recipes.json."""
    return f"{tuning.ranks} x {name} {flags_of(tuning)}"


def default_tunings() -> dict[str, Tuning]:
    """Return the settings of all forecasts that the default table may need, by their keys."""
    tunings = {}
    for name, shape in MODELS.items():
        choices = list(settings(shape, LoraConfig(), 1, BITS))
        for lora in (LoraConfig(), None):
            for ranks in CARDS:
                choices += settings(shape, lora, ranks)
        tunings |= {key_of(name, tuning): tuning for tuning in choices}
    return tunings


def write(path: Path) -> None:
    """Forecast the memory of the default table, which takes minutes, and write it to a file."""
    tunings = default_tunings()
    memories = {}
    with Progress(tr("forecasting"), len(tunings), tr("settings")) as progress:
        for key, memory in zip(tunings, forecasts(list(tunings.values())), strict=True):
            memories[key] = asdict(memory)
            progress.advance(1)
    write_json(path, {**assumptions(), "bytes": memories})


def read(path: Path = PATH) -> dict[str, Memory]:
    """Return the forecasts of a file by key, or {} if the file is for other shapes or settings."""
    content = read_json(path)
    memories = content.pop("bytes")
    if content != assumptions():
        return {}
    return {key: Memory(**memory) for key, memory in memories.items()}


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """The first settings that fit, their memory for one row, and the hours of a run if known."""

    tuning: Tuning
    memory: Memory
    hours: float | None
    preference_hours: float | None


class Planner:
    """Finds recipes for one kind of card."""

    def __init__(
        self,
        chip: Chip,
        rates: Rates | None,
        tokens: int,
        memory_of: Callable[[str, Tuning], Memory],
        memory_gib: float | None = None,  # memory of an equally fast card; None: the chip's
    ):
        self.chip = chip
        self.rates = rates
        self.tokens = tokens
        self.memory_of = memory_of
        self.budget = SHARE * (memory_gib or chip.memory_gib) * 2**30

    def recipe(
        self,
        name: str,
        shape: QwenConfig,
        lora: LoraConfig | None,
        ranks: int,
        bits: int = 16,
    ) -> Recipe | None:
        """Return the recipe of the first settings that fit, or None if none fit."""
        for tuning in settings(shape, lora, ranks, bits):
            if self.rates is not None:
                tuning = tuning.on_servers_of(self.rates.server)
            memory = self.memory_of(name, tuning)
            if memory.peak <= self.budget:
                return Recipe(tuning, memory, *self.hours(tuning, memory))
        return None

    def hours(self, tuning: Tuning, memory: Memory) -> tuple[float | None, float | None]:
        """Return the hours for conversations and for preferences, or two None if unknown."""
        if self.rates is None:
            return None, None
        tuning = with_fitting_rows(tuning, memory, self.budget)
        program = program_for(tuning, self.chip.name)
        step = step_of(tuning, rows_of_step(tuning.ranks), self.rates, program)
        return step.hours(self.tokens), step.hours(self.tokens, preferences=True)


def rounded(hours: float | None) -> str:
    """Return a time with two significant digits, in minutes or hours, or "-" if it is unknown."""
    if hours is None:
        return "-"
    if hours < 1:
        return tr("{minutes} min", minutes=f"{60 * hours:.2g}")
    return tr("{hours} h", hours=f"{hours:.2g}" if hours < 99.5 else f"{hours:,.0f}")


def cells(recipe: Recipe | None, nearest: str) -> list[str]:
    """Return the cells of a recipe: flags, GiB, and time without and with preferences."""
    if recipe is None:
        return [tr("does not fit; {nearest}", nearest=nearest), "-", "-", "-"]
    flags = short_flags(recipe.tuning)
    code = f"`{flags}`" if flags else tr("none")
    gib = f"{recipe.memory.peak / 2**30:.1f}"
    return [code, gib, rounded(recipe.hours), rounded(recipe.preference_hours)]


def of_model(
    planner: Planner,
    name: str,
    shape: QwenConfig,
    lora: LoraConfig,
    cards: Sequence[int],
) -> Iterator[list[str]]:
    """Yield the rows of a model, one for each number of cards."""
    adapters = [planner.recipe(name, shape, lora, ranks) for ranks in cards]
    in_full = [planner.recipe(name, shape, None, ranks) for ranks in cards]
    larger = least_cards(adapters)
    adapter_hint = tr("{ranks} cards do", ranks=larger) if larger else tr("nor do more here")
    full_hint = adapter_hint
    if larger:
        full_hint = tr("LoRA does, on {ranks} or more", ranks=larger)
    if least_cards(in_full):
        full_hint = tr("{ranks} cards do", ranks=least_cards(in_full))
    for ranks, adapter, full in zip(cards, adapters, in_full, strict=True):
        *full_cells, _ = cells(full, full_hint)
        yield [name, str(ranks), *cells(adapter, adapter_hint), *full_cells]


def least_cards(recipes: Sequence[Recipe | None]) -> int | None:
    """Return the smallest number of cards for which there is a recipe, or None."""
    return min((recipe.tuning.ranks for recipe in recipes if recipe), default=None)


def memories() -> Callable[[str, Tuning], Memory]:
    """Return a function that gives the memory of a model's settings.

    Memory that recipes.json does not have is forecast now.
    """
    shipped = read()

    def memory_of(name: str, tuning: Tuning) -> Memory:
        key = key_of(name, tuning)
        if key in shipped and MODELS.get(name) == tuning.shape:
            return shipped[key]
        return announced_forecast(tuning)

    return memory_of


def table(
    chip: Chip,
    rates: Rates | None,
    source: str,
    tokens: int,
    models: Mapping[str, QwenConfig],
    lora: LoraConfig,
    cards: Sequence[int],
) -> str:
    """Return the table for one kind of card, with notes, in Markdown.

    `rates` are the card's, or None if they are unknown, and `source` says where they come from.
    Raises UserError if the card cannot train.
    """
    check_trains(chip)
    planner = Planner(chip, rates, tokens, memories())
    rows = []
    for name, shape in models.items():
        rows += of_model(planner, name, shape, lora, cards)
    first = tr(
        "{chip} of {memory:.0f} GiB. Add --loss=dpo for preferences, and --lora_rank=0 to "
        "train all parameters.",
        chip=chip.name,
        memory=chip.memory_gib,
    )
    return _with_notes(markdown(head(), rows), first, models, tokens, source)


def table_in_4_bits(
    chip: Chip,
    rates: Rates | None,
    source: str,
    tokens: int,
    models: Mapping[str, QwenConfig],
    lora: LoraConfig,
) -> str:
    """Return the table of adapters on bases in 4 bits, on one card of 16 and of 32 GiB.

    The times are those of the card of table(), as if it had as much memory. Raises UserError if
    that card cannot train.
    """
    check_trains(chip)
    memory_of = memories()
    rows = []
    for name, shape in models.items():
        for gib in SMALL_GIB:
            planner = Planner(chip, rates, tokens, memory_of, gib)
            recipe = planner.recipe(name, shape, lora, 1, BITS)
            row = cells(recipe, "") if recipe else [tr("does not fit"), "-", "-", "-"]
            rows.append([name, f"{gib} GiB", *row])
    columns = [tr("model"), tr("memory of the card"), *head()[2:6]]
    first = tr(
        "One card as fast as a {chip}, with the base in 4 bits. Add --loss=dpo for preferences.",
        chip=chip.name,
    )
    return _with_notes(markdown(columns, rows), first, models, tokens, source)


def _with_notes(
    rows: str, first: str, models: Mapping[str, QwenConfig], tokens: int, source: str
) -> str:
    """Return a table with a first note of its own, and those on its forecasts of memory and time."""
    notes = (
        first,
        tr(
            "GiB a card: forecast for passes of one row of {length:,} tokens. "
            "A run takes as many rows in a pass as fit.",
            length=next(iter(models.values())).sequence_len,
        ),
        tr(
            "Time: predicted for {tokens:,} tokens, such as one epoch of {conversations:,.0f} "
            "conversations of {length} tokens, or of {pairs:,.0f} pairs of such answers with DPO.",
            tokens=tokens,
            conversations=tokens / CONVERSATION,
            pairs=tokens / CONVERSATION / 2,
            length=CONVERSATION,
        ),
        tr(
            "A run may take {least} to {most} times as long, and what comes before the first step, "
            "validation and saving are extra. Rates: {source}.",
            least=LEAST,
            most=MOST,
            source=source,
        ),
    )
    return "\n".join([rows, "", *notes])


def default_models(sequence_len: int) -> dict[str, QwenConfig]:
    """Return the models of the default table, with rows of `sequence_len` tokens."""
    return {name: replace(shape, sequence_len=sequence_len) for name, shape in MODELS.items()}
