"""The layers of Qwen by the operators of a platform, with the parameters of the plain layers under the same names.

See layers.py; the formulas are those of models/qwen/layers.py.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.context import Context
from nanochat.linear import Linear
from nanochat.models.qwen.layers import MLP, Attention, Block, Norm, Vocabulary
from nanochat.models.qwen.model import Qwen
from nanochat.platforms.operations import Operations
from nanochat.platforms.together import Pack, Product, joined


class Joined:
    """Matrices with the same inputs and without biases as one, for inference.

    Their own weights are empty from then on, and their adapters still add to what they give.
    """

    def __init__(self, matrices: Sequence[Linear], multiply: Product):
        """`multiply` multiplies with all of them, as joined() makes it."""
        self.multiply = multiply
        self._matrices = matrices
        self._sizes = [matrix.out_features for matrix in matrices]

    @staticmethod
    def of(matrices: Sequence[Linear], pack: Pack, dtype: torch.dtype) -> "Joined | None":
        """Return the matrices as one, or None if joined() cannot join them."""
        multiply = joined(matrices, pack, dtype)
        return None if multiply is None else Joined(matrices, multiply)

    @property
    def plain(self) -> bool:
        """Whether no matrix has an adapter."""
        return all(matrix.adapter is None for matrix in self._matrices)

    def __call__(self, x: Tensor) -> list[Tensor]:  # (..., inputs) -> (..., outputs) of each matrix
        parts = self.multiply(x).split(self._sizes, dim=-1)
        results = []
        for matrix, product in zip(self._matrices, parts, strict=True):
            results.append(product if matrix.adapter is None else matrix.adapter(x, product))
        return results


class OperatorVocabulary(Vocabulary):
    """The vocabulary, whose loss the platform computes."""

    operations: Operations

    def loss(self, x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """See Vocabulary.loss."""
        vocab = self.weight.size(0)
        return self.operations.loss(
            x, self.weight, targets, vocab, weights, self.chunk, capped=False
        )


class OperatorNorm(Norm):
    """The weighted norm of a platform."""

    operations: Operations
    settled: Tensor | None = None  # the scale, once the weights do not change again

    @property
    def scale(self) -> Tensor:  # (C,) fp32
        """See Norm.scale."""
        return self.weight.float() + self.one if self.settled is None else self.settled

    def settle(self) -> None:
        """Keep the scale from here on: the weights do not change again."""
        self.settled = self.scale.detach()

    def release(self) -> None:
        """Follow the weights again, see Operations.release()."""
        self.settled = None

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.weighted_norm(x, self.scale, self.epsilon)

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + y, and x + y."""
        return self.operations.add_weighted_norm(x, y, self.scale, self.epsilon)


class OperatorAttention(Attention):
    """Attention whose matrices may be joined, and whose heads the platform norms and rotates."""

    operations: Operations
    joined: Joined | None = None
    norm_weights: Tensor | None = None  # (H + Hkv, D) of both norms for each head, once joined

    def join(self, pack: Pack, dtype: torch.dtype) -> None:
        """Multiply with the matrices of queries, keys and values at once from here on, as Joined does."""
        c = self.config
        matrices = Joined.of((self.q_proj, self.k_proj, self.v_proj), pack, dtype)
        if matrices is None:
            return
        self.joined = matrices
        if c.qk_norm:
            q_weight, k_weight = (
                norm.weight.detach().float() + norm.one for norm in (self.q_norm, self.k_norm)
            )
            repeated = (q_weight.expand(c.n_head, -1), k_weight.expand(c.n_kv_head, -1))
            self.norm_weights = torch.cat(repeated)

    def release(self) -> None:
        """Multiply with each matrix by itself again, see Operations.release()."""
        self.joined = None

    def heads(
        self, x: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See Attention.heads."""
        if self.joined is None:
            return super().heads(x, rotary)
        c = self.config
        H = c.n_head
        Hkv = c.n_kv_head
        if c.qk_norm and not c.output_gate and self.joined.plain:  # the fewest operators
            heads = self.joined.multiply(x).unflatten(2, (H + 2 * Hkv, -1))
            q_and_k = self._turned(heads[:, :, : H + Hkv], rotary)
            return q_and_k[:, :, :H], q_and_k[:, :, H:], heads[:, :, H + Hkv :], None
        q, k, v = self.joined(x)
        q = q.unflatten(2, (H, -1))
        k = k.unflatten(2, (Hkv, -1))
        gate = None
        if c.output_gate:
            q, gate = q.chunk(2, dim=3)
        if c.qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return self.rotated(q, rotary), self.rotated(k, rotary), v.unflatten(2, (Hkv, -1)), gate

    def _turned(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:  # (B, T, H + Hkv, D)
        """Norm and rotate all queries and keys."""
        assert self.norm_weights is not None
        epsilon = self.q_norm.epsilon
        if self.config.rotated == self.config.head_dim:
            return self.operations.normed_heads(x, self.norm_weights, epsilon, *rotary)
        x = self.operations.weighted_norm(x, self.norm_weights, epsilon)
        return self.rotated(x, rotary)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Attention.rotate."""
        return self.operations.rotary(x, cos, sin)


class OperatorMLP(MLP):
    """The MLP, whose first two matrices may be joined."""

    operations: Operations
    joined: Joined | None = None

    def join(self, pack: Pack, dtype: torch.dtype) -> None:
        """Multiply with the first two matrices at once from here on, as Joined does."""
        self.joined = self.joined or Joined.of((self.gate_proj, self.up_proj), pack, dtype)

    def release(self) -> None:
        """Multiply with each matrix by itself again, see Operations.release()."""
        self.joined = None

    def forward(self, x: Tensor) -> Tensor:
        if self.joined is None:
            return super().forward(x)
        if self.joined.plain:
            return self.down_proj(self.operations.swiglu(self.joined.multiply(x)))
        gate, up = self.joined(x)
        return self.down_proj(F.silu(gate).mul_(up))


class OperatorBlock(Block):
    """A layer whose second norm is fused with the sum before it."""

    operations: Operations

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
        y = self.mixed(self.input_layernorm(x), rotary, context)
        normed, x = cast(OperatorNorm, self.post_attention_layernorm).add(x, y)
        return x + self.mlp(normed)


class OperatorQwen(Qwen):
    """The model, with rotary tables as the platform reads them."""

    operations: Operations

    def rotary_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """See Qwen.rotary_tables."""
        c = self.config
        cos, sin = self.operations.rotary_tables(
            length, c.rotated, self.device, self.dtype, c.rope_theta
        )
        return cos, -sin

    def log_totals(self, logits: Tensor) -> Tensor | None:
        """See Qwen.log_totals."""
        return self.operations.log_totals(logits)


LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    Qwen: OperatorQwen,
    Block: OperatorBlock,
    Attention: OperatorAttention,
    MLP: OperatorMLP,
    Norm: OperatorNorm,
    Vocabulary: OperatorVocabulary,
}
