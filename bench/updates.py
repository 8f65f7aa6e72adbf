"""An optimizer update as the training scripts make it, for benches that measure it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.nn as nn
from torch import Tensor

from nanochat.context import model_arguments
from nanochat.device import Compute
from nanochat.step import Optimizers, Outcome, Safeguards, Update, unmarked


class Data(Protocol):
    """What one rank trains on in a step, such as dataloader.Step."""

    @property
    def num_targets(self) -> int:
        """The targets of all ranks."""
        ...

    @property
    def micro_batches(self) -> Sequence[tuple[Tensor, ...]]:
        """Inputs, targets and the extras of each pass."""
        ...

    @property
    def extras(self) -> tuple[str, ...]:
        """The names of the tensors after inputs and targets."""
        ...


def update(
    model: nn.Module,
    optimizers: Optimizers,
    data: Data,
    safeguards: Safeguards,
    compute: Compute,
    mark: Callable[[str], None] = unmarked,
) -> Outcome:
    """Run forward, backward and one optimizer step over the micro-batches of a step."""
    with Update(model, optimizers, safeguards, data.num_targets, compute, mark=mark) as step:
        for idx, targets, *others in step.passes(data.micro_batches):
            extras = dict(zip(data.extras, others, strict=True))
            loss = model(idx, targets, reduction="sum", **model_arguments(extras))
            step.add(loss)
            (loss * step.factor).backward()
        return step.step()
