"""Implements --graphs: captures a training pass once, and lets the device replay it as one launch.

A graph always uses the memory that it was captured with, so inputs are copied into that memory and
every pass must have the same shape. The trained model is the same with and without graphs.
generate/graphs.py has the graphs that the engine uses for generation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.common import UserError, log, tr
from nanochat.device import Compute
from nanochat.platforms.base import Platform


def check(compute: Compute, compile: bool | None = None) -> None:
    """Raise UserError if training passes cannot be captured.

    That is so on some devices, with more than one rank, and together with --compile (exit code 2).
    """
    if compile:
        raise UserError(
            tr(
                "--graphs and --compile were both asked for, and a pass is either captured or "
                "compiled. Leave one of them out."
            ),
            exit_code=2,
        )
    check_device(compute)
    if compute.world_size > 1:
        raise UserError(
            tr(
                "--graphs was asked for with {ranks} ranks, but collectives cannot be captured: "
                "between passes the parameters of a sharded model are freed and gathered again, "
                "and a graph needs them where they were. Leave --graphs out, or train on one "
                "device (NPROC_PER_NODE=1).",
                ranks=compute.world_size,
            )
        )


def check_device(compute: Compute) -> None:
    """Raise UserError if the device cannot capture graphs."""
    why = compute.platform.graphs_missing()
    if why:
        raise UserError(
            tr("--graphs was asked for, but cannot be used: {why}. Leave --graphs out.", why=why)
        )


def for_replies(requested: bool | None, compute: Compute) -> Platform | None:
    """Return the platform that replays decoding steps as graphs, or None to replay nothing.

    `requested` is the value of --graphs. If it is None, steps are replayed if that is faster on
    this device and there is only one rank. Raises UserError if --graphs was given but the device
    cannot capture graphs.
    """
    if requested is None:
        is_faster = compute.platform.replays_replies and compute.world_size == 1
        return compute.platform if is_faster else None
    if requested:
        check_device(compute)
        return compute.platform
    return None


class _Pass(nn.Module):
    """A model's training pass that takes only tensors, as capturing requires."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model(inputs, targets, "sum")


class GraphedModel(nn.Module):
    """Stands in for a model in training by replaying its captured forward and backward passes.

    The gradients of a pass lie in the graph's memory, which the next pass overwrites. The gradients
    of a step's first pass are therefore copied before its second pass.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, int], compute: Compute):
        """Capture a pass of `shape` (B, T) after a few warm-up passes.

        The model's parameters are left unchanged.
        """
        super().__init__()
        self.shape = shape
        self.model = _Pass(model)
        self._copied: set[int] = set()  # addresses of gradients outside the graph
        tokens = torch.zeros(shape, dtype=torch.long, device=compute.device)
        self._replay = compute.platform.graphed(self.model, (tokens, tokens.clone()))
        model.zero_grad()
        log(
            tr(
                "graphs: a pass of {rows} x {row_tokens} tokens was captured, forward and backward",
                rows=shape[0],
                row_tokens=shape[1],
            )
        )

    def forward(self, inputs: Tensor, targets: Tensor, reduction: str, **extras: Tensor) -> Tensor:
        """Return the sum of the losses, a tensor (), as model(inputs, targets, "sum") does.

        Raises UserError if the shape or the arguments are not those that were captured.
        """
        shape = tuple(inputs.shape)
        if reduction != "sum" or extras or shape != self.shape:
            raise UserError(
                tr(
                    "--graphs needs passes of one shape, without {extras}: {captured} was captured, "
                    "and a pass of {shape} came. Leave --graphs out.",
                    extras=" or ".join(extras) or "weights",
                    captured=self.shape,
                    shape=shape,
                )
            )
        self._copy_gradients()
        return self._replay(inputs, targets)

    def _copy_gradients(self) -> None:
        """Copy the gradients that still lie in the graph's memory to memory of their own."""
        parameters = []
        grads: list[Any] = []
        for parameter in self.parameters():
            grad = parameter.grad
            if grad is not None and grad.data_ptr() not in self._copied:
                parameters.append(parameter)
                grads.append(grad)
        if not grads:
            return
        copies = torch._foreach_mul(grads, 1.0)  # pyright: ignore[reportPrivateImportUsage]
        for parameter, copy in zip(parameters, copies, strict=True):
            parameter.grad = copy
        self._copied = {copy.data_ptr() for copy in copies}


class StepGraph:
    """A function of gradients and learning rates that is captured once and replayed as one launch.

    Each replay first copies its gradients and rates into the memory that the graph reads.
    """

    def __init__(
        self,
        platform: Platform,
        function: Callable[[Sequence[Tensor], Sequence[Any]], None],
    ):
        """Prepare to capture `function` on `platform`.

        The first call runs the function normally, as is necessary before a capture. The second call
        captures and replays it.
        """
        self._platform = platform
        self._function = function
        self._has_run = False
        self._gradients: list[Tensor] = []
        self._rates = torch.empty(0)
        self._host_rates = torch.empty(0)
        self._replay: Callable[[], None] | None = None

    def __call__(self, gradients: Sequence[Tensor], rates: Sequence[float]) -> None:
        """Run the function; from the second call on, the rates reach it as tensors of shape ()."""
        if not self._has_run:
            self._function(gradients, rates)
            self._has_run = True
            return
        if self._replay is None:
            self._gradients = [gradient.clone() for gradient in gradients]
            self._rates = torch.tensor(rates, device=gradients[0].device)
            self._replay = self._platform.captured(self._captured_call)
        else:
            torch._foreach_copy_(self._gradients, list(gradients))  # pyright: ignore[reportPrivateImportUsage]
            # an attribute, since the copy may still be under way
            self._host_rates = torch.tensor(rates).pin_memory()
            self._rates.copy_(self._host_rates, non_blocking=True)
        self._replay()

    def _captured_call(self) -> None:
        self._function(self._gradients, self._rates.unbind())
