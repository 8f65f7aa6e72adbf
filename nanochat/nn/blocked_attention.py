"""Attention made of matmuls over a few blocks of queries; kernels.py says where."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

GROUP_BYTES = 2**23  # of fp32 weights of a block of queries, over the heads that are computed together


def _query_blocks(T: int, window: int) -> list[tuple[slice, slice]]:
    """(queries, the keys they see) of about four blocks: few, since each is compiled for itself."""
    size = max(-(-T // 512) * 128, 128)
    return [(slice(i, min(i + size, T)), slice(max(i - window, 0), min(i + size, T))) for i in range(0, T, size)]


def _block_scores(
    q: Tensor,  # (N, T, D)
    k: Tensor,  # (N, T, D)
    queries: slice,
    keys: slice,
    window: int,
) -> Tensor:  # (N, queries, keys) fp32, -inf where a key is not seen
    """Scaled products of a block of queries with the keys that it may see."""
    distance = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
    distance = distance - torch.arange(keys.start, keys.stop, device=q.device)[None]
    scores = torch.bmm(q[:, queries], k[:, keys].mT).float() * q.size(-1) ** -0.5
    return scores.masked_fill((distance < 0) | (distance > window), hidden_score(q))


def hidden_score(x: Tensor) -> float:
    """A score that no softmax sees. Some chips have no inf."""
    return float("-inf") if x.device.type == "cpu" else -1e30


def _forward(
    q: Tensor,  # (N, T, D)
    k: Tensor,  # (N, T, D)
    v: Tensor,  # (N, T, D)
    window: int,
) -> tuple[Tensor, Tensor]:
    """The attended values (N, T, D), and the log of the sum of exponents of each query (N, T, 1) fp32."""
    outs, sums = [], []
    for queries, keys in _query_blocks(q.size(1), window):
        scores = _block_scores(q, k, queries, keys, window)
        sums.append(torch.logsumexp(scores, dim=-1, keepdim=True))
        outs.append(torch.bmm(torch.exp(scores - sums[-1]).to(q.dtype), v[:, keys]))
    return torch.cat(outs, dim=1), torch.cat(sums, dim=1)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, gradient: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by q, k and v, from that of `out`; the weights are made again."""
    scale = q.size(-1) ** -0.5
    along = (gradient.float() * out.float()).sum(dim=-1, keepdim=True)  # (N, T, 1)
    q_grads, k_grad, v_grad = [], torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    for queries, keys in _query_blocks(q.size(1), window):
        weights = torch.exp(_block_scores(q, k, queries, keys, window) - sums[:, queries])
        by_weight = torch.bmm(gradient[:, queries], v[:, keys].mT).float() - along[:, queries]
        by_score = (weights * by_weight * scale).to(q.dtype)
        v_grad[:, keys] += torch.bmm(weights.to(q.dtype).mT, gradient[:, queries])
        k_grad[:, keys] += torch.bmm(by_score.mT, q[:, queries])
        q_grads.append(torch.bmm(by_score, k[:, keys]))
    return torch.cat(q_grads, dim=1), k_grad.to(k.dtype), v_grad.to(v.dtype)


@lru_cache(maxsize=2)
def _fast(work: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled by itself, once for every shape."""
    return torch.compile(work, dynamic=False)


def _grouped(work: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], window: int) -> list[Tensor]:
    """`work` on a few heads at a time, so that their weights stay in the caches of a CPU."""
    N, T = tensors[0].shape[:2]
    size = max(GROUP_BYTES // (4 * T * max(-(-T // 512) * 128, 128)), 1)  # by the largest block of _query_blocks
    if size >= N:
        return list(_fast(work)(*tensors, window))
    parts = [_fast(work)(*(tensor[i : i + size] for tensor in tensors), window) for i in range(0, N, size)]
    return [torch.cat(of_groups) for of_groups in zip(*parts, strict=True)]


@torch.library.custom_op("nanochat::blocked_attention", mutates_args=())
def _opaque_forward(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    out, sums = _grouped(_forward, (q, k, v), window)
    return out, sums


@_opaque_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(*q.shape[:2], 1, dtype=torch.float32)


@torch.library.custom_op("nanochat::blocked_attention_backward", mutates_args=())
def _opaque_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, gradient: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    q_grad, k_grad, v_grad = _grouped(_backward, (q, k, v, out, sums, gradient), window)
    return q_grad, k_grad, v_grad


@_opaque_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, gradient: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class BlockedAttention(torch.autograd.Function):
    """Attention as matmuls over a few blocks of queries, the weights made again in the backward pass.

    For NPUs without fused attention, where it saves holding T x T weights of every layer. And for compiled bf16 on
    CPUs: there the softmax between the matmuls is fused, and a layer takes less than half the time of torch's flash
    attention, whose own blocks are too small for bf16 matmuls (4,096 tokens, T 512, one thread: 42 against 96 ms
    forward and backward). Uncompiled it is no faster on CPUs.

    Within a compiled model it is an operator of its own: else the compiler sees that the weights are made twice, and
    keeps those of the forward pass, which are most of a step's memory at T 2,048.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        B, T, H, D = q.shape
        q, k, v = (x.transpose(1, 2).reshape(B * H, T, D) for x in (q, k, v))
        work: Callable[..., Any] = _opaque_forward if is_compiling() else _forward
        out, sums = work(q, k, v, window)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.window, ctx.shape = window, (B, H, T, D)
        return out.view(B, H, T, D).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        B, H, T, D = ctx.shape
        gradient = grads[0].transpose(1, 2).reshape(B * H, T, D)
        work: Callable[..., Any] = _opaque_backward if is_compiling() else _backward
        parts = work(*ctx.saved_tensors, gradient, ctx.window)
        return *(part.view(B, H, T, D).transpose(1, 2) for part in parts), None
