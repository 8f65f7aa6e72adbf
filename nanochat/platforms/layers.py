"""The layers of the GPT by the operators of a platform, with the parameters of the plain layers under the same names.

accelerate() swaps them into a model. Each layer calls the Operations of its device for what that device fuses; the
formulas are those of gpt.py, and a test compares the two.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.common import appendix
from nanochat.context import Context, whole_rows
from nanochat.gpt import GPT, MLP, QK_SCALE, Block, CausalSelfAttention, Head, offset_keys
from nanochat.model import Model
from nanochat.platforms.operations import Operations
from nanochat.platforms.together import Pack, Product, Unit, joined

NOT_CAST = (None, None)  # every use casts its own matrix


class OperatorAttention(CausalSelfAttention):
    """Attention whose heads are made, normed and rotated by the platform."""

    operations: Operations
    cast_weights: Sequence[Tensor | None] = NOT_CAST  # of q, k and v; of the output; of the gate
    joined: Product | None = (
        None  # multiplies with the matrices of queries, keys and values at once
    )

    def join(self, pack: Pack, dtype: torch.dtype) -> None:
        """Multiply with the matrices of queries, keys and values at once from here on, if joined() can join them."""
        self.joined = self.joined or joined((self.c_q, self.c_k, self.c_v), pack, dtype)

    def release(self) -> None:
        """Multiply with each matrix by itself again, see Operations.release()."""
        self.joined = None

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        value: Tensor | None,  # (B, T, Hkv * D)
        rotary: tuple[Tensor, Tensor],
        context: Context,
    ) -> Tensor:  # (B, T, C)
        matrices = (self.c_q, self.c_k, self.c_v) if self.joined is None else self.joined
        how = (self.head_dim, *rotary, QK_SCALE)
        qkv_weight, out_weight, *gate_weight = self.cast_weights
        if value is None or self.ve_gate is None:
            q, k, v = self.operations.heads(x, matrices, *how, qkv_weight)
        else:
            weights = None if qkv_weight is None else (qkv_weight, cast(Tensor, gate_weight[0]))
            q, k, v = self.operations.gated_heads(x, matrices, self.ve_gate, value, *how, weights)
        if self.has_offset:
            if whole_rows(context):
                k = self.operations.offset_keys(k)
            else:
                k = offset_keys(k, context.previous_keys(self.layer, k))
        scale = self.operations.softmax_scale(self.head_dim, QK_SCALE)
        y = context.attend(self.layer, q, k, v, self.window, scale)
        return self.operations.project(y.flatten(2), self.c_proj, out_weight)


class OperatorMLP(MLP):
    """The MLP, computed by the platform."""

    operations: Operations
    cast_weights: Sequence[Tensor | None] = NOT_CAST

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.mlp(x, self.c_fc, self.c_proj, self.cast_weights)


class OperatorBlock(Block):
    """A layer whose norms are fused with the sums before them."""

    operations: Operations

    def units(self) -> list[Unit]:
        """The matrices as they are multiplied: MLP in and out, queries with keys and values, attention out, gate."""
        a = self.attn
        units = [(self.mlp.c_fc,), (self.mlp.c_proj,), (a.c_q, a.c_k, a.c_v), (a.c_proj,)]
        if a.ve_gate is not None:
            units.append((a.ve_gate,))
        return [tuple(matrix.weight for matrix in unit) for unit in units]

    def use(self, cast_weights: Sequence[Tensor] | None) -> None:
        """Multiply with these units(), which have the compute dtype; None: every use casts its own matrix."""
        cast(OperatorMLP, self.mlp).cast_weights = cast_weights[:2] if cast_weights else NOT_CAST
        attention = cast(OperatorAttention, self.attn)
        attention.cast_weights = cast_weights[2:] if cast_weights else NOT_CAST

    def forward(
        self, x: Tensor, value: Tensor | None, rotary: tuple[Tensor, Tensor], context: Context
    ) -> Tensor:
        normed, x = self.operations.norm_and_keep(x)
        y = self.attn(normed, value, rotary, context)
        normed, x = self.operations.add_norm(x, y)
        return x + self.mlp(normed)


class OperatorHead(Head):
    """The head, whose softcap and loss the platform computes."""

    operations: Operations

    def logits(self, x: Tensor) -> Tensor:
        """See Head.logits."""
        return self.operations.softcap(self.scores(x))

    def loss(self, x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """See Head.loss."""
        chunk = self.loss_tokens
        return self.operations.loss(x, self.weight, targets, self.vocab, weights, chunk)


class OperatorGPT(GPT):
    """The GPT, whose operators outside of the layers the platform computes."""

    operations: Operations

    def rotary_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """See GPT.rotary_tables; each row is as the platform reads it."""
        size = self.config.head_dim
        return self.operations.rotary_tables(length, size, self.device, self.dtype)

    def embed(self, idx: Tensor) -> Tensor:
        """See GPT.embed."""
        return self.operations.norm(self.wte(idx).to(self.dtype))

    def smear(self, x: Tensor, context: Context) -> Tensor:
        """See GPT.smear."""
        previous = None if whole_rows(context) else context.previous(x)
        return self.operations.smear(x, previous, self.smear_gate, self.smear_lambda)

    def mix(
        self, x: Tensor, x0: Tensor, resid_lambda: Tensor, x0_lambda: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See GPT.mix."""
        return self.operations.mix(x, x0, resid_lambda, x0_lambda)

    def backout(self, x: Tensor, middle: Tensor) -> Tensor:
        """See GPT.backout."""
        return self.operations.norm(self.operations.backout(x, middle, self.backout_lambda))

    def log_totals(self, logits: Tensor) -> Tensor | None:
        """See GPT.log_totals."""
        return self.operations.log_totals(logits)

    def hidden(self, idx: Tensor, context: Context | None = None) -> Tensor:
        """See GPT.hidden. The matrices of all layers are cast together, if the platform casts them so.

        Not those of a sharded model, whose layers fully_shard gives a class of their own: it sees only gradients that
        a layer itself makes.
        """
        blocks = self.blocks
        if not self.operations.fewest_launches or any(type(b) is not OperatorBlock for b in blocks):
            return super().hidden(idx, context)
        layers = cast(list[OperatorBlock], blocks)
        weights = self.operations.cast_together([block.units() for block in layers], self.dtype)
        if weights is None:
            return super().hidden(idx, context)
        for block, cast_weights in zip(layers, weights, strict=True):
            block.use(cast_weights)
        try:
            return super().hidden(idx, context)
        finally:
            for block in layers:
                block.use(None)


LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    GPT: OperatorGPT,
    Block: OperatorBlock,
    CausalSelfAttention: OperatorAttention,
    MLP: OperatorMLP,
    Head: OperatorHead,
}


def operations_of(model: nn.Module) -> Operations:
    """Return the operations that a model computes with: plain torch's unless accelerate() gave it others."""
    attention = getattr(model, "attention", None)
    return attention if isinstance(attention, Operations) else Operations()


def accelerate(model: Model, operations: Operations) -> Counter[str]:
    """Let a model compute with the operators of a device; returns how many modules of each class were swapped.

    Call it before the model is sharded or compiled.
    """
    module = cast(Any, model)
    module.attention = operations
    counts: Counter[str] = Counter()
    for submodule in module.modules():
        if isinstance(submodule, Head):
            submodule.loss_tokens = operations.loss_chunk
            submodule.capped_logits = operations.capped_logits
        elif hasattr(submodule, "loss_logits"):  # the vocabulary of a published family
            submodule.loss_tokens = operations.loss_chunk
            submodule.loss_logits = operations.loss_logits
    if not operations.fuses_layers:
        return counts
    swaps = LAYERS
    if not isinstance(model, GPT):
        swaps = appendix("nanochat.platforms.qwen_layers").LAYERS
    for submodule in module.modules():
        faster = swaps.get(type(submodule))
        if faster is not None:
            submodule.__class__ = faster
            submodule.operations = operations
            counts[faster.__name__] += 1
    return counts
