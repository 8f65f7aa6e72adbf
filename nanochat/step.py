"""One optimizer update: the sums over all ranks, and the safeguards against a single bad step.

The model call, the loss and backward() are in the training script:

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
from nanochat.common import tr
from nanochat.device import Compute, is_sharded, local
from nanochat.runtime import parallel
from nanochat.runtime.parallel import place_of
from nanochat.train.fit import memory

WINDOW = 128  # steps whose gradient norms a new norm is compared with
SIGMAS = 6.0
GROWTH_STEPS = 2000  # good steps after which the loss scale doubles


@dataclass(frozen=True)
class Outcome:
    """The result of one update: its loss and gradient norm, and whether it was skipped."""

    loss: float  # mean per target over all ranks, in nats unless the script sums something else
    grad_norm: float
    skipped: bool  # whether the parameters were left unchanged
    reason: str = "not finite"  # why the update was skipped
    figures: Mapping[str, float] = field(default_factory=dict)  # means per target


NO_UPDATE = Outcome(0.0, 0.0, skipped=False)  # the outcome of a step with nothing to learn from


# --- state that carries over between updates -----------------------------------------------------


@dataclass
class LossScale:
    """The factor that keeps fp16 gradients from underflowing; for other formats it is 1."""

    value: float = 1.0
    good_steps: int = 0
    growing: bool = False

    @staticmethod
    def start(compute: Compute, state: Mapping[str, Any]) -> "LossScale":
        """Return a new scale, or the scale that a checkpoint of the same format has saved."""
        if not compute.scaler:
            return LossScale()
        fresh = LossScale(65536.0, growing=True)
        saved = state.get("scale", {})
        if saved == LossScale().state():  # the run had another format, which needs no scale
            return fresh
        return replace(fresh, **saved)

    def state(self) -> dict[str, float]:
        """Return the values that a checkpoint keeps."""
        return {"value": self.value, "good_steps": self.good_steps}

    def update(self, finite: bool) -> None:
        """Halve the scale after an overflow, and double it after 2,000 steps in a row without one.

        This is the rule of torch's GradScaler. A scale that is not `growing` stays as it is.
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
    """Detects gradient spikes: norms more than six sigma above the mean of the last 128 norms.

    The norm is computed over all ranks, so all ranks decide alike. A spike is itself added to the
    128 norms. If gradients jump to a new level and stay there, about four spikes raise mean and
    sigma enough for training to continue.
    """

    norms: list[float] = field(default_factory=list)

    @staticmethod
    def start(state: Mapping[str, Any]) -> "Spikes":
        """Return a detector without norms, or with the norms that a checkpoint has saved."""
        return Spikes(list(state.get("norms", [])))

    def is_spike(self, norm: float) -> bool:
        """Return whether a finite norm is a spike, and remember the norm.

        Until 128 norms are known, no norm is a spike.
        """
        full = len(self.norms) == WINDOW
        spike = full and norm > fmean(self.norms) + SIGMAS * pstdev(self.norms)
        self.norms = [*self.norms[-(WINDOW - 1) :], norm]
        return spike

    def __post_init__(self) -> None:
        assert all(map(math.isfinite, self.norms)) and len(self.norms) <= WINDOW


@dataclass
class Safeguards:
    """The loss scale and the spike detector of a run, which are saved in checkpoints."""

    scale: LossScale = field(default_factory=LossScale)
    spikes: Spikes | None = field(default_factory=Spikes)  # None: no step counts as a spike

    @staticmethod
    def start(compute: Compute, state: Mapping[str, Any]) -> "Safeguards":
        """Return new safeguards, or the safeguards that a checkpoint has saved."""
        return Safeguards(LossScale.start(compute, state), Spikes.start(state))

    def state(self) -> dict[str, Any]:
        """Return the values that a checkpoint keeps."""
        norms = self.spikes.norms if self.spikes is not None else []
        return {"scale": self.scale.state(), "norms": norms}


# --- the update ----------------------------------------------------------------------------------


class Optimizers(Protocol):
    """The optimizers that an update steps (Protocol)."""

    def zero_grad(self) -> None:
        """Discard all gradients."""
        ...

    def step(self) -> None:
        """Update all parameters from their gradients."""
        ...


def unmarked(phase: str) -> None:
    """Do nothing; this is the `mark` of an update that is not profiled."""


@dataclass(frozen=True)
class _Totals:
    """The sums of one step over all ranks."""

    grad_square: float
    overflows: float  # number of overflows on devices that saturate instead of giving infinity
    loss: float
    figures: tuple[float, ...]

    @property
    def finite(self) -> bool:
        """True if the loss and all gradients are finite and nothing overflowed."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_square) and not self.overflows


class Update:
    """One optimizer update, as a context manager that discards old gradients when entered.

    The loss is divided by the number of targets of the whole step over all ranks, so that neither
    the split into passes nor the number of ranks changes the gradient. If memory runs out inside
    the context, a UserError says what to change.
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
        """Set up the update; nothing is changed yet.

        `num_targets` counts the targets of all ranks and passes. `figures` names the quantities
        that are averaged over the targets in addition to the loss. `mark` is called with the name
        of each part of the step as it begins.
        """
        self.model = model
        self.optimizers = optimizers
        self.safeguards = safeguards
        self.num_targets = max(num_targets, 1)
        self.compute = compute
        self.mark = mark
        self._figures = tuple(figures)
        self._pass_rows: list[int] = []
        # Sums of the loss and of every figure, in fp32 on the device, so that no pass waits.
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
        """The factor on the summed loss of a pass before backward().

        It divides by the number of targets and applies the loss scale. FSDP averages gradients over
        ranks, but every rank holds its part of one sum, so the factor also undoes that average.
        """
        return self.safeguards.scale.value * self.compute.world_size / self.num_targets

    def passes(self, micro_batches: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tensors of each pass on the device.

        Ranks exchange gradients in the last pass only, except with --shard=full.
        """
        self._pass_rows = [len(batch[0]) for batch in micro_batches]
        for number, batch in enumerate(micro_batches, 1):
            self.mark("forward")
            parallel.sync_gradients(self.model, last=number == len(micro_batches))
            yield tuple(device.to_device(tensor, self.compute) for tensor in batch)

    def add(self, loss: Tensor, figures: Tensor | None = None) -> None:
        """Add the sums of losses () and figures (F,) of a pass, before its backward() runs."""
        self.mark("backward")
        self._sums[0].add_(loss.detach())  # += would copy the sum once more
        if figures is not None:
            self._sums[1:].add_(figures.detach())

    def step(self) -> Outcome:
        """Step the optimizers unless the step must be skipped, and return the outcome.

        Call this once every pass has been added and its backward() has run. The step is skipped on
        all ranks if the loss or a gradient is not finite or has overflowed, or if the norm of the
        gradients is a spike.
        """
        parallel.average_rows(self.model, self.compute)
        self.mark("gradient norm")
        parameters = [
            parameter for parameter in self.model.parameters() if parameter.grad is not None
        ]
        gradients = [_gradient_values(parameter) for parameter in parameters]
        totals = self._totals(parameters, gradients)
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

    def _totals(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> _Totals:
        """Return the sums over all ranks.

        This is the one place in a step where the host waits for the device.
        """
        squares = self.compute.operations.square_sums(gradients)
        overflows = device.overflows(self.compute)
        sizes = [len(squares), len(self._sums), len(overflows)]
        on_host = torch.cat((squares, self._sums, *overflows)).cpu().double()
        squares, sums, overflow_flags = on_host.split(sizes)
        # Ranks that hold the same gradient would count it more than once in the total. Every sharded
        # tensor has the same number of copies.
        replicas = next((place_of(p).replicas for p in parameters if is_sharded(p)), 1)
        copies = [replicas if is_sharded(p) else self.compute.world_size for p in parameters]
        grad_square = float((squares / torch.tensor(copies)).sum())
        own_sums = [grad_square, float(overflow_flags.sum()), *sums.tolist()]
        grad_square, overflow_count, loss, *figures = parallel.total(own_sums, self.compute)
        return _Totals(grad_square, overflow_count, loss, tuple(figures))

    def _judge(self, totals: _Totals) -> Outcome:
        """Return the outcome of the step: its figures, and whether it is skipped and why."""
        scale = self.safeguards.scale
        spikes = self.safeguards.spikes
        loss = totals.loss / self.num_targets
        grad_norm = math.sqrt(max(totals.grad_square, 0.0)) / scale.value
        means = [value / self.num_targets for value in totals.figures]
        figures = dict(zip(self._figures, means, strict=True))
        if totals.finite:
            if spikes is None or not spikes.is_spike(grad_norm):
                return Outcome(loss, grad_norm, skipped=False, figures=figures)
            reason = tr("more than six sigma above the last {window}", window=WINDOW)
            return Outcome(loss, grad_norm, True, reason, figures)
        reason = tr("not finite")
        if scale.growing:  # a scale that is too large explains it; the next step tries half of it
            reason = tr(
                "fp16 overflowed at a loss scale of {scale:g}, which is now {half:g}",
                scale=scale.value,
                half=scale.value / 2,
            )
        return Outcome(loss, grad_norm, True, reason, figures)


def _gradient_values(parameter: Tensor) -> Tensor:
    """Return the values of this rank's part of a parameter's gradient.

    A sparse gradient is coalesced, and only the rows that it holds are returned.
    """
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return local(parameter.grad)
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()
