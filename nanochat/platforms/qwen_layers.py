"""Qwen layers that compute with the operators of a platform.

As in layers.py, the parameters have the same names as in the plain layers. The formulas are the
same as in models/qwen/layers.py.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.context import Context
from nanochat.linear import Linear
from nanochat.models.llama import Llama
from nanochat.models.qwen.experts import Experts
from nanochat.models.qwen.layers import MLP, Attention, Block, Norm, Vocabulary
from nanochat.models.qwen.model import Qwen
from nanochat.models.rope import rotary_base, rotary_divisors
from nanochat.platforms.grouped_experts import GroupedExperts
from nanochat.platforms.operations import Operations
from nanochat.platforms.together import Join, Product


class Joined:
    """Multiplies by several matrices at once, for inference.

    The matrices have the same inputs and no biases. Each matrix keeps an empty weight, and its
    adapter, if any, still adds to its outputs.
    """

    def __init__(
        self,
        matrices: Sequence[Linear],
        multiply: Product,  # multiplies with all matrices
    ):
        self.multiply = multiply
        self._matrices = matrices
        self._sizes = [matrix.out_features for matrix in matrices]

    @staticmethod
    def of(
        matrices: Sequence[Linear],
        join: Join,
    ) -> "Joined | None":
        """Return the matrices as one Joined, or None if `join` cannot join them."""
        multiply = join(matrices)
        if multiply is None:
            return None
        return Joined(matrices, multiply)

    @property
    def plain(self) -> bool:
        """Whether no matrix has an adapter."""
        return all(matrix.adapter is None for matrix in self._matrices)

    def __call__(self, x: Tensor) -> list[Tensor]:  # (..., inputs) -> (..., outputs) of each matrix
        products = self.multiply(x).split(self._sizes, dim=-1)
        outputs = []
        for matrix, product in zip(self._matrices, products, strict=True):
            added = None if matrix.adapter is None else matrix.adapter(x)
            outputs.append(product if added is None else product + added)
        return outputs


class OperatorVocabulary(Vocabulary):
    """A vocabulary whose loss the platform computes, and whose table a platform may store.

    While a platform stores the table, the weight is empty: `multiply` and `look_up` replace it.
    """

    operations: Operations
    look_up: Callable[[Tensor], Tensor] | None = None  # token ids (...) -> embeddings (..., C)

    def release(self) -> None:
        """Give an emptied weight its shape back, without its values, for Operations.release()."""
        if self.look_up is not None:
            blank = self.weight.new_empty(self.shape)
            self.weight = nn.Parameter(blank, requires_grad=False)
            self.look_up = None

    def embeddings(self, ids: Tensor) -> Tensor:
        """Implement Vocabulary.embeddings with the table that the platform stores, if it does."""
        return super().embeddings(ids) if self.look_up is None else self.look_up(ids)

    def loss(
        self,
        x: Tensor,  # (N, C)
        targets: Tensor,  # (N,)
        weights: Tensor | None,  # (N,)
    ) -> Tensor:
        """Implement Vocabulary.loss with the platform's loss."""
        if self.look_up is not None:
            losses = self.token_losses(x, targets)
            return losses.sum() if weights is None else (losses * weights).sum()
        return self.operations.loss(
            x,
            self.weight,
            targets,
            self.criterion,
            weights=weights,
            chunk=self.chunk,
        )

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:  # (N, C), (N,) -> (N,)
        """Implement Vocabulary.token_losses with the platform's losses, or with a stored table."""
        if self.look_up is None:
            return self.operations.token_losses(
                x,
                self.weight,
                targets,
                self.criterion,
                chunk=self.chunk,
            )
        losses = []
        chunks = zip(x.split(self.chunk), targets.split(self.chunk), strict=True)
        for chunk, chunk_targets in chunks:
            logits = self.logits(chunk)
            loss = F.cross_entropy(logits, chunk_targets, ignore_index=-1, reduction="none")
            losses.append(loss)
        return torch.cat(losses)


class OperatorNorm(Norm):
    """A norm that the platform computes."""

    operations: Operations
    settled: Tensor | None = None  # the scale, computed in advance while the weights do not change

    @property
    def scale(self) -> Tensor:  # (C,) fp32
        """The factor of each channel, which settle() stores until release()."""
        if self.settled is not None:
            return self.settled
        return self.weight.float() + self.one

    def settle(self) -> None:
        """Compute the scale once, for inference with weights that do not change until release()."""
        self.settled = self.scale.detach()

    def release(self) -> None:
        """Undo settle(), for Operations.release()."""
        self.settled = None

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.weighted_norm(x, self.scale, self.epsilon)

    def add(
        self,
        x: Tensor,  # (..., C)
        y: Tensor,  # (..., C)
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + y, and x + y itself."""
        return self.operations.add_weighted_norm(x, y, self.scale, self.epsilon)


class OperatorAttention(Attention):
    """Attention whose input matrices can be joined, and whose heads the platform rotates."""

    operations: Operations
    joined: Joined | None = None
    norm_weights: Tensor | None = None  # (H + Hkv, D), the norm weight of each head, once joined

    def join(self, join: Join) -> None:
        """Join the query, key and value matrices into one product, if `join` can."""
        matrices = (self.q_proj, self.k_proj, self.v_proj)
        all_matrices = Joined.of(matrices, join)
        if all_matrices is None:
            return
        self.joined = all_matrices
        c = self.config
        if c.qk_norm:
            q_weights = _norm_weight(self.q_norm).expand(c.n_head, -1)
            k_weights = _norm_weight(self.k_norm).expand(c.n_kv_head, -1)
            self.norm_weights = torch.cat((q_weights, k_weights))

    def release(self) -> None:
        """Undo join(), for Operations.release()."""
        self.joined = None

    def heads(
        self,
        x: Tensor,  # (B, T, C)
        rotary: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Implement Attention.heads with the joined matrices, if they were joined."""
        if self.joined is None:
            return super().heads(x, rotary)
        c = self.config
        H = c.n_head
        Hkv = c.n_kv_head
        if not c.output_gate and self.joined.plain:  # the fewest operators
            heads = self.joined.multiply(x).unflatten(2, (H + 2 * Hkv, -1))
            qk, v = heads.split((H + Hkv, Hkv), dim=2)
            q, k = self._turned(qk, rotary).split((H, Hkv), dim=2)
            return q, k, v, None
        q, k, v = self.joined(x)
        q = q.unflatten(2, (H, -1))
        k = k.unflatten(2, (Hkv, -1))
        v = v.unflatten(2, (Hkv, -1))
        gate = None
        if c.output_gate:
            q, gate = q.chunk(2, dim=3)
        if c.qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return self.rotated(q, rotary), self.rotated(k, rotary), v, gate

    def _turned(
        self,
        qk: Tensor,  # (B, T, H + Hkv, D)
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:  # (B, T, H + Hkv, D)
        """Return all queries and keys, normalized if the model norms them, and rotated."""
        if self.norm_weights is None:
            return self.rotated(qk, rotary)
        epsilon = self.q_norm.epsilon
        c = self.config
        if self.rotates and c.rotated == c.head_dim:
            return self.operations.normed_heads(qk, self.norm_weights, epsilon, *rotary)
        normed = self.operations.weighted_norm(qk, self.norm_weights, epsilon)
        return self.rotated(normed, rotary)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Implement Attention.rotate with the platform's operator."""
        return self.operations.rotary(x, cos, sin)


def _norm_weight(norm: Norm) -> Tensor:  # (D,) fp32
    return norm.weight.detach().float() + norm.one


class OperatorMLP(MLP):
    """An MLP whose gate and up matrices can be joined."""

    operations: Operations
    joined: Joined | None = None

    def join(self, join: Join) -> None:
        """Join the gate and up matrices into one product, if `join` can."""
        if self.joined is None:
            matrices = (self.gate_proj, self.up_proj)
            self.joined = Joined.of(matrices, join)

    def release(self) -> None:
        """Undo join(), for Operations.release()."""
        self.joined = None

    def forward(self, x: Tensor) -> Tensor:
        if self.joined is None:
            return super().forward(x)
        if self.joined.plain:
            inner = self.operations.swiglu(self.joined.multiply(x))
        else:
            gate, up = self.joined(x)
            inner = F.silu(gate).mul_(up)
        return self.down_proj(inner)


class OperatorBlock(Block):
    """A layer whose second norm the platform may fuse with the sum before it."""

    operations: Operations

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        rotary: tuple[Tensor, Tensor],
        context: Context,
    ) -> Tensor:
        y = self.mixed(self.input_layernorm(x), rotary, context)
        norm = cast(OperatorNorm, self.post_attention_layernorm)
        normed, x = norm.add(x, y)
        return x + self.mlp(normed)


class OperatorQwen(Qwen):
    """A Qwen model that a platform may decode as a whole, with rotary tables in its layout."""

    operations: Operations
    # Returns what hidden() does, or None if it does not support a pass; set by Operations.serve().
    decoder: Callable[[Tensor, Context | None], Tensor | None] | None = None

    def release(self) -> None:
        """Discard the decoder, which knows the stored weights, for Operations.release()."""
        self.decoder = None

    def hidden(self, idx: Tensor, context: Context | None = None) -> Tensor:
        """Implement Qwen.hidden with the platform's decoder if it supports the pass."""
        hidden = None if self.decoder is None else self.decoder(idx, context)
        return super().hidden(idx, context) if hidden is None else hidden

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """Implement Qwen.angles with tables in the layout that the platform reads."""
        c = self.config
        divisors = rotary_divisors(c, self.device)
        return self.operations.rotary_tables(
            length, c.rotated, self.device, torch.float32, rotary_base(c), divisors
        )

    def log_totals(self, logits: Tensor) -> Tensor | None:
        """Return the log-sum-exp of each row of logits, or None if log_softmax is cheaper."""
        return self.operations.log_totals(logits)


class OperatorLlama(OperatorQwen, Llama):
    """A Llama model whose rotary tables have the layout that the platform reads."""


# Layers that are faster with torch's own operators, on every device.
EVERYWHERE: dict[type[nn.Module], type[nn.Module]] = {Experts: GroupedExperts}
LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    **EVERYWHERE,
    Qwen: OperatorQwen,
    Llama: OperatorLlama,
    Block: OperatorBlock,
    Attention: OperatorAttention,
    MLP: OperatorMLP,
    Norm: OperatorNorm,
    Vocabulary: OperatorVocabulary,
}
