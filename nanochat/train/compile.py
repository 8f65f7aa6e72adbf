"""torch.compile where it works and pays; eager, with the reason, where it does not."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn

from nanochat import device
from nanochat.common import UserError, log, warn
from nanochat.device import Compute
from nanochat.platforms import cpu as host
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
    """The model to train with: compiled where that works, else the model itself, with one line that says why.

    `wanted` None means where it pays: on a CPU or CUDA device with a compiler. The first pass of shape (B, T) runs
    here, so that a compiler that fails shows now, before any state is touched.
    """
    why_not = "switched off" if wanted is False else device.compiler_missing(compute)
    if not parallel.least(int(not why_not), compute):  # the first pass takes all ranks
        why_not = why_not or "another rank has no compiler"
    if why_not:
        if wanted:
            raise UserError(f"--compile was asked for, but cannot be used: {why_not}")
        log(f"not compiled: {why_not}")
        return model
    start = time.monotonic()
    if compute.device_type == "cpu" and torch.get_num_threads() > 1:
        # Else compiled threads add to a row of a table in any order, and no run is repeated bit for bit.
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling new memory is for debugging, and slow.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    tokens = torch.zeros(shape, dtype=torch.long, device=compute.device)
    with torch.no_grad():  # what a model makes on its first pass, made while tracing, would trace the second anew
        model(tokens[:1])
    try:
        if compute.world_size > 1:
            for block in blocks:
                block.compile(dynamic=False)
            fast: Any = model
        else:
            fast = torch.compile(model, dynamic=False)
        with memory.saving(tokens.numel(), compute):
            fast(tokens, tokens.clone(), "sum").backward()  # a clone: aliased arguments would compile another graph
    except Exception as failure:  # the edge to a foreign compiler, which raises anything; eager always works
        if memory.ran_out(failure):
            raise memory.advice(shape[0], shape[0]) from failure
        if wanted:
            raise
        warn(f"torch.compile failed, the run goes on uncompiled: {str(failure).splitlines()[0]}")
        fast = _uncompiled(model, blocks)
    for parameter in model.parameters():
        parameter.grad = None
    host.give_freed_memory_back()
    log(f"torch.compile: {time.monotonic() - start:.1f} s")
    return fast
