"""Chooses what is left at `auto`: the shape of a model and the split of a step, by depth, corpus, device and memory.
Says before the first step what a run needs: memory, disk, time, and how often it reads its data."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from nanochat import device
from nanochat.checkpoint_manager.families import on_meta
from nanochat.common import UserError, log, tr, warn
from nanochat.data.traits import traits
from nanochat.dataloader import Rows
from nanochat.device import Compute
from nanochat.gpt import GPTConfig
from nanochat.model import ModelConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.runtime import parallel
from nanochat.runtime.progress import amount, duration
from nanochat.train import schedule
from nanochat.train.fit.memory import reachable
from nanochat.train.flags import Auto

Shape = TypeVar("Shape", bound=ModelConfig)
Kind = Literal["gpt", "qwen3"]  # of a model that is trained from nothing
WINDOWS = "SSSL"  # attention windows of a GPT where none are asked for

STATE_BYTES = 12  # per parameter, at least: an fp32 master, its gradient and one moment
MANY_EPOCHS = 4  # beyond this, reading a text again teaches little (Muennighoff et al. 2023, arXiv:2305.16264)
PAIRS, MOST_PAIRS = 32, 2**17  # rows of bigrams for each entry of the vocabulary, and in all
EPOCHS_WITH_PAIRS = 2  # in text that is read more often, a model learns pairs by heart (dev/LOG.md)
LONG_SECONDS = 3600  # a run on a CPU that takes longer gets a warning
ACTIVATION_BYTES = (
    40  # held for the backward pass per token, channel and layer, by counting a layer's tensors
)


def model_config(
    depth: int,
    model_dim: int | Auto,
    head_dim: int | Auto,
    max_seq_len: int | Auto,
    window_pattern: str,
    vocab_size: int,
    corpus: str,
    compute: Compute,
    kind: Kind = "gpt",
    bigram_rows: int | Auto = "auto",
    offset_layers: int | Auto = "auto",
) -> GPTConfig | QwenConfig:
    """The shape of a model from its depth and the sizes that override what follows from the depth.

    A GPT gets bigrams unless bigram_rows is 0 or the corpus has no use for them; keep_bigrams() removes them where the
    text is read too often. A Qwen3 gets an MLP of 8/3 of its channels, so that it has about as many parameters in its
    layers as a GPT.
    """
    given = {
        "depth": depth,
        "model_dim": model_dim,
        "head_dim": head_dim,
        "max_seq_len": max_seq_len,
    }
    for flag, size in given.items():
        if size != "auto" and size < 1:
            raise UserError(f"{flag} must be at least 1, got {size}", exit_code=2)
    if bigram_rows != "auto" and bigram_rows < 0:
        raise UserError(f"bigram_rows must be at least 0, got {bigram_rows}", exit_code=2)
    # 128 channels per head suit matrix units best, but below eight layers they would leave too few heads
    head = head_dim if head_dim != "auto" else (128 if depth >= 8 else 64)
    dim = model_dim if model_dim != "auto" else -(-depth * 64 // head) * head
    if dim % head:
        raise UserError(
            f"model_dim must be a multiple of head_dim, got {dim} and {head}", exit_code=2
        )
    length = max_seq_len
    if length == "auto":
        length, why = traits(corpus).row_tokens, f"the documents of {corpus} are short"
        if length is None:
            length, why = compute.platform.context
        log(f"max_seq_len: {length} ({why})")
    heads = dim // head
    if kind == "gpt":
        offset = depth if offset_layers == "auto" else offset_layers
        pairs = table_rows(bigram_rows, vocab_size)
        if bigram_rows == "auto" and not traits(corpus).pairs:
            pairs = 0
            log(f"bigram_rows: 0 (they teach little about {corpus})")
        return GPTConfig(
            length, vocab_size, depth, heads, heads, dim, window_pattern, pairs, offset
        )
    if bigram_rows not in (0, "auto"):
        raise UserError(
            f"a Qwen3 has no bigrams, got --bigram_rows={bigram_rows}: leave the flag out",
            exit_code=2,
        )
    if window_pattern not in (WINDOWS, "L"):
        raise UserError(
            f"a Qwen3 sees the whole context in every layer, got --window_pattern={window_pattern}: leave the flag out",
            exit_code=2,
        )
    hidden = -(-8 * dim // (3 * 64)) * 64
    return QwenConfig(
        length, vocab_size, depth, dim, heads, heads, head, hidden, rope_theta=10_000.0, tied=0
    )


@dataclass(frozen=True)
class ModelSize:
    """How large a model is."""

    parameters: int
    scaling_parameters: int  # matrices and head, which scaling laws count
    flops_per_token: int


def model_size(shape: GPTConfig | QwenConfig, compute: Compute, fp8: bool) -> ModelSize:
    """Return the size of a model of this shape, which takes no memory.

    UserError if the model is to train in FP8, and the device or the family cannot.
    """
    model = on_meta(shape, compute, fp8)
    counts = model.parameter_counts()
    return ModelSize(counts["total"], counts["scaling"], model.flops_per_token())


def table_rows(asked: int | Auto, vocab_size: int) -> int:
    """How many rows a table of bigrams has: as many as were asked for, or, at auto, what suits the vocabulary."""
    return min(PAIRS * vocab_size, MOST_PAIRS) if asked == "auto" else asked


def keep_bigrams(shape: Shape, asked: int | Auto, epochs: float) -> Shape:
    """The shape, without bigrams if their number was left at auto and the text is read more than twice."""
    if asked != "auto" or not isinstance(shape, GPTConfig) or not shape.bigram_rows:
        return shape
    rows = shape.bigram_rows if epochs <= EPOCHS_WITH_PAIRS else 0
    log(f"bigram_rows: {rows:,} (the text is read {epochs:,.2f} times)")
    return replace(shape, bigram_rows=rows)


def check_fits(depth: int, parameters: int, mode: parallel.Sharding, compute: Compute) -> None:
    """UserError if a model's parameters, gradients and optimizer state exceed the memory of the device."""
    _, shards = parallel.mesh_shape(mode, compute)
    sharers = (
        parallel.ranks_per_host(compute) if compute.platform.is_host else 1
    )  # ranks in one memory
    needed, total = STATE_BYTES * parameters / shards * sharers, device.memory_total(compute)
    free = reachable(compute)
    if free < needed <= total:
        raise UserError(
            tr(
                "training takes at least {needed:,.1f} GiB of each device, but only {free:,.1f} of {total:,.1f} GiB are "
                "free: other processes hold the rest. End them, or choose another device.",
                needed=needed / 2**30,
                free=free / 2**30,
                total=total / 2**30,
            )
        )
    if needed > total:
        figures = {
            "depth": depth,
            "parameters": parameters,
            "needed": needed / 2**30,
            "total": total / 2**30,
        }
        if compute.platform.is_host:
            text = tr(
                "depth {depth} makes {parameters:,} parameters, which take at least {needed:,.0f} GiB to train; "
                "this host has {total:,.0f} GiB. Take a smaller --depth or --model_dim.",
                **figures,
            )
        else:
            text = tr(
                "depth {depth} makes {parameters:,} parameters, which take at least {needed:,.0f} GiB to train; "
                "a device has {total:,.0f} GiB. Take a smaller --depth or --model_dim, or more devices with "
                "--shard=full (now {mode}).",
                mode=mode,
                **figures,
            )
        raise UserError(text, exit_code=2)


def check_disk(folder: Path, parameters: int, one: float, keep: int) -> None:
    """Raise UserError if the disk of a folder cannot hold two checkpoints of `one` bytes each.

    Warn if the disk cannot hold all the checkpoints that the stage keeps.
    """
    disk = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(disk).free
    there = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    most = one * (keep + 1 if keep else 2)  # the newest is whole before the oldest goes
    if free + there < 2 * one:
        raise UserError(
            tr(
                "a checkpoint of {parameters:,} parameters takes up to {size}, and two must fit, but {folder} has "
                "{free} free. Free some space, or set NANOCHAT_BASE_DIR to a folder on another disk.",
                parameters=parameters,
                size=amount(one, "B"),
                folder=folder,
                free=amount(free, "B"),
            )
        )
    if free + there < most:
        warn(
            tr(
                "the checkpoints will take up to {size}, but {folder} has {free} free: free some space, or lower "
                "--keep",
                size=amount(most, "B"),
                folder=folder,
                free=amount(free, "B"),
            )
        )


def warn_of_time(seconds: float, compute: Compute) -> None:
    """A warning if a run on a CPU will take longer than an hour."""
    if compute.platform.is_host and seconds > LONG_SECONDS:
        warn(
            tr(
                "this run will take a CPU about {time}. You can stop at any time and resume with the same command. For "
                "a shorter run give --num_iterations, or a smaller --depth, --max_seq_len and --total_batch_size; "
                "docs/data.md has an example for a laptop",
                time=duration(seconds),
            )
        )


def tell_epochs(corpus: str, rows: int, row_tokens: int, steps: int, rows_per_step: int) -> None:
    """Log how often a run reads its rows; a warning if that is so often that it learns them by heart."""
    epochs = steps * rows_per_step / rows
    log(f"data: {corpus}, {rows:,} rows of {row_tokens} tokens, {epochs:,.2f} epochs")
    if epochs > MANY_EPOCHS:
        enough = max(MANY_EPOCHS * rows // rows_per_step, 1)
        warn(
            tr(
                "the run reads all of its data {epochs:,.0f} times; from about {many} times on, a model learns the "
                "texts by heart instead of learning from them. Add texts, or give --num_iterations={enough}",
                epochs=epochs,
                many=MANY_EPOCHS,
                enough=enough,
            )
        )


def check_for_ranks(flag: str, per_step: int, compute: Compute) -> None:
    """UserError if a step's rows or problems cannot be split equally over the ranks."""
    if per_step % compute.world_size:
        raise UserError(
            f"{flag} must be a multiple of the {compute.world_size} ranks, got {per_step}. Take "
            f"--{flag}={max(per_step // compute.world_size, 1) * compute.world_size}.",
            exit_code=2,
        )


@dataclass(frozen=True)
class Batch:
    """How a step is split."""

    tokens_per_step: int
    rows_per_step: int
    device_batch_size: int  # rows of one pass on one rank
    passes: int
    probe: bool = False  # no size was given, so probe.fit() may find how many rows the memory holds


def batch(
    total_batch_size: int | Auto,
    device_batch_size: int | Auto,
    shape: ModelConfig,
    parameters: int,
    tokens: float | None,
    corpus: str,
    compute: Compute,
    asked_passes: int | None = None,
    begun_rows: int | None = None,
) -> Batch:
    """How a step is split: its tokens, and the rows of a pass.

    `tokens` is the expected horizon, or None if the number of steps is given. `asked_passes` decides an automatic
    device_batch_size; if both are given they must agree. `begun_rows` are the rows of a step of the run that resumes:
    an automatic step keeps them. UserError if the ranks cannot share them.
    """
    unit = shape.sequence_len * compute.world_size
    total = total_batch_size
    if total == "auto" and begun_rows is not None:
        total = _as_begun(begun_rows, compute) * shape.sequence_len
        log(f"total_batch_size: {total:,} tokens a step (as the run began)")
    elif total == "auto":
        if (total := traits(corpus).step_tokens) is not None:
            why = f"{corpus} is small"
        elif tokens is None:
            total, why = schedule.REFERENCE_BATCH, "the default"
        else:
            reference = 12.0 * schedule.REFERENCE_SCALING_PARAMETERS
            total, why = schedule.batch_tokens(tokens, reference), f"for {tokens:,.0f} tokens"
        total = max(round(total / unit), 1) * unit
        log(f"total_batch_size: {total:,} tokens a step ({why})")
    rows = device_batch_size
    if rows == "auto" and asked_passes is not None:
        rows = max(total // (unit * max(asked_passes, 1)), 1)
    elif rows == "auto":
        rows, why = _device_rows(shape, parameters, compute)
        log(f"device_batch_size: at most {rows} rows a pass ({why})")
    per_pass, passes = schedule.micro_batches(total, shape.sequence_len, rows, compute.world_size)
    if device_batch_size != "auto" and per_pass < rows:
        log(
            f"device_batch_size: lowered from {rows} to {per_pass}, a divisor of each rank's rows of a step"
        )
    product = (
        f"{total:,} tokens = {passes} pass(es) x {per_pass} rows x {shape.sequence_len:,} tokens x "
        f"{compute.world_size} rank(s)"
    )
    if asked_passes is not None and passes != asked_passes:
        raise UserError(_other_passes(asked_passes, total, per_pass, unit, product), exit_code=2)
    log(f"step: {product}")
    probe = device_batch_size == "auto" and asked_passes is None
    return Batch(total, total // shape.sequence_len, per_pass, passes, probe)


def _as_begun(rows: int, compute: Compute) -> int:
    """The rows of a step of the run that resumes. UserError (code 2) if the ranks cannot share them equally."""
    if rows % compute.world_size:
        fits = ", ".join(str(ranks) for ranks in range(1, rows + 1) if rows % ranks == 0)
        raise UserError(
            tr(
                "a step of this run has {rows} rows, which {ranks} devices cannot share equally. Resume on a number of "
                "devices that divides {rows} ({fits}), or give --resume=none to start again, which moves the "
                "checkpoints aside.",
                rows=rows,
                ranks=compute.world_size,
                fits=fits,
            ),
            exit_code=2,
        )
    return rows


def example_batch(
    examples: int | Auto,
    device_batch_size: int | Auto,
    shape: ModelConfig,
    parameters: int,
    rows: Rows,
    corpus: str,
    compute: Compute,
    begun_rows: int | None = None,
) -> Batch:
    """How a step of `examples` rows is split; an automatic number follows from the `rows` that there are.

    `begun_rows` are the rows of a step of the run that resumes: an automatic step keeps them. UserError if ranks cannot
    share the rows equally.
    """
    if examples == "auto":
        if begun_rows is not None:
            examples = _as_begun(begun_rows, compute)
            why = "as the run began"
        else:
            fitting = schedule.tuning_step_rows(rows.count, rows.conversations)
            examples = -(-fitting // compute.world_size) * compute.world_size
            why = f"for {rows.conversations:,} conversations in {rows.count:,} rows of {shape.sequence_len:,} tokens"
        log(f"target_examples_per_step: {examples} rows a step ({why})")
    check_for_ranks("target_examples_per_step", examples, compute)
    return batch(
        examples * shape.sequence_len, device_batch_size, shape, parameters, None, corpus, compute
    )


def _other_passes(asked: int, total: int, per_pass: int, unit: int, product: str) -> str:
    """Why a step cannot have the given number of passes, and a flag that would agree with it."""
    agrees = ""
    if asked > 0:
        rows = total / (unit * asked)
        agrees = (
            f"--device_batch_size={rows:.0f}"
            if rows == int(rows)
            else f"--total_batch_size={asked * per_pass * unit}"
        )
    return (
        f"gradient_accumulation_steps must be {total:,} / ({per_pass} x {unit:,}) = {total // (per_pass * unit)}, "
        f"since a step of {product}; got {asked}. Leave it out"
        + (f", or take {agrees}." if agrees else ".")
    )


def _device_rows(shape: ModelConfig, parameters: int, compute: Compute) -> tuple[int, str]:
    """How many rows of a pass fit: on a CPU into its caches, elsewhere into memory beside 16 bytes a parameter."""
    if suits := compute.platform.pass_tokens:
        return max(
            suits // shape.sequence_len, 1
        ), f"{suits:,} tokens a pass suit {compute.platform.context[1]}"
    memory = device.memory_total(compute)
    return rows_that_fit(memory, shape, parameters), f"{memory / 2**30:.0f} GiB of memory"


def memory_of(rows: int, shape: ModelConfig, parameters: int, shards: int = 1) -> float:
    """Bytes on one device for a pass of `rows` rows: activations, and for each parameter its state.

    The state is an fp32 master, a gradient and two moments. With several shards each holds its share of master and
    moments, and between passes the whole gradient and a copy to compute with.
    """
    state = 16 if shards == 1 else 6 + 12 / shards
    return (
        state * parameters
        + ACTIVATION_BYTES * shape.n_layer * shape.n_embd * shape.sequence_len * rows
    )


def rows_that_fit(memory: float, shape: ModelConfig, parameters: int) -> int:
    """Rows of a pass, a power of two, that `memory` bytes hold beside masters, gradients and optimizer state."""
    state = memory_of(0, shape, parameters)
    fit = max(int((0.8 * memory - state) // (memory_of(1, shape, parameters) - state)), 1)
    return 2 ** (fit.bit_length() - 1)
