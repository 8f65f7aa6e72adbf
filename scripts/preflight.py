"""Check before a run that data, disk and memory suffice, and estimate how long it takes.

python -m scripts.preflight --data fineweb --shards 40 --depth 12
"""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nanochat import device
from nanochat.checkpoint_manager.families import on_meta
from nanochat.checkpoint_manager.files import latest_step, read_meta
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError, base_dir, log, tr
from nanochat.data.command_line import run
from nanochat.data.mixing import unweighted
from nanochat.data.shards import shard_paths
from nanochat.data.sources.hub import Host
from nanochat.data.sources.published import SOURCES, Source
from nanochat.device import Compute
from nanochat.evals.core import find_bundle
from nanochat.gpt import GPT
from nanochat.model import Model
from nanochat.optim import Rates
from nanochat.planner.expected import at_usual_speed, rates_here
from nanochat.planner.plan import batch_of, plan_of
from nanochat.planner.work import size_of_model
from nanochat.runtime import progress
from nanochat.runtime.progress import amount, duration
from nanochat.train import sizes
from nanochat.train.fit import disk
from nanochat.train.fit.disk import saved_bytes
from nanochat.train.flags import Auto, Family, ShapeFlags
from tasks.mixtures import curriculum
from tasks.needs import answers, repos
from tasks.published import carry_in


@dataclass(frozen=True)
class Config:
    """The run to check: its data, its model and its devices."""

    data: str = "tinyworld"
    """Corpus to pretrain on, by name, or a mixture.
    Default: tinyworld, which needs no data from outside."""
    shards: int = 0
    """Training shards that the run downloads of each published corpus in --data.
    Default: 0, for corpora that are already here."""
    host: Annotated[Host, tyro.conf.arg(name="from")] = "hub"
    """Where the run downloads them from, as nanochat.dataset's --from."""
    family: Family = "gpt"
    """Kind of model that the run trains, as base_train's --family."""
    depth: int = 20
    """Number of layers of the model."""
    model_dim: int | Auto = "auto"
    """Number of channels. auto: as base_train chooses it."""
    head_dim: int | Auto = "auto"
    """Channels per head. auto: as base_train chooses it."""
    max_seq_len: int | Auto = "auto"
    """Context length in tokens. auto: as base_train chooses it."""
    bigram_rows: int | Auto = "auto"
    """Rows of the table of token pairs; 0: none. auto: as base_train chooses them."""
    offset_layers: int | Auto = "auto"
    """Layers that take half of each key from the token before. auto: as base_train chooses them."""
    exclusive_layers: int | Auto = "auto"
    """Layers with exclusive attention, as base_train's flag. auto: as base_train chooses them."""
    vocab_size: int = 65_536
    """Number of tokens in the vocabulary."""
    tokens: float = 0
    """Number of tokens that the run trains on.
    Default: 0, for 12 tokens per parameter, as base_train does."""
    conversations: str | None = None
    """The corpus whose conversations the later stages learn from, as their --data.
    Default: the corpus of --data."""
    model_tag: str | None = None
    """The folder of the run's checkpoints, as the stages' --model_tag.
    Space that checkpoints there take already is not asked for again. Default: none are there."""
    devices: int = 1
    """Number of devices that will train."""
    device_type: str = ""
    """Device to use: npu, cuda, mps or cpu. Default: the first usable one, except mps."""


def describe(place: str) -> str:
    """Return a phrase that says where a data set comes from; data_of() explains `place`."""
    return {
        "NANOCHAT_TASK_DIR": tr("here, in NANOCHAT_TASK_DIR"),
        "cache": tr("here, in the cache of Hugging Face"),
        "hub": tr("will be downloaded"),
        "": tr("not here, and this machine cannot download it"),
    }[place]


def published(cfg: Config) -> list[Source]:
    """Return the published corpora that the run downloads."""
    if not cfg.shards:
        return []
    names = unweighted(cfg.data).split(",")
    return [SOURCES[name] for name in names if name in SOURCES]


def data_of(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the name and the place of each data set that the run needs from outside.

    The place says where this machine gets the data set: "NANOCHAT_TASK_DIR", "cache", "hub" (which
    is ModelScope if --from says so), or "" for nowhere. Raises UserError (exit code 2) if --from
    names a host that has no copy of a corpus.
    """
    for source in published(cfg):
        shards = shard_paths(base_dir() / "base_data" / source.name)
        missing = cfg.shards + 1 - len(shards)  # one more is for validation
        if missing > 0:
            try:
                place = "hub" if answers(source.url(source.validation, cfg.host)) else ""
            except OSError:
                place = ""
            yield tr("{corpus}, {count} shards", corpus=source.title, count=missing), place
    yield from repos(cfg.conversations or cfg.data).items()


def size_of(folder: Path) -> int:
    """Return the total size of a folder's files in bytes, or 0 if there is no folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def bytes_of_steps(folder: Path) -> float:
    """Return the size of a stage's checkpoints in bytes, or infinity if the stage is done.

    Steps that were set aside do not count, because the stage will not replace them.
    """
    newest = latest_step(folder)
    try:
        if newest is not None and newest >= read_meta(folder, newest)["steps"]:
            return math.inf
    except UserError:  # a damaged step: the stage falls back to an earlier one
        pass
    return sum(size_of(path) for path in folder.glob("*step_*"))


def still_to_write(cfg: Config, checkpoint: float, downloads: bool = True) -> float:
    """Return the largest number of bytes that the run may still write.

    This is the total of the parts that disk.of_run() returns, less the bytes that are already on
    the disk. `checkpoint` is the size of a checkpoint's tensors in bytes. `downloads` is False
    if all conversations are already here.
    """
    texts: dict[str, float] = {}
    written: dict[str, float] = {"chats": size_of(base_dir() / "chat_data")}
    sources = {source.name: source for source in published(cfg)}
    for name in unweighted(cfg.data).split(","):
        folder = base_dir() / "base_data" / name
        text_bytes = sum(path.stat().st_size for path in folder.glob("shard_*"))
        written[f"texts {name}"] = text_bytes
        written[f"tokens {name}"] = sum(size_of(path) for path in folder.glob("tokens-*"))
        missing = max(cfg.shards + 1 - len(shard_paths(folder)), 0)  # one more is for validation
        if name in sources:
            text_bytes += missing * sources[name].file_bytes
        texts[name] = text_bytes
    if cfg.model_tag is not None:
        for stage in disk.SPEEDRUN:
            written[stage] = bytes_of_steps(checkpoint_dir(stage, cfg.model_tag))
        if all(written[stage] == math.inf for stage in disk.SPEEDRUN):
            written["newest"] = math.inf
    if not downloads:
        written["downloads"] = math.inf
    published_chats = bool(curriculum(cfg.conversations or cfg.data).needs())
    sizes_by_name = disk.of_run(checkpoint, texts, cfg.vocab_size, published_chats)
    return sum(max(size - written.get(name, 0), 0) for name, size in sizes_by_name.items())


def seconds_of(cfg: Config, model: Model, tokens: float, compute: Compute) -> float:
    """Return an estimate of how many seconds pretraining will take.

    This is the planner's prediction if the planner knows the card and the family of the model.
    Otherwise, it follows from the usual share of the peak FLOP/s.
    """
    chip_and_rates = rates_here(compute)
    if chip_and_rates is not None and isinstance(model, GPT):
        chip, rates = chip_and_rates
        size = size_of_model(model)
        plan = plan_of(size, chip, cfg.devices, batch_of(size, cfg.devices), rates)
        assert plan.step is not None  # the rates are known
        return tokens / plan.step.tokens_per_second
    return at_usual_speed(model, tokens, cfg.devices, compute)


def check(cfg: Config, compute: Compute) -> None:
    """Log the data, disk space, memory and time that the run needs.

    Raises UserError (exit code 2) if a flag is out of range, or if data, disk space or memory is
    lacking; the message then names everything that is.
    """
    if cfg.devices < 1:
        raise UserError(
            tr("--devices must be at least 1, got {devices}", devices=cfg.devices), exit_code=2
        )
    if not 0 <= cfg.tokens < math.inf:  # NaN is in no range
        raise UserError(
            tr(
                "--tokens must be a number of tokens, or 0 for the usual number, got {tokens}",
                tokens=cfg.tokens,
            ),
            2,
        )
    flags = ShapeFlags(
        cfg.depth,
        cfg.model_dim,
        cfg.head_dim,
        cfg.max_seq_len,
        bigram_rows=cfg.bigram_rows,
        offset_layers=cfg.offset_layers,
        exclusive_layers=cfg.exclusive_layers,
        family=cfg.family,
    )
    shape = sizes.model_config(flags, cfg.vocab_size, cfg.data, compute)
    model = on_meta(shape, compute)

    places = dict(data_of(cfg))
    problems = check_data(cfg, places)
    downloads = any("/" in name and place in ("hub", "") for name, place in places.items())
    problems += check_disk(still_to_write(cfg, saved_bytes(model, Rates()), downloads))
    problems += check_memory(cfg, model.parameter_counts()["total"], compute)
    log_time(cfg, model, compute)
    if problems:
        missing = [name for name, place in places.items() if not place]
        raise UserError(advice(cfg, problems, missing), exit_code=2)


def check_data(cfg: Config, places: Mapping[str, str]) -> list[str]:
    """Log where each data set comes from, and return a list with a problem for each missing one."""
    problems = []
    for name, place in places.items():
        log(tr("data    {what}: {where}", what=name, where=describe(place)))
        if not place:
            problems.append(f"{name}: {describe(place)}")
    if cfg.shards and find_bundle() is None:
        log(
            tr(
                "data    CORE's tasks: not here, so base_eval will skip CORE (base_eval --download "
                "fetches them)"
            )
        )
    return problems


def check_disk(needed: float) -> list[str]:
    """Log the free disk space, and return a list with a problem if the run may write more."""
    free = shutil.disk_usage(base_dir()).free
    values = {"folder": base_dir(), "needed": amount(needed, "B"), "free": amount(free, "B")}
    log(tr("disk    up to {needed} in {folder}, which has {free} free", **values))
    if needed <= free:
        return []
    return [
        tr(
            "{folder} has {free} free, and the run writes up to {needed}. Free some space, or set "
            "NANOCHAT_BASE_DIR to a folder on another disk",
            **values,
        )
    ]


def check_memory(cfg: Config, parameters: int, compute: Compute) -> list[str]:
    """Log the memory that training needs, and return a list with a problem if there is less."""
    memory = device.memory_total(compute)
    state = sizes.STATE_BYTES * parameters
    values = {
        "least": progress.memory(state),
        "parameters": parameters,
        "memory": progress.memory(memory),
    }
    if compute.platform.has_own_memory:
        log(
            tr(
                "memory  at least {least} to train {parameters:,} parameters, of {memory} on each "
                "device",
                **values,
            )
        )
        memory *= cfg.devices
    else:
        log(
            tr("memory  at least {least} to train {parameters:,} parameters, of {memory}", **values)
        )
    if state <= memory:
        return []
    return [
        tr(
            "{parameters:,} parameters need more memory than there is: take a smaller --depth",
            **values,
        )
    ]


def log_time(cfg: Config, model: Model, compute: Compute) -> None:
    """Log how long pretraining will take."""
    tokens = cfg.tokens or 12 * model.parameter_counts()["scaling"]
    seconds = seconds_of(cfg, model, tokens, compute)
    log(
        tr(
            "time    about {time} to train on {tokens:,.0f} tokens with {flops:.2e} FLOPs; "
            "starting the stages, sampling and evaluating come on top",
            time=duration(seconds),
            tokens=tokens,
            flops=tokens * model.flops_per_token(),
        )
    )


def advice(cfg: Config, problems: Sequence[str], missing: Sequence[str]) -> str:
    """Return a message that names everything that is missing and the commands that help."""
    lines = [tr("this run would stop later, because of:")]
    lines += [f"  - {problem}" for problem in problems]
    repositories = [name for name in missing if "/" in name]
    if repositories:
        command = carry_in(repositories)
        lines.append(tr("{how}. docs/offline.md has every command.", how=command))
    if cfg.data != "tinyworld":
        lines.append(
            tr(
                "`bash speedrun.sh --data tinyworld` needs no data from outside, and little disk "
                "and memory."
            )
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run(device.with_compute(check), Config, __doc__)
