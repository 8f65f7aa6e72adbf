"""The operations that a device may do its own way: attention, norm, rotary embedding, the loss.

Shapes: B batch, T time, H heads, D head dimension, C channels, V vocabulary.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SOFTCAP = 15.0  # logits are squashed to (-15, 15) by 15 tanh(l / 15)


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, without parameters."""
    return F.rms_norm(x, (x.size(-1),))


def rotary_tables(length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each (length, D/2), base 100,000 (RoFormer, arXiv 2104.09864)."""
    frequency = 100_000 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequency)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotary(
    x: Tensor,  # (B, T, H, D)
    cos: Tensor,  # (1 or B, T, 1, D/2)
    sin: Tensor,  # (1 or B, T, 1, D/2)
) -> Tensor:
    """Rotate pairs (i, i + D/2) of channels by -theta, as upstream does: only relative angles matter."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


@lru_cache(maxsize=16)
def _band(window: int, device: torch.device) -> Tensor:
    """(W, 2W): query r of a block sees keys r .. r + W of the previous block and its own, W + 1 keys."""
    offset = torch.arange(2 * window, device=device)[None] - torch.arange(window, device=device)[:, None]
    return (offset >= 0) & (offset <= window)


def attend(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
    window: int,
) -> Tensor:  # (B, T, H, D)
    """Causal attention in which a query also sees at most `window` keys before its own.

    A short window is computed in blocks of W queries against 2W keys, so that neither time nor any mask grows
    with T squared; the one (W, 2W) mask is shared by all blocks and layers.
    """
    B, T, H, _ = q.shape
    grouped = k.size(2) != H
    if torch.compiler.is_compiling() and q.device.type == "cpu" and q.dtype == torch.bfloat16 and not grouped:
        return _BlockedAttention.apply(q, k, v, window)  # type: ignore[no-any-return]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
    if window >= T - 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
    W = window
    blocks = -(-T // W)
    if pad := blocks * W - T:  # padded keys come after every real query, so causality hides them
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
    first = F.scaled_dot_product_attention(q[:, :, :W], k[:, :, :W], v[:, :, :W], is_causal=True, enable_gqa=grouped)

    def later(x: Tensor) -> Tensor:  # blocks 1.. as a batch: (B * (blocks - 1), H, W, D)
        return x[:, :, W:].unflatten(2, (blocks - 1, W)).transpose(1, 2).flatten(0, 1)

    def pairs(x: Tensor) -> Tensor:  # each later block behind the one before it: (B * (blocks - 1), H, 2W, D)
        x = x.unflatten(2, (blocks, W))
        return torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3).transpose(1, 2).flatten(0, 1)

    rest = F.scaled_dot_product_attention(
        later(q), pairs(k), pairs(v), attn_mask=_band(W, q.device), enable_gqa=grouped
    )
    rest = rest.unflatten(0, (B, blocks - 1)).transpose(1, 2).flatten(2, 3)  # (B, H, T - W, D)
    return torch.cat((first, rest), dim=2)[:, :, :T].transpose(1, 2)


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
    return scores.masked_fill((distance < 0) | (distance > window), float("-inf"))


class _BlockedAttention(torch.autograd.Function):
    """Attention as matmuls over a few blocks of queries, the weights made again in the backward pass.

    Only for compiled bf16 on CPUs: there the softmax between the matmuls is fused, and a layer takes less than half
    the time of torch's flash attention, whose own blocks are too small for bf16 matmuls (4,096 tokens, T 512, one
    thread: 42 against 96 ms forward and backward). Uncompiled it is no faster.
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


def cache_mask(
    positions: Tensor,  # (B, T) the place of each query in its sequence
    keys: int,  # how many places of the cache are looked at
    window: int,
) -> Tensor:  # (B, 1, T, keys) bool, True = seen
    """Which cached keys each query sees: none after its own place, at most `window` before it."""
    distance = positions[:, :, None] - torch.arange(keys, device=positions.device)
    return ((distance >= 0) & (distance <= window))[:, None]


def attend_cached(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, K, Hkv, D) cached keys, those of this call included
    v: Tensor,  # (B, K, Hkv, D)
    mask: Tensor,  # (B, 1, T, K) from cache_mask
) -> Tensor:  # (B, T, H, D)
    """Attention of new queries over a cache; rows may be at different places."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=k.size(2) != q.size(2)
    )
    return out.transpose(1, 2)


def softcap(logits: Tensor) -> Tensor:
    """fp32 logits squashed to (-15, 15)."""
    return SOFTCAP * torch.tanh(logits.float() / SOFTCAP)


def token_losses(
    x: Tensor,  # (N, C) normed activations
    weight: Tensor,  # (V', C) head, V' >= vocab
    targets: Tensor,  # (N,) token ids, -1 = ignored
    vocab: int,
    chunk: int = 2048,
) -> Tensor:  # (N,) fp32 nats, 0 where ignored
    """Cross-entropy of each token, without gradient and without holding all logits at once."""
    weight = weight.to(x.dtype)
    losses = [
        F.cross_entropy(softcap(F.linear(x[i : i + chunk], weight)[:, :vocab]), targets[i : i + chunk],
                        ignore_index=-1, reduction="none")
        for i in range(0, x.size(0), chunk)
    ]  # fmt: skip
    return torch.cat(losses)


def _chunk_loss(
    x: Tensor,  # (n, C)
    weight: Tensor,  # (V', C) in x's dtype
    targets: Tensor,  # (n,)
    scale: Tensor,  # (n,) fp32 weight of each token, 0 = ignored
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """Weighted loss of a chunk, (), and its gradient by the logits, (n, V')."""
    raw = F.linear(x, weight)
    squashed = torch.tanh(raw.float() / SOFTCAP)
    logits = SOFTCAP * squashed
    if vocab < weight.size(0):  # the padded rows of the head are no tokens
        logits = logits.masked_fill(torch.arange(weight.size(0), device=x.device) >= vocab, float("-inf"))
    top = logits.amax(dim=1, keepdim=True)
    exponent = torch.exp(logits - top)
    total = exponent.sum(dim=1, keepdim=True)
    index = targets.clamp_min(0)[:, None]
    nll = (total.log() + top - logits.gather(1, index)).squeeze(1)
    one_hot = torch.arange(weight.size(0), device=x.device)[None] == index
    slope = (1 - squashed * squashed) * scale[:, None]  # of the softcap, times the token's weight
    gradient = (exponent / total - one_hot.to(exponent.dtype)) * slope
    return (nll * scale).sum(), gradient.to(x.dtype)


class _ChunkedLoss(torch.autograd.Function):
    """The loss and both gradients in one pass over chunks of tokens, so that only a chunk's logits ever exist."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, vocab: int, chunk: int) -> Tensor:
        head = weight.to(x.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        x_grads, weight_grad = [], torch.zeros_like(weight, dtype=torch.float32)  # a sum of many chunks
        for i in range(0, x.size(0), chunk):
            part = x[i : i + chunk]
            chunk_loss, gradient = _chunk_loss(part, head, targets[i : i + chunk], scale[i : i + chunk], vocab)
            loss = loss + chunk_loss
            x_grads.append(gradient @ head)
            weight_grad += gradient.mT @ part
        ctx.save_for_backward(torch.cat(x_grads), weight_grad.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        (upstream,) = grads
        return x_grad * upstream.to(x_grad.dtype), weight_grad * upstream.to(weight_grad.dtype), None, None, None, None


def chunked_loss(
    x: Tensor,  # (N, C) normed activations
    weight: Tensor,  # (V', C) head, V' >= vocab
    targets: Tensor,  # (N,) token ids, -1 = ignored
    vocab: int,
    weights: Tensor | None = None,  # (N,) weight of each token's loss, default 1
    chunk: int = 1024,
) -> Tensor:  # () fp32
    """The sum over tokens of weight times cross-entropy in nats, of softcapped logits, with its gradient.

    Gradients are formed in the forward pass, chunk by chunk: memory is chunk x V, not N x V.
    """
    scale = (targets >= 0).float()
    if weights is not None:
        scale = scale * weights.float()
    return _ChunkedLoss.apply(x, weight, targets, scale, vocab, min(chunk, x.size(0)))  # type: ignore[no-any-return]
