"""The arithmetic of layers and of the loss, in as few operators and memory accesses as possible.

The functions suit devices on which every operator costs a launch and memory traffic. All except
square_sums have their own backward passes. They are plain torch, which runs everywhere, and up to
rounding they return the same results as operations.py and loss.py. Shapes: B batch, T time, C
channels, H heads, D head dimension, N tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.loss import SOFTCAP

Gradients = tuple[Tensor | None, ...]


# --- in a layer ----------------------------------------------------------------------------------


class _SquaredRelu(torch.autograd.Function):
    """Computes relu(x)^2, and keeps relu(x) for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        zero: Tensor,
    ) -> Tensor:
        root = F.relu(x)
        ctx.save_for_backward(root, zero)
        return root * root

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        root, zero = ctx.saved_tensors
        x_grad = torch.addcmul(zero, grads[0], root, value=2.0)
        return x_grad, None


def squared_relu(
    x: Tensor,
    zero: Tensor,  # (), of x's dtype and device, made once by the caller
) -> Tensor:
    """Return relu(x)^2, with two operators forward and one backward."""
    return _SquaredRelu.apply(x, zero)  # type: ignore[no-any-return]


class _Narrow(torch.autograd.Function):
    """Multiplies the first channels of x by a matrix, and also returns x.

    In the backward pass, the gradient through the product is added in place to the gradient of the
    returned x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        channels = weight.size(1)
        rows = x.flatten(0, -2)
        product = rows[:, :channels] @ weight.mT
        return x.view_as(x), product.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        x_grad, product_grad = grads
        channels = weight.size(1)
        product_grad = product_grad.flatten(0, -2)
        # Nothing else holds the gradient of the view that forward() returned.
        first_channels = x_grad.flatten(0, -2)[:, :channels]
        first_channels.addmm_(product_grad, weight)
        rows = x.flatten(0, -2)
        return x_grad, product_grad.mT @ rows[:, :channels]


def narrow(
    x: Tensor,  # (B, T, C) contiguous
    weight: Tensor,  # (H, R) in x's dtype; reads the first R channels
) -> tuple[Tensor, Tensor]:  # (B, T, C), (B, T, H)
    """Return x, and the product of a small matrix and x's first channels, without copying x.

    Exactly one operator must use the returned x, and none may use the x that was passed in.
    """
    return _Narrow.apply(x, weight)  # type: ignore[no-any-return]


class _AddValues(torch.autograd.Function):
    """Computes v + 3 sigmoid(logits) * value_embedding."""

    @staticmethod
    def forward(
        ctx: Any,
        v: Tensor,
        value_embedding: Tensor,
        logits: Tensor,
    ) -> Tensor:
        gate = torch.sigmoid(logits)
        ctx.save_for_backward(value_embedding, gate)
        return torch.addcmul(v, gate.unsqueeze(-1), value_embedding, value=3.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value_embedding, gate = ctx.saved_tensors
        g = grads[0]
        embedding_grad = g * (3.0 * gate).unsqueeze(-1)
        gate_grad = (g * value_embedding).sum(dim=-1)
        logit_grad = torch.ops.aten.sigmoid_backward(gate_grad, gate)
        return g, embedding_grad, logit_grad.mul_(3.0)


def add_values(
    v: Tensor,  # (B, T, H, D)
    value_embedding: Tensor,  # (B, T, H, D)
    logits: Tensor,  # (B, T, H)
) -> Tensor:  # (B, T, H, D)
    """Return v + 3 sigmoid(logits) * value_embedding.

    This takes two operators forward and six backward. Three of the six read large tensors.
    """
    return _AddValues.apply(v, value_embedding, logits)  # type: ignore[no-any-return]


class _OffsetKeys(torch.autograd.Function):
    """Computes gpt.offset_keys() for whole sequences, and moves gradients the other way in time."""

    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        zeros: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(zeros)
        return _OffsetKeys.moved(k, zeros, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (zeros,) = ctx.saved_tensors
        return _OffsetKeys.moved(grads[0], zeros, back=True), None

    @staticmethod
    def moved(k: Tensor, zeros: Tensor, back: bool) -> Tensor:
        """Return k with its slow half moved by one token: forward in time or, if `back`, backward."""
        halves = k.unflatten(-1, (2, 2, -1))  # (B, T, H, 2, 2, D / 4)
        fast, slow = halves.unbind(-2)
        if back:
            slow = torch.cat((slow[:, 1:], zeros), dim=1)
        else:
            slow = torch.cat((zeros, slow[:, :-1]), dim=1)
        return torch.stack((fast, slow), dim=-2).flatten(-3)


def offset_keys(
    k: Tensor,  # (B, T, H, D)
    zeros: Tensor,  # (B, 1, H, 2, D / 4) of k's dtype and device, made once by the caller
) -> Tensor:  # (B, T, H, D)
    """Return k with half of each key taken from the previous token, or from `zeros` for the first.

    This takes two operators forward and two backward.
    """
    return _OffsetKeys.apply(k, zeros)  # type: ignore[no-any-return]


class _ExcludeOwn(torch.autograd.Function):
    """Computes gpt.exclude_own() for heads that do not share values."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        own: Tensor,
        zero: Tensor,
    ) -> Tensor:
        along = (y * own).mean(dim=-1, keepdim=True)
        ctx.save_for_backward(y, own, along, zero)
        return torch.addcmul(y, along, own, value=-1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        y, own, along, zero = ctx.saved_tensors
        g = grads[0]
        g_along = (g * own).mean(dim=-1, keepdim=True)
        y_grad = torch.addcmul(g, g_along, own, value=-1.0)
        own_grad = torch.addcmul(zero, along, g, value=-1.0)
        return y_grad, own_grad.addcmul_(g_along, y, value=-1.0), None


def exclude_own(
    y: Tensor,  # (B, T, H, D)
    own: Tensor,  # (B, T, H, D) normed values
    zero: Tensor,  # (), of y's dtype and device, made once by the caller
) -> Tensor:  # (B, T, H, D)
    """Return y without its component along `own`.

    This takes three operators forward and five backward.
    """
    return _ExcludeOwn.apply(y, own, zero)  # type: ignore[no-any-return]


# --- between layers ------------------------------------------------------------------------------


class _Mix(torch.autograd.Function):
    """Computes a x + b x0, and also returns x0.

    The next layer uses this x0, so each layer adds to the gradient of x0 with one operator.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x0: Tensor,
        a: Tensor,
        b: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, x0, a, b)
        ctx.set_materialize_grads(False)
        mixed = (x * a).addcmul_(x0, b)
        return mixed, x0.view_as(x0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        x, x0, a, b = ctx.saved_tensors
        g, later_x0_grad = grads
        if g is None:
            return None, later_x0_grad, None, None
        if later_x0_grad is None:
            x0_grad = g * b
        else:
            x0_grad = torch.addcmul(later_x0_grad, g, b)
        flat = g.flatten()
        a_grad = flat.dot(x.flatten())
        b_grad = flat.dot(x0.flatten())
        return g * a, x0_grad, a_grad, b_grad


def mix(
    x: Tensor,  # (B, T, C)
    x0: Tensor,  # (B, T, C)
    a: Tensor,  # ()
    b: Tensor,  # ()
) -> tuple[Tensor, Tensor]:  # (B, T, C), and x0 to give to the next layer
    """Return a x + b x0, and x0 itself.

    This takes two operators forward and four backward.
    """
    return _Mix.apply(x, x0, a, b)  # type: ignore[no-any-return]


# --- loss and gradients --------------------------------------------------------------------------


def _chunk_loss(
    x: Tensor,  # (n, C)
    head: Tensor,  # (V', C) in x's dtype
    targets: Tensor,  # (n,)
    scale: Tensor,  # (n,) fp32
    vocab: int,
    hidden: float,
) -> tuple[Tensor, Tensor, Tensor]:  # (), (n, C), (V', C)
    """Return the weighted loss of a chunk, and its gradients with respect to x and the head.

    A softcapped logit lies between -15 and 15, so a target's probability never underflows, and its
    logarithm is accurate enough. `scale` multiplies matrices with C columns rather than V'.
    """
    raw = F.linear(x, head)
    factor = torch.full((1,), 1 / SOFTCAP, device=x.device)
    squashed = torch.mul(raw, factor).tanh_()
    logits = squashed * SOFTCAP
    if vocab < head.size(0):  # the padded rows of the head stand for no token
        logits[:, vocab:] = hidden
    slope = logits.softmax(dim=-1)
    index = targets.clamp_min(0)[:, None]
    probability = slope.gather(1, index)
    slope.scatter_(1, index, probability - 1)
    gradient = torch.ops.aten.tanh_backward(slope, squashed).to(x.dtype)
    token_scale = scale[:, None].to(x.dtype)
    log_likelihood = probability.log_().squeeze(1)
    loss = -log_likelihood.dot(scale)
    x_grad = (gradient @ head).mul_(token_scale)
    head_grad = gradient.mT @ (x * token_scale)
    return loss, x_grad, head_grad


class _Loss(torch.autograd.Function):
    """Computes the loss and both gradients in the forward pass, one chunk of tokens at a time."""

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
        head = weight.to(x.dtype)
        head_grad = torch.empty(0)
        x_grads = []
        losses = []
        for start in range(0, x.size(0), chunk):
            tokens = slice(start, start + chunk)
            loss, x_chunk_grad, head_chunk_grad = _chunk_loss(
                x[tokens],
                head,
                targets[tokens],
                scale[tokens],
                vocab,
                hidden,
            )
            if not losses:
                head_grad = head_chunk_grad
            else:  # a sum of many chunks needs fp32
                head_grad = head_grad.float().add_(head_chunk_grad)
            x_grads.append(x_chunk_grad)
            losses.append(loss)
        ctx.dtype = weight.dtype
        if len(losses) == 1:
            ctx.save_for_backward(x_grads[0], head_grad)
            return losses[0]
        ctx.save_for_backward(torch.cat(x_grads), head_grad)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        x_grad, head_grad = ctx.saved_tensors
        upstream = grads[0].reshape(1)  # not a scalar, so that a product with bf16 is fp32
        to_x = x_grad * upstream.to(x_grad.dtype)
        to_head = (head_grad * upstream).to(ctx.dtype)
        return to_x, to_head, *[None] * 5


def chunked_loss(
    x: Tensor,  # (N, C) normed activations
    weight: Tensor,  # (V', C) head, V' >= vocab
    targets: Tensor,  # (N,) token ids, -1 = ignored
    vocab: int,
    weights: Tensor | None,  # (N,) weight of each token's loss, default 1
    chunk: int,  # tokens in a chunk
    hidden: float,  # the score of the padded rows of the head
) -> Tensor:  # () fp32
    """Return loss.chunked_loss() for softcapped logits, with as few operators as possible."""
    scale = (targets >= 0).float()
    if weights is not None:
        scale = scale * weights.float()
    chunk = min(chunk, x.size(0))
    return _Loss.apply(x, weight, targets, scale, vocab, chunk, hidden)  # type: ignore[no-any-return]


def square_sums(gradients: Sequence[Tensor]) -> Tensor:  # (number of gradients,) fp32
    """Return the sum of squares of each gradient, with a single norm operator."""
    tensors = [gradient.float() for gradient in gradients]
    norms = torch._foreach_norm(tensors)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).square()
