"""FlashAttention 4 (the package flash-attn-4) as operators of torch, for models that are compiled.

The package writes its kernels when they are first called, which takes twenty seconds, and keeps
them. Its own function is no operator: torch's compiler would look into it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # pyright: ignore[reportMissingImports]
from torch import Tensor

WHOLE = -1  # a window that hides nothing


def _visible(window: int) -> Mapping[str, Any]:
    """Return the package's words for which keys a query sees."""
    if window == WHOLE:
        return {"causal": True}
    return {"causal": True, "window_size_left": window, "window_size_right": 0}


@torch.library.custom_op("nanochat::flash_attention_4", mutates_args=())
def _forward(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # (B, T, H, D), (B, H, T) fp32
    """Return the attended values, and the log of the sum of each query's exponentials."""
    out, log_sums, *_ = _flash_attn_fwd(
        q,
        k,
        v,
        softmax_scale=scale,
        return_lse=True,
        **_visible(window),
    )
    return out, log_sums


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    log_sums = q.new_empty(B, H, T, dtype=torch.float32)
    return torch.empty_like(q), log_sums


@torch.library.custom_op("nanochat::flash_attention_4_backward", mutates_args=())
def _backward(
    out_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to q, k and v, from the gradient of `out`."""
    q_grad, k_grad, v_grad, *_ = _flash_attn_bwd(
        q,
        k,
        v,
        out,
        out_grad.contiguous(),
        log_sums,
        softmax_scale=scale,
        **_visible(window),
    )
    return q_grad, k_grad, v_grad


@_backward.register_fake
def _(
    out_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _FlashAttention(torch.autograd.Function):
    """Both operators as one function with a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int,
        scale: float,
    ) -> Tensor:
        out, log_sums = _forward(q, k, v, window, scale)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.window = window
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input_grads = _backward(grads[0], *ctx.saved_tensors, ctx.window, ctx.scale)
        return *input_grads, None, None


def flash_attn_func(
    q: Tensor,  # (B, T, H, D) of 16 bits
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
    softmax_scale: float | None,  # of the scores, default 1/sqrt(D)
    causal: bool,  # only True is served
    # Keys before and after a query's own; -1: all that causality leaves.
    window_size: tuple[int, int],
) -> Tensor:  # (B, T, H, D)
    """Return causal attention, called as FlashAttention 3 is."""
    assert causal
    scale = q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
    window = window_size[0]
    return _FlashAttention.apply(q, k, v, window, scale)  # type: ignore[no-any-return]
