"""One optimizer update from a step's micro-batches, what keeps one bad step from spoiling a run, and the mix of a run's
end with its start."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from nanochat import device
from nanochat.common import UserError
from nanochat.context import model_arguments
from nanochat.device import Compute, is_sharded, local
from nanochat.runtime import parallel, signals
from nanochat.runtime.parallel import place_of
from nanochat.train.fit import memory
from nanochat.train.optim import Optimizers

WINDOW = 128  # steps whose gradient norms a new one is compared with
SIGMAS = 6.0
SPIKE = "more than six sigma above the last 128"


class MicroBatches(Protocol):
    """What one step trains on: dataloader.Step, or RL's Rollouts."""

    @property
    def num_targets(self) -> int: ...

    @property
    def micro_batches(self) -> Sequence[tuple[Tensor, ...]]: ...

    @property
    def extras(self) -> tuple[str, ...]:
        """What a micro-batch holds after inputs and targets, as the model's forward names it."""
        ...


class Objective(Protocol):
    """What an update minimises."""

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of the figures that are measured beside the loss."""
        ...

    def __call__(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, **extras: Tensor
    ) -> Tensor:
        """Sums over the targets of a micro-batch: of the loss, with gradient, and of every figure, (1 + figures,)."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of every target, as the model itself sums it."""

    figures: tuple[str, ...] = ()

    def __call__(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, **extras: Tensor
    ) -> Tensor:
        return model(inputs, targets, "sum", **model_arguments(extras))[None]


@dataclass(frozen=True)
class Outcome:
    """What one step did."""

    loss: float  # mean per target over all ranks: nats, unless the objective says otherwise
    grad_norm: float
    skipped: bool  # nothing was changed
    reason: str = "not finite"  # why the step was skipped
    figures: Mapping[str, float] = field(
        default_factory=dict
    )  # the objective's own, each a mean per target


NO_UPDATE = Outcome(0.0, 0.0, skipped=False)  # the outcome of a step that had nothing to learn from


@dataclass
class LossScale:
    """The factor that lifts fp16 gradients out of underflow. For other formats the factor is always 1."""

    value: float = 1.0
    good_steps: int = 0
    growing: bool = False

    @staticmethod
    def start(compute: Compute, state: Mapping[str, Any]) -> "LossScale":
        """A new scale, or the one that a checkpoint's state holds."""
        fresh = LossScale(65536.0, 0, True) if compute.scaler else LossScale()
        return replace(fresh, **state["scale"]) if "scale" in state and compute.scaler else fresh

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of the scale."""
        return {"value": self.value, "good_steps": self.good_steps}

    def update(self, finite: bool) -> None:
        """Halve the scale after an overflow and double it after 2,000 good steps, as torch's GradScaler does."""
        if not self.growing:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == 2000:
            self.value, self.good_steps = self.value * 2, 0


@dataclass
class Spikes:
    """Recognises a sudden gradient: a norm more than six sigma above the mean of the last 128 norms.

    The norm is computed over all ranks, so all ranks decide alike. A spike joins the window. If gradients stay large,
    four spikes widen the window enough for training to continue, so ten skipped steps in a row, which stop a run,
    cannot all be spikes.
    """

    norms: list[float] = field(default_factory=list)

    @staticmethod
    def start(state: Mapping[str, Any]) -> "Spikes":
        """An empty window, or the one that a checkpoint's state holds."""
        return Spikes(list(state.get("norms", [])))

    def found(self, norm: float) -> bool:
        """Whether a finite norm is a spike; the norm joins the window. Until the window is full, no norm is a spike."""
        full = len(self.norms) == WINDOW
        spike = full and norm > fmean(self.norms) + SIGMAS * pstdev(self.norms)
        self.norms = [*self.norms[-(WINDOW - 1) :], norm]
        return spike

    def __post_init__(self) -> None:
        assert all(map(math.isfinite, self.norms)) and len(self.norms) <= WINDOW


def unmarked(part: str) -> None:
    """The `mark` of an update that nobody profiles."""


def update(
    model: nn.Module,
    optimizers: Optimizers,
    step: MicroBatches,
    scale: LossScale,
    compute: Compute,
    spikes: Spikes | None = None,
    mark: Callable[[str], None] = unmarked,
    objective: Objective = CrossEntropy(),
) -> Outcome:
    """Run forward, backward and one optimizer step over a step's micro-batches.

    The whole step is skipped on all ranks if its loss or gradients are not finite, or if `spikes` finds a spike. The
    loss is divided by the targets of the whole step over all ranks, so that neither the split into micro-batches nor
    the number of ranks changes the gradient. `mark` is told which part of the step begins. Where memory runs out, a
    UserError names the next batch size to try.
    """
    rows = [len(batch[0]) for batch in step.micro_batches]
    with memory.advising(max(rows, default=1), sum(rows)):
        return _update(model, optimizers, step, scale, compute, spikes, mark, objective)


def forward(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    extras: tuple[str, ...],
    objective: Objective,
    compute: Compute,
) -> Tensor:
    """The objective's sums over a micro-batch, which may lie on the host; `extras` names what follows the targets."""
    inputs, targets, *more = (device.to_device(tensor, compute) for tensor in batch)
    return objective(model, inputs, targets, **dict(zip(extras, more, strict=True)))


def _numbers(parameter: Tensor) -> Tensor:
    """What this rank holds of a gradient; of a sparse one, which is coalesced here, the rows that are not zero."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return local(parameter.grad)
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()


def _update(
    model: nn.Module,
    optimizers: Optimizers,
    step: MicroBatches,
    scale: LossScale,
    compute: Compute,
    spikes: Spikes | None,
    mark: Callable[[str], None],
    objective: Objective,
) -> Outcome:
    optimizers.zero_grad()
    device.clear_overflow(compute)
    # FSDP averages gradients over ranks. Every rank holds its part of the same sum, so the average is undone here.
    factor = scale.value * compute.world_size / max(step.num_targets, 1)
    batches = step.micro_batches
    sums = torch.zeros(1 + len(objective.figures), dtype=torch.float32, device=compute.device)
    for number, batch in enumerate(batches):
        mark("forward")
        parallel.sync_gradients(model, number == len(batches) - 1)
        found = forward(model, batch, step.extras, objective, compute)
        mark("backward")
        # one sum is squeezed, because the gradient of found[0] would first be written into zeros of its size
        (found.squeeze(0) if len(found) == 1 else found[0]).mul(factor).backward()
        sums += found.detach()
    parallel.average_rows(model, compute)
    mark("gradient norm")
    moved = [p for p in model.parameters() if p.grad is not None]
    gradients = [_numbers(p) for p in moved]
    figures = torch.cat(
        (compute.operations.square_sums(gradients), sums, *device.overflows(compute))
    )
    host, count = (
        figures.cpu().double(),
        len(gradients),
    )  # the one time that the host waits for the device
    squares, summed, bad = host.split([count, len(sums), len(host) - count - len(sums)])
    # how many ranks hold the same gradients; whatever is sharded has as many replicas
    replicas = next((place_of(p).replicas for p in moved if is_sharded(p)), 1)
    copies = torch.tensor([replicas if is_sharded(p) else compute.world_size for p in moved])
    norm_square, overflows, loss_total, *others = parallel.total(
        [float((squares / copies).sum()), float(bad.sum()), *summed.tolist()], compute
    )
    mean, norm = (
        loss_total / max(step.num_targets, 1),
        math.sqrt(max(norm_square, 0.0)) / scale.value,
    )
    mark("optimizer")
    finite = math.isfinite(mean) and math.isfinite(norm_square) and not overflows
    spike = finite and spikes is not None and spikes.found(norm)
    if finite and not spike:
        if scale.value != 1.0:
            torch._foreach_mul_(gradients, 1 / scale.value)  # pyright: ignore[reportPrivateImportUsage]
        optimizers.step()
    reason = SPIKE if spike else "not finite"
    if scale.growing and not finite:  # which a wrong scale explains: the next step tries half of it
        reason = (
            f"fp16 overflowed at a loss scale of {scale.value:g}, which is now {scale.value / 2:g}"
        )
    scale.update(finite)
    optimizers.zero_grad()
    means = {
        name: value / max(step.num_targets, 1)
        for name, value in zip(objective.figures, others, strict=True)
    }
    return Outcome(mean, norm, spike or not finite, reason, means)


@torch.no_grad()
def measure(
    objective: Objective, model: nn.Module, steps: Iterable[MicroBatches], compute: Compute
) -> dict[str, float]:
    """The means of an objective over all targets of `steps`: `loss`, and its figures by their names.

    Every rank must call it with the same number of steps, each with its own rows; all ranks get the same result.
    signals.Stopped if the run is told to stop.
    """
    sums, count = [torch.zeros(1 + len(objective.figures), device=compute.device)], 0
    for step in steps:
        signals.check(compute)
        count += step.num_targets
        for batch in step.micro_batches:
            inputs, targets, *more = (device.to_device(tensor, compute) for tensor in batch)
            sums.append(
                objective(model, inputs, targets, **dict(zip(step.extras, more, strict=True)))
            )
    on_host = torch.stack(sums).cpu().double()  # in this order, since NPUs have no float64
    totals = parallel.total(on_host.sum(dim=0).tolist(), compute)
    return {
        name: value / max(count, 1)
        for name, value in zip(("loss", *objective.figures), totals, strict=True)
    }


class Start:
    """The weights that a stage starts from, to mix the finished model with them: this rank's part, in memory.

    A model between both answers more questions in new wordings than either of them, and forgets less of what the start
    knew (WiSE-FT, Wortsman et al. 2022, arXiv:2109.01903; dev/LOG.md has the figures for TinyWorld).
    """

    def __init__(self, model: nn.Module, share: float):
        """`share` of the finished model is the start's. UserError (code 2) unless it is at least 0 and below 1."""
        if not 0 <= share < 1:
            raise UserError(f"--start_share must be at least 0 and below 1, got {share:g}", 2)
        self.model, self.share = model, share
        self._weights = (
            [local(parameter).detach().clone() for parameter in model.parameters()] if share else []
        )

    @torch.no_grad()
    def mix(self) -> None:
        """Move the model's weights towards the start's by the share; nothing happens if that is 0."""
        if self.share:
            for parameter, weight in zip(self.model.parameters(), self._weights, strict=True):
                local(parameter).lerp_(weight, self.share)
