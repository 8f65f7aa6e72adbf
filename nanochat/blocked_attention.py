"""Attention made of matmuls over a few blocks of queries; kernels.py says where."""

from typing import Any

import torch
from torch import Tensor


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


class BlockedAttention(torch.autograd.Function):
    """Attention as matmuls over a few blocks of queries, the weights made again in the backward pass.

    For NPUs without fused attention, where it saves holding T x T weights of every layer. And for compiled bf16 on
    CPUs: there the softmax between the matmuls is fused, and a layer takes less than half the time of torch's flash
    attention, whose own blocks are too small for bf16 matmuls (4,096 tokens, T 512, one thread: 42 against 96 ms
    forward and backward). Uncompiled it is no faster on CPUs.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        B, T, H, D = q.shape
        q, k, v = (x.transpose(1, 2).reshape(B * H, T, D) for x in (q, k, v))
        outs, sums = [], []  # sums: log of the sum of exponents of each query, (N, queries, 1) fp32
        for queries, keys in _query_blocks(T, window):
            scores = _block_scores(q, k, queries, keys, window)
            sums.append(torch.logsumexp(scores, dim=-1, keepdim=True))
            outs.append(torch.bmm(torch.exp(scores - sums[-1]).to(q.dtype), v[:, keys]))
        out = torch.cat(outs, dim=1)
        ctx.save_for_backward(q, k, v, out, torch.cat(sums, dim=1))
        ctx.window, ctx.shape = window, (B, H, T, D)
        return out.view(B, H, T, D).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        B, H, T, D = ctx.shape
        gradient = grads[0].transpose(1, 2).reshape(B * H, T, D)
        along = (gradient.float() * out.float()).sum(dim=-1, keepdim=True)  # (N, T, 1)
        q_grads, k_grad, v_grad = [], torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        for queries, keys in _query_blocks(T, ctx.window):
            weights = torch.exp(_block_scores(q, k, queries, keys, ctx.window) - sums[:, queries])
            by_weight = torch.bmm(gradient[:, queries], v[:, keys].mT).float() - along[:, queries]
            by_score = (weights * by_weight * D**-0.5).to(q.dtype)
            v_grad[:, keys] += torch.bmm(weights.to(q.dtype).mT, gradient[:, queries])
            k_grad[:, keys] += torch.bmm(by_score.mT, q[:, queries])
            q_grads.append(torch.bmm(by_score, k[:, keys]))
        parts = (torch.cat(q_grads, dim=1), k_grad.to(k.dtype), v_grad.to(v.dtype))
        return *(part.view(B, H, T, D).transpose(1, 2) for part in parts), None
