"""The layers of a Qwen model: vocabulary, norm, attention, MLP. Shapes as in gpt.py."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.context import Context
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.deltanet import GatedDeltaNet
from nanochat.nn import loss
from nanochat.nn.lean import swiglu
from nanochat.nn.lora import Joined, Linear
from nanochat.nn.operations import Operations
from nanochat.nn.together import Pack


class Vocabulary(nn.Module):
    """A row of channels for each token, as embedding, as head, or as both where they are tied.

    Every use is a call of this module, so that sharding hooks see it.
    """

    only_multiplies = False

    def __init__(self, config: QwenConfig, operations: Operations):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))
        self.operations = operations
        self.packed: Callable[[Tensor], Tensor] | None = (
            None  # multiplies as the head: int8.py, operations.hold()
        )

    def forward(
        self,
        input: Tensor,  # (...) token ids, or (..., C) normed activations
        targets: Tensor | None = None,  # (...) token ids, -1 = ignored
        weights: Tensor | None = None,  # (...) weight of each token's loss
        each: bool = False,
    ) -> Tensor:
        """The rows (..., C) of token ids. Of activations: fp32 logits (..., V); with targets the weighted sum of
        losses, or with `each` the loss of every token, (...)."""
        if not input.is_floating_point():
            return F.embedding(input, self.weight)
        if targets is None and self.packed is not None:
            return self.packed(input).float()
        if targets is None:
            return F.linear(input, self.weight.to(input.dtype)).float()
        flat, wanted, vocab = input.flatten(0, -2), targets.flatten(), self.weight.size(0)
        chunk = min(self.operations.loss_chunk, max(self.operations.loss_logits // vocab, 64))
        if each:
            losses = loss.token_losses(flat, self.weight, wanted, vocab, chunk, capped=False)
            return losses.view_as(targets).clone()  # a sharded module must not return a view
        weights = None if weights is None else weights.flatten()
        flat, wanted, weights = self.operations.with_targets(flat, wanted, weights)
        fused = self.operations.fused_loss(flat)
        return loss.chunked_loss(
            flat, self.weight, wanted, vocab, weights, chunk, capped=False, fused=fused
        )

    def release(self) -> None:
        """See Operations.release()."""
        self.packed = None


class Norm(nn.Module):
    """RMS norm times a weight for each channel, or times 1 + weight where the weights are centred on zero."""

    def __init__(self, channels: int, config: QwenConfig, operations: Operations):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.epsilon, self.one = config.norm_eps, float(config.zero_centred)
        self.operations = operations
        self._scale: Tensor | None = None

    @property
    def scale(self) -> Tensor:  # (C,) fp32
        """What every channel is multiplied with."""
        return self.weight.float() + self.one if self._scale is None else self._scale

    def settle(self) -> None:
        """Keep the scale from here on: the weights do not change again."""
        self._scale = self.scale.detach()

    def release(self) -> None:
        """Follow the weights again, see Operations.release()."""
        self._scale = None

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.weighted_norm(x, self.scale, self.epsilon)

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + y, and x + y."""
        return self.operations.add_weighted_norm(x, y, self.scale, self.epsilon)


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings, and what a family adds: biases, norms, an output gate."""

    def __init__(self, config: QwenConfig, place: int, operations: Operations):
        """`place` is the number of the layer among the attention layers, which is where its keys lie in the cache."""
        super().__init__()
        self.place, self.config, self.operations = place, config, operations
        D, C, bias = config.head_dim, config.n_embd, bool(config.qkv_bias)
        self.q_proj = Linear(C, config.n_head * D * (2 if config.output_gate else 1), bias)
        self.k_proj = Linear(C, config.n_kv_head * D, bias)
        self.v_proj = Linear(C, config.n_kv_head * D, bias)
        self.o_proj = Linear(config.n_head * D, C)
        if config.qk_norm:
            self.q_norm, self.k_norm = Norm(D, config, operations), Norm(D, config, operations)
        self.joined: Joined | None = None
        self._norms = torch.empty(
            0
        )  # (H + Hkv, D) the weights of both norms for each head, where matrices are joined

    def join(self, pack: Pack, dtype: torch.dtype) -> None:
        """Multiply with the matrices of queries, keys and values at once from here on, as Joined does."""
        matrices, c = (self.q_proj, self.k_proj, self.v_proj), self.config
        if (made := Joined.of(matrices, pack, dtype)) is None:
            return
        self.joined = made
        if c.qk_norm:
            norms = [norm.weight.detach().float() + norm.one for norm in (self.q_norm, self.k_norm)]
            self._norms = torch.cat(
                (norms[0].expand(c.n_head, -1), norms[1].expand(c.n_kv_head, -1))
            )

    def release(self) -> None:
        """Multiply with each matrix by itself again, see Operations.release()."""
        self.joined = None

    def _heads(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[
        Tensor, Tensor, Tensor, Tensor | None
    ]:  # (B, T, H, D), (B, T, Hkv, D) twice, (B, T, H, D)
        """Queries and keys, normed and rotated, values, and the gate of the output."""
        c, gate = self.config, None
        H, Hkv = c.n_head, c.n_kv_head
        if (
            self.joined is not None and c.qk_norm and not c.output_gate and self.joined.plain
        ):  # the fewest operators
            heads = self.joined.multiply(x).unflatten(2, (H + 2 * Hkv, -1))
            both = heads[:, :, : H + Hkv]
            if c.rotated == c.head_dim:
                both = self.operations.normed_heads(
                    both, self._norms, self.q_norm.epsilon, cos, sin
                )
            else:
                both = self.operations.weighted_norm(both, self._norms, self.q_norm.epsilon)
                both = self._rotated(both, cos, sin)
            return both[:, :, :H], both[:, :, H:], heads[:, :, H + Hkv :], None
        made = (
            self.joined(x)
            if self.joined is not None
            else [m(x) for m in (self.q_proj, self.k_proj, self.v_proj)]
        )
        q, k, v = (
            each.unflatten(2, (count, -1)) for each, count in zip(made, (H, Hkv, Hkv), strict=True)
        )
        if c.output_gate:
            q, gate = q.chunk(2, dim=3)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self._rotated(q, cos, sin), self._rotated(k, cos, sin), v, gate

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, H, D) with its first channels rotated."""
        D = self.config.rotated
        if x.size(3) == D:
            return self.operations.rotary(x, cos, sin)
        return torch.cat((self.operations.rotary(x[..., :D], cos, sin), x[..., D:]), dim=3)

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        cos: Tensor,  # (1 or B, T, 1, D/2), as operations.rotary() reads it
        sin: Tensor,
        context: Context,
    ) -> Tensor:  # (B, T, C)
        c = self.config
        q, k, v, gate = self._heads(x, cos, sin)
        y = context.attend(self.place, q, k, v, c.sequence_len)
        if gate is not None:
            y = y * torch.sigmoid(gate)
        return self.o_proj(y.flatten(2))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: QwenConfig, operations: Operations):
        super().__init__()
        self.operations = operations
        self.gate_proj = Linear(config.n_embd, config.n_hidden)
        self.up_proj = Linear(config.n_embd, config.n_hidden)
        self.down_proj = Linear(config.n_hidden, config.n_embd)
        self.joined: Joined | None = None

    def join(self, pack: Pack, dtype: torch.dtype) -> None:
        """Multiply with the first two matrices at once from here on, as Joined does."""
        self.joined = self.joined or Joined.of((self.gate_proj, self.up_proj), pack, dtype)

    def release(self) -> None:
        """Multiply with each matrix by itself again, see Operations.release()."""
        self.joined = None

    def forward(self, x: Tensor) -> Tensor:
        if self.joined is not None and self.joined.plain:
            return self.down_proj(self.operations.swiglu(self.joined.multiply(x)))
        if self.joined is not None:
            gate, up = self.joined(x)
            return self.down_proj(F.silu(gate).mul_(up))
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    """One layer: attention or Gated DeltaNet, then MLP, each on the normed residual stream."""

    def __init__(self, config: QwenConfig, layer: int, operations: Operations):
        super().__init__()
        place = config.place(layer)
        self.input_layernorm = Norm(config.n_embd, config, operations)
        self.linear_attn = self.self_attn = None
        if config.kinds[layer] == "D":
            self.linear_attn = GatedDeltaNet(config, place)
        else:
            self.self_attn = Attention(config, place, operations)
        self.post_attention_layernorm = Norm(config.n_embd, config, operations)
        self.mlp = MLP(config, operations)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: Context) -> Tensor:
        normed = self.input_layernorm(x)
        if self.linear_attn is not None:
            y = self.linear_attn(normed, context)
        else:
            y = cast(Attention, self.self_attn)(normed, cos, sin, context)
        normed, x = self.post_attention_layernorm.add(x, y)
        return x + self.mlp(normed)
