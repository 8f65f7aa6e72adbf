"""Plans the presets of speedrun.sh that pretrain on published text: hours, memory, disk and FLOPs.

`bash speedrun.sh --preset NAME --plan` prints it. A test compares the sizes with speedrun.sh.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nanochat.common import UserError, tr
from nanochat.data.sources.published import SOURCES
from nanochat.planner.cards import Rates, in_fp8
from nanochat.planner.plan import RATIO, Plan, batch_of, plan_of
from nanochat.planner.programs import PROGRAMS_FP8
from nanochat.planner.tables import cells, markdown, plan_head
from nanochat.planner.work import size_of
from nanochat.platforms.base import Chip
from nanochat.runtime.progress import amount
from nanochat.train import task_scores
from nanochat.train.fit import disk

# What a measurement of CORE reads with the 100 problems of each task that --core_examples has by
# default. 863,000 tokens were counted for 18 of its 22 tasks; the rest is an estimate (dev/LOG.md).
CORE_TOKENS = 1_240_000
READING_MFU = 0.5  # of training's, an estimate: prompts have many lengths, and few fill a pass


@dataclass(frozen=True)
class Preset:
    """The run that a preset of speedrun.sh makes of a published corpus."""

    depth: int
    vocab_size: int
    corpus: str
    shards: int  # training shards to download
    ratio: float = RATIO  # training tokens per scaling parameter
    fp8: bool = False  # whether GPUs that can multiply the large matrices in FP8


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "d12": Preset(12, 65_536, "fineweb", disk.SHARDS[12]),
        "d20": Preset(20, 65_536, "fineweb", disk.SHARDS[20]),
        # Upstream's fastest published run to GPT-2's CORE: LEADERBOARD run 6, 8 tokens per
        # parameter on ClimbMix, vocabulary 32,768, FP8, 1.65 hours on eight H100.
        "gpt2": Preset(24, 32_768, "climbmix", 130, ratio=8.0, fp8=True),
    }
)


@dataclass(frozen=True)
class Cards:
    """Some cards of one kind, and the rates of one, which are `measured` or from its data sheet."""

    chip: Chip
    count: int
    rates: Rates | None
    measured: bool = False


def preset_named(name: str) -> Preset:
    """Return the preset called `name`, or raise UserError (exit code 2)."""
    if name in PRESETS:
        return PRESETS[name]
    raise UserError(
        tr(
            "a plan is made for the presets {presets}, got {name!r}: name one of them. The other "
            "presets take minutes on a CPU",
            presets=", ".join(PRESETS),
            name=name,
        ),
        exit_code=2,
    )


def plan_text(name: str, hosts: list[Cards], upstream: bool = False) -> str:
    """Return the plan of a preset for each of `hosts`: its data and cost, and a table.

    With `upstream`, the model is upstream's: without a table of pairs, offset keys or exclusive
    attention.
    Raises UserError as preset_named() and plan_of() do.
    """
    preset = preset_named(name)
    size = size_of(preset.depth, preset.vocab_size, upstream=upstream)
    source = SOURCES[preset.corpus]
    licence = source.licence
    if not source.commercial:
        licence = tr("{licence}, not for commercial use", licence=licence)
    tokens = preset.ratio * size.scaling
    disk_bytes = disk.of_speedrun(
        preset.depth, tokens, size.saved, preset.vocab_size, preset.corpus, preset.shards
    )
    head = tr(
        "{name}: {depth} layers, {parameters:,} parameters, vocabulary {vocabulary:,}\n"
        "data: {tokens:.1f} billion tokens of {corpus}, {shards} shards of {megabytes:.0f} MB "
        "(licence: {licence})\n"
        "cost: {flops:.2e} FLOPs of pretraining, up to {disk} of disk for all stages",
        name=name,
        depth=preset.depth,
        parameters=size.parameters,
        vocabulary=preset.vocab_size,
        tokens=tokens / 1e9,
        corpus=source.title,
        shards=preset.shards + 1,  # one for validation
        megabytes=source.file_bytes / 1e6,
        licence=licence,
        flops=tokens * size.flops_per_token,
        disk=amount(disk_bytes, "B"),
    )
    rows = []
    for cards in hosts:
        for fp8 in (True, False) if preset.fp8 and cards.chip.name in PROGRAMS_FP8 else (False,):
            plan = _plan(preset, cards, upstream, fp8)
            label = f"{cards.chip.name}, fp8" if fp8 else cards.chip.name
            chip_cells = cells(plan, cards.chip)[:-1]  # the disk is in the head
            rows.append([label, str(cards.count), *chip_cells])
    columns = plan_head()
    table = markdown([*columns[:2], *columns[3:-1]], rows)
    times, share = core_while_training(tokens)
    notes = (
        tr(
            "Hours are predicted for pretraining; midtraining, SFT, RL and evaluations come on top. "
            "Nobody has timed this preset."
        ),
        tr("MFU is the share of the card's peak in 16 bits, also in the row with fp8."),
        tr(
            "If CORE's tasks are in the base folder, CORE is measured {times} times as the model "
            "trains, which adds about {percent:.1f} % to these hours.",
            times=times,
            percent=100 * share,
        ),
        tr(
            "For other cards: python -m nanochat.planner --preset {name} --chip H200 --ranks 8",
            name=name,
        ),
    )
    return "\n\n".join((head, table, "\n".join(notes)))


def core_while_training(tokens: float) -> tuple[int, float]:
    """Return how often --core_every=auto measures CORE in a run, and its share of the run's time.

    Reading a token takes a third of the FLOPs of training on it, at half (READING_MFU) of the MFU.
    """
    times = task_scores.affordable_times(CORE_TOKENS, tokens)
    return times, times * CORE_TOKENS / (task_scores.PASSES * tokens * READING_MFU)


def _plan(preset: Preset, cards: Cards, upstream: bool, fp8: bool) -> Plan:
    size = size_of(preset.depth, preset.vocab_size, upstream=upstream)
    rates = cards.rates
    if fp8 and rates is not None:
        rates = in_fp8(rates)
    return plan_of(
        size,
        cards.chip,
        cards.count,
        batch_of(size, cards.count, preset.ratio),
        rates,
        cards.measured,
        preset.ratio,
        PROGRAMS_FP8[cards.chip.name] if fp8 else None,
    )
