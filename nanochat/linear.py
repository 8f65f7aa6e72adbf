"""Linear layers and embedding tables, whose parameters are fp32 masters in training.

A Linear has two hooks: `multiply` replaces the matrix product, and `adapter` returns what is added
to it. A device, a number format or a LoRA sets a hook, and the layers of the models stay as they
are.
"""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# x (..., inputs), weight (outputs, inputs) -> x W^T. Where torch.compile cannot read the function,
# its attribute `untraceable` says why.
Multiply = Callable[[Tensor, Tensor], Tensor]
# x (..., inputs) -> what is added to W x (..., outputs), or None if nothing is
Contribution = Callable[[Tensor], Tensor | None]


class Linear(nn.Linear):
    """A linear layer that computes in its input's format, whatever format its parameters have."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias=bias)
        self.has_bias = bias
        self.multiply: Multiply | None = None  # replaces the product with the weight
        self.adapter: Contribution | None = None

    def forward(self, input: Tensor) -> Tensor:  # (..., inputs) -> (..., outputs)
        bias = self.bias.to(input.dtype) if self.has_bias else None
        added = None if self.adapter is None else self.adapter(input)
        if self.multiply is None:
            weight = self.weight.to(input.dtype)
            if added is None:
                return F.linear(input, weight, bias)
            y = plus_product(added, input, weight)
        elif added is None:
            y = self.multiply(input, self.weight)
        elif hasattr(self.multiply, "plus"):  # as of matrices in 4 bits, which adapters train on
            y = self.multiply.plus(added, input)
        else:
            y = self.multiply(input, self.weight) + added
        return y if bias is None else y + bias


def plus_product(
    added: Tensor,  # (..., outputs)
    x: Tensor,  # (..., inputs)
    weight: Tensor,  # (outputs, inputs) in x's dtype
) -> Tensor:  # (..., outputs)
    """Return `added` plus x W^T, rounded only once.

    What an adapter adds at the beginning of training is less than half the distance between two
    numbers of bf16 near the product. Added to a product that is rounded already, it would be lost,
    and the first steps would teach the model less than in fp32 (dev/LOG.md).
    """
    y = torch.addmm(added.flatten(0, -2), x.flatten(0, -2), weight.mT)
    return y.view(added.shape)


def matrix_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the shape (outputs, inputs) of each Linear's matrix, by the name of its weight.

    The weight itself may be empty, while `multiply` holds the matrix in another form.
    """
    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            shapes[f"{name}.weight"] = (module.out_features, module.in_features)
    return shapes


class Embedding(nn.Embedding):
    """An embedding table that starts uninitialised, for init_weights() or a checkpoint to fill.

    Values drawn by torch would be overwritten. For a model on the meta device, drawing them would
    also import torch's compiler, which takes 1.6 seconds.
    """

    def reset_parameters(self) -> None:
        """Leave the table uninitialised."""
