"""8-bit matrices for decoding on a CPU.

A decoding step reads every matrix once, so it is faster with half the bytes of bf16. Every output
channel of a matrix has a scale, which is its largest absolute weight divided by 127. For a few
rows, torch's operator for 8-bit weights computes the product in the dtype of the rows. For more
rows, as in a prompt, the matrix is dequantized first.
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
    """Multiplies by an 8-bit matrix, whose number of inputs must be a multiple of 16."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):  # (outputs, inputs)
        """Quantize a weight; `dtype` is the dtype of the activations."""
        weight = weight.detach().float()
        scales = (weight.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        self.scales = scales.to(dtype)  # (outputs,)
        scaled = weight / self.scales.float()[:, None]
        self.integers = scaled.round().clamp(-127, 127).to(torch.int8)

    def dequantized(self) -> Tensor:
        """Return the quantized matrix, in the dtype of the activations."""
        return self.integers.to(self.scales.dtype) * self.scales[:, None]

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the product of the matrix and x (..., inputs), as (..., outputs).

        The signature is that of Linear.multiply; `weight` is ignored.
        """
        rows = x.flatten(0, -2)
        if rows.size(0) > MAX_ROWS:
            return F.linear(x, self.dequantized())
        y = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), self.integers, self.scales)
        return y.view(*x.shape[:-1], -1)


@torch.no_grad()
def hold_in_int8(model: Qwen) -> None:
    """Quantize to 8 bits every matrix whose input size is a multiple of 16, for inference.

    This includes the head, but its `weight` keeps its dtype and gets the dequantized values.
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
