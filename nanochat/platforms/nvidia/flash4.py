"""FlashAttention 4 (the package flash-attn-4) as torch operators, for use in compiled models.

The package compiles its kernels on first use, which takes twenty seconds, and keeps them. Its own
function is not an operator, so torch's compiler would try to trace it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # pyright: ignore[reportMissingImports]
from torch import Tensor

WHOLE = -1  # a window that hides nothing


def _visible(window: int) -> Mapping[str, Any]:
    """Return the package's keyword arguments that say which keys a query sees."""
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
    """Return the attention output, and the log-sum-exp of each query's scores."""
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
    """Return the gradients of q, k and v, given the gradient of `out`."""
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
    """Combines the forward and backward operators into a differentiable function."""

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
    q: Tensor,  # (B, T, H, D) with 16-bit numbers
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
    softmax_scale: float | None,  # multiplies the scores; default 1/sqrt(D)
    causal: bool,  # must be True
    # Keys that a query sees before and after its own; -1 means all that causality allows.
    window_size: tuple[int, int],
) -> Tensor:  # (B, T, H, D)
    """Return causal attention; the arguments are named as in FlashAttention 3."""
    assert causal
    scale = q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
    window = window_size[0]
    return _FlashAttention.apply(q, k, v, window, scale)  # type: ignore[no-any-return]
