"""Softcapped logits, and the cross-entropy loss computed in chunks.

The logits of a whole batch are never in memory at the same time.

Shapes: N tokens, n tokens of a chunk, C channels, V vocabulary, V' >= V rows of the head, of which
the first V stand for tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SOFTCAP = 15.0  # 15 tanh(l / 15) squashes a logit l to (-15, 15)
HIDDEN = -1e30  # the logit of a row that stands for no token, since some chips have no inf

# Takes a chunk of activations (n, C), the head (V', C) in their format, targets (n,), and the fp32
# weight of each token's loss (n,), which is 0 for ignored tokens. Returns the weighted losses (n,),
# and the gradient of their sum with respect to the logits (n, V'), which the next call may overwrite.
ChunkLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def softcap(logits: Tensor) -> Tensor:  # (..., V) -> (..., V) fp32
    """Return logits squashed smoothly to the range from -15 to 15 (SOFTCAP).

    The tanh is computed as tanh(l) = 2 sigmoid(2 l) - 1, because CPUs compute a sigmoid in a tenth
    of the time of a tanh.
    """
    return (torch.sigmoid(logits.float() * (2 / SOFTCAP)) - 0.5) * (2 * SOFTCAP)


def chunked_loss(
    x: Tensor,  # (N, C) normed activations
    head: Tensor,  # (V', C)
    targets: Tensor,  # (N,) token ids, -1 = ignored
    vocab: int,
    weights: Tensor | None = None,  # (N,) weight of each token's loss, default 1
    chunk: int = 1024,  # tokens at a time
    capped: bool = True,  # whether logits are softcapped; if not, every row of the head is a token
    chunk_loss: ChunkLoss | None = None,  # computes a chunk; by default, the functions below do
) -> Tensor:  # () fp32
    """Return the weighted sum of all tokens' cross-entropies in nats.

    The forward pass also computes the gradients, chunk by chunk, so it needs memory for n x V'
    logits rather than N x V'.
    """
    scale = token_weights(targets, weights)
    chunk = min(chunk, x.size(0))
    return _Loss.apply(x, head, targets, scale, vocab, chunk, capped, chunk_loss)  # type: ignore[no-any-return]


def token_losses(
    x: Tensor,  # (N, C) normed activations
    head: Tensor,  # (V', C)
    targets: Tensor,  # (N,) token ids, -1 = ignored
    vocab: int,
    chunk: int = 2048,  # tokens at a time
    capped: bool = True,  # whether the logits are softcapped
    chunk_loss: ChunkLoss | None = None,  # as in chunked_loss()
) -> Tensor:  # (N,) fp32 nats, 0 if ignored
    """Return the cross-entropy of each token, with only one chunk of logits in memory at a time.

    Any function of the losses can be differentiated. If the head is frozen, this takes as many
    passes through the head as chunked_loss(). If not, the backward pass computes the logits of
    every chunk again, because the head's gradient sums over tokens that the function weighs.
    """
    if torch.is_grad_enabled():
        return _TokenLosses.apply(x, head, targets, vocab, chunk, capped, chunk_loss)  # type: ignore[no-any-return]
    return _token_losses(x, head, targets, vocab, chunk, capped)


# --- one chunk -----------------------------------------------------------------------------------


def softcapped_loss(
    x: Tensor,  # (n, C)
    head: Tensor,  # (V', C) in x's dtype
    targets: Tensor,  # (n,)
    scale: Tensor,  # (n,) fp32 weight of each token, 0 = ignored
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """Return a chunk's weighted losses (n,), and their sum's gradient for the logits (n, V').

    No softcapped logit is above SOFTCAP (15) or below -SOFTCAP, so the softmax need not search for
    the largest logit: nothing overflows, and no sum is 0.
    """
    raw = F.linear(x, head).float()
    squashed = 2 * torch.sigmoid(raw * (2 / SOFTCAP)) - 1  # a cheaper tanh, see softcap()
    logits = SOFTCAP * squashed
    rows = torch.arange(head.size(0), device=x.device)
    if vocab < head.size(0):
        logits = logits.masked_fill(rows >= vocab, HIDDEN)
    exponentials = torch.exp(logits - SOFTCAP)
    total = exponentials.sum(dim=1, keepdim=True)
    index = targets.clamp_min(0)[:, None]
    nll = (total.log() + SOFTCAP - logits.gather(1, index)).squeeze(1)
    one_hot = (rows[None] == index).to(exponentials.dtype)
    # the derivative of the softcap, times the weight
    slope = (1 - squashed * squashed) * scale[:, None]
    gradient = (exponentials / total - one_hot) * slope
    return nll * scale, gradient.to(x.dtype)


def uncapped_loss(
    x: Tensor,  # (n, C)
    head: Tensor,  # (V, C) in x's dtype
    targets: Tensor,  # (n,)
    scale: Tensor,  # (n,) fp32 weight of each token, 0 = ignored
) -> tuple[Tensor, Tensor]:
    """Return what softcapped_loss() returns, but for logits without a softcap.

    The fp32 copy of the logits is overwritten by their gradient, because the vocabularies of
    published models are large.
    """
    raw = F.linear(x, head)
    index = targets.clamp_min(0)[:, None]
    top = raw.amax(dim=1, keepdim=True).float()
    target_logits = raw.gather(1, index).float()
    exponentials = raw.float().sub_(top).exp_()
    total = exponentials.sum(dim=1, keepdim=True)
    nll = (total.log() + top - target_logits).squeeze(1)
    exponentials.mul_(scale[:, None] / total).scatter_add_(1, index, -scale[:, None])
    return nll * scale, exponentials.to(x.dtype)


def _token_losses(
    x: Tensor, head: Tensor, targets: Tensor, vocab: int, chunk: int, capped: bool
) -> Tensor:
    head = head.to(x.dtype)
    losses = []
    for i in range(0, x.size(0), chunk):
        logits = F.linear(x[i : i + chunk], head)[:, :vocab]
        logits = softcap(logits) if capped else logits.float()
        target = targets[i : i + chunk]
        losses.append(F.cross_entropy(logits, target, ignore_index=-1, reduction="none"))
    return torch.cat(losses)


# --- all chunks ----------------------------------------------------------------------------------


def token_weights(targets: Tensor, weights: Tensor | None) -> Tensor:  # (N,) fp32
    """Return the weight of each token's loss, which is 0 for ignored tokens."""
    scale = (targets >= 0).float()
    return scale if weights is None else scale * weights.float()


def _chunk_loss(vocab: int, capped: bool) -> ChunkLoss:
    def softcapped(x: Tensor, head: Tensor, targets: Tensor, scale: Tensor) -> Any:
        return softcapped_loss(x, head, targets, scale, vocab)

    return softcapped if capped else uncapped_loss


def loss_and_gradients(
    x: Tensor,  # (N, C)
    head: Tensor,  # (V', C)
    targets: Tensor,  # (N,)
    scale: Tensor,  # (N,) fp32 weight of each token, 0 = ignored
    chunk: int,
    chunk_loss: ChunkLoss,
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
        chunk_losses, logits_grad = chunk_loss(chunk_x, cast_head, chunk_targets, chunk_scale)
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
        vocab: int,
        chunk: int,
        capped: bool,
        chunk_loss: ChunkLoss | None,
    ) -> Tensor:
        frozen = not ctx.needs_input_grad[1]
        chunk_loss = chunk_loss or _chunk_loss(vocab, capped)
        loss, *gradients = loss_and_gradients(x, head, targets, scale, chunk, chunk_loss, frozen)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, head_grad = ctx.saved_tensors
        return *scaled_gradients(x_grad, head_grad, grads[0]), *[None] * 6


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
        ctx: Any,
        x: Tensor,
        head: Tensor,
        targets: Tensor,
        vocab: int,
        chunk: int,
        capped: bool,
        chunk_loss: ChunkLoss | None,
    ) -> Tensor:
        chunk_loss = chunk_loss or _chunk_loss(vocab, capped)
        ctx.frozen = not ctx.needs_input_grad[1]
        if not ctx.frozen:
            ctx.chunk = chunk
            ctx.chunk_loss = chunk_loss
            ctx.save_for_backward(x, head, targets)
            return _token_losses(x, head, targets, vocab, chunk, capped)
        scale = token_weights(targets, None)
        losses, x_grad, _ = loss_and_gradients(
            x, head, targets, scale, chunk, chunk_loss, frozen=True, by_token=True
        )
        ctx.save_for_backward(x_grad)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.frozen:
            (token_grads,) = ctx.saved_tensors  # (N, C)
            x_grad = (token_grads * grads[0][:, None]).to(token_grads.dtype)
            return x_grad, *[None] * 6
        x, head, targets = ctx.saved_tensors
        scale = token_weights(targets, grads[0])
        _, x_grad, head_grad = loss_and_gradients(
            x, head, targets, scale, ctx.chunk, ctx.chunk_loss, frozen=False
        )
        return x_grad, head_grad, *[None] * 5
