"""An optimizer update as the training scripts make it, for tests of what it computes."""

from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torch import Tensor

from nanochat.context import model_arguments
from nanochat.device import Compute
from nanochat.step import LossScale, Outcome, Safeguards, Spikes, Update, unmarked

Loss = Callable[..., tuple[Tensor, Tensor | None]]


def summed(model: nn.Module, idx: Tensor, targets: Tensor, **extras: Tensor) -> tuple[Tensor, None]:
    return model(idx, targets, reduction="sum", **model_arguments(extras)), None


def update(
    model: nn.Module, optimizers: Any, data: Any, scale: LossScale, compute: Compute,
    spikes: Spikes | None = None, mark: Callable[[str], None] = unmarked, loss: Loss | None = None,
) -> Outcome:  # fmt: skip
    """One update over data.micro_batches; `loss` gives the sums of the loss and of its figures."""
    figures = getattr(loss, "figures", ())
    loss = loss or summed
    safeguards = Safeguards(scale, spikes)
    with Update(model, optimizers, safeguards, data.num_targets, compute, figures, mark) as step:
        for idx, targets, *others in step.passes(data.micro_batches):
            extras = dict(zip(data.extras, others, strict=True))
            loss_sum, figure_sums = loss(model, idx, targets, **extras)
            step.add(loss_sum, figure_sums)
            (loss_sum * step.factor).backward()
        return step.step()
