"""Softcapped logits, and the cross-entropy loss computed in chunks.

The logits of a whole batch are never in memory at the same time.

Shapes: N tokens, n tokens of a chunk, C channels, V vocabulary, V' >= V rows of the head, of which
the first V stand for tokens.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

SOFTCAP = 15.0  # 15 tanh(l / 15) squashes a logit l to (-15, 15)
HIDDEN = -1e30  # the logit of a row that stands for no token, since some chips have no inf


def softcap(logits: Tensor) -> Tensor:  # (..., V) -> (..., V) fp32
    """Return logits squashed smoothly to the range from -15 to 15 (SOFTCAP).

    The tanh is computed as tanh(l) = 2 sigmoid(2 l) - 1, because CPUs compute a sigmoid in a tenth
    of the time of a tanh.
    """
    return (torch.sigmoid(logits.float() * (2 / SOFTCAP)) - 0.5) * (2 * SOFTCAP)


# --- one chunk -----------------------------------------------------------------------------------


class Criterion(Protocol):
    """What a chunk of tokens costs: Softcapped for the GPT; published models have their own."""

    def logits(self, raw: Tensor) -> Tensor:  # (n, V') -> (n, V) fp32
        """Return the logits of all tokens from the products of activations and head."""
        ...

    def losses(
        self,
        x: Tensor,  # (n, C)
        head: Tensor,  # (V', C) in x's dtype
        targets: Tensor,  # (n,)
        scale: Tensor,  # (n,) fp32 weight of each token, 0 = ignored
    ) -> tuple[Tensor, Tensor]:
        """Return weighted losses (n,), and the gradient (n, V') of their sum for `raw` logits.

        The next call may overwrite the gradient.
        """
        ...


class Softcapped:
    """The criterion of the GPT: the cross-entropy of softcapped logits."""

    def __init__(self, vocab: int):
        self.vocab = vocab

    def logits(self, raw: Tensor) -> Tensor:  # (..., V') -> (..., V) fp32
        """Return softcapped logits, without those of the head's padding rows."""
        return softcap(raw[..., : self.vocab])

    def losses(
        self,
        x: Tensor,  # (n, C)
        head: Tensor,  # (V', C) in x's dtype
        targets: Tensor,  # (n,)
        scale: Tensor,  # (n,) fp32 weight of each token, 0 = ignored
    ) -> tuple[Tensor, Tensor]:
        """Implement Criterion.losses.

        No softcapped logit is above SOFTCAP (15) or below -SOFTCAP, so the softmax need not search
        for the largest logit: nothing overflows, and no sum is 0.
        """
        raw = F.linear(x, head).float()
        squashed = 2 * torch.sigmoid(raw * (2 / SOFTCAP)) - 1  # a cheaper tanh, see softcap()
        logits = SOFTCAP * squashed
        rows = torch.arange(head.size(0), device=x.device)
        if self.vocab < head.size(0):
            logits = logits.masked_fill(rows >= self.vocab, HIDDEN)
        exponentials = torch.exp(logits - SOFTCAP)
        total = exponentials.sum(dim=1, keepdim=True)
        index = targets.clamp_min(0)[:, None]
        nll = (total.log() + SOFTCAP - logits.gather(1, index)).squeeze(1)
        one_hot = (rows[None] == index).to(exponentials.dtype)
        # the derivative of the softcap, times the weight
        slope = (1 - squashed * squashed) * scale[:, None]
        gradient = (exponentials / total - one_hot) * slope
        return nll * scale, gradient.to(x.dtype)


# --- all chunks ----------------------------------------------------------------------------------


def chunked_loss(
    x: Tensor,  # (N, C) normed activations
    head: Tensor,  # (V', C)
    targets: Tensor,  # (N,) token ids, -1 = ignored
    criterion: Criterion,
    weights: Tensor | None = None,  # (N,) weight of each token's loss, default 1
    chunk: int = 1024,  # tokens at a time
) -> Tensor:  # () fp32
    """Return the weighted sum of all tokens' cross-entropies in nats.

    The forward pass also computes the gradients, chunk by chunk, so it needs memory for n x V'
    logits rather than N x V'.
    """
    scale = token_weights(targets, weights)
    chunk = min(chunk, x.size(0))
    return _Loss.apply(x, head, targets, scale, criterion, chunk)  # type: ignore[no-any-return]


def token_losses(
    x: Tensor,  # (N, C) normed activations
    head: Tensor,  # (V', C)
    targets: Tensor,  # (N,) token ids, -1 = ignored
    criterion: Criterion,
    chunk: int = 2048,  # tokens at a time
) -> Tensor:  # (N,) fp32 nats, 0 if ignored
    """Return the cross-entropy of each token, with only one chunk of logits in memory at a time.

    Any function of the losses can be differentiated. If the head is frozen, this takes as many
    passes through the head as chunked_loss(). If not, the backward pass computes the logits of
    every chunk again, because the head's gradient sums over tokens that the function weighs.
    """
    if torch.is_grad_enabled():
        return _TokenLosses.apply(x, head, targets, criterion, chunk)  # type: ignore[no-any-return]
    return _without_gradients(x, head, targets, criterion, chunk)


def token_weights(targets: Tensor, weights: Tensor | None) -> Tensor:  # (N,) fp32
    """Return the weight of each token's loss, which is 0 for ignored tokens."""
    scale = (targets >= 0).float()
    return scale if weights is None else scale * weights.float()


def loss_and_gradients(
    x: Tensor,  # (N, C)
    head: Tensor,  # (V', C)
    targets: Tensor,  # (N,)
    scale: Tensor,  # (N,) fp32 weight of each token, 0 = ignored
    criterion: Criterion,
    chunk: int,
    frozen: bool,  # whether the head needs no gradient
    by_token: bool = False,  # whether to return losses (N,) rather than their sum ()
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the weighted loss in fp32, and the gradients that the sum has for x and for the head.

    The head's gradient is None if `frozen`.
    """
    cast_head = head.to(x.dtype)
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    losses = []
    # in fp32, since it is a sum over many chunks
    head_grad = None if frozen else torch.zeros_like(head, dtype=torch.float32)
    x_grads = []
    for i in range(0, x.size(0), chunk):
        chunk_x = x[i : i + chunk]
        chunk_scale = scale[i : i + chunk]
        chunk_targets = targets[i : i + chunk]
        chunk_losses, logits_grad = criterion.losses(chunk_x, cast_head, chunk_targets, chunk_scale)
        if by_token:
            losses.append(chunk_losses)
        else:
            loss = loss + chunk_losses.sum()
        x_grads.append(logits_grad @ cast_head)
        if head_grad is not None:
            if logits_grad.dtype == head_grad.dtype:
                # needs no second tensor of the size of the head
                head_grad.addmm_(logits_grad.mT, chunk_x)
            else:
                head_grad += logits_grad.mT @ chunk_x
    if by_token:
        loss = torch.cat(losses)
    return loss, torch.cat(x_grads), None if head_grad is None else head_grad.to(head.dtype)


class _Loss(torch.autograd.Function):
    """Computes the loss and the gradients of x and the head in one pass over chunks of tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Tensor,
        targets: Tensor,
        scale: Tensor,
        criterion: Criterion,
        chunk: int,
    ) -> Tensor:
        frozen = not ctx.needs_input_grad[1]
        loss, *gradients = loss_and_gradients(x, head, targets, scale, criterion, chunk, frozen)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, head_grad = ctx.saved_tensors
        return *scaled_gradients(x_grad, head_grad, grads[0]), *[None] * 4


def scaled_gradients(
    x_grad: Tensor, head_grad: Tensor | None, upstream: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return both gradients times `upstream` (), the gradient that reaches the loss from above."""
    if head_grad is not None:
        head_grad = head_grad * upstream.to(head_grad.dtype)
    return x_grad * upstream.to(x_grad.dtype), head_grad


class _TokenLosses(torch.autograd.Function):
    """Computes token_losses() with gradients.

    The gradient of x is one row for each token, and depends on the gradient of that token's loss
    alone. So it can be computed with the losses, and multiplied when that gradient is known.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, targets: Tensor, criterion: Criterion, chunk: int
    ) -> Tensor:
        ctx.frozen = not ctx.needs_input_grad[1]
        if not ctx.frozen:
            ctx.chunk = chunk
            ctx.criterion = criterion
            ctx.save_for_backward(x, head, targets)
            return _without_gradients(x, head, targets, criterion, chunk)
        scale = token_weights(targets, None)
        losses, x_grad, _ = loss_and_gradients(
            x, head, targets, scale, criterion, chunk, frozen=True, by_token=True
        )
        ctx.save_for_backward(x_grad)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.frozen:
            (token_grads,) = ctx.saved_tensors  # (N, C)
            x_grad = (token_grads * grads[0][:, None]).to(token_grads.dtype)
            return x_grad, *[None] * 4
        x, head, targets = ctx.saved_tensors
        scale = token_weights(targets, grads[0])
        _, x_grad, head_grad = loss_and_gradients(
            x, head, targets, scale, ctx.criterion, ctx.chunk, frozen=False
        )
        return x_grad, head_grad, *[None] * 3


def _without_gradients(
    x: Tensor, head: Tensor, targets: Tensor, criterion: Criterion, chunk: int
) -> Tensor:  # (N,) fp32
    head = head.to(x.dtype)
    losses = []
    for i in range(0, x.size(0), chunk):
        logits = criterion.logits(F.linear(x[i : i + chunk], head))
        target = targets[i : i + chunk]
        losses.append(F.cross_entropy(logits, target, ignore_index=-1, reduction="none"))
    return torch.cat(losses)
