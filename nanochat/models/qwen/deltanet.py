"""Gated DeltaNet (arXiv 2412.06464): a layer whose memory is one matrix a head, whatever the length of the text.

Token t of a head with key k, value v, query q, decay a = exp(g) and strength b changes the memory S, (Dk, Dv), to
    S <- a S + b k (v - a S^T k)^T,    and reads    o = S^T q.
Training and prefill do this for chunks of tokens at a time with matmuls alone; decoding does it token by token. Keys
and queries have norm 1. Memory, decays and the system of equations within a chunk are fp32; the other matmuls have the
format of the activations.
Shapes: B batch, T time, N chunks, C tokens of a chunk, H heads of keys, G heads of values for each of them.
"""

from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from nanochat.cache import Cache, zeros_on_demand
from nanochat.context import Context
from nanochat.linear import Linear
from nanochat.models.qwen.config import QwenConfig

CHUNK = 64
EPSILON = 1e-6  # of the norm of queries and keys
NEVER = -1e4  # the log of a decay that leaves nothing in fp32; some chips have no inf


class _Inverse(torch.autograd.Function):
    """The inverse of I + M, where M is the strictly lower triangle of a matrix (..., C, C), C a power of two.

    The inverses of the blocks on the diagonal are joined two by two, from 1 x 1 to C x C: as exact as substitution,
    with 2 log C batched matmuls instead of C steps.
    """

    @staticmethod
    def forward(ctx: Any, strict: Tensor) -> Tensor:
        C = strict.size(-1)  # what stands on and above the diagonal is never read
        blocks = strict.new_ones(*strict.shape[:-2], C, 1, 1)  # (..., C / s, s, s) inverses
        size = 1
        while size < C:
            n = C // (2 * size)
            grid = strict.unflatten(-1, (n, 2 * size)).unflatten(
                -3, (n, 2 * size)
            )  # (..., n, 2s, n, 2s)
            below = grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[
                ..., size:, :size
            ]  # (..., n, s, s)
            upper, lower = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
            joined = strict.new_zeros(*strict.shape[:-2], n, 2 * size, 2 * size)
            joined[..., :size, :size], joined[..., size:, size:] = upper, lower
            joined[..., size:, :size] = -(lower @ (below @ upper))
            blocks, size = joined, 2 * size
        inverse = blocks.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grads[0] @ inverse.mT).tril_(-1)


class _Scan(torch.autograd.Function):
    """The memory before each chunk, chunk after chunk, and what each chunk's tokens write. Matrices are batched over
    (B, H, G).

    The backward pass is written by hand, so that only two matmuls a chunk wait for the chunk after it, and every
    gradient has the layout of what it is the gradient of.
    """

    @staticmethod
    def forward(
        ctx: Any,
        written: Tensor,  # (N, ..., C, Dv) what the tokens would write into an empty memory
        known: Tensor,  # (N, ..., C, Dk) the keys with which they read what the memory has
        keys: Tensor,  # (N, ..., C, Dk) the keys with which they write, each decayed to the end of its chunk
        kept: Tensor,  # (N, ..., 1, 1) fp32 decay of the memory over a chunk
        memory: Tensor,  # (..., Dk, Dv) fp32 before the first chunk
    ) -> tuple[
        Tensor, Tensor, Tensor
    ]:  # (N, ..., Dk, Dv) as written, (N, ..., C, Dv), (..., Dk, Dv) fp32
        before, new, S = [], [], memory
        for write, know, key, keep in zip(
            written.unbind(), known.unbind(), keys.unbind(), kept.unbind(), strict=True
        ):
            before.append(S.to(write.dtype))
            new.append(write - know @ before[-1])
            S = S * keep + key.mT @ new[-1]
        all_before, all_new = torch.stack(before), torch.stack(new)
        ctx.save_for_backward(known, keys, kept, all_before, all_new)
        return all_before, all_new, S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        known, keys, kept, before, new = ctx.saved_tensors
        grad_before, grad_new, grad_S = grads
        after, whole = [], []
        parts = (
            known.unbind(),
            keys.unbind(),
            kept.unbind(),
            grad_before.unbind(),
            grad_new.unbind(),
        )
        for know, key, keep, d_before, d_new in reversed(list(zip(*parts, strict=True))):
            after.append(grad_S)  # of the memory after this chunk
            whole.append(d_new + key @ grad_S.to(key.dtype))
            grad_S = grad_S * keep + d_before - know.mT @ whole[-1]
        grad_after, grad_written = torch.stack(after[::-1]), torch.stack(whole[::-1])
        grad_known = -(grad_written @ before.mT)
        grad_keys = new @ grad_after.to(new.dtype).mT
        grad_kept = (before * grad_after).sum((-2, -1), keepdim=True)
        return grad_written, grad_known, grad_keys, grad_kept, grad_S


def unit(x: Tensor) -> Tensor:
    """fp32 vectors of norm 1 along the last dimension."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + EPSILON)


def _cut(x: Tensor, chunks: int, size: int) -> Tensor:
    """(B, T, H, ...) as (N, B, H, C, ...), with zeros behind the last token."""
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, chunks * size - x.size(1)))
    return x.unflatten(1, (chunks, size)).movedim(1, 0).transpose(2, 3).contiguous()


def _seen(documents: Tensor, chunks: int, size: int) -> tuple[Tensor, Tensor]:
    """From the document of each token, (B, T): which tokens of its chunk each token sees, (N, B, 1, 1, C, C), and
    which tokens see the chunks before their own, (N, B, 1, 1, C)."""
    padded = F.pad(
        documents[None].float(), (0, chunks * size - documents.size(1)), mode="replicate"
    )[0]
    cut = padded.unflatten(1, (chunks, size)).movedim(1, 0)[:, :, None, None]  # (N, B, 1, 1, C)
    before = torch.cat(
        (cut[:1, ..., :1], cut[:-1, ..., -1:])
    )  # the last document of the chunk before
    return (cut[..., :, None] == cut[..., None, :]).tril(), cut == before


def chunked(
    q: Tensor,  # (B, T, H, Dk)
    k: Tensor,  # (B, T, H, Dk)
    v: Tensor,  # (B, T, H * G, Dv)
    log_decay: Tensor,  # (B, T, H * G) fp32, at most 0; 0 where a token is padding
    strength: Tensor,  # (B, T, H * G), from 0 to 1; 0 where a token is padding
    memory: Tensor | None = None,  # (B, H * G, Dk, Dv) fp32 before the first token; None: zeros
    documents: Tensor
    | None = None,  # (B, T) the number of each token's document, if a row holds several
    size: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # (B, T, H * G, Dv) in the format of v, (B, H * G, Dk, Dv) fp32
    """What every token reads, and the memory after the last token. No token reads what another document wrote."""
    B, T, H, Dk = k.shape
    G, Dv, N, dtype = v.size(2) // H, v.size(3), -(-T // size), v.dtype
    q, k = _cut(unit(q) * Dk**-0.5, N, size), _cut(unit(k), N, size)  # (N, B, H, C, Dk)
    v = _cut(v, N, size).unflatten(2, (H, G))  # (N, B, H, G, C, Dv)
    total = (
        _cut(log_decay.float(), N, size).unflatten(2, (H, G)).cumsum(-1)
    )  # (N, B, H, G, C) log decay since the chunk began
    b = _cut(strength.float(), N, size).unflatten(2, (H, G))[..., None]
    decay_before = total.exp()  # of the memory that a token finds
    triangle = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
    if documents is not None:
        triangle, continues = _seen(documents, N, size)
        decay_before = decay_before * continues
    # The decay between two tokens of a chunk, (N, B, H, G, C, C); 0 where the second does not see the first.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~triangle, NEVER).exp()
    inverse = _Inverse.apply((k @ k.mT).unsqueeze(3) * decay * b).to(dtype)
    written = inverse @ (v * b).to(dtype)  # what each token would write into an empty memory
    # Reads what the memory has for those keys.
    known = inverse @ (k.unsqueeze(3) * (decay_before[..., None] * b)).to(dtype)
    scores = ((q.to(dtype) @ k.to(dtype).mT).unsqueeze(3) * decay).to(dtype)
    asking = (q.unsqueeze(3) * decay_before[..., None]).to(dtype)
    keys = (k.unsqueeze(3) * decay[..., -1, :, None]).to(dtype)
    kept = decay_before[..., -1:, None]
    S = k.new_zeros(B, H, G, Dk, Dv) if memory is None else memory.unflatten(1, (H, G))
    found, new, S = cast(tuple[Tensor, Tensor, Tensor], _Scan.apply(written, known, keys, kept, S))
    out = asking @ found + scores @ new  # (N, B, H, G, C, Dv)
    out = out.transpose(0, 1).flatten(2, 3).transpose(2, 3)  # (B, N, C, H * G, Dv)
    return out.flatten(1, 2)[:, :T], S.flatten(1, 2)


def step(
    q: Tensor,  # (B, 1, H, Dk)
    k: Tensor,  # (B, 1, H, Dk)
    v: Tensor,  # (B, 1, H * G, Dv)
    log_decay: Tensor,  # (B, 1, H * G)
    strength: Tensor,  # (B, 1, H * G)
    memory: Tensor,  # (B, H * G, Dk, Dv) fp32
) -> tuple[Tensor, Tensor]:  # (B, 1, H * G, Dv) fp32, (B, H * G, Dk, Dv) fp32
    """What chunked() gives for one token."""
    G = v.size(2) // k.size(2)
    q = (
        (unit(q) * q.size(3) ** -0.5).transpose(1, 2).repeat_interleave(G, dim=1)
    )  # (B, H * G, 1, Dk)
    k = unit(k).transpose(1, 2).repeat_interleave(G, dim=1)
    memory = memory * log_decay.transpose(1, 2)[..., None].exp()
    surprise = v.float().transpose(1, 2) - k @ memory  # (B, H * G, 1, Dv)
    memory = memory + k.mT @ (surprise * strength.float().transpose(1, 2)[..., None])
    return (q @ memory).transpose(1, 2), memory


def convolve(
    x: Tensor,  # (B, T, C)
    weight: Tensor,  # (C, 1, W), the last column multiplies the token itself
    before: Tensor | None = None,  # (B, W - 1, C) the tokens before the first; None: zeros
    positions: Tensor
    | None = None,  # (B, T) the place of each token in its document, if a row holds several
) -> tuple[Tensor, Tensor]:  # (B, T, C), (B, W - 1 + T, C)
    """Each channel's causal convolution, and the tokens with those before them."""
    W, T = weight.size(2), x.size(1)
    taps = (
        weight[:, 0].to(x.dtype).mT.contiguous().unbind(0)
    )  # strided ones would be multiplied one by one
    joined = (
        F.pad(x, (0, 0, W - 1, 0)) if before is None else torch.cat((before.to(x.dtype), x), dim=1)
    )
    y = x * taps[-1]
    for back in range(1, W):
        earlier = joined[:, W - 1 - back : W - 1 - back + T] * taps[-1 - back]
        if positions is not None:
            earlier = earlier * (positions >= back)[..., None]
        y = y + earlier
    return y, joined


class GatedDeltaNet(nn.Module):
    """The layer: projections, convolution, memory, and a gated norm of what the memory gives. The parameters have the
    names that they have in Qwen3.5's checkpoints."""

    def __init__(self, config: QwenConfig, place: int):
        """`place` is the number of the layer among the DeltaNets, which is where its states lie in the cache."""
        super().__init__()
        self.place, self.config = place, config
        self.recomputes = (
            True  # whether training keeps only what the matrices give, and computes the rest again
        )
        value_channels = config.delta_value_heads * config.delta_value_dim
        self.in_proj_qkv = Linear(config.n_embd, config.delta_channels)
        self.in_proj_z = Linear(config.n_embd, value_channels)
        self.in_proj_b = Linear(config.n_embd, config.delta_value_heads)
        self.in_proj_a = Linear(config.n_embd, config.delta_value_heads)
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.empty(config.delta_channels, 1, config.delta_width))
        self.dt_bias = nn.Parameter(torch.empty(config.delta_value_heads))
        self.A_log = nn.Parameter(torch.empty(config.delta_value_heads))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.empty(config.delta_value_dim))
        self.out_proj = Linear(value_channels, config.n_embd)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # (B, T, C)
        before = context.read("inputs", self.place)
        taps = cast(Tensor, self.conv1d.weight)
        mixed, inputs = convolve(
            self.in_proj_qkv(x), taps, before, context.positions if before is None else None
        )
        if before is not None:
            context.write(
                "inputs", self.place, _last(inputs, self.config.delta_width - 1, context.lengths)
            )
        given = mixed, self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        # Below adapters a compiler chooses better by itself; where matrices are trained it would keep a fifth more.
        left_alone = is_compiling() and not self.in_proj_qkv.weight.requires_grad
        if before is None and self.recomputes and torch.is_grad_enabled() and not left_alone:
            y = checkpoint(
                self._remember, *given, context, use_reentrant=False, preserve_rng_state=False
            )
        else:
            y = self._remember(*given, context)
        return self.out_proj(cast(Tensor, y))

    def _remember(
        self,
        mixed: Tensor,  # (B, T, 2 * H * Dk + H * G * Dv) queries, keys and values, before their SiLU
        z: Tensor,  # (B, T, H * G * Dv) before the gate
        b: Tensor,  # (B, T, H * G) before the sigmoid
        a: Tensor,  # (B, T, H * G) before the decay
        context: Context,
    ) -> Tensor:  # (B, T, H * G * Dv)
        """What the memory gives, normed and gated. The intermediate results take several times as much memory as the
        arguments, and time beside the matrices is short."""
        c, dtype, T = self.config, mixed.dtype, mixed.size(1)
        memory = context.read("memory", self.place)
        mixed = F.silu(mixed)
        keys = c.delta_key_heads * c.delta_key_dim
        q, k, v = mixed.split((keys, keys, mixed.size(2) - 2 * keys), dim=2)
        q, k = (part.unflatten(2, (-1, c.delta_key_dim)) for part in (q, k))
        v = v.unflatten(2, (-1, c.delta_value_dim))
        strength = b.float().sigmoid()
        log_decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        if context.lengths is not None and T > 1:  # padding changes no memory
            real = (torch.arange(T, device=z.device) < context.lengths[:, None])[..., None]
            strength, log_decay = strength * real, log_decay * real
        if memory is not None and T == 1:
            y, memory = step(q, k, v, log_decay, strength, memory)
        else:
            y, memory = chunked(q, k, v, log_decay, strength, memory, context.documents)
        context.write("memory", self.place, memory)
        gate = F.silu(z.float()).view_as(y)
        y = (
            F.rms_norm(y.float(), (y.size(-1),), None, c.norm_eps)
            * cast(Tensor, self.norm.weight).float()
            * gate
        )
        return y.to(dtype).flatten(2)


def _last(
    inputs: Tensor,  # (B, W + T, C)
    count: int,  # W
    lengths: Tensor | None,  # (B,) how many of the T tokens are real
) -> Tensor:  # (B, W, C)
    """The last real tokens of each row, and those before the row where it has too few."""
    if lengths is None:
        return inputs[:, -count:]
    index = lengths[:, None] + torch.arange(count, device=inputs.device)
    return inputs.take_along_dim(index[..., None], dim=1)


def add_states(
    cache: Cache, config: QwenConfig, slots: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Give a cache what the DeltaNets of a model keep of each sequence: memories, fp32, and the last inputs of the
    convolutions."""
    layers = config.kinds.count("D")
    shape = (slots, layers, config.delta_value_heads, config.delta_key_dim, config.delta_value_dim)
    cache.add_state("memory", zeros_on_demand(shape, device, torch.float32))
    inputs = (slots, layers, config.delta_width - 1, config.delta_channels)
    cache.add_state("inputs", zeros_on_demand(inputs, device, dtype))
