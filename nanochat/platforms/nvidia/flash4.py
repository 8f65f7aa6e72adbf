"""FlashAttention 4 (the package flash-attn-4) as operators of torch, so that models which use it can be compiled.

The package writes its kernels when they are first called, which takes twenty seconds, and keeps them. Its own function
is no operator: torch's compiler would look into it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # pyright: ignore[reportMissingImports]
from torch import Tensor

WHOLE = -1  # a window that hides nothing


def _seen(window: int) -> Mapping[str, Any]:
    return {"causal": True} | (
        {} if window == WHOLE else {"window_size_left": window, "window_size_right": 0}
    )


@torch.library.custom_op("nanochat::flash_attention_4", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """The attended values (B, T, H, D), and for each query the log of the sum of its exponentials, (B, H, T) fp32."""
    out, sums, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, return_lse=True, **_seen(window))
    return out, sums


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    return torch.empty_like(q), q.new_empty(B, H, T, dtype=torch.float32)


@torch.library.custom_op("nanochat::flash_attention_4_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to q, k and v, from the gradient of `out`."""
    grads = _flash_attn_bwd(
        q, k, v, out, gradient.contiguous(), sums, softmax_scale=scale, **_seen(window)
    )
    return grads[0], grads[1], grads[2]


@_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _FlashAttention(torch.autograd.Function):
    """Both operators as one function with a gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        out, sums = _forward(q, k, v, window, scale)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.window, ctx.scale = window, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(grads[0], *ctx.saved_tensors, ctx.window, ctx.scale), None, None


def flash_attn_func(
    q: Tensor,  # (B, T, H, D) of 16 bits
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
    softmax_scale: float | None,  # of the scores, default 1/sqrt(D)
    causal: bool,  # only True is served
    window_size: tuple[
        int, int
    ],  # keys before and after a query's own; -1: all that causality leaves
) -> Tensor:  # (B, T, H, D)
    """Causal attention, called as FlashAttention 3 is."""
    assert causal
    scale = q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
    return _FlashAttention.apply(q, k, v, window_size[0], scale)  # type: ignore[no-any-return]
