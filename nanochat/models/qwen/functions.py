"""SwiGLU and RMS norm, which save neither fp32 copies nor large results for the backward pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _SwiGLU(torch.autograd.Function):
    """Computes silu(gate) * up, and recomputes silu(gate) for the backward pass to save memory."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        grad_up = F.silu(gate).mul_(grads[0])
        return grad_gate, grad_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (arXiv 2002.05202)."""
    return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return]


class _WeightedNorm(torch.autograd.Function):
    """Computes RMS norm times a weight in fp32.

    For the backward pass it saves x, the weight and one number for each row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = x.float() * inverse
        grad = grads[0].float()
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = (grad * normed).flatten(0, -2).sum(dim=0).to(weight.dtype)
        grad = grad * weight
        along_x = (grad * normed).mean(dim=-1, keepdim=True)
        x_grad = grad.sub_(normed.mul_(along_x)).mul_(inverse)
        return x_grad.to(x.dtype), weight_grad, None


def weighted_norm(
    x: Tensor,  # (..., C)
    weight: Tensor,  # (C,) fp32
    epsilon: float,
) -> Tensor:
    """Return x after RMS norm over its last dimension, times a weight for each channel."""
    return _WeightedNorm.apply(x, weight, epsilon)  # type: ignore[no-any-return]
