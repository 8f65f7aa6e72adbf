"""Matrices in 8 bits, for decoding on a CPU: a decoding step reads every matrix once, so half the bytes take less time.

Every output channel of a matrix has a scale, the largest weight over 127. A few rows are multiplied by torch's operator
for 8-bit weights, which computes in the rows' own number format; more rows, as in a prompt, by the matrix that the
numbers and scales make again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanochat.linear import Linear
from nanochat.models.qwen.model import Qwen

MOST_ROWS = 8  # with more rows, the operator for 8-bit weights is slower than a matmul
UNIT = 16  # inputs that torch's operator reads at a time: in bf16 it reads past the end of other matrices (torch 2.13)


class Int8:
    """A matrix in 8 bits, which multiplies as the matrix does. Its inputs are a multiple of UNIT."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):  # (outputs, inputs)
        """`dtype` is the number format of the activations."""
        weight = weight.detach().float()
        scales = (weight.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        self.scales = scales.to(dtype)  # (outputs,)
        self.numbers = (
            (weight / self.scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        )

    def whole(self) -> Tensor:
        """The matrix that is multiplied with, in the number format of the activations."""
        return self.numbers.to(self.scales.dtype) * self.scales[:, None]

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Multiply x (..., inputs); fills the slot `multiply` of a matrix, whose weight is not needed."""
        flat = x.flatten(0, -2)
        if flat.size(0) > MOST_ROWS:
            return F.linear(x, self.whole())
        y = torch.ops.aten._weight_int8pack_mm(flat.contiguous(), self.numbers, self.scales)
        return y.view(*x.shape[:-1], -1)


@torch.no_grad()
def hold_in_int8(model: Qwen) -> None:
    """Hold the matrices of a model in 8 bits, for inference, where their inputs are a multiple of UNIT. The tables of
    the vocabulary keep their number format, with the values that 8 bits leave, and the head multiplies in 8 bits."""
    for module in model.modules():
        if isinstance(module, Linear) and not module.in_features % UNIT:
            module.multiply = Int8(module.weight, model.dtype)
            module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
    head = model.head
    if not head.weight.size(1) % UNIT:
        packed = Int8(head.weight, model.dtype)
        head.weight.copy_(packed.whole())
        head.multiply = packed
