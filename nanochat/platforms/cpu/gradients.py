"""Training operators that run compiled kernels, as torch autograd functions.

Each function keeps only what its gradient needs, and computes the gradients of several inputs in
one loop over memory. Shapes: B batch, T time, C channels, H heads, D head dimension, N tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.common import base_dir
from nanochat.loss import SOFTCAP, Criterion, Softcapped
from nanochat.platforms import host
from nanochat.platforms.cpu.kernels import EPSILON, Kernels
from nanochat.platforms.cpu.products import Matrix, Matrix8
from nanochat.platforms.cpu.training import (
    ProductsInt8,
    Training,
    evenly_spaced,
    side_by_side,
    training,
)

Gradients = tuple[Tensor | None, ...]
# Overwrites logits with the gradient of their losses' sum, and returns the losses (n,). The
# arguments are logits, targets, weights, vocab and cap.
FusedLoss = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]


@dataclass(frozen=True)
class Trained:
    """The kernels that compute training operators and their gradients."""

    kernels: Kernels
    training: Training
    int8: ProductsInt8 | None = None  # if given, matrices multiply bf16 activations in 8 bits

    def matrix(self, masters: Sequence[Tensor], x: Tensor) -> Matrix:
        """Return `masters`, stacked as one matrix for activations in x's format."""
        if self.int8 is not None:
            return Matrix8(self.int8, masters)
        return Matrix(self.kernels, masters, x.dtype)


class Norm(torch.autograd.Function):
    """Computes the RMS norm of x, or of x + added, and also returns the norm's input.

    The gradients of both results are combined in one loop.
    """

    @staticmethod
    def forward(
        ctx: Any,
        use: Trained,
        x: Tensor,  # (..., C)
        added: Tensor | None,  # (..., C)
    ) -> tuple[Tensor, Tensor]:
        y, total = use.kernels.norm(x, None, EPSILON, added)
        if added is None:
            total = total.view_as(total)  # an output must not be the same tensor as an input
        ctx.use = use
        ctx.has_added = added is not None
        ctx.save_for_backward(total)
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        (total,) = ctx.saved_tensors
        y_grad, total_grad = grads
        if y_grad is None:
            x_grad = total_grad
        else:
            training = ctx.use.training
            x_grad = training.norm_back(total, y_grad, total_grad, EPSILON)
        added_grad = x_grad if ctx.has_added else None
        return None, x_grad, added_grad


class Mix(torch.autograd.Function):
    """Computes a x + b x0, and also returns x0.

    The gradients of x0 from both results are added in one loop.
    """

    @staticmethod
    def forward(
        ctx: Any,
        use: Trained,
        x: Tensor,  # (..., C)
        x0: Tensor,  # (..., C)
        a: Tensor,  # ()
        b: Tensor,  # ()
    ) -> tuple[Tensor, Tensor]:
        ctx.use = use
        ctx.save_for_backward(x, x0, a, b)
        ctx.set_materialize_grads(False)
        mixed = use.kernels.mix(x, x0, a, b)
        return mixed, x0.view_as(x0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        x, x0, a, b = ctx.saved_tensors
        mixed_grad, later_x0_grad = grads
        if mixed_grad is None:
            return None, None, later_x0_grad, None, None
        training = ctx.use.training
        x_grad, x0_grad, sums = training.mix_back(mixed_grad, x, x0, later_x0_grad, a, b)
        a_grad, b_grad = sums.to(a.dtype).unbind()
        return None, x_grad, x0_grad, a_grad.view_as(a), b_grad.view_as(b)


class Heads(torch.autograd.Function):
    """Computes queries, keys and values with one product.

    Queries and keys are then normalized, multiplied by `sharpen` and rotated. If there is a gate, 3
    sigmoid(gate x) times the value embedding is added to the values. The gate reads only the first
    channels of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        use: Trained,
        x: Tensor,  # (B, T, C)
        cos: Tensor,  # (1 or B, T, 1, D / 2)
        sin: Tensor,
        sharpen: float,
        gate: Tensor | None,  # (Hkv, R)
        value_embedding: Tensor | None,  # (B, T, Hkv * D)
        *weights: Tensor,  # for queries, keys and values: (H * D, C), (Hkv * D, C), (Hkv * D, C)
    ) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D)
        rows = x.flatten(0, -2)
        D = 2 * cos.size(-1)
        ctx.use = use
        ctx.sharpen = sharpen
        ctx.sizes = [len(weight) for weight in weights]
        ctx.head_counts = [size // D for size in ctx.sizes]
        ctx.formats = [weight.dtype for weight in weights]
        ctx.matrix = use.matrix(weights, x)
        products = ctx.matrix.times(rows)  # (N, C')
        heads = products.view(*x.shape[:-1], -1, D)
        q, k, v = heads.split(ctx.head_counts, dim=2)
        opened = None
        if gate is not None and value_embedding is not None:
            gate = gate.to(x.dtype)
            value_embedding = value_embedding.contiguous().view(len(rows), -1, D)
            opened = use.training.gate(rows, gate, value_embedding, v.flatten(0, 1))
        ctx.save_for_backward(rows, products, cos, sin, gate, value_embedding, opened)
        q = use.kernels.turn(q, None, cos, sin, EPSILON, sharpen)
        k = use.kernels.turn(k, None, cos, sin, EPSILON, sharpen)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        rows, products, cos, sin, gate, value_embedding, opened = ctx.saved_tensors
        training = ctx.use.training
        q_grad, k_grad, v_grad = grads
        B, T, _, D = q_grad.shape
        product_grads = torch.empty_like(products)

        def by_heads(x: Tensor) -> Sequence[Tensor]:
            return x.view(B, T, -1, D).split(ctx.head_counts, dim=2)

        q, k, _ = by_heads(products)
        to_q, to_k, to_v = by_heads(product_grads)  # views, which are written below
        training.turn_back(q_grad, q, cos, sin, to_q, EPSILON, ctx.sharpen)
        training.turn_back(k_grad, k, cos, sin, to_k, EPSILON, ctx.sharpen)
        to_v.copy_(v_grad)

        x_grad = ctx.matrix.back(product_grads)
        weight_grads = ctx.matrix.slope(product_grads, rows).split(ctx.sizes)
        gate_grad = None
        embedding_grad = None
        if gate is not None:
            v_rows = side_by_side(to_v).flatten(0, 1)
            embedding_grad, gate_grad = training.gate_back(
                v_rows, rows, gate, value_embedding, opened, x_grad
            )
            embedding_grad = embedding_grad.view(B, T, -1)
        cast_weight_grads = []
        for grad, dtype in zip(weight_grads, ctx.formats, strict=True):
            cast_weight_grads.append(grad.to(dtype))
        x_grad = x_grad.view(B, T, -1)
        return None, x_grad, None, None, None, gate_grad, embedding_grad, *cast_weight_grads


class SquaredReluMlp(torch.autograd.Function):
    """Computes two matrix products with a squared ReLU between them.

    Between the products, only the activations after the squared ReLU are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        use: Trained,
        x: Tensor,  # (..., C)
        into: Tensor,  # (inner, C)
        out: Tensor,  # (C, inner)
    ) -> Tensor:  # (..., C)
        rows = x.flatten(0, -2)
        ctx.use = use
        ctx.into = use.matrix([into], x)
        ctx.out = use.matrix([out], x)
        ctx.into_dtype = into.dtype
        ctx.out_dtype = out.dtype
        ctx.shape = x.shape
        inner = ctx.into.squared_relu(rows)
        ctx.save_for_backward(rows, inner)
        y = ctx.out.times(inner)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        rows, inner = ctx.saved_tensors
        y_grad = grads[0].flatten(0, -2)
        out_grad = ctx.out.slope(y_grad, inner)
        inner_grad = ctx.out.back(y_grad)
        ctx.use.training.squared_relu_back(inner_grad, inner, inner_grad)
        into_grad = ctx.into.slope(inner_grad, rows)
        x_grad = ctx.into.back(inner_grad).view(ctx.shape)
        return None, x_grad, into_grad.to(ctx.into_dtype), out_grad.to(ctx.out_dtype)


class Product(torch.autograd.Function):
    """Multiplies activations by a matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        use: Trained,
        x: Tensor,  # (..., inputs)
        weight: Tensor,  # (outputs, inputs)
    ) -> Tensor:  # (..., outputs)
        rows = x.flatten(0, -2)
        ctx.matrix = use.matrix([weight], x)
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(rows)
        y = ctx.matrix.times(rows)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        (rows,) = ctx.saved_tensors
        y_grad = grads[0].flatten(0, -2)
        x_grad = ctx.matrix.back(y_grad)
        weight_grad = ctx.matrix.slope(y_grad, rows)
        x_grad = x_grad.view(*grads[0].shape[:-1], -1)
        return None, x_grad, weight_grad.to(ctx.weight_dtype)


class Product8:
    """Multiplies by an 8-bit matrix during training, as the `multiply` hook of a Linear."""

    untraceable = "--matmul int8 multiplies by kernels that torch.compile cannot read"

    def __init__(self, use: Trained):
        """`use` holds kernels that compute in 8 bits."""
        self.use = use

    def __call__(
        self,
        x: Tensor,  # (..., inputs) bf16
        weight: Tensor,  # (outputs, inputs)
    ) -> Tensor:  # (..., outputs)
        """Return x times the transposed weight, in 8 bits only if gradients are enabled."""
        if not torch.is_grad_enabled():
            return F.linear(x, weight.to(x.dtype))
        return Product.apply(self.use, x, weight)


def attention_kernels() -> Training | None:
    """Return the functions for training, compiled on first use, or None if they cannot be."""
    return training(host.use_compile_cache(base_dir()))


# The two operators are opaque to torch's compiler, so that compiled layers call them too.
@torch.library.custom_op("nanochat::cpu_attention", mutates_args=())
def _attention(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
    positions: Tensor | None,  # (B, T)
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # (B, T, H, D), (B, H, T) fp32
    q, k, v = (side_by_side(x) for x in (q, k, v))
    kernels = attention_kernels()
    assert kernels is not None
    return kernels.attention(q, k, v, window, scale, positions)


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, H, T, dtype=torch.float32)


@torch.library.custom_op("nanochat::cpu_attention_backward", mutates_args=())
def _attention_backward(
    y_grad: Tensor,  # (B, T, H, D)
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
    y: Tensor,  # (B, T, H, D)
    log_sums: Tensor,  # (B, H, T) fp32
    positions: Tensor | None,  # (B, T)
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # as q, k and v
    y_grad, q, k, v, y = (side_by_side(x) for x in (y_grad, q, k, v, y))
    q_grad, k_grad, v_grad = (x.new_empty(x.shape) for x in (q, k, v))
    kernels = attention_kernels()
    assert kernels is not None
    kernels.attention_back(
        q,
        k,
        v,
        y,
        y_grad,
        log_sums,
        (q_grad, k_grad, v_grad),
        window,
        scale,
        positions,
    )
    return q_grad, k_grad, v_grad


@_attention_backward.register_fake
def _(
    y_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    log_sums: Tensor,
    positions: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class Attention(torch.autograd.Function):
    """Computes windowed causal attention; the backward pass recomputes the attention weights."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # (B, T, H, D), for which Training.takes() is True
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        positions: Tensor | None,  # (B, T) of each token in its document; None: rows are documents
        window: int,
        scale: float,
    ) -> Tensor:  # (B, T, H, D)
        y, log_sums = _attention(q, k, v, positions, window, scale)
        ctx.window = window
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, y, log_sums, positions)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        q, k, v, y, log_sums, positions = ctx.saved_tensors
        input_grads = _attention_backward(
            grads[0],
            q,
            k,
            v,
            y,
            log_sums,
            positions,
            ctx.window,
            ctx.scale,
        )
        return *input_grads, None, None, None


class Smear(torch.autograd.Function):
    """Adds to each token's activations a gated share of the previous token's, if there is one."""

    @staticmethod
    def forward(
        ctx: Any,
        use: Trained,
        x: Tensor,  # (B, T, C)
        gate: Tensor,  # (R,)
        smear_lambda: Tensor,  # ()
    ) -> Tensor:  # (B, T, C)
        ctx.use = use
        ctx.gate_dtype = gate.dtype
        ctx.smear_lambda_dtype = smear_lambda.dtype
        x = x.contiguous()
        gate = gate.to(x.dtype)
        smear_lambda = smear_lambda.to(x.dtype)
        y, opened = use.training.smear(x, gate, smear_lambda)
        ctx.save_for_backward(x, gate, smear_lambda, opened)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        x, gate, smear_lambda, opened = ctx.saved_tensors
        training = ctx.use.training
        x_grad, sums = training.smear_back(grads[0], x, gate, smear_lambda, opened)
        gate_grad, smear_lambda_grad = sums.split([len(gate), 1])
        smear_lambda_grad = smear_lambda_grad.view_as(smear_lambda)
        return (
            None,
            x_grad,
            gate_grad.to(ctx.gate_dtype),
            smear_lambda_grad.to(ctx.smear_lambda_dtype),
        )


class Offset(torch.autograd.Function):
    """Replaces half of each key with the same half of the previous token's key.

    For the first token of a row, that half becomes 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        use: Trained,
        k: Tensor,  # (B, T, H, D)
    ) -> Tensor:
        ctx.use = use
        return use.training.shift(k, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        return None, ctx.use.training.shift(grads[0], back=True)


class Exclude(torch.autograd.Function):
    """Removes from each head of y the component along the token's own value."""

    @staticmethod
    def forward(
        ctx: Any,
        use: Trained,
        y: Tensor,  # (B, T, H, D)
        v: Tensor,  # (B, T, Hkv, D)
    ) -> Tensor:  # (B, T, H, D)
        y = y.contiguous()
        v = evenly_spaced(v)
        ctx.use = use
        ctx.save_for_backward(y, v)
        return use.training.exclude(y, v, EPSILON)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        y, v = ctx.saved_tensors
        y_grad, v_grad = ctx.use.training.exclude_back(grads[0], y, v, EPSILON)
        return None, y_grad, v_grad


class Fused:
    """A criterion that computes losses and their gradient with one call of a kernel.

    All chunks write their logits, and then the gradient, to the same memory: malloc would map so
    large a tensor again for each chunk.
    """

    def __init__(
        self,
        criterion: Criterion,
        kernel: FusedLoss,
        multiply: Callable[[Tensor], Tensor] | None = None,  # with the head; None: torch's own
    ):
        self.kernel = kernel
        self.multiply = multiply
        self.logits = criterion.logits  # without gradients, as the criterion computes them
        self.vocab: int | None = None  # rows of the head that stand for tokens; None: all of them
        self.cap = 0.0  # of the softcap; 0 if the logits are not capped
        self._buffer: Tensor | None = None  # memory of the logits (n, V')
        if isinstance(criterion, Softcapped):
            self.vocab = criterion.vocab
            self.cap = SOFTCAP

    def losses(
        self,
        x: Tensor,  # (n, C)
        head: Tensor,  # (V', C)
        targets: Tensor,  # (n,)
        scale: Tensor,  # (n,) fp32
    ) -> tuple[Tensor, Tensor]:
        """Implement Criterion.losses: the kernel overwrites the logits by their gradient."""
        logits = self._products(x, head) if self.multiply is None else self.multiply(x)
        vocab = head.size(0) if self.vocab is None else self.vocab
        losses = self.kernel(logits, targets, scale, vocab, self.cap)
        return losses, logits

    def _products(self, x: Tensor, head: Tensor) -> Tensor:  # (n, C), (V', C) -> (n, V')
        if self._buffer is None or len(self._buffer) < len(x):
            self._buffer = x.new_empty(len(x), len(head))
        return torch.mm(x, head.mT, out=self._buffer[: len(x)])
