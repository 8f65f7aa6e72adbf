"""Plans flags: predicts speed, memory and disk of pretraining, memory and hours of fine-tuning.

python -m nanochat.planner                            # pretraining on the cards of this host
python -m nanochat.planner --chip 910B3 --ranks 8     # for other cards
python -m nanochat.planner --table                    # d12 to d32, every known chip, 1 to 128 cards
python -m nanochat.planner --preset gpt2              # hours, memory, disk and FLOPs of a preset of speedrun.sh
python -m nanochat.planner --rows                     # rows of a pass that fit each chip's memory
python -m nanochat.planner --published                # predictions of runs that others published
python -m nanochat.planner --finetune --chip 910B3    # which models can be fine-tuned on 1 to 8 cards
python -m nanochat.planner --model ./Qwen3-8B --chip 910B3 --ranks 4 --shard full    # fine-tuning

The flags are printed on one line, and the reasons for them on standard error. The speed of the
cards comes from data sheets and from what others have measured; after `python check_npu.py
--bench`, the speed of your own cards comes from that measurement.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanochat import device
from nanochat.checkpoint_manager.huggingface.config import read_config
from nanochat.checkpoint_manager.huggingface.folders import model_name, published_folder
from nanochat.checkpoint_manager.huggingface.weights import check_bits
from nanochat.common import UserError, tr
from nanochat.data.command_line import given, run
from nanochat.models.lora import LoraConfig
from nanochat.models.nf4 import BITS
from nanochat.planner import calibration, recipes, tables
from nanochat.planner.calibration import is_measured, rates_for
from nanochat.planner.cards import Rates
from nanochat.planner.forecast import Tuning
from nanochat.planner.plan import Plan, batch_of, check_trains, plan_of
from nanochat.planner.presets import Cards, plan_text
from nanochat.planner.programs import program_of
from nanochat.planner.published_tuning import print_published, print_speeds
from nanochat.planner.roofline import least_rows
from nanochat.planner.tuning import print_forecast
from nanochat.planner.work import size_of
from nanochat.platforms.base import Chip
from nanochat.runtime import parallel
from nanochat.runtime.progress import amount
from nanochat.train.flags import Auto

# Cards that --preset plans for on a host without any: kind and number
REFERENCE = (("H100", 8), ("910B3", 8), ("910B3", 16))


@dataclass(frozen=True)
class Config:
    """The flags of the planner."""

    depth: int = 12
    """layers"""
    total_batch_size: int | Auto = "auto"
    """tokens of a step over all cards; --table always takes auto.
    auto: as the preset of speedrun.sh for this depth has it, else as training chooses it"""
    vocab_size: int = 65_536
    """tokens of the vocabulary; default: as in speedrun.sh"""
    chip: str = ""
    """kind of card, such as 910A, 910B3 or 910C.
    Names that the vendor's tools print (Ascend910_9382) and names of servers (Atlas 900 A3) are accepted too.
    Default: the cards of this host, or with --table every kind"""
    ranks: int = 0
    """number of cards; default: all cards of this host, or with --table 1 to 128"""
    table: bool = False
    """print a table of predicted tokens/s, MFU, hours of pretraining,
    memory and disk for d12 to d32"""
    rows: bool = False
    """print a table for several depths: how many rows of a pass fit,
    with a vocabulary of 32,768 / 65,536"""
    preset: str = ""
    """print the plan of a preset of speedrun.sh instead: d12, d20 or gpt2.
    Without cards here and without --chip, it is that for 8 H100, 8 and 16 910B3"""
    recipe: Literal["ours", "upstream"] = "ours"
    """with --preset: the model to plan, as in speedrun.sh"""
    published: bool = False
    """for runs that others have published, print the predicted speed next to the reported speed"""
    published_memory: bool = False
    """print our forecasts of fine-tuning next to the memory and the speed that published runs report.
    This takes a minute."""
    finetune: bool = False
    """print a table for fine-tuning by LoRA, DPO and in full: the flags that fit, memory and time.
    The models are five published ones or that of --model, and the cards are 1, 2, 4 and 8 or --ranks."""
    tokens: int = recipes.TOKENS
    """with --finetune: tokens of the run, which decide its time"""
    write_recipes: bool = False
    """forecast the memory of the table of --finetune again, and write it beside the code.
    This takes minutes."""
    model: Path | None = None
    """folder of a published model, where config.json is enough:
    forecast the memory of fine-tuning it"""
    lora_rank: int = 8
    """with --model or --finetune: rank of the adapter; with --model, 0 trains every parameter"""
    base_bits: Literal[16, 4] = 16
    """with --model: bits of each weight below an adapter, as in training;
    with --finetune: 4 prints the table of cards of 16 and 32 GiB"""
    device_batch_size: int = 1
    """with --model: rows of a pass on one card"""
    max_length: int = 2048
    """with --model or --finetune: tokens of a row"""
    checkpoint_activations: bool = False
    """with --model: compute each layer again in the backward pass"""
    offload_activations: bool = False
    """with --model: like --checkpoint_activations,
    with the inputs of layers in the host's memory"""
    shard: parallel.Sharding = "grad"
    """with --model: what is split across the cards, as in training"""


def explain(plan: Plan, chip: Chip, rates: Rates | None, source: str) -> str:
    """Return one or two lines that explain a plan; `source` says where its `rates` come from."""
    fit = tr(
        "{chip} x {ranks}: {rows} rows fit {memory:.0f} GiB",
        chip=chip.name,
        ranks=plan.ranks,
        rows=plan.rows_that_fit,
        memory=chip.memory_gib,
    )
    needs = tr(
        "{memory:.0f} GiB a card, up to {disk} of disk for all stages",
        memory=plan.memory / 2**30,
        disk=amount(plan.disk, "B"),
    )
    if plan.step is None or rates is None:
        return tr(
            "{fit}; planned by memory alone, because no peak of this chip is known: {needs}. "
            "`{command}` measures its speed",
            fit=fit,
            needs=needs,
            command=device.MEASURE,
        )
    seconds = plan.step.one_pass
    bound = tr("compute-bound") if seconds.compute_bound else tr("bound by the host")
    smallest = least_rows(plan.size, rates, program_of(chip.name))
    speed = tables.rounded(plan.step.tokens_per_second)
    mfu = tr("unknown peak") if plan.mfu is None else f"MFU {100 * plan.mfu:.0f} %"
    if smallest > 1:
        threshold = tr("compute-bound from {rows} rows", rows=smallest)
    else:
        threshold = tr("compute-bound from {rows} row", rows=smallest)
    one_pass = tr(
        "{fit}; a pass of {rows} takes the host about {host:.0f} ms and the card {card:.0f} ms: "
        "{bound} ({threshold})",
        fit=fit,
        rows=plan.rows,
        host=1000 * seconds.host,
        card=1000 * seconds.card,
        bound=bound,
        threshold=threshold,
    )
    forecast = tr(
        "predicted, ± {within} %: {speed} tokens/s, {mfu}, {hours:,.1f} hours for {tokens:,.1f} "
        "billion tokens; {needs} ({source})",
        within=plan.within,
        speed=speed,
        mfu=mfu,
        hours=plan.hours,
        tokens=plan.tokens / 1e9,
        needs=needs,
        source=source,
    )
    return f"{one_pass}\n{forecast}"


def check_fits(depth: int, plan: Plan, chip: Chip) -> None:
    """Raise UserError if a plan needs more memory than one card has."""
    if plan.memory > chip.memory_gib * 2**30:
        raise UserError(
            tr(
                "a model of depth {depth} must fit into the {memory_gib:.0f} GiB of a "
                "{name}, but needs {memory:.1f} GiB on each of {ranks} card(s) with {rows} "
                "row(s) a pass. Take a smaller --depth, or more cards with --ranks",
                depth=depth,
                memory_gib=chip.memory_gib,
                name=chip.name,
                memory=plan.memory / 2**30,
                ranks=plan.ranks,
                rows=plan.rows,
            )
        )


def tuning_of(cfg: Config, folder: Path, ranks: int) -> Tuning:
    """Return the fine-tuning settings that the flags describe for the model in `folder`.

    Raises UserError if a flag cannot be used (exit code 2), and as read_config() does.
    """
    for flag in ("device_batch_size", "max_length"):
        if getattr(cfg, flag) < 1:
            raise UserError(
                tr(
                    "--{flag} must be at least 1, got {value}",
                    flag=flag,
                    value=getattr(cfg, flag),
                ),
                exit_code=2,
            )
    if cfg.base_bits == BITS and not cfg.lora_rank:
        raise UserError(
            tr(
                "--base_bits=4 freezes the weights that it holds in 4 bits, and --lora_rank=0 "
                "trains them: leave one of the two out"
            ),
            exit_code=2,
        )
    folder = published_folder(folder)
    shape = read_config(folder, cfg.max_length)
    check_bits(shape, cfg.base_bits, folder.name)
    lora = LoraConfig(cfg.lora_rank) if cfg.lora_rank else None
    return Tuning(
        shape,
        lora,
        rows=cfg.device_batch_size,
        checkpoint_activations=cfg.checkpoint_activations or cfg.offload_activations,
        offload_activations=cfg.offload_activations,
        shard=cfg.shard,
        ranks=ranks,
        base_bits=cfg.base_bits,
    )


def print_tables(
    cfg: Config,
    chip: Chip | None,
    bench: calibration.Bench | None,
) -> None:
    """Print the table that --table, --rows or --published asks for."""
    if cfg.published:
        print(tables.of_published())
        return
    if chip is None:
        chips = [planned for planned in device.planned() if planned.trains]
    else:
        check_trains(chip)
        chips = [chip]
    if cfg.rows:
        print(tables.of_rows(chips, (4, 8, *tables.DEPTHS), tables.VOCABULARIES))
        return
    measured = {bench.chip: calibration.rates_from(bench)} if bench else {}
    cards = [cfg.ranks] if cfg.ranks else tables.CARDS
    print(tables.of_plans(chips, cards, tables.DEPTHS, cfg.vocab_size, measured))


def chip_named(spelled: str) -> Chip:
    """Return the kind of card that `spelled`, the value of --chip, names.

    It may be a name that the vendor's tools print or that is on the box of a server. Raises
    UserError (exit code 2) if the name means several kinds or none that the planner knows.
    """
    chips = device.chips_called(spelled)
    names = ", ".join(chip.name for chip in chips)
    if len(chips) > 1:
        raise UserError(
            tr(
                "--chip={spelled} may mean {names}, which differ in speed or memory: name "
                "one of them. The tools of the driver show which chip a server has",
                spelled=spelled,
                names=names,
            ),
            exit_code=2,
        )
    if chips and (chips[0].tflops or not chips[0].trains):
        return chips[0]
    if chips:
        raise UserError(
            tr(
                "--chip must be a kind with a known peak, got {spelled!r}. A {names} is "
                "planned by its memory, on a host that has such a card: leave out --chip "
                "there",
                spelled=spelled,
                names=names,
            ),
            exit_code=2,
        )
    names = ", ".join(chip.name for chip in device.planned())
    raise UserError(
        tr("--chip must be one of {names}, got {spelled!r}", names=names, spelled=spelled),
        exit_code=2,
    )


def finetune_table(
    cfg: Config,
    chip: Chip,
    bench: calibration.Bench | None,
) -> str:
    """Return the table that --finetune asks for.

    Raises UserError (exit code 2) if a flag cannot be used or is a setting that the table chooses.
    """
    chosen = ("device_batch_size", "checkpoint_activations", "offload_activations", "shard")
    for flag in given(cfg, chosen):
        raise UserError(
            tr("--finetune chooses --{flag} itself: leave it out", flag=flag), exit_code=2
        )
    for flag in ("tokens", "lora_rank", "max_length"):
        if getattr(cfg, flag) < 1:
            raise UserError(
                tr(
                    "--{flag} must be at least 1 with --finetune, got {value}",
                    flag=flag,
                    value=getattr(cfg, flag),
                ),
                exit_code=2,
            )
    models = recipes.default_models(cfg.max_length)
    if cfg.model is not None:
        folder = published_folder(cfg.model)
        shape = read_config(folder, cfg.max_length)
        check_bits(shape, cfg.base_bits, folder.name)
        models = {model_name(folder): shape}
    rates, source = rates_for(chip, bench)
    lora = LoraConfig(cfg.lora_rank)
    if cfg.base_bits == BITS and cfg.ranks:
        raise UserError(
            tr(
                "--finetune --base_bits=4 plans one card of 16 and one of 32 GiB, got "
                "--ranks={ranks}: leave one of the two out",
                ranks=cfg.ranks,
            ),
            exit_code=2,
        )
    if cfg.base_bits == BITS:
        return recipes.table_in_4_bits(chip, rates, source, cfg.tokens, models, lora)
    cards = [cfg.ranks] if cfg.ranks else recipes.CARDS
    return recipes.table(chip, rates, source, cfg.tokens, models, lora, cards)


def hosts_of(cfg: Config, chip: Chip | None, bench: calibration.Bench | None) -> list[Cards]:
    """Return the cards to plan a preset for: those that the flags name, those here, or REFERENCE.

    Raises UserError if the cards are for inference only.
    """
    host_chip, host_count = device.cards()
    reference = ((chip_named(name), cfg.ranks or count) for name, count in REFERENCE)
    counts = list(dict.fromkeys(reference))  # --ranks gives each kind one number of cards
    if chip is not None and chip != host_chip:
        counts = [(chip, cfg.ranks or 8)]
    elif host_chip is not None:
        counts = [(host_chip, cfg.ranks or max(host_count, 1))]
    hosts = []
    for kind, count in counts:
        check_trains(kind)
        rates, _ = rates_for(kind, bench)
        hosts.append(Cards(kind, count, rates, is_measured(kind, bench)))
    return hosts


def main(cfg: Config) -> None:
    """Print the planned flags or, if `cfg` asks for one, a table or a forecast of fine-tuning."""
    chip = chip_named(cfg.chip) if cfg.chip else None
    if cfg.ranks < 0:
        raise UserError(tr("--ranks must be at least 1, got {ranks}", ranks=cfg.ranks), exit_code=2)
    if cfg.published_memory:
        print_speeds()
        print_published()
        return
    if cfg.write_recipes:
        recipes.write(recipes.PATH)
        return
    bench = calibration.read(calibration.path_of())
    if cfg.table or cfg.rows or cfg.published:
        print_tables(cfg, chip, bench)
        return
    if cfg.preset:
        print(plan_text(cfg.preset, hosts_of(cfg, chip, bench), cfg.recipe == "upstream"))
        return
    ranks = cfg.ranks
    if chip is None or ranks < 1:
        host_chip, host_cards = device.cards()
        chip = chip or host_chip
        ranks = ranks or host_cards
    if chip is None:
        raise UserError(
            tr(
                "this host has no card of a known kind; name a kind with --chip and a number "
                "of cards with --ranks"
            )
        )
    if cfg.finetune:
        print(finetune_table(cfg, chip, bench))
        return
    rates, source = rates_for(chip, bench)
    if cfg.model is not None:
        check_trains(chip)
        tuning = tuning_of(cfg, cfg.model, max(ranks, 1))
        if rates is not None:
            tuning = tuning.on_servers_of(rates.server)
        print_forecast(tuning, cfg.model.name, chip)
        return
    size = size_of(cfg.depth, cfg.vocab_size)
    ranks = max(ranks, 1)
    batch = batch_of(size, ranks) if cfg.total_batch_size == "auto" else cfg.total_batch_size
    plan = plan_of(size, chip, ranks, batch, rates, is_measured(chip, bench))
    check_fits(cfg.depth, plan, chip)
    print(explain(plan, chip, rates, source), file=sys.stderr)
    print(f"--depth={cfg.depth} --total_batch_size={batch} --device_batch_size={plan.rows}")


if __name__ == "__main__":
    run(main, Config, __doc__)
