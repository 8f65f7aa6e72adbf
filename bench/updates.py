"""An optimizer update as the training scripts make it: benchmarks and tests train with this one."""

from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torch import Tensor

from nanochat.context import Packed
from nanochat.device import Compute
from nanochat.rl.trees import model_arguments
from nanochat.step import LossScale, Outcome, Safeguards, Spikes, Update, unmarked

Loss = Callable[..., tuple[Tensor, Tensor | None]]


def summed_loss(
    model: nn.Module, idx: Tensor, targets: Tensor, **extras: Tensor
) -> tuple[Tensor, None]:
    """Return the sum of a pass's losses, and no other figures."""
    if "documents" in extras:
        context = Packed(extras["documents"])
        return model(idx, targets, reduction="sum", context=context), None
    return model(idx, targets, reduction="sum", **model_arguments(extras)), None


def update(
    model: nn.Module,
    optimizers: Any,
    data: Any,  # such as dataloader.Step: what one rank trains on in a step
    scale: LossScale,
    compute: Compute,
    spikes: Spikes | None = None,
    mark: Callable[[str], None] = unmarked,
    loss: Loss | None = None,
) -> Outcome:
    """Run forward, backward and one optimizer step over the micro-batches of a step.

    `loss` returns the sums of a pass: that of its loss, and those of the figures it names. By
    default it sums the loss of the model, without figures.
    """
    figures = getattr(loss, "figures", ())
    loss = loss or summed_loss
    safeguards = Safeguards(scale, spikes)
    with Update(model, optimizers, safeguards, data.num_targets, compute, figures, mark) as step:
        for idx, targets, *others in step.passes(data.micro_batches):
            extras = dict(zip(data.extras, others, strict=True))
            loss_sum, figure_sums = loss(model, idx, targets, **extras)
            step.add(loss_sum, figure_sums)
            (loss_sum * step.factor).backward()
        return step.step()
