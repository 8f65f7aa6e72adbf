"""Attention made of matmuls over a few blocks of queries, for devices where that is the fastest or the only way."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

GROUP_BYTES = (
    2**23
)  # of the fp32 attention weights of a block of queries, for the heads computed together


def _query_blocks(T: int, window: int) -> list[tuple[slice, slice]]:
    """About four blocks of queries, each with the keys that its queries see: few, since each block is compiled by
    itself."""
    size = max(-(-T // 512) * 128, 128)
    return [
        (slice(i, min(i + size, T)), slice(max(i - window, 0), min(i + size, T)))
        for i in range(0, T, size)
    ]


def _block_scores(
    q: Tensor,  # (N, T, D)
    k: Tensor,  # (N, T, D)
    queries: slice,
    keys: slice,
    window: int,
    hidden: float,
) -> Tensor:  # (N, queries, keys) fp32, `hidden` where a key is not seen
    """Scaled products of a block of queries with the keys that it may see."""
    distance = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
    distance = distance - torch.arange(keys.start, keys.stop, device=q.device)[None]
    scores = torch.bmm(q[:, queries], k[:, keys].mT).float() * q.size(-1) ** -0.5
    return scores.masked_fill((distance < 0) | (distance > window), hidden)


def _forward(
    q: Tensor,  # (N, T, D)
    k: Tensor,  # (N, T, D)
    v: Tensor,  # (N, T, D)
    window: int,
    hidden: float,
) -> tuple[Tensor, Tensor]:
    """The attended values (N, T, D), and for each query the log of the sum of its exponentials, (N, T, 1) fp32."""
    outs, sums = [], []
    for queries, keys in _query_blocks(q.size(1), window):
        scores = _block_scores(q, k, queries, keys, window, hidden)
        sums.append(torch.logsumexp(scores, dim=-1, keepdim=True))
        outs.append(torch.bmm(torch.exp(scores - sums[-1]).to(q.dtype), v[:, keys]))
    return torch.cat(outs, dim=1), torch.cat(sums, dim=1)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    gradient: Tensor,
    window: int,
    hidden: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to q, k and v, from the gradient of `out`; the weights are recomputed."""
    scale = q.size(-1) ** -0.5
    along = (gradient.float() * out.float()).sum(dim=-1, keepdim=True)  # (N, T, 1)
    q_grads, k_grad, v_grad = (
        [],
        torch.zeros_like(k, dtype=torch.float32),
        torch.zeros_like(v, dtype=torch.float32),
    )
    for queries, keys in _query_blocks(q.size(1), window):
        weights = torch.exp(_block_scores(q, k, queries, keys, window, hidden) - sums[:, queries])
        by_weight = torch.bmm(gradient[:, queries], v[:, keys].mT).float() - along[:, queries]
        by_score = (weights * by_weight * scale).to(q.dtype)
        v_grad[:, keys] += torch.bmm(weights.to(q.dtype).mT, gradient[:, queries])
        k_grad[:, keys] += torch.bmm(by_score.mT, q[:, queries])
        q_grads.append(torch.bmm(by_score, k[:, keys]))
    return torch.cat(q_grads, dim=1), k_grad.to(k.dtype), v_grad.to(v.dtype)


@lru_cache(maxsize=2)
def _fast(work: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled by itself, once for every shape."""
    return torch.compile(work, dynamic=False)


def _grouped(
    work: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], window: int, hidden: float
) -> list[Tensor]:
    """Do `work` on a few heads at a time, so that their weights stay in the caches of a CPU."""
    N, T = tensors[0].shape[:2]
    size = max(
        GROUP_BYTES // (4 * T * max(-(-T // 512) * 128, 128)), 1
    )  # by the largest block of _query_blocks
    if size >= N:
        return list(_fast(work)(*tensors, window, hidden))
    parts = [
        _fast(work)(*(tensor[i : i + size] for tensor in tensors), window, hidden)
        for i in range(0, N, size)
    ]
    return [torch.cat(of_groups) for of_groups in zip(*parts, strict=True)]


@torch.library.custom_op("nanochat::blocked_attention", mutates_args=())
def _opaque_forward(
    q: Tensor, k: Tensor, v: Tensor, window: int, hidden: float
) -> tuple[Tensor, Tensor]:
    out, sums = _grouped(_forward, (q, k, v), window, hidden)
    return out, sums


@_opaque_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int, hidden: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(*q.shape[:2], 1, dtype=torch.float32)


@torch.library.custom_op("nanochat::blocked_attention_backward", mutates_args=())
def _opaque_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    gradient: Tensor,
    window: int,
    hidden: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q_grad, k_grad, v_grad = _grouped(_backward, (q, k, v, out, sums, gradient), window, hidden)
    return q_grad, k_grad, v_grad


@_opaque_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    gradient: Tensor,
    window: int,
    hidden: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class BlockedAttention(torch.autograd.Function):
    """Attention as matmuls over a few blocks of queries; the backward pass recomputes the attention weights.

    On accelerators without fused attention this avoids holding the T x T weights of every layer. In compiled bf16
    models on CPUs the softmax between the matmuls is fused, and a layer takes less than half the time of torch's flash
    attention, whose own blocks are too small for bf16 matmuls (4,096 tokens, T 512, one thread: 42 against 96 ms
    forward and backward). Uncompiled, blocked attention is no faster on CPUs.

    Within a compiled model blocked attention is an operator of its own. Otherwise the compiler would see that the
    weights are computed twice and keep the forward pass's weights, which are most of a step's memory at T 2,048.
    `hidden` is the score of a key that a query must not see.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, hidden: float) -> Tensor:
        B, T, H, D = q.shape
        q, k, v = (x.transpose(1, 2).reshape(B * H, T, D) for x in (q, k, v))
        work: Callable[..., Any] = _opaque_forward if is_compiling() else _forward
        out, sums = work(q, k, v, window, hidden)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.window, ctx.hidden, ctx.shape = window, hidden, (B, H, T, D)
        return out.view(B, H, T, D).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        B, H, T, D = ctx.shape
        gradient = grads[0].transpose(1, 2).reshape(B * H, T, D)
        work: Callable[..., Any] = _opaque_backward if is_compiling() else _backward
        parts = work(*ctx.saved_tensors, gradient, ctx.window, ctx.hidden)
        return *(grad.view(B, H, T, D).transpose(1, 2) for grad in parts), None, None


def ungrouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A key head and a value head for every query head."""
    group = q.size(2) // k.size(2)
    return (
        (k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2))
        if group > 1
        else (k, v)
    )
