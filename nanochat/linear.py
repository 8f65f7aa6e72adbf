"""Matrices and tables of embeddings.

Parameters are fp32 masters, and every use casts them to the activations' format.

How a matrix multiplies, and what an adapter adds, are two slots of one class: a device, a number
format or a LoRA fills a slot, and the layers of the models stay as they are.
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
    """A matrix whose fp32 master is cast at every use."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias=bias)
        self.multiply: Multiply | None = None  # replaces the product with the weight
        self.adapter: AddAdapter | None = None  # adds to what the matrix gives

    def forward(self, input: Tensor) -> Tensor:  # (..., inputs) -> (..., outputs)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        if self.multiply is None:
            y = F.linear(input, self.weight.to(input.dtype), bias)
        else:
            y = self.multiply(input, self.weight)
            y = y if bias is None else y + bias
        return y if self.adapter is None else self.adapter(input, y)


class Embedding(nn.Embedding):
    """A table of embeddings that init_weights() or a checkpoint fills.

    torch would draw values in vain. For a model on the meta device drawing imports torch's
    compiler, which takes 1.6 seconds.
    """

    def reset_parameters(self) -> None:
        """Leave the table as it is."""
