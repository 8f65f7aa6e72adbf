"""Captured graphs: a sequence of operators that the device replays as one launch, in training with --graphs; those of
the engine are in generate/graphs.py.

A graph computes on the memory that it was captured with, so its inputs are copied in, and every pass must have one
shape. What is learned does not change.
"""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.common import UserError, log, tr
from nanochat.device import Compute
from nanochat.platforms.base import Platform


def check(compute: Compute, compile: bool | None = None) -> None:
    """UserError if passes cannot be captured on this device, with this number of ranks, or because of --compile."""
    if compile:
        raise UserError(
            tr(
                "--graphs and --compile were both asked for, and a pass is either captured or compiled. "
                "Leave one of them out."
            ),
            exit_code=2,
        )
    check_device(compute)
    if compute.world_size > 1:
        raise UserError(
            tr(
                "--graphs was asked for with {ranks} ranks, but collectives cannot be captured: between passes the "
                "parameters of a sharded model are freed and gathered again, and a graph needs them where they were. "
                "Leave --graphs out, or train on one device (NPROC_PER_NODE=1).",
                ranks=compute.world_size,
            )
        )


def check_device(compute: Compute) -> None:
    """UserError if the device captures no graphs."""
    if why := compute.platform.graphs_missing():
        raise UserError(
            tr("--graphs was asked for, but cannot be used: {why}. Leave --graphs out.", why=why)
        )


def for_replies(asked: bool | None, compute: Compute) -> Platform | None:
    """What replays the decoding steps of replies, if --graphs asks for it or, without --no-graphs, one device gains by
    it; None where every operator is launched by itself. UserError if --graphs cannot be used."""
    if asked:
        check_device(compute)
    gains = compute.platform.replays_replies and compute.world_size == 1
    return compute.platform if asked or (asked is None and gains) else None


class _Pass(nn.Module):
    """A model's training pass with tensors as its only arguments, as graphs want it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model(inputs, targets, "sum")


class GraphedModel(nn.Module):
    """A model for update(): called as the model is, it replays two graphs, one forward and one backward.

    The gradients of a pass lie in the graph's memory, which the next pass overwrites; so the first gradients of a step
    are copied before its second pass.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, int], compute: Compute):
        """Captures a pass of `shape` (B, T) after a few passes that warm up; the model is left unchanged."""
        super().__init__()
        self.shape = shape
        self.model = _Pass(model)
        self._kept: set[int] = set()  # addresses of gradients outside the graph
        tokens = torch.zeros(shape, dtype=torch.long, device=compute.device)
        self._replay = compute.platform.graphed(self.model, (tokens, tokens.clone()))
        model.zero_grad()
        log(f"graphs: a pass of {shape[0]} x {shape[1]} tokens was captured, forward and backward")

    def forward(self, inputs: Tensor, targets: Tensor, reduction: str, **extras: Tensor) -> Tensor:
        """The sum of losses, (), as model(inputs, targets, "sum") gives it."""
        if reduction != "sum" or extras or tuple(inputs.shape) != self.shape:
            raise UserError(
                f"--graphs needs passes of one shape, without {' or '.join(extras) or 'weights'}: {self.shape} was "
                f"captured, and a pass of {tuple(inputs.shape)} came. Leave --graphs out."
            )
        self._keep_gradients()
        return self._replay(inputs, targets)

    def _keep_gradients(self) -> None:
        """Move gradients that still lie in the graph's memory out of it."""
        held = [
            p
            for p in self.parameters()
            if p.grad is not None and p.grad.data_ptr() not in self._kept
        ]
        if not held:
            return
        grads: list[Any] = [parameter.grad for parameter in held]
        copies = torch._foreach_mul(grads, 1.0)  # pyright: ignore[reportPrivateImportUsage]
        for parameter, copy in zip(held, copies, strict=True):
            parameter.grad = copy
        self._kept = {copy.data_ptr() for copy in copies}
