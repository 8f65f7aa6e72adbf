"""One optimizer update: what all ranks must agree on, and what keeps one bad step from spoiling a
run.

The model call, the loss and backward() stand in the training script:

    with Update(model, optimizers, safeguards, batch.num_targets, compute) as update:
        for idx, targets in update.passes(batch.micro_batches):
            loss = model(idx, targets, reduction="sum")
            update.add(loss)
            (loss * update.factor).backward()
        outcome = update.step()
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from nanochat import device
from nanochat.device import Compute, is_sharded, local
from nanochat.runtime import parallel
from nanochat.runtime.parallel import place_of
from nanochat.train.fit import memory

WINDOW = 128  # steps whose gradient norms a new norm is compared with
SIGMAS = 6.0
SPIKE = "more than six sigma above the last 128"
GROWTH_STEPS = 2000  # good steps after which the loss scale doubles


@dataclass(frozen=True)
class Outcome:
    """What one update did."""

    loss: float  # mean per target over all ranks: nats, unless the script sums something else
    grad_norm: float
    skipped: bool  # nothing was changed
    reason: str = "not finite"  # why the update was skipped
    figures: Mapping[str, float] = field(default_factory=dict)  # means per target


NO_UPDATE = Outcome(0.0, 0.0, skipped=False)  # the outcome of a step that had nothing to learn from


# --- what one update hands to the next -----------------------------------------------------------


@dataclass
class LossScale:
    """The factor that lifts fp16 gradients out of underflow. For other formats the factor is 1."""

    value: float = 1.0
    good_steps: int = 0
    growing: bool = False

    @staticmethod
    def start(compute: Compute, state: Mapping[str, Any]) -> "LossScale":
        """Return a new scale, or the one that a checkpoint's state holds."""
        if not compute.scaler:
            return LossScale()
        fresh = LossScale(65536.0, growing=True)
        return replace(fresh, **state.get("scale", {}))

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps of the scale."""
        return {"value": self.value, "good_steps": self.good_steps}

    def update(self, finite: bool) -> None:
        """Halve the scale after an overflow, and double it after 2,000 good steps.

        This is the rule of torch's GradScaler.
        """
        if not self.growing:
            return
        if not finite:
            self.value /= 2
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value *= 2
            self.good_steps = 0


@dataclass
class Spikes:
    """Recognises a sudden gradient: a norm more than six sigma above the mean of the last 128.

    The norm is computed over all ranks, so all ranks decide alike. A spike joins the window. If
    gradients stay large, four spikes widen the window enough for training to continue, so ten
    skipped steps in a row, which stop a run, cannot all be spikes.
    """

    norms: list[float] = field(default_factory=list)

    @staticmethod
    def start(state: Mapping[str, Any]) -> "Spikes":
        """Return an empty window, or the one that a checkpoint's state holds."""
        return Spikes(list(state.get("norms", [])))

    def is_spike(self, norm: float) -> bool:
        """Return whether a finite norm is a spike, and add the norm to the window.

        Until the window is full, no norm is a spike.
        """
        full = len(self.norms) == WINDOW
        spike = full and norm > fmean(self.norms) + SIGMAS * pstdev(self.norms)
        self.norms = [*self.norms[-(WINDOW - 1) :], norm]
        return spike

    def __post_init__(self) -> None:
        assert all(map(math.isfinite, self.norms)) and len(self.norms) <= WINDOW


@dataclass
class Safeguards:
    """What protects a run from one bad step; checkpoints keep both parts."""

    scale: LossScale = field(default_factory=LossScale)
    spikes: Spikes | None = field(default_factory=Spikes)  # None: no step counts as a spike

    @staticmethod
    def start(compute: Compute, state: Mapping[str, Any]) -> "Safeguards":
        """Return new safeguards, or those that a checkpoint's state holds."""
        return Safeguards(LossScale.start(compute, state), Spikes.start(state))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the safeguards."""
        norms = self.spikes.norms if self.spikes is not None else []
        return {"scale": self.scale.state(), "norms": norms}


# --- the update ----------------------------------------------------------------------------------


class Optimizers(Protocol):
    """What an update asks of optimizers."""

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...

    def step(self) -> None:
        """Update all parameters from their gradients."""
        ...


def unmarked(phase: str) -> None:
    """Do nothing: the `mark` of an update that nobody profiles."""


@dataclass(frozen=True)
class _Totals:
    """Sums of a step over all ranks."""

    grad_square: float
    overflows: float  # how often devices that saturate instead of overflowing did so
    loss: float
    figures: tuple[float, ...]

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_square) and not self.overflows


class Update:
    """One optimizer update, as a context: gradients are dropped at its beginning.

    The loss is divided by the number of targets of the whole step over all ranks, so that neither
    the split into passes nor the number of ranks changes the gradient. Where memory runs out inside
    the context, a UserError names the next batch size to try.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        safeguards: Safeguards,
        num_targets: int,
        compute: Compute,
        figures: Sequence[str] = (),
        mark: Callable[[str], None] = unmarked,
    ):
        """`num_targets` counts the targets of all ranks and passes. `figures` names what is
        averaged over the targets beside the loss. `mark` is called with the part of the step that
        begins.
        """
        self.model = model
        self.optimizers = optimizers
        self.safeguards = safeguards
        self.num_targets = max(num_targets, 1)
        self.compute = compute
        self.mark = mark
        self._figures = tuple(figures)
        self._pass_rows: list[int] = []
        # of the loss and of every figure; fp32 on the device, so that no pass waits for the host
        self._sums = torch.zeros(1 + len(figures), dtype=torch.float32, device=compute.device)

    def __enter__(self) -> "Update":
        self.optimizers.zero_grad()
        device.clear_overflow(self.compute)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if failure is not None and memory.ran_out(failure):
            raise memory.advice(max(self._pass_rows, default=1), sum(self._pass_rows)) from failure

    @property
    def factor(self) -> float:
        """What a pass's sum of losses is multiplied by before backward().

        FSDP averages gradients over ranks, but every rank holds its part of one sum, so the factor
        undoes that average.
        """
        return self.safeguards.scale.value * self.compute.world_size / self.num_targets

    def passes(self, micro_batches: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tensors of each pass on the device; ranks exchange gradients in the last pass."""
        self._pass_rows = [len(batch[0]) for batch in micro_batches]
        for number, batch in enumerate(micro_batches, 1):
            self.mark("forward")
            parallel.sync_gradients(self.model, last=number == len(micro_batches))
            yield tuple(device.to_device(tensor, self.compute) for tensor in batch)

    def add(self, loss: Tensor, figures: Tensor | None = None) -> None:
        """Add up what a pass gave, before its backward(): a sum of losses (), of figures (F,)."""
        self.mark("backward")
        self._sums[0].add_(loss.detach())  # += would copy the sum once more
        if figures is not None:
            self._sums[1:].add_(figures.detach())

    def step(self) -> Outcome:
        """Step the optimizers, once every pass has been added and its backward() has run.

        The step is skipped on all ranks if the loss or a gradient is not finite, or if the norm of
        the gradients is a spike.
        """
        parallel.average_rows(self.model, self.compute)
        self.mark("gradient norm")
        moved = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        gradients = [_gradient_values(parameter) for parameter in moved]
        totals = self._totals(moved, gradients)
        self.mark("optimizer")
        outcome = self._judge(totals)
        scale = self.safeguards.scale
        if not outcome.skipped:
            if scale.value != 1.0:
                torch._foreach_mul_(gradients, 1 / scale.value)  # pyright: ignore[reportPrivateImportUsage]
            self.optimizers.step()
        scale.update(totals.finite)
        self.optimizers.zero_grad()
        return outcome

    def _totals(self, moved: Sequence[Tensor], gradients: Sequence[Tensor]) -> _Totals:
        """Sum over all ranks; here the host waits for the device, once in a step."""
        squares = self.compute.operations.square_sums(gradients)
        on_device = torch.cat((squares, self._sums, *device.overflows(self.compute)))
        on_host = on_device.cpu().double()
        sizes = [len(gradients), len(self._sums)]
        squares, sums, overflows = on_host.split([*sizes, len(on_host) - sum(sizes)])
        # how many ranks hold the same gradients; whatever is sharded has as many replicas
        replicas = next((place_of(p).replicas for p in moved if is_sharded(p)), 1)
        copies = [replicas if is_sharded(p) else self.compute.world_size for p in moved]
        grad_square = float((squares / torch.tensor(copies)).sum())
        values = [grad_square, float(overflows.sum()), *sums.tolist()]
        grad_square, overflow_count, loss, *figures = parallel.total(values, self.compute)
        return _Totals(grad_square, overflow_count, loss, tuple(figures))

    def _judge(self, totals: _Totals) -> Outcome:
        """Return the outcome of the step, by sums over all ranks: whether it is skipped."""
        scale = self.safeguards.scale
        spikes = self.safeguards.spikes
        loss = totals.loss / self.num_targets
        grad_norm = math.sqrt(max(totals.grad_square, 0.0)) / scale.value
        means = [value / self.num_targets for value in totals.figures]
        figures = dict(zip(self._figures, means, strict=True))
        if totals.finite:
            spike = spikes is not None and spikes.is_spike(grad_norm)
            return Outcome(loss, grad_norm, spike, SPIKE if spike else "not finite", figures)
        reason = "not finite"
        if scale.growing:  # a wrong scale explains it: the next step tries half of the scale
            reason = (
                f"fp16 overflowed at a loss scale of {scale.value:g}, "
                f"which is now {scale.value / 2:g}"
            )
        return Outcome(loss, grad_norm, True, reason, figures)


def _gradient_values(parameter: Tensor) -> Tensor:
    """Return what this rank holds of a gradient.

    A sparse gradient is coalesced here; of it, these are the rows that are not zero.
    """
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return local(parameter.grad)
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()
