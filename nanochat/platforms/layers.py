"""GPT layers that compute with the operators of a platform.

Their parameters have the same names as in the plain layers, and accelerate() swaps them into a
model. Each layer calls the Operations of its device for everything that the device may fuse. The
formulas are the same as in gpt.py, and a test compares the results.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch.nn as nn
from torch import Tensor

from nanochat.common import UserError, appendix, tr
from nanochat.context import Context, whole_rows
from nanochat.gpt import GPT, MLP, QK_SCALE, Block, CausalSelfAttention, Head, offset_keys
from nanochat.linear import Linear
from nanochat.model import Model
from nanochat.platforms.operations import Operations
from nanochat.platforms.together import Join, Layer, Product

NOT_CAST = (None, None)  # no matrix is cast in advance: each is cast wherever it is used


class OperatorAttention(CausalSelfAttention):
    """Attention whose heads the platform computes, normalizes and rotates."""

    operations: Operations
    cast_weights: Sequence[Tensor | None] = NOT_CAST  # for q, k and v; the output; and the gate
    joined: Product | None = None  # multiplies with the q, k and v matrices at once

    def join(self, join: Join) -> None:
        """Join the query, key and value matrices into one product, if `join` can."""
        if self.joined is None:
            matrices = (self.c_q, self.c_k, self.c_v)
            self.joined = join(matrices)

    def release(self) -> None:
        """Undo join(), for Operations.release()."""
        self.joined = None

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        value: Tensor | None,  # (B, T, Hkv * D)
        rotary: tuple[Tensor, Tensor],
        context: Context,
    ) -> Tensor:  # (B, T, C)
        q, k, v = self._heads(x, value, rotary)
        if self.has_offset:
            k = self._offset(k, context)
        scale = self.operations.softmax_scale(self.head_dim, QK_SCALE)
        y = context.attend(self.layer, q, k, v, self.window, scale)
        if self.is_exclusive:
            y = self.operations.exclude_own(y, v)
        out_weight = self.cast_weights[1]
        return self.operations.project(y.flatten(2), self.c_proj, out_weight)

    def _heads(
        self,
        x: Tensor,  # (B, T, C)
        value: Tensor | None,  # (B, T, Hkv * D)
        rotary: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D)
        matrices = self.joined
        if matrices is None:
            matrices = (self.c_q, self.c_k, self.c_v)
        qkv_weight = self.cast_weights[0]
        cos, sin = rotary
        if value is None or self.ve_gate is None:
            return self.operations.heads(
                x,
                matrices,
                self.head_dim,
                cos,
                sin,
                QK_SCALE,
                qkv_weight,
            )
        gated_weights = None
        if qkv_weight is not None:
            gate_weight = cast(Tensor, self.cast_weights[2])
            gated_weights = (qkv_weight, gate_weight)
        return self.operations.gated_heads(
            x,
            matrices,
            self.ve_gate,
            value,
            self.head_dim,
            cos,
            sin,
            QK_SCALE,
            gated_weights,
        )

    def _offset(self, k: Tensor, context: Context) -> Tensor:
        if whole_rows(context):
            return self.operations.offset_keys(k)
        return offset_keys(k, context.previous_keys(self.layer, k))


class OperatorMLP(MLP):
    """An MLP that the platform computes."""

    operations: Operations
    cast_weights: Sequence[Tensor | None] = NOT_CAST

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.mlp(x, self.c_fc, self.c_proj, self.cast_weights)


class OperatorBlock(Block):
    """A layer whose second norm the platform may fuse with the sum before it."""

    operations: Operations

    def units(self) -> Layer:
        """Return the layer's matrices, grouped into units that are each multiplied as one matrix.

        The order is MLP input, MLP output, queries with keys and values, attention output, and the
        gate, if any.
        """
        attn = self.attn
        mlp = self.mlp
        units = [
            (mlp.c_fc.weight,),
            (mlp.c_proj.weight,),
            (attn.c_q.weight, attn.c_k.weight, attn.c_v.weight),
            (attn.c_proj.weight,),
        ]
        if attn.ve_gate is not None:
            units.append((attn.ve_gate.weight,))
        return units

    def use(self, cast_weights: Sequence[Tensor] | None) -> None:
        """Make the layer multiply by `cast_weights`, copies of its units() in the compute dtype.

        With None, each matrix is cast wherever it is used.
        """
        mlp = cast(OperatorMLP, self.mlp)
        attention = cast(OperatorAttention, self.attn)
        if cast_weights is None:
            mlp.cast_weights = NOT_CAST
            attention.cast_weights = NOT_CAST
        else:
            mlp.cast_weights = cast_weights[:2]
            attention.cast_weights = cast_weights[2:]

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        value: Tensor | None,  # (B, T, Hkv * D)
        rotary: tuple[Tensor, Tensor],
        context: Context,
    ) -> Tensor:
        normed, x = self.operations.norm_and_keep(x)
        y = self.attn(normed, value, rotary, context)
        normed, x = self.operations.add_norm(x, y)
        return x + self.mlp(normed)


class OperatorHead(Head):
    """An output head whose softcap and loss the platform computes."""

    operations: Operations

    def logits(self, x: Tensor) -> Tensor:
        """Implement Head.logits with the platform's softcap."""
        return self.operations.softcap(self.scores(x))

    def loss(
        self,
        x: Tensor,  # (N, C)
        targets: Tensor,  # (N,)
        weights: Tensor | None,  # (N,)
    ) -> Tensor:
        """Implement Head.loss with the platform's loss."""
        return self.operations.loss(
            x,
            self.weight,
            targets,
            self.criterion,
            weights=weights,
            chunk=self.loss_tokens,
        )

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:  # (N, C), (N,) -> (N,)
        """Implement Head.token_losses with the platform's losses."""
        return self.operations.token_losses(
            x,
            self.weight,
            targets,
            self.criterion,
            chunk=self.single_loss_tokens,
        )


class OperatorGPT(GPT):
    """A GPT that leaves computations outside its layers to the platform too."""

    operations: Operations

    def rotary_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Implement GPT.rotary_tables with tables in the layout that the platform reads."""
        D = self.config.head_dim
        return self.operations.rotary_tables(length, D, self.device, self.dtype)

    def embed(self, idx: Tensor) -> Tensor:
        """Implement GPT.embed with the platform's norm."""
        embedding = self.wte(idx).to(self.dtype)
        return self.operations.norm(embedding)

    def smear(self, x: Tensor, context: Context) -> Tensor:
        """Implement GPT.smear with the platform's operators."""
        previous = None if whole_rows(context) else context.previous(x)
        return self.operations.smear(x, previous, self.smear_gate, self.smear_lambda)

    def mix(
        self,
        x: Tensor,  # (B, T, C)
        x0: Tensor,  # (B, T, C)
        resid_lambda: Tensor,  # ()
        x0_lambda: Tensor,  # ()
    ) -> tuple[Tensor, Tensor]:
        """Implement GPT.mix with the platform's operators."""
        return self.operations.mix(x, x0, resid_lambda, x0_lambda)

    def backout(
        self,
        x: Tensor,  # (B, T, C)
        middle: Tensor,  # (B, T, C)
    ) -> Tensor:
        """Implement GPT.backout with the platform's operators."""
        remainder = self.operations.backout(x, middle, self.backout_lambda)
        return self.operations.norm(remainder)

    def log_totals(self, logits: Tensor) -> Tensor | None:
        """Return the log-sum-exp of each row of logits, or None if log_softmax is cheaper."""
        return self.operations.log_totals(logits)

    def hidden(self, idx: Tensor, context: Context | None = None) -> Tensor:
        """Implement GPT.hidden, casting the matrices of all layers together if the platform can.

        The layers of a sharded model cast their own matrices: fully_shard changes the class of a
        layer, and sees only gradients that the layer itself produces.
        """
        blocks = self.blocks
        if any(type(block) is not OperatorBlock for block in blocks):
            return super().hidden(idx, context)
        layers = cast(list[OperatorBlock], blocks)
        weights = self.operations.cast_together(layers, self.dtype)
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
    """Return the operations that accelerate() gave a model, or new plain-torch ones if none."""
    attention = getattr(model, "attention", None)
    if isinstance(attention, Operations):
        return attention
    return Operations()


def accelerate(model: Model, operations: Operations) -> Counter[str]:
    """Make a model compute with a device's operators, and return a Counter of swapped modules.

    The Counter's keys are the names of the modules' new classes. If `operations` do not fuse
    layers, only attention and experts are replaced. Call this before the model is sharded or
    compiled.
    """
    module = cast(Any, model)
    module.attention = operations
    _set_chunks(module, operations)
    counts: Counter[str] = Counter()
    swaps = LAYERS if operations.fuses_layers else {}
    if not isinstance(model, GPT):
        published = appendix("nanochat.platforms.qwen_layers")
        swaps = published.LAYERS if operations.fuses_layers else published.EVERYWHERE
    for layer in module.modules():
        faster = swaps.get(type(layer))
        if faster is not None:
            layer.__class__ = faster
            layer.operations = operations
            counts[faster.__name__] += 1
    return counts


def _set_chunks(model: nn.Module, operations: Operations) -> None:
    """Set how many logits a model's head may compute at a time, as `operations` prescribe."""
    for module in model.modules():
        if isinstance(module, Head):
            module.loss_tokens = operations.loss_chunk
            module.capped_logits = operations.capped_logits
        elif hasattr(module, "loss_logits"):  # the vocabulary of a published family
            vocabulary = cast(Any, module)
            vocabulary.loss_tokens = operations.loss_chunk
            vocabulary.loss_logits = operations.loss_logits


def matrices_named(model: Model, endings: tuple[str, ...]) -> dict[str, Linear]:
    """Return a model's Linear modules whose names end with one of `endings`, as a dict by name."""
    module = cast(nn.Module, model)
    return {
        name: matrix
        for name, matrix in module.named_modules()
        if isinstance(matrix, Linear) and name.endswith(endings)
    }


def check_sides(matrices: Mapping[str, Linear], multiple: int, number_format: str) -> None:
    """Raise UserError (exit code 2) unless `multiple` divides both sizes of every matrix."""
    for name, matrix in matrices.items():
        for size in (matrix.in_features, matrix.out_features):
            if size % multiple:
                raise UserError(
                    tr(
                        "{number_format} needs matrices whose sides are multiples of {multiple}, and "
                        "{name} has {size}: choose another --model_dim, or leave --matmul out",
                        number_format=number_format,
                        multiple=multiple,
                        name=name,
                        size=size,
                    ),
                    exit_code=2,
                )
