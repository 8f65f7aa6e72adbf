"""The layers of a published decoder: vocabulary, norm, attention, MLP and block.

Shapes: B batch, T time, C channels, H heads, Hkv heads of keys and values, D head dimension, V
vocabulary.
"""

from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.context import Context
from nanochat.gpt import rotate
from nanochat.linear import Linear, Multiply
from nanochat.loss import chunked_loss, token_losses
from nanochat.models.qwen.config import DELTANET, QwenConfig
from nanochat.models.qwen.deltanet import GatedDeltaNet
from nanochat.models.qwen.experts import MixtureOfExperts
from nanochat.models.qwen.functions import swiglu, weighted_norm
from nanochat.models.qwen.loss import Uncapped


class Vocabulary(nn.Module):
    """The vocabulary table, used as the embedding, as the head, or as both if they are tied.

    Every use goes through a call of this module, so that sharding hooks see it.
    """

    loss_tokens = 1024  # tokens whose logits exist at the same time in a loss
    loss_logits = 1 << 25  # logits that exist at the same time in a loss, 128 MB in fp32
    criterion = Uncapped()

    def __init__(self, config: QwenConfig):
        super().__init__()
        self.shape = (config.vocab_size, config.n_embd)  # the shape of the weight
        self.weight = nn.Parameter(torch.empty(self.shape))
        self.multiply: Multiply | None = None  # replaces the product with the weight, as in Linear

    @property
    def chunk(self) -> int:
        """The number of tokens whose loss is computed in one chunk."""
        return min(self.loss_tokens, max(self.loss_logits // self.shape[0], 64))

    def forward(
        self,
        input: Tensor,  # (...) token ids, or (..., C) normed activations
        targets: Tensor | None = None,  # (...) token ids, -1 = ignored
        weights: Tensor | None = None,  # (...) weight of each token's loss
        reduction: Literal["sum", "none"] = "sum",
    ) -> Tensor:
        """Return embeddings (..., C) for token ids, or logits or a loss for activations.

        Activations without targets give fp32 logits (..., V). With targets they give the weighted
        sum of the losses, or with reduction "none" the loss of each token (...).
        """
        if not input.is_floating_point():
            return self.embeddings(input)
        if targets is None:
            return self.logits(input)
        x = input.flatten(0, -2)
        if reduction == "none":
            losses = self.token_losses(x, targets.flatten()).view_as(targets)
            return losses.clone()  # a sharded module must not return a view
        flat_weights = None if weights is None else weights.flatten()
        return self.loss(x, targets.flatten(), flat_weights)

    def embeddings(self, ids: Tensor) -> Tensor:  # (...) -> (..., C)
        """Return the embeddings of token ids."""
        return F.embedding(ids, self.weight)

    def logits(self, x: Tensor) -> Tensor:  # (..., C) -> (..., V) fp32
        """Return the logits of all tokens in the vocabulary."""
        if self.multiply is not None:
            return self.multiply(x, self.weight).float()
        return F.linear(x, self.weight.to(x.dtype)).float()

    def loss(  # (N, C), (N,), (N,) -> ()
        self,
        x: Tensor,
        targets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """Return the weighted sum of the losses of N tokens."""
        return chunked_loss(x, self.weight, targets, self.criterion, weights, self.chunk)

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:  # (N, C), (N,) -> (N,)
        """Return the loss of each of N tokens."""
        return token_losses(x, self.weight, targets, self.criterion, self.chunk)


class Norm(nn.Module):
    """Applies RMS norm, times a weight for each channel, or times 1 + weight if zero-centred."""

    def __init__(self, channels: int, config: QwenConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.epsilon = config.norm_eps
        self.one = float(config.zero_centred)

    @property
    def scale(self) -> Tensor:  # (C,) fp32
        """The factor of each channel."""
        return self.weight.float() + self.one

    def forward(self, x: Tensor) -> Tensor:
        return weighted_norm(x, self.scale, self.epsilon)


class Attention(nn.Module):
    """Causal self-attention, with the biases, norms and output gate that the config asks for."""

    def __init__(self, config: QwenConfig, layer: int):
        super().__init__()
        self.index = config.index_of_kind(layer)  # without DeltaNets, as in the cache
        self.window = config.windows[self.index]
        self.rotates = config.rotates(layer)
        self.config = config
        C = config.n_embd
        D = config.head_dim
        bias = bool(config.qkv_bias)
        query_channels = config.n_head * D * (2 if config.output_gate else 1)
        self.q_proj = Linear(C, query_channels, bias)
        self.k_proj = Linear(C, config.n_kv_head * D, bias)
        self.v_proj = Linear(C, config.n_kv_head * D, bias)
        self.o_proj = Linear(config.n_head * D, C, bool(config.o_bias))
        if config.qk_norm:
            self.q_norm = Norm(D, config)
            self.k_norm = Norm(D, config)

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        rotary: tuple[Tensor, Tensor],  # cosines and sines, (1 or B, T, 1, rotated / 2) each
        context: Context,
    ) -> Tensor:  # (B, T, C)
        q, k, v, gate = self.heads(x, rotary)
        y = context.attend(self.index, q, k, v, self.window)
        if gate is not None:
            y = y * torch.sigmoid(gate)
        return self.o_proj(y.flatten(2))

    def heads(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the normalized and rotated queries and keys, the values, and the output gate.

        Queries and gate are (B, T, H, D), keys and values (B, T, Hkv, D). Queries and keys are
        normalized only if the config says so, and the gate is None without an output gate.
        """
        c = self.config
        q = self.q_proj(x).unflatten(2, (c.n_head, -1))
        k = self.k_proj(x).unflatten(2, (c.n_kv_head, -1))
        v = self.v_proj(x).unflatten(2, (c.n_kv_head, -1))
        gate = None
        if c.output_gate:
            q, gate = q.chunk(2, dim=3)
        if c.qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return self.rotated(q, rotary), self.rotated(k, rotary), v, gate

    def rotated(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:  # (B, T, H, D)
        """Return x with the first `config.rotated` channels of every head rotated.

        A layer without rotary embeddings returns x itself.
        """
        if not self.rotates:
            return x
        channels = self.config.rotated
        if x.size(3) == channels:
            return self.rotate(x, *rotary)
        return torch.cat((self.rotate(x[..., :channels], *rotary), x[..., channels:]), dim=3)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, T, H, D)
        """Return x with all channels of every head rotated; see gpt.rotate()."""
        return rotate(x, cos, sin)


class MLP(nn.Module):
    """Computes down(silu(gate(x)) * up(x)), a SwiGLU MLP (arXiv 2002.05202)."""

    def __init__(self, config: QwenConfig, channels: int):
        """Build an MLP with `channels` channels inside."""
        super().__init__()
        bias = bool(config.mlp_bias)
        self.gate_proj = Linear(config.n_embd, channels, bias)
        self.up_proj = Linear(config.n_embd, channels, bias)
        self.down_proj = Linear(channels, config.n_embd, bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    """One layer: attention or a Gated DeltaNet, then an MLP or a mixture of experts.

    Each has a norm before it and a residual around it.
    """

    def __init__(self, config: QwenConfig, layer: int):
        super().__init__()
        self.input_layernorm = Norm(config.n_embd, config)
        self.linear_attn: GatedDeltaNet | None = None
        self.self_attn: Attention | None = None
        if config.kinds[layer] == DELTANET:
            self.linear_attn = GatedDeltaNet(config, config.index_of_kind(layer))
        else:
            self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = Norm(config.n_embd, config)
        self.mlp = _mlp(config, layer)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
        x = x + self.mixed(self.input_layernorm(x), rotary, context)
        return x + self.mlp(self.post_attention_layernorm(x))

    def mixed(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """Return the output of attention or of the DeltaNet for the normalized x (B, T, C)."""
        if self.linear_attn is not None:
            return self.linear_attn(x, context)
        assert self.self_attn is not None
        return self.self_attn(x, rotary, context)


def _mlp(config: QwenConfig, layer: int) -> nn.Module:
    """Return the MLP of a layer, or the mixture of experts in its place."""
    if config.mlp_kinds[layer] == "M":
        return MLP(config, config.n_hidden)
    shared_expert = None
    if config.n_shared_hidden:
        shared_expert = MLP(config, config.n_shared_hidden)
    return MixtureOfExperts(config, shared_expert)
