"""Linear layers and embedding tables, whose parameters are fp32 masters in training.

A Linear has two hooks: `multiply` replaces the matrix product, and `adapter` adds to its result. A
device, a number format or a LoRA sets a hook, and the layers of the models stay as they are.
"""

from collections.abc import Callable

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# x (..., inputs), weight (outputs, inputs) -> x W^T. Where torch.compile cannot read the function,
# its attribute `untraceable` says why.
Multiply = Callable[[Tensor, Tensor], Tensor]
AddAdapter = Callable[[Tensor, Tensor], Tensor]  # x (..., inputs), W x (..., outputs) -> W x + A(x)


class Linear(nn.Linear):
    """A linear layer that computes in its input's format, whatever format its parameters have."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias=bias)
        self.has_bias = bias
        self.multiply: Multiply | None = None  # replaces the product with the weight
        self.adapter: AddAdapter | None = None  # adds to the product with the weight

    def forward(self, input: Tensor) -> Tensor:  # (..., inputs) -> (..., outputs)
        bias = self.bias.to(input.dtype) if self.has_bias else None
        if self.multiply is None:
            y = F.linear(input, self.weight.to(input.dtype), bias)
        else:
            y = self.multiply(input, self.weight)
            y = y if bias is None else y + bias
        return y if self.adapter is None else self.adapter(input, y)


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
