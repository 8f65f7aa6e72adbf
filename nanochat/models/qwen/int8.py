"""Matrices in 8 bits, for decoding on a CPU.

A decoding step reads every matrix once, so half the bytes take less time. Every output channel of a
matrix has a scale, the largest weight over 127. A few rows are multiplied by torch's operator for
8-bit weights, which computes in the rows' dtype; more rows, as in a prompt, by the matrix that
integers and scales stand for.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanochat.linear import Linear
from nanochat.models.qwen.model import Qwen

MAX_ROWS = 8  # with more rows, the operator for 8-bit weights is slower than a matmul
# Inputs that torch's operator reads at a time: in bf16 it reads past the end of other matrices
# (torch 2.13).
UNIT = 16


class Int8:
    """The product with a matrix in 8 bits. The inputs of the matrix are a multiple of UNIT."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):  # (outputs, inputs)
        """`dtype` is that of the activations."""
        weight = weight.detach().float()
        scales = (weight.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        self.scales = scales.to(dtype)  # (outputs,)
        scaled = weight / self.scales.float()[:, None]
        self.integers = scaled.round().clamp(-127, 127).to(torch.int8)

    def dequantized(self) -> Tensor:
        """Return the matrix that is multiplied with, in the dtype of the activations."""
        return self.integers.to(self.scales.dtype) * self.scales[:, None]

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the product (..., outputs) with x (..., inputs).

        This fills the slot `multiply` of a matrix, whose weight is not needed.
        """
        rows = x.flatten(0, -2)
        if rows.size(0) > MAX_ROWS:
            return F.linear(x, self.dequantized())
        y = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), self.integers, self.scales)
        return y.view(*x.shape[:-1], -1)


@torch.no_grad()
def hold_in_int8(model: Qwen) -> None:
    """Turn the matrices of a model to 8 bits, for inference, where their inputs allow it.

    The tables of the vocabulary keep their dtype, with the values that 8 bits leave, and the head
    multiplies in 8 bits.
    """
    for module in model.modules():
        if isinstance(module, Linear) and not module.in_features % UNIT:
            module.multiply = Int8(module.weight, model.dtype)
            module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
    head = model.head
    if not head.weight.size(1) % UNIT:
        packed = Int8(head.weight, model.dtype)
        head.weight.copy_(packed.dequantized())
        head.multiply = packed
