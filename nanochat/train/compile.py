"""Compiles a model where torch.compile works and pays; elsewhere the model stays uncompiled, and the log says why."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn

from nanochat import device
from nanochat.common import UserError, log, warn
from nanochat.device import Compute
from nanochat.runtime import parallel
from nanochat.train import memory


def _uncompiled(model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
    for block in blocks:
        block._compiled_call_impl = None
    return model


def compiled(
    model: nn.Module,
    wanted: bool | None,
    shape: tuple[int, int],
    compute: Compute,
    blocks: Sequence[nn.Module],
) -> nn.Module:
    """The model to train with: compiled if that works, else the model itself, and one line that says why.

    `wanted` None means: wherever the device has a compiler. The first pass of shape (B, T) runs here, so that a
    compiler fails now, before any state is touched. With several ranks each of `blocks` is compiled by itself.
    """
    why_not = "switched off" if wanted is False else device.compiler_missing(compute)
    if not parallel.least(int(not why_not), compute):  # the first pass needs all ranks
        why_not = why_not or "another rank has no compiler"
    if why_not:
        if wanted:
            raise UserError(f"--compile was asked for, but cannot be used: {why_not}")
        log(f"not compiled: {why_not}")
        return model
    start = time.monotonic()
    compute.platform.prepare_compiling()
    tokens = torch.zeros(shape, dtype=torch.long, device=compute.device)
    with torch.no_grad():  # tables made while tracing would be traced again
        model(tokens[:1])
    try:
        if compute.world_size > 1:
            for block in blocks:
                block.compile(dynamic=False)
            fast: Any = model
        else:
            fast = torch.compile(model, dynamic=False)
        with compute.platform.saving_memory(tokens.numel()):
            # The targets are a clone, since aliased arguments would compile another graph.
            fast(tokens, tokens.clone(), "sum").backward()
    except Exception as failure:  # the edge to a foreign compiler, which raises anything; eager always works
        if memory.ran_out(failure):
            raise memory.advice(shape[0], shape[0]) from failure
        if wanted:
            raise
        warn(f"torch.compile failed, and training continues uncompiled: {str(failure).splitlines()[0]}")
        fast = _uncompiled(model, blocks)
    for parameter in model.parameters():
        parameter.grad = None
    compute.platform.finish_compiling()
    log(f"torch.compile: {time.monotonic() - start:.1f} s")
    return fast
