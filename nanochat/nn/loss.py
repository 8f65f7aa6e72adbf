"""Logits, softcapped or not, and their cross-entropy in chunks: the logits of a batch never exist at once."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.nn.together import Multiply

# Computes the weighted sum of the losses of a chunk, and overwrites its logits with the gradient: from logits (n, V')
# before the softcap, targets (n,), weights (n,), the size of the vocabulary, and the cap, or 0.
Fused = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]

SOFTCAP = 15.0  # 15 tanh(l / 15) squashes a logit l to (-15, 15)


def softcap(logits: Tensor) -> Tensor:
    """fp32 logits squashed to (-15, 15), by tanh(l) = 2 sigmoid(2 l) - 1: CPUs take a tenth of tanh's time for that."""
    return (torch.sigmoid(logits.float() * (2 / SOFTCAP)) - 0.5) * (2 * SOFTCAP)


def token_losses(
    x: Tensor,  # (N, C) normed activations
    weight: Tensor,  # (V', C) head, V' >= vocab
    targets: Tensor,  # (N,) token ids, -1 = ignored
    vocab: int,
    chunk: int = 2048,
    capped: bool = True,  # whether the logits are softcapped
) -> Tensor:  # (N,) fp32 nats, 0 where ignored
    """The cross-entropy of each token; only a chunk's logits exist at one time.

    Where gradients are on, the backward pass computes every chunk's logits again. So a loss may be any function of the
    losses of tokens, at the price of one more pass through the head than chunked_loss() takes.
    """
    if torch.is_grad_enabled():
        return _TokenLosses.apply(x, weight, targets, vocab, chunk, capped)  # type: ignore[no-any-return]
    return _token_losses(x, weight, targets, vocab, chunk, capped)


def _token_losses(
    x: Tensor, weight: Tensor, targets: Tensor, vocab: int, chunk: int, capped: bool
) -> Tensor:
    weight = weight.to(x.dtype)
    scores = softcap if capped else Tensor.float
    losses = [
        F.cross_entropy(
            scores(F.linear(x[i : i + chunk], weight)[:, :vocab]),
            targets[i : i + chunk],
            ignore_index=-1,
            reduction="none",
        )
        for i in range(0, x.size(0), chunk)
    ]
    return torch.cat(losses)


def _chunk_loss(
    x: Tensor,  # (n, C)
    weight: Tensor,  # (V', C) in x's dtype
    targets: Tensor,  # (n,)
    scale: Tensor,  # (n,) fp32 weight of each token, 0 = ignored
    vocab: int,
    hidden: float,
) -> tuple[Tensor, Tensor]:
    """The weighted loss of a chunk, (), and its gradient with respect to the logits, (n, V').

    No logit is above SOFTCAP or below -SOFTCAP, so the softmax needs no search for the largest: nothing overflows, and
    no sum is 0.
    """
    squashed = (
        2 * torch.sigmoid(F.linear(x, weight).float() * (2 / SOFTCAP)) - 1
    )  # a cheaper tanh, see softcap()
    logits = SOFTCAP * squashed
    if vocab < weight.size(0):  # the padded rows of the head stand for no token
        logits = logits.masked_fill(torch.arange(weight.size(0), device=x.device) >= vocab, hidden)
    exponent = torch.exp(logits - SOFTCAP)
    total = exponent.sum(dim=1, keepdim=True)
    index = targets.clamp_min(0)[:, None]
    nll = (total.log() + SOFTCAP - logits.gather(1, index)).squeeze(1)
    one_hot = torch.arange(weight.size(0), device=x.device)[None] == index
    slope = (1 - squashed * squashed) * scale[
        :, None
    ]  # the derivative of the softcap, times the token's weight
    gradient = (exponent / total - one_hot.to(exponent.dtype)) * slope
    return (nll * scale).sum(), gradient.to(x.dtype)


def _uncapped_chunk_loss(
    x: Tensor,  # (n, C)
    weight: Tensor,  # (V, C) in x's dtype
    targets: Tensor,  # (n,)
    scale: Tensor,  # (n,) fp32 weight of each token, 0 = ignored
) -> tuple[Tensor, Tensor]:
    """_chunk_loss() of logits that are not softcapped: one fp32 copy of them, which becomes the gradient."""
    raw = F.linear(x, weight)
    index = targets.clamp_min(0)[:, None]
    top = raw.amax(dim=1, keepdim=True).float()
    own = raw.gather(1, index).float()
    exponent = raw.float().sub_(top).exp_()
    total = exponent.sum(dim=1, keepdim=True)
    nll = (total.log() + top - own).squeeze(1)
    exponent.mul_(scale[:, None] / total).scatter_add_(1, index, -scale[:, None])
    return (nll * scale).sum(), exponent.to(x.dtype)


def _loss_and_gradients(
    x: Tensor,  # (N, C)
    weight: Tensor,  # (V', C)
    targets: Tensor,  # (N,)
    scale: Tensor,  # (N,) fp32 weight of each token, 0 = ignored
    vocab: int,
    chunk: int,
    hidden: float,
    capped: bool,
    frozen: bool,
    fused: Fused | None = None,
    multiply: Multiply | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The weighted loss, (), and its gradients with respect to x, and to the weight unless the head is frozen."""
    head = weight.to(x.dtype)
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    weight_grad = (
        None if frozen else torch.zeros_like(weight, dtype=torch.float32)
    )  # a sum of many chunks
    x_grads = []
    for i in range(0, x.size(0), chunk):
        part, wanted, shares = x[i : i + chunk], targets[i : i + chunk], scale[i : i + chunk]
        if fused is not None:
            gradient = F.linear(part, head) if multiply is None else multiply(part)
            chunk_loss = fused(gradient, wanted, shares, vocab, SOFTCAP if capped else 0.0)
        elif capped:
            chunk_loss, gradient = _chunk_loss(part, head, wanted, shares, vocab, hidden)
        else:
            chunk_loss, gradient = _uncapped_chunk_loss(part, head, wanted, shares)
        loss = loss + chunk_loss
        x_grads.append(gradient @ head)
        if weight_grad is not None:
            if gradient.dtype == weight_grad.dtype:
                weight_grad.addmm_(gradient.mT, part)  # without a second tensor of the head's size
            else:
                weight_grad += gradient.mT @ part
    return loss, torch.cat(x_grads), None if weight_grad is None else weight_grad.to(weight.dtype)


class _TokenLosses(torch.autograd.Function):
    """token_losses() with gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocab: int, chunk: int, capped: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.how = vocab, chunk, float("-inf"), capped, not ctx.needs_input_grad[1]
        return _token_losses(x, weight, targets, vocab, chunk, capped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets = ctx.saved_tensors
        scale = (targets >= 0).float() * grads[0]
        _, x_grad, weight_grad = _loss_and_gradients(x, weight, targets, scale, *ctx.how)
        return x_grad, weight_grad, *[None] * 4


class _ChunkedLoss(torch.autograd.Function):
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
        capped: bool,
        fused: Fused | None,
        multiply: Multiply | None,
    ) -> Tensor:
        frozen = not ctx.needs_input_grad[1]
        loss, *gradients = _loss_and_gradients(
            x, weight, targets, scale, vocab, chunk, hidden, capped, frozen, fused, multiply
        )
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        (upstream,) = grads
        weight_grad = None if weight_grad is None else weight_grad * upstream.to(weight_grad.dtype)
        return x_grad * upstream.to(x_grad.dtype), weight_grad, *[None] * 8


def chunked_loss(
    x: Tensor,  # (N, C) normed activations
    weight: Tensor,  # (V', C) head, V' >= vocab
    targets: Tensor,  # (N,) token ids, -1 = ignored
    vocab: int,
    weights: Tensor | None = None,  # (N,) weight of each token's loss, default 1
    chunk: int = 1024,  # tokens at a time
    hidden: float = float("-inf"),  # the score of the padded rows of the head
    capped: bool = True,  # whether the logits are softcapped; a head whose logits are not has no padded rows
    fused: Fused | None = None,
    multiply: Multiply | None = None,  # with fused only: multiplies with the head instead of torch
) -> Tensor:  # () fp32
    """The sum over tokens of weight times cross-entropy in nats of the logits, with gradients.

    The forward pass computes the gradients too, chunk by chunk: this takes memory for chunk x V logits, not N x V.
    """
    scale = (targets >= 0).float()
    if weights is not None:
        scale = scale * weights.float()
    return _ChunkedLoss.apply(
        x, weight, targets, scale, vocab, min(chunk, x.size(0)), hidden, capped, fused, multiply
    )  # type: ignore[no-any-return]
