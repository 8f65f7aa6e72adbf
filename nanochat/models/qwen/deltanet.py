"""Gated DeltaNet, the recurrent layer of Qwen3.5: a short convolution, then the gated delta rule.

delta_rule.py has the arithmetic of the layer's memory. Shapes: B batch, T time, C channels, H key
heads, G value heads for each key head, Dk and Dv their dimensions, W taps of the convolution.
"""

from typing import cast

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
from nanochat.models.qwen.delta_rule import chunked, step


def convolve(
    x: Tensor,  # (B, T, C)
    weight: Tensor,  # (C, 1, W), the last column multiplies the token itself
    before: Tensor | None = None,  # (B, W - 1, C) the tokens before the first; None: zeros
    positions: Tensor | None = None,  # (B, T) position in its document, if a row holds several
) -> tuple[Tensor, Tensor]:  # (B, T, C), (B, W - 1 + T, C)
    """Return the causal convolution of each channel, and x preceded by the tokens before it."""
    W = weight.size(2)
    T = x.size(1)
    # contiguous, since strided ones would be multiplied one by one
    columns = weight[:, 0].to(x.dtype).mT.contiguous()  # (W, C)
    taps = columns.unbind(0)
    if before is None:
        inputs = F.pad(x, (0, 0, W - 1, 0))
    else:
        inputs = torch.cat((before.to(x.dtype), x), dim=1)
    y = x * taps[-1]
    for back in range(1, W):
        first = W - 1 - back
        earlier = inputs[:, first : first + T] * taps[-1 - back]
        if positions is not None:
            earlier = earlier * (positions >= back)[..., None]
        y = y + earlier
    return y, inputs


class GatedDeltaNet(nn.Module):
    """The DeltaNet layer: projections, a convolution, the memory, and a gated norm of its output.

    The parameters are named as in the checkpoints of Qwen3.5.
    """

    def __init__(self, config: QwenConfig, index: int):
        """Build DeltaNet `index`, which is counted without attention layers, as in the cache."""
        super().__init__()
        self.index = index
        self.config = config
        self.recomputes = True  # whether training recomputes all but the projections
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
        before = context.read("inputs", self.index)
        positions = context.positions if before is None else None
        taps = cast(Tensor, self.conv1d.weight)
        mixed, inputs = convolve(self.in_proj_qkv(x), taps, before, positions)
        if before is not None:
            last = _last(inputs, self.config.delta_width - 1, context.lengths)
            context.write("inputs", self.index, last)
        z = self.in_proj_z(x)
        b = self.in_proj_b(x)
        a = self.in_proj_a(x)
        if before is None and self._must_recompute():
            y = checkpoint(
                self._remember,
                mixed,
                z,
                b,
                a,
                context,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            return self.out_proj(cast(Tensor, y))
        return self.out_proj(self._remember(mixed, z, b, a, context))

    def _must_recompute(self) -> bool:
        """Return whether the backward pass recomputes _remember() instead of saving its results."""
        # Below adapters a compiler chooses better by itself; where matrices are trained it would
        # keep a fifth more.
        compiler_chooses = is_compiling() and not self.in_proj_qkv.weight.requires_grad
        return self.recomputes and torch.is_grad_enabled() and not compiler_chooses

    def _remember(
        self,
        mixed: Tensor,  # (B, T, 2 * H * Dk + H * G * Dv) queries, keys and values, before SiLU
        z: Tensor,  # (B, T, H * G * Dv) before the gate
        b: Tensor,  # (B, T, H * G) before the sigmoid
        a: Tensor,  # (B, T, H * G) before the decay
        context: Context,
    ) -> Tensor:  # (B, T, H * G * Dv)
        """Update the memory, and return what each token reads from it, normalized and gated.

        Intermediate results take up several times as much device memory as the arguments, but are
        quick to compute compared with the projections.
        """
        c = self.config
        T = mixed.size(1)
        key_channels = c.delta_key_heads * c.delta_key_dim
        value_channels = mixed.size(2) - 2 * key_channels
        q, k, v = F.silu(mixed).split((key_channels, key_channels, value_channels), dim=2)
        q = q.unflatten(2, (-1, c.delta_key_dim))
        k = k.unflatten(2, (-1, c.delta_key_dim))
        v = v.unflatten(2, (-1, c.delta_value_dim))
        strength = b.float().sigmoid()
        log_decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        if context.lengths is not None and T > 1:  # padding changes no memory
            is_real = torch.arange(T, device=z.device) < context.lengths[:, None]
            strength = strength * is_real[..., None]
            log_decay = log_decay * is_real[..., None]
        memory = context.read("memory", self.index)
        if memory is not None and T == 1:
            y, memory = step(q, k, v, log_decay, strength, memory)
        else:
            y, memory = chunked(q, k, v, log_decay, strength, memory, context.documents)
        context.write("memory", self.index, memory)
        scale = cast(Tensor, self.norm.weight).float()
        gate = F.silu(z.float()).view_as(y)
        normed = F.rms_norm(y.float(), (y.size(-1),), eps=c.norm_eps)
        return (normed * scale * gate).to(mixed.dtype).flatten(2)


def _last(
    inputs: Tensor,  # (B, W + T, C)
    count: int,  # W
    lengths: Tensor | None,  # (B,) how many of the T tokens are real
) -> Tensor:  # (B, W, C)
    """Return the last `count` inputs of each row that are not padding."""
    if lengths is None:
        return inputs[:, -count:]
    index = lengths[:, None] + torch.arange(count, device=inputs.device)
    return inputs.take_along_dim(index[..., None], dim=1)


def add_states(
    cache: Cache,
    config: QwenConfig,
    slots: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Add the states of a model's DeltaNets to a cache, for every sequence slot.

    These are the memories, in fp32, and the last inputs of the convolutions.
    """
    layers = config.deltanets
    shape = (slots, layers, config.delta_value_heads, config.delta_key_dim, config.delta_value_dim)
    cache.add_state("memory", zeros_on_demand(shape, device, torch.float32))
    shape = (slots, layers, config.delta_width - 1, config.delta_channels)
    cache.add_state("inputs", zeros_on_demand(shape, device, dtype))
