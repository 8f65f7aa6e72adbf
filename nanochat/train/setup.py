"""Prepares a model for training: logs its size, shards it, fills it and creates its optimizers."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch.nn as nn

from nanochat.checkpoint_manager.resume import Start
from nanochat.common import log, tr
from nanochat.device import Compute
from nanochat.gpt import GPT
from nanochat.model import Model
from nanochat.optim import OneRate, Optimizers, Rates
from nanochat.platforms.base import dtype_name
from nanochat.platforms.operations import Matmul
from nanochat.runtime import parallel
from nanochat.train import sizes
from nanochat.train.fit.disk import saved_bytes
from nanochat.train.flags import RunFlags


def check_room(model: Model, rates: Rates | OneRate, folder: Path, resume: Start) -> None:
    """Raise UserError if the disk cannot hold two checkpoints, before hours are spent on data."""
    trained = sum(parameter.numel() for _, parameter in parallel.trained(cast(nn.Module, model)))
    sizes.check_disk(folder, trained, saved_bytes(model, rates), 1, resume)


def set_up(
    model: Model,
    rates: Rates | OneRate,
    scale: float,
    folder: Path,
    flags: RunFlags,
    compute: Compute,
    table_momentum: float = 0.8,
    fill: Callable[[], None] | None = None,
) -> Optimizers:
    """Shard the model over the ranks as --shard says, and return its optimizers.

    `scale` multiplies every learning rate, and `table_momentum` is AdamW's first beta for
    embeddings and head. If the model was built on meta, `fill` must set its parameters; it is
    called after sharding, so that no rank holds more than its share. Raises UserError if the disk
    cannot hold two checkpoints.
    """
    module = cast(nn.Module, model)
    trained = sum(parameter.numel() for _, parameter in parallel.trained(module))
    _describe(model, trained)
    sizes.check_disk(folder, trained, saved_bytes(model, rates), flags.keep, flags.resume)
    parallel.shard(module, model.shard_groups(), compute, flags.shard)
    if fill is not None:
        fill()
    return Optimizers(
        module,
        model.parameter_roles(),
        model.config.n_embd,
        rates,
        scale,
        compute.dtype,
        table_momentum,
    )


def set_matmul(model: Model, matmul: Matmul, compute: Compute) -> None:
    """Make a model train with matrix products in the number format of --matmul, and log the format.

    Call it before set_up(), which shards the model. Raises UserError (exit code 2) if the device or
    the model cannot train in that format.
    """
    compute.platform.use_matmul(model, matmul, compute.operations)
    dtype = dtype_name(model.dtype)
    if matmul == "auto" and isinstance(model, GPT):
        faster = compute.platform.preset_matmul(model.dtype, compute.operations)
        if faster != "auto":
            log(
                tr(
                    "matmul: {dtype} (--matmul {faster} is faster on this device, and a step learns "
                    "a little less)",
                    dtype=dtype,
                    faster=faster,
                )
            )
            return
    if matmul in ("fp8", "int8"):
        log(tr("matmul: {matmul} in training, {dtype} elsewhere", matmul=matmul, dtype=dtype))
    else:
        log(tr("matmul: {dtype}", dtype=dtype))


def _describe(model: Model, trained: int) -> None:
    """Log a model's shape, its numbers of parameters and its FLOPs per token."""
    shape = model.config
    total = model.parameter_counts()["total"]
    figures = {
        "layers": shape.n_layer,
        "channels": shape.n_embd,
        "vocabulary": shape.vocab_size,
        "total": total,
        "flops": model.flops_per_token(),
    }
    if trained < total:
        log(
            tr(
                "model: {layers} layers, {channels} channels, vocabulary {vocabulary:,}, "
                "{total:,} parameters, of which {trained:,} are trained, {flops:,} FLOPs a token",
                trained=trained,
                **figures,
            )
        )
        return
    log(
        tr(
            "model: {layers} layers, {channels} channels, vocabulary {vocabulary:,}, "
            "{total:,} parameters, {flops:,} FLOPs a token",
            **figures,
        )
    )
