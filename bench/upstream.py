"""A training step of karpathy/nanochat, with the calls that its base_train makes.

Only processes whose `nanochat` is a checkout of upstream, or of a port of it, import this file.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Learning rates of its base_train by default.
RATES = {
    "unembedding_lr": 0.008,
    "embedding_lr": 0.3,
    "matrix_lr": 0.02,
    "scalar_lr": 0.5,
}


class Upstream:
    """A model of upstream and its optimizer."""

    def __init__(self, shape: dict[str, Any], device: torch.device, **options: float):
        """Make them on a device; the options are those of upstream's setup_optimizer."""
        from nanochat.gpt import GPT, GPTConfig

        config: Any = GPTConfig  # upstream's class, which the type checker cannot see
        with torch.device("meta"):
            model: Any = GPT(config(**shape))
        model.to_empty(device=device)
        model.init_weights()
        self.model = model
        self.device = device
        self.optimizer = model.setup_optimizer(**options)
        self.passes = model  # what computes a pass: the model, or the compiled model

    def compile(self) -> None:
        """Compile the model as base_train does."""
        self.passes = torch.compile(self.model, dynamic=False)

    def backward(self, passes: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute the gradients of a step, and return the loss of its last pass in nats."""
        loss = torch.zeros(())
        for inputs, targets in passes:
            inputs = inputs.to(self.device, non_blocking=True)
            loss = self.passes(inputs, targets.to(self.device, non_blocking=True))
            (loss / len(passes)).backward()
        return loss.detach()

    def step(self, passes: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Make one update, and return the loss of its last pass in nats."""
        loss = self.backward(passes)
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss.item()
