"""The arithmetic of a layer and of the loss in few operators that move few bytes, each with its own backward pass.

For devices on which every operator costs a launch and reads and writes memory; plain torch, which runs everywhere. The
values are those of operations.py and loss.py up to rounding. Shapes: B batch, T time, C channels, H heads, D head
dimension, N tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.loss import SOFTCAP


class _SquaredRelu(torch.autograd.Function):
    """relu(x)^2: where x < 0, the root of the output is 0 already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, zero: Tensor) -> Tensor:
        root = F.relu(x)
        ctx.save_for_backward(root, zero)
        return root * root

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        root, zero = ctx.saved_tensors
        return torch.addcmul(zero, grads[0], root, value=2.0), None


def squared_relu(
    x: Tensor,
    zero: Tensor,  # (), of x's dtype and device, kept by the caller
) -> Tensor:
    """relu(x)^2 with two operators forward and one backward."""
    return _SquaredRelu.apply(x, zero)  # type: ignore[no-any-return]


def square_sums(gradients: Sequence[Tensor]) -> Tensor:  # (number of gradients,) fp32
    """The sum of squares of each tensor, with one operator for all."""
    norms = torch._foreach_norm([g.float() for g in gradients])  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).square()


class _Mix(torch.autograd.Function):
    """a x + b x0. x0 passes through, so that its gradients add up layer by layer in one operator each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, x0: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, x0, a, b)
        ctx.set_materialize_grads(False)
        return (x * a).addcmul_(x0, b), x0.view_as(x0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, x0, a, b = ctx.saved_tensors
        g, later = grads
        if g is None:
            return None, later, None, None
        flat = g.flatten()
        to_x0 = g * b if later is None else torch.addcmul(later, g, b)
        return g * a, to_x0, flat.dot(x.flatten()), flat.dot(x0.flatten())


def mix(
    x: Tensor,  # (B, T, C)
    x0: Tensor,  # (B, T, C)
    a: Tensor,  # ()
    b: Tensor,  # ()
) -> tuple[Tensor, Tensor]:  # (B, T, C), and x0 to give to the next layer
    """a x + b x0 with two operators forward and four backward."""
    return _Mix.apply(x, x0, a, b)  # type: ignore[no-any-return]


class _Narrow(torch.autograd.Function):
    """A matrix on the first channels of x. Its gradient is added in place to that of all channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        first_channels = x.flatten(0, -2)[:, : weight.size(1)]
        return x.view_as(x), (first_channels @ weight.mT).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        x_grad, narrow = grads[0], grads[1].flatten(0, -2)
        first_channels = slice(0, weight.size(1))
        x_grad.flatten(0, -2)[:, first_channels].addmm_(
            narrow, weight
        )  # nobody else holds the gradient of the view given above
        return x_grad, narrow.mT @ x.flatten(0, -2)[:, first_channels]


def narrow(
    x: Tensor,  # (B, T, C) contiguous
    weight: Tensor,  # (H, few) in x's dtype
) -> tuple[
    Tensor, Tensor
]:  # x itself, to be used instead of x from here on by one operator, and (B, T, H)
    """The product of a small matrix and the first channels of x, without copies in either direction."""
    return _Narrow.apply(x, weight)  # type: ignore[no-any-return]


class _AddValues(torch.autograd.Function):
    """v + 3 sigmoid(logits) * value."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, value: Tensor, logits: Tensor) -> Tensor:
        gate = torch.sigmoid(logits)
        ctx.save_for_backward(value, gate)
        return torch.addcmul(v, gate.unsqueeze(-1), value, value=3.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, gate = ctx.saved_tensors
        g = grads[0]
        to_logits = torch.ops.aten.sigmoid_backward((g * value).sum(dim=-1), gate)
        return g, g * (3.0 * gate).unsqueeze(-1), to_logits.mul_(3.0)


def add_values(
    v: Tensor,  # (B, T, H, D)
    value: Tensor,  # (B, T, H, D)
    logits: Tensor,  # (B, T, H)
) -> Tensor:  # (B, T, H, D)
    """v + 3 sigmoid(logits) * value with two operators forward and six backward, three of them on large tensors."""
    return _AddValues.apply(v, value, logits)  # type: ignore[no-any-return]


class _OffsetKeys(torch.autograd.Function):
    """gpt.offset_keys() on whole sequences. Its gradient is the same, with the token after."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, none: Tensor) -> Tensor:
        ctx.save_for_backward(none)
        return _OffsetKeys.moved(k, none, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _OffsetKeys.moved(grads[0], *ctx.saved_tensors, back=True), None

    @staticmethod
    def moved(k: Tensor, none: Tensor, back: bool) -> Tensor:
        fast, slow = k.unflatten(-1, (2, 2, -1)).unbind(-2)
        slow = torch.cat((slow[:, 1:], none) if back else (none, slow[:, :-1]), dim=1)
        return torch.stack((fast, slow), dim=-2).flatten(-3)


def offset_keys(
    k: Tensor,  # (B, T, H, D)
    none: Tensor,  # (B, 1, H, 2, D / 4) zeros of k's dtype and device, kept by the caller
) -> Tensor:  # (B, T, H, D)
    """Keys, half of each from the token before, with two operators in either direction."""
    return _OffsetKeys.apply(k, none)  # type: ignore[no-any-return]


def _chunk_loss(
    x: Tensor,  # (n, C)
    head: Tensor,  # (V', C) in x's dtype
    targets: Tensor,  # (n,)
    scale: Tensor,  # (n,) fp32
    vocab: int,
    hidden: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted loss of a chunk, (), and its gradients with respect to x, (n, C), and the head, (V', C).

    A softcapped logit lies within 15 of 0: no token's probability underflows, and its logarithm is exact enough.
    The weights of the tokens multiply matrices of C columns, not of V'.
    """
    raw = F.linear(x, head)
    squashed = torch.mul(raw, torch.full((1,), 1 / SOFTCAP, device=x.device)).tanh_()
    logits = squashed * SOFTCAP
    if vocab < head.size(0):  # the padded rows of the head stand for no token
        logits[:, vocab:] = hidden
    slope = logits.softmax(dim=-1)
    index = targets.clamp_min(0)[:, None]
    chance = slope.gather(1, index)
    slope.scatter_(1, index, chance - 1)
    gradient = torch.ops.aten.tanh_backward(slope, squashed).to(x.dtype)
    share = scale[:, None].to(x.dtype)
    return (
        -chance.log_().squeeze(1).dot(scale),
        (gradient @ head).mul_(share),
        gradient.mT @ (x * share),
    )


class _Loss(torch.autograd.Function):
    """The loss and both gradients in one pass over chunks of tokens; only a chunk's logits exist at one time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor,
        vocab: int,
        chunk: int,
        hidden: float,
    ) -> Tensor:
        head, x_grads, weight_grad, losses = weight.to(x.dtype), [], torch.empty(0), []
        for i in range(0, x.size(0), chunk):
            rows = slice(i, i + chunk)
            loss, to_x, to_head = _chunk_loss(
                x[rows], head, targets[rows], scale[rows], vocab, hidden
            )
            losses.append(loss)
            x_grads.append(to_x)
            # a sum of many chunks needs fp32
            weight_grad = to_head if len(losses) == 1 else weight_grad.float().add_(to_head)
        ctx.save_for_backward(x_grads[0] if len(x_grads) == 1 else torch.cat(x_grads), weight_grad)
        ctx.dtype = weight.dtype
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        upstream = grads[0].reshape(1)  # not a scalar, so that a product with bf16 is fp32
        return (
            x_grad * upstream.to(x_grad.dtype),
            (weight_grad * upstream).to(ctx.dtype),
            *[None] * 5,
        )


def chunked_loss(
    x: Tensor,  # (N, C) normed activations
    weight: Tensor,  # (V', C) head, V' >= vocab
    targets: Tensor,  # (N,) token ids, -1 = ignored
    vocab: int,
    weights: Tensor | None,  # (N,) weight of each token's loss, default 1
    chunk: int,  # tokens at a time
    hidden: float,  # the score of the padded rows of the head
) -> Tensor:  # () fp32
    """See loss.chunked_loss; every operator on the logits that can be left out is left out."""
    scale = (targets >= 0).float()
    if weights is not None:
        scale = scale * weights.float()
    return _Loss.apply(x, weight, targets, scale, vocab, min(chunk, x.size(0)), hidden)  # type: ignore[no-any-return]
