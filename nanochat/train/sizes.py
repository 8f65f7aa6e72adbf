"""Chooses what is left at `auto`: the shape of a model and the split of a step, by depth, corpus, device and memory."""

from dataclasses import dataclass

from nanochat import device
from nanochat.common import UserError, log
from nanochat.data.traits import traits
from nanochat.device import Compute
from nanochat.gpt import GPTConfig
from nanochat.runtime import parallel
from nanochat.train import schedule
from nanochat.train.flags import Auto
from nanochat.train.memory import reachable

STATE_BYTES = 12  # per parameter, at least: an fp32 master, its gradient and one moment
ACTIVATION_BYTES = 40  # held for the backward pass per token, channel and layer, by counting a layer's tensors


def model_config(
    depth: int, model_dim: int | Auto, head_dim: int | Auto, max_seq_len: int | Auto, window_pattern: str,
    vocab_size: int, corpus: str, compute: Compute,
) -> GPTConfig:  # fmt: skip
    """The shape of a model from its depth and the sizes that override what follows from the depth."""
    given = {"depth": depth, "model_dim": model_dim, "head_dim": head_dim, "max_seq_len": max_seq_len}
    for flag, size in given.items():
        if size != "auto" and size < 1:
            raise UserError(f"{flag} must be at least 1, got {size}", exit_code=2)
    # 128 channels per head suit matrix units best, but below eight layers they would leave too few heads
    head = head_dim if head_dim != "auto" else (128 if depth >= 8 else 64)
    dim = model_dim if model_dim != "auto" else -(-depth * 64 // head) * head
    if dim % head:
        raise UserError(f"model_dim must be a multiple of head_dim, got {dim} and {head}", exit_code=2)
    length = max_seq_len
    if length == "auto":
        length, why = traits(corpus).row_tokens, f"the documents of {corpus} are short"
        if length is None:
            length, why = compute.platform.context
        log(f"max_seq_len: {length} ({why})")
    heads = dim // head
    return GPTConfig(length, vocab_size, depth, heads, heads, dim, window_pattern)


def check_fits(depth: int, parameters: int, mode: parallel.Sharding, compute: Compute) -> None:
    """UserError if a model's parameters, gradients and optimizer state exceed the memory of the device."""
    _, shards = parallel.mesh_shape(mode, compute)
    sharers = parallel.ranks_per_host(compute) if compute.platform.is_host else 1  # ranks in one memory
    needed, total = STATE_BYTES * parameters / shards * sharers, device.memory_total(compute)
    free = reachable(compute)
    if free < needed <= total:
        raise UserError(
            f"training takes at least {needed / 2**30:,.1f} GiB of each device, but only {free / 2**30:,.1f} of "
            f"{total / 2**30:,.1f} GiB are free: other processes hold the rest. End them, or choose another device."
        )
    if needed > total:
        whose = "this host" if compute.platform.is_host else "a device"
        raise UserError(
            f"depth {depth} makes {parameters:,} parameters, which take at least {needed / 2**30:,.0f} GiB to train; "
            f"{whose} has {total / 2**30:,.0f} GiB. Take a smaller --depth or --model_dim"
            + ("." if compute.platform.is_host else f", or more devices with --shard=full (now {mode})."),
            exit_code=2,
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
    total_batch_size: int | Auto, device_batch_size: int | Auto, shape: GPTConfig, parameters: int,
    tokens: float | None, corpus: str, compute: Compute, asked_passes: int | None = None,
) -> Batch:  # fmt: skip
    """How a step is split: its tokens, and the rows of a pass.

    `tokens` is the expected horizon, or None if the number of steps is given. `asked_passes` decides an automatic
    device_batch_size; if both are given they must agree.
    """
    unit = shape.sequence_len * compute.world_size
    total = total_batch_size
    if total == "auto":
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
        log(f"device_batch_size: lowered from {rows} to {per_pass}, a divisor of each rank's rows of a step")
    product = (f"{total:,} tokens = {passes} pass(es) x {per_pass} rows x {shape.sequence_len:,} tokens x "
               f"{compute.world_size} rank(s)")  # fmt: skip
    if asked_passes is not None and passes != asked_passes:
        raise UserError(_other_passes(asked_passes, total, per_pass, unit, product), exit_code=2)
    log(f"step: {product}")
    probe = device_batch_size == "auto" and asked_passes is None
    return Batch(total, total // shape.sequence_len, per_pass, passes, probe)


def _other_passes(asked: int, total: int, per_pass: int, unit: int, product: str) -> str:
    """Why a step cannot have the given number of passes, and a flag that would agree with it."""
    agrees = ""
    if asked > 0:
        rows = total / (unit * asked)
        agrees = (
            f"--device_batch_size={rows:.0f}" if rows == int(rows) else f"--total_batch_size={asked * per_pass * unit}"
        )
    return (
        f"gradient_accumulation_steps must be {total:,} / ({per_pass} x {unit:,}) = {total // (per_pass * unit)}, "
        f"since a step of {product}; got {asked}. Leave it out" + (f", or take {agrees}." if agrees else ".")
    )


def _device_rows(shape: GPTConfig, parameters: int, compute: Compute) -> tuple[int, str]:
    """How many rows of a pass fit: on a CPU into its caches, elsewhere into memory beside 16 bytes a parameter."""
    if suits := compute.platform.pass_tokens:
        return max(suits // shape.sequence_len, 1), f"{suits:,} tokens a pass suit {compute.platform.context[1]}"
    memory = device.memory_total(compute)
    return rows_that_fit(memory, shape, parameters), f"{memory / 2**30:.0f} GiB of memory"


def rows_that_fit(memory: float, shape: GPTConfig, parameters: int) -> int:
    """Rows of a pass, a power of two, that `memory` bytes hold beside masters, gradients and optimizer state."""
    row = ACTIVATION_BYTES * shape.n_layer * shape.n_embd * shape.sequence_len
    fit = max(int((0.8 * memory - 16 * parameters) // row), 1)
    return 2 ** (fit.bit_length() - 1)
