"""Functions of single channels that keep no fp32 copies and no intermediate results for their backward pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up. What autograd would keep, silu(gate), is computed again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * up, gate), F.silu(gate).mul_(grads[0])


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202)."""
    return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return]


class _WeightedNorm(torch.autograd.Function):
    """RMS norm times a weight, in fp32 inside; it keeps its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, gradient, weight_grad = x.float() * inverse, grads[0].float(), None
        if ctx.needs_input_grad[1]:
            weight_grad = (gradient * normed).flatten(0, -2).sum(dim=0).to(weight.dtype)
        gradient = gradient * weight
        along = (gradient * normed).mean(dim=-1, keepdim=True)
        return gradient.sub_(normed.mul_(along)).mul_(inverse).to(x.dtype), weight_grad, None


def weighted_norm(
    x: Tensor,  # (..., C)
    weight: Tensor,  # (C,) fp32
    epsilon: float,
) -> Tensor:
    """RMS norm over the last dimension, times a weight for each channel."""
    return _WeightedNorm.apply(x, weight, epsilon)  # type: ignore[no-any-return]
