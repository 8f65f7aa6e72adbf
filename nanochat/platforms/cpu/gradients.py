"""Operations of training with compiled kernels, as functions that torch's autograd knows.

Each of them keeps as little as its gradient needs, and gives the gradients of several inputs in one loop over memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.loss import loss_and_gradients, scaled_gradients
from nanochat.platforms.cpu.int8 import Matrix, Matrix8, fits
from nanochat.platforms.cpu.kernels import EPSILON, Kernels
from nanochat.platforms.cpu.training import Training, side_by_side


@dataclass(frozen=True)
class Trained:
    """What computes operations and their gradients."""

    kernels: Kernels
    training: Training
    int8: bool = False  # whether products of bf16 activations are made in integers of 8 bits

    def takes_int8(self, masters: Sequence[Tensor], x: Tensor) -> bool:
        """Whether activations such as x are multiplied with these matrices in integers of 8 bits."""
        return self.int8 and x.dtype == torch.bfloat16 and fits(masters)

    def matrix(self, masters: Sequence[Tensor], x: Tensor) -> Matrix:
        """What multiplies activations such as x with matrices (outputs, inputs) that lie below one another."""
        if self.takes_int8(masters, x):
            return Matrix8(self.training, masters)
        return Matrix(self.kernels, masters, x.dtype)


class Norm(torch.autograd.Function):
    """RMS norm of x, and x itself: what uses both gets one gradient in one loop. With `added`, of x + added."""

    @staticmethod
    def forward(ctx: Any, use: Trained, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        y, total = use.kernels.norm(x, None, EPSILON, added)
        if added is None:
            total = total.view_as(total)  # an output must not be an input
        ctx.use, ctx.both = use, added is not None
        ctx.save_for_backward(total)
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (total,), (g, more) = ctx.saved_tensors, grads
        dx = more if g is None else ctx.use.training.norm_back(total, g, more, EPSILON)
        return None, dx, dx if ctx.both else None


class Mix(torch.autograd.Function):
    """a x + b x0, and x0 itself, whose gradients from several layers are added in the loop that makes them."""

    @staticmethod
    def forward(
        ctx: Any, use: Trained, x: Tensor, x0: Tensor, a: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.use = use
        ctx.save_for_backward(x, x0, a, b)
        ctx.set_materialize_grads(False)
        return use.kernels.mix(x, x0, a, b), x0.view_as(x0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (x, x0, a, b), (g, more) = ctx.saved_tensors, grads
        if g is None:
            return None, None, more, None, None
        dx, dx0, sums = ctx.use.training.mix_back(g, x, x0, more, a, b)
        by_a, by_b = sums.to(a.dtype).unbind()
        return None, dx, dx0, by_a.view_as(a), by_b.view_as(b)


class Heads(torch.autograd.Function):
    """Queries, keys and values by one product, with queries and keys normed, sharpened and rotated. With `value`, each
    head of a value gains 3 sigmoid(gate x) times it; the gate reads the first channels of x."""

    @staticmethod
    def forward(
        ctx: Any,
        use: Trained,
        x: Tensor,  # (B, T, C)
        cos: Tensor,  # (1 or B, T, 1, D / 2)
        sin: Tensor,
        sharpen: float,
        gate: Tensor | None,  # (Hkv, R)
        value: Tensor | None,  # (B, T, Hkv * D)
        *weights: Tensor,  # of queries, keys and values: (H * D, C), (Hkv * D, C), (Hkv * D, C)
    ) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D)
        rows, size = x.flatten(0, -2), 2 * cos.size(-1)
        sizes = [len(weight) for weight in weights]
        matrix = use.matrix(weights, x)
        products = matrix.times(rows)  # (N, C')
        q, k, v = products.view(*x.shape[:-1], -1, size).split(
            [part // size for part in sizes], dim=2
        )
        opened = None
        if gate is not None and value is not None:
            gate, value = gate.to(x.dtype), value.contiguous().view(len(rows), -1, size)
            opened = use.training.gate(rows, gate, value, v.flatten(0, 1))
        ctx.use, ctx.sharpen, ctx.sizes, ctx.formats = (
            use,
            sharpen,
            sizes,
            [weight.dtype for weight in weights],
        )
        ctx.matrix = matrix
        ctx.save_for_backward(rows, products, cos, sin, gate, value, opened)
        q, k = (use.kernels.turn(head, None, cos, sin, EPSILON, sharpen) for head in (q, k))
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, products, cos, sin, gate, value, opened = ctx.saved_tensors
        use, (B, T, _, size) = ctx.use, grads[0].shape
        g = torch.empty_like(products)
        heads = [part // size for part in ctx.sizes]
        parts, by_parts = (x.view(B, T, -1, size).split(heads, dim=2) for x in (products, g))
        for slope, x, dx in zip(grads[:2], parts[:2], by_parts[:2], strict=True):
            use.training.turn_back(slope, x, cos, sin, dx, EPSILON, ctx.sharpen)
        by_parts[2].copy_(grads[2])
        dx, by_weight, by_gate, by_value = ctx.matrix.back(g), ctx.matrix.slope(g, rows), None, None
        if gate is not None:
            slope = side_by_side(by_parts[2]).flatten(0, 1)
            by_value, by_gate = use.training.gate_back(slope, rows, gate, value, opened, dx)
            by_value = by_value.view(B, T, -1)
        by_weights = [
            part.to(to) for part, to in zip(by_weight.split(ctx.sizes), ctx.formats, strict=True)
        ]
        return None, dx.view(B, T, -1), None, None, None, by_gate, by_value, *by_weights


class SquaredReluMlp(torch.autograd.Function):
    """Two matrices with a squared ReLU between them. What lies between them is kept once, after the squared ReLU."""

    @staticmethod
    def forward(
        ctx: Any, use: Trained, x: Tensor, into: Tensor, out: Tensor
    ) -> Tensor:  # (..., C), masters
        rows = x.flatten(0, -2)
        ctx.into, ctx.out = use.matrix([into], x), use.matrix([out], x)
        inner = ctx.into.squared_relu(rows)
        ctx.use, ctx.formats, ctx.shape = use, (into.dtype, out.dtype), x.shape
        ctx.save_for_backward(rows, inner)
        return ctx.out.times(inner).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner = ctx.saved_tensors
        g = grads[0].flatten(0, -2)
        by_out = ctx.out.slope(g, inner).to(ctx.formats[1])
        by_inner = ctx.out.back(g)
        ctx.use.training.squared_relu_back(by_inner, inner, by_inner)
        by_into = ctx.into.slope(by_inner, rows).to(ctx.formats[0])
        return None, ctx.into.back(by_inner).view(ctx.shape), by_into, by_out


class Product(torch.autograd.Function):
    """Activations times a matrix."""

    @staticmethod
    def forward(
        ctx: Any, use: Trained, x: Tensor, weight: Tensor
    ) -> Tensor:  # (..., inputs), (outputs, inputs)
        ctx.matrix, ctx.format, rows = use.matrix([weight], x), weight.dtype, x.flatten(0, -2)
        ctx.save_for_backward(rows)
        return ctx.matrix.times(rows).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), g = ctx.saved_tensors, grads[0].flatten(0, -2)
        return (
            None,
            ctx.matrix.back(g).view(*grads[0].shape[:-1], -1),
            ctx.matrix.slope(g, rows).to(ctx.format),
        )


class Attention(torch.autograd.Function):
    """Causal attention in a window. The weights are computed again for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, use: Trained, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float
    ) -> Tensor:  # (B, T, H, D), and (B, T, Hkv, D) twice
        q, k, v = (side_by_side(x) for x in (q, k, v))
        y, logs = use.training.attention(q, k, v, window, scale)
        ctx.use, ctx.how = use, (window, scale)
        ctx.save_for_backward(q, k, v, y, logs)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, logs = ctx.saved_tensors
        grads_qkv = [x.new_empty(x.shape) for x in (q, k, v)]
        ctx.use.training.attention_back(
            q, k, v, y, side_by_side(grads[0]), logs, grads_qkv, *ctx.how
        )
        return None, *grads_qkv, None, None


class Smear(torch.autograd.Function):
    """x with a gated part of the token before."""

    @staticmethod
    def forward(
        ctx: Any, use: Trained, x: Tensor, weight: Tensor, smear_lambda: Tensor
    ) -> Tensor:  # (B, T, C), (R,), ()
        ctx.use, ctx.formats = use, (weight.dtype, smear_lambda.dtype)
        x, weight, smear_lambda = x.contiguous(), weight.to(x.dtype), smear_lambda.to(x.dtype)
        y, gates = use.training.smear(x, weight, smear_lambda)
        ctx.save_for_backward(x, weight, smear_lambda, gates)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, smear_lambda, gates = ctx.saved_tensors
        dx, sums = ctx.use.training.smear_back(grads[0], x, weight, smear_lambda, gates)
        by_weight, by_most = sums.split([len(weight), 1])
        return (
            None,
            dx,
            by_weight.to(ctx.formats[0]),
            by_most.view_as(smear_lambda).to(ctx.formats[1]),
        )


class Offset(torch.autograd.Function):
    """Keys, half of each from the token before."""

    @staticmethod
    def forward(ctx: Any, use: Trained, k: Tensor) -> Tensor:  # (B, T, H, D)
        ctx.use = use
        return use.training.shift(k, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.use.training.shift(grads[0], back=True)


class Loss(torch.autograd.Function):
    """The loss of loss.chunked_loss(), whose chunks are computed by one function each."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (N, C)
        head: Tensor,  # (V', C)
        targets: Tensor,  # (N,)
        scale: Tensor,  # (N,) fp32
        vocab: int,
        chunk: int,
        cap: float,  # of the softcap; 0: the logits are not capped
        fused: Callable[
            [Tensor, Tensor, Tensor, int, float], Tensor
        ],  # overwrites logits with their gradient
        multiply: Callable[[Tensor], Tensor] | None,  # with the head, instead of torch
    ) -> Tensor:
        def chunk_loss(
            rows: Tensor, cast_head: Tensor, targets: Tensor, shares: Tensor
        ) -> tuple[Tensor, Tensor]:
            logits = F.linear(rows, cast_head) if multiply is None else multiply(rows)
            return fused(logits, targets, shares, vocab, cap), logits

        frozen = not ctx.needs_input_grad[1]
        loss, *grads = loss_and_gradients(x, head, targets, scale, chunk, chunk_loss, frozen)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, head_grad = ctx.saved_tensors
        return *scaled_gradients(x_grad, head_grad, grads[0]), *[None] * 7
