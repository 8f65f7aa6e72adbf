"""Attention computed with matmuls over a few blocks of queries.

This is for accelerators without fused attention, and for compiled bf16 models on CPUs. Shapes: N
heads over all rows of a batch, T time, D head dimension.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

# Bytes of fp32 attention weights for one block of queries, over the heads computed together.
GROUP_BYTES = 2**23


class Block(NamedTuple):
    """A range of queries that are computed together, and the keys that any of them can see."""

    queries: slice
    keys: slice


def _block_size(T: int) -> int:
    """Return the number of queries in a block: T / 4, rounded up to a multiple of 128."""
    return max(-(-T // 512) * 128, 128)


def _query_blocks(T: int, window: int) -> list[Block]:
    """Return at most four blocks that cover T queries; each block is compiled separately."""
    size = _block_size(T)
    blocks = []
    for start in range(0, T, size):
        stop = min(start + size, T)
        first_key = max(start - window, 0)
        blocks.append(Block(slice(start, stop), slice(first_key, stop)))
    return blocks


def _block_scores(
    q: Tensor,  # (N, T, D)
    k: Tensor,  # (N, T, D)
    block: Block,
    window: int,
    hidden: float,
) -> Tensor:  # (N, queries, keys) fp32
    """Return the scaled scores of a block, with `hidden` where a query must not see a key."""
    queries, keys = block
    query_positions = torch.arange(queries.start, queries.stop, device=q.device)
    key_positions = torch.arange(keys.start, keys.stop, device=q.device)
    distance = query_positions[:, None] - key_positions[None]
    products = torch.bmm(q[:, queries], k[:, keys].mT)
    scores = products.float() * q.size(-1) ** -0.5
    is_hidden = (distance < 0) | (distance > window)
    return scores.masked_fill(is_hidden, hidden)


def _forward(
    q: Tensor,  # (N, T, D)
    k: Tensor,  # (N, T, D)
    v: Tensor,  # (N, T, D)
    window: int,
    hidden: float,
) -> tuple[Tensor, Tensor]:  # (N, T, D), (N, T, 1) fp32
    """Return the attention output, and the log-sum-exp of each query's scores."""
    outs = []
    log_sums = []
    for block in _query_blocks(q.size(1), window):
        scores = _block_scores(q, k, block, window, hidden)
        log_sum = torch.logsumexp(scores, dim=-1, keepdim=True)
        weights = torch.exp(scores - log_sum).to(q.dtype)
        outs.append(torch.bmm(weights, v[:, block.keys]))
        log_sums.append(log_sum)
    return torch.cat(outs, dim=1), torch.cat(log_sums, dim=1)


def _backward(
    q: Tensor,  # (N, T, D)
    k: Tensor,  # (N, T, D)
    v: Tensor,  # (N, T, D)
    out: Tensor,  # (N, T, D)
    log_sums: Tensor,  # (N, T, 1) fp32
    out_grad: Tensor,  # (N, T, D)
    window: int,
    hidden: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, recomputing the attention weights."""
    scale = q.size(-1) ** -0.5
    weighted_grad = out_grad.float() * out.float()
    row_sums = weighted_grad.sum(dim=-1, keepdim=True)  # (N, T, 1)
    q_grads = []
    k_grad = torch.zeros_like(k, dtype=torch.float32)
    v_grad = torch.zeros_like(v, dtype=torch.float32)
    for block in _query_blocks(q.size(1), window):
        queries, keys = block
        scores = _block_scores(q, k, block, window, hidden)
        weights = torch.exp(scores - log_sums[:, queries])
        block_grad = out_grad[:, queries]
        weight_grads = torch.bmm(block_grad, v[:, keys].mT).float()
        weight_grads = weight_grads - row_sums[:, queries]
        score_grads = (weights * weight_grads * scale).to(q.dtype)
        v_grad[:, keys] += torch.bmm(weights.to(q.dtype).mT, block_grad)
        k_grad[:, keys] += torch.bmm(score_grads.mT, q[:, queries])
        q_grads.append(torch.bmm(score_grads, k[:, keys]))
    return torch.cat(q_grads, dim=1), k_grad.to(k.dtype), v_grad.to(v.dtype)


# --- under a compiler ----------------------------------------------------------------------------


@lru_cache(maxsize=2)
def _compiled(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return `work`, compiled separately from its caller, once for each shape."""
    return torch.compile(work, dynamic=False)


def _grouped(
    work: Callable[..., tuple[Tensor, ...]],  # _forward or _backward
    tensors: Sequence[Tensor],
    window: int,
    hidden: float,
) -> list[Tensor]:
    """Return the results of `work`, run on few enough heads at a time to fit a CPU's caches."""
    N, T = tensors[0].shape[:2]
    head_bytes = 4 * T * _block_size(T)
    size = max(GROUP_BYTES // head_bytes, 1)
    compiled = _compiled(work)
    if size >= N:
        return list(compiled(*tensors, window, hidden))
    groups = []
    for start in range(0, N, size):
        heads = slice(start, start + size)
        group = [tensor[heads] for tensor in tensors]
        groups.append(compiled(*group, window, hidden))
    return [torch.cat(results) for results in zip(*groups, strict=True)]


@torch.library.custom_op("nanochat::blocked_attention", mutates_args=())
def _opaque_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    hidden: float,
) -> tuple[Tensor, Tensor]:
    out, log_sums = _grouped(_forward, (q, k, v), window, hidden)
    return out, log_sums


@_opaque_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    hidden: float,
) -> tuple[Tensor, Tensor]:
    N, T, _ = q.shape
    log_sums = q.new_empty(N, T, 1, dtype=torch.float32)
    return torch.empty_like(q), log_sums


@torch.library.custom_op("nanochat::blocked_attention_backward", mutates_args=())
def _opaque_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    out_grad: Tensor,
    window: int,
    hidden: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (q, k, v, out, log_sums, out_grad)
    q_grad, k_grad, v_grad = _grouped(_backward, tensors, window, hidden)
    return q_grad, k_grad, v_grad


@_opaque_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    out_grad: Tensor,
    window: int,
    hidden: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# --- with a gradient -----------------------------------------------------------------------------


class BlockedAttention(torch.autograd.Function):
    """Computes attention with matmuls over a few blocks of queries.

    The backward pass recomputes the weights.

    On accelerators without fused attention this avoids holding the T x T weights of every layer. In
    compiled bf16 models on CPUs the softmax between the matmuls is fused, and a layer takes less
    than half the time of torch's flash attention, whose own blocks are too small for bf16 matmuls
    (4,096 tokens, T 512, one thread: 42 against 96 ms forward and backward). Uncompiled, blocked
    attention is no faster on CPUs.

    In a compiled model, blocked attention is an opaque operator. If it were not, the compiler would
    see that the weights are computed twice, and keep those of the forward pass, which take most of
    a step's memory at T 2,048. `hidden` is the score of a key that a query must not see.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, H, D)
        v: Tensor,  # (B, T, H, D)
        window: int,
        hidden: float,
    ) -> Tensor:  # (B, T, H, D)
        B, T, H, D = q.shape
        q, k, v = (_heads_first(x) for x in (q, k, v))
        work: Callable[..., Any] = _opaque_forward if is_compiling() else _forward
        out, log_sums = work(q, k, v, window, hidden)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.window = window
        ctx.hidden = hidden
        ctx.shape = (B, H, T, D)
        return out.view(ctx.shape).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out_grad = _heads_first(grads[0])
        work: Callable[..., Any] = _opaque_backward if is_compiling() else _backward
        input_grads = work(*ctx.saved_tensors, out_grad, ctx.window, ctx.hidden)
        as_given = [grad.view(ctx.shape).transpose(1, 2) for grad in input_grads]
        return *as_given, None, None


def _heads_first(x: Tensor) -> Tensor:  # (B, T, H, D) -> (B * H, T, D)
    B, T, H, D = x.shape
    return x.transpose(1, 2).reshape(B * H, T, D)


def ungrouped(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
) -> tuple[Tensor, Tensor]:  # (B, T, H, D) twice
    """Return keys and values, repeated so that every query head has its own."""
    group = q.size(2) // k.size(2)
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
