"""Compares each operation that training needs on one NPU with fp32 on the host; imported only after torch_npu loads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanochat.attention import cache_mask
from nanochat.loss import chunked_loss
from nanochat.platforms.ascend import Ascend
from nanochat.platforms.base import kernels_asked
from nanochat.platforms.operations import Operations

DEVICE = "npu:0"
# The largest allowed error, relative to the largest value: one rounding step times the growth of the error in sums.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Tensors = tuple[torch.Tensor, ...]


def operations() -> Operations:
    """What the project computes with on the card; UserError where the chip's operators are missing."""
    return Operations() if DEVICE == "cpu" else Ascend().operations(kernels_asked("auto"))


def error(found: Tensors, expected: Tensors) -> float:
    """The largest difference relative to the largest value; infinity if any value is not finite."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        one, other = one.detach().cpu().float(), other.detach()
        if not torch.isfinite(one).all():
            return float("inf")
        worst = max(worst, float((one - other).abs().max() / other.abs().max().clamp_min(1e-6)))
    return worst


def inputs(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Standard normal fp32 tensors on the host."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def with_gradients(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Tensors:
    """The output of a function, and the gradients of a randomly weighted sum of the output for every input."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    (weights,) = inputs(10, tuple(out.shape))
    gradients = torch.autograd.grad((out.float() * weights.to(out.device)).sum(), leaves)
    return out, *gradients


def compare(
    function: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    tensors: list[torch.Tensor],
    dtype: torch.dtype,
    backward: bool = True,
) -> float:
    """The error of a function on the NPU in `dtype`; the reference gets the same rounded values in fp32."""
    rounded = [tensor.to(dtype) for tensor in tensors]
    there = [tensor.to(DEVICE) for tensor in rounded]
    here = [tensor.float() for tensor in rounded]
    if backward:
        return error(with_gradients(function, there), with_gradients(reference, here))
    return error((function(*there),), (reference(*here),))


# --- references -----------------------------------------------------------------------------------


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Plain softmax attention, (B, T, H, D); a query sees its own key and at most `window` keys before it."""
    groups = q.size(2) // k.size(2)
    q, k, v = (
        x.transpose(1, 2)
        for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2))
    )
    distance = (
        torch.arange(q.size(2))[:, None] + (k.size(2) - q.size(2)) - torch.arange(k.size(2))[None]
    )
    scores = (q @ k.mT) * q.size(-1) ** -0.5
    scores = scores.masked_fill((distance < 0) | (distance > window), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def rms(x: torch.Tensor) -> torch.Tensor:
    """RMS norm over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1.19e-7)


# --- checks: each returns its error --------------------------------------------------------------------


def matmul(dtype: torch.dtype) -> float:
    """A product of two matrices, forward and backward."""
    a, b = inputs(0, (256, 384), (384, 320))
    return compare(torch.matmul, torch.matmul, [a, b], dtype)


def stacked_matmul(dtype: torch.dtype) -> float:
    """baddbmm over a stack of matrices, which is what Muon computes."""
    a, b, c = inputs(1, (6, 64, 64), (6, 64, 96), (6, 96, 64))
    return compare(torch.baddbmm, torch.baddbmm, [a, b, c], dtype, backward=False)


def there_and_back() -> float:
    """A copy from pinned memory to the card, a sum on the card, and a copy back."""
    (x,) = inputs(2, (1024, 1024))
    there = x.pin_memory().to(DEVICE, non_blocking=True)
    back = (there + 1).to("cpu", non_blocking=True)
    torch.npu.synchronize()  # type: ignore[attr-defined]
    return error((back,), (x + 1,))


def attend(dtype: torch.dtype, window: int, kv_heads: int = 4) -> float:
    """The project's training attention, forward and backward; `window` below 255 is a band."""
    made = operations()
    q, k, v = inputs(3, (2, 256, 4, 64), (2, 256, kv_heads, 64), (2, 256, kv_heads, 64))
    return compare(
        lambda *x: made.attend(*x, window), lambda *x: attention(*x, window), [q, k, v], dtype
    )


def norm(dtype: torch.dtype) -> float:
    return compare(operations().norm, rms, inputs(4, (4, 128, 768)), dtype)


def rotary(dtype: torch.dtype) -> float:
    (x,) = inputs(5, (2, 128, 4, 64))
    angle = torch.outer(torch.arange(128.0), 100_000 ** (-torch.arange(0, 64, 2.0) / 64))[:, None]

    def reference(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)

    made = operations()
    cos, sin = (
        table[None, :, None] for table in made.rotary_tables(128, 64, torch.device(DEVICE), dtype)
    )
    return compare(lambda x: made.rotary(x, cos, sin), reference, [x], dtype)


def loss(dtype: torch.dtype) -> float:
    """The chunked loss with its gradients, compared with plain cross-entropy of softcapped logits."""
    x, weight = inputs(6, (96, 64), (256, 64))
    targets = torch.randint(0, 250, (96,), generator=torch.Generator().manual_seed(7))
    targets[:8] = -1

    def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = 15 * torch.tanh((x @ weight.mT)[:, :250] / 15)
        return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")

    there = targets.to(DEVICE)
    return compare(
        lambda x, weight: chunked_loss(x, weight, there, 250, chunk=32),
        reference,
        [x, weight],
        dtype,
    )


def adamw() -> float:
    """Two steps of the fused AdamW on an fp32 parameter."""
    start, gradient = inputs(8, (64, 64), (64, 64))

    def stepped(device: str, fused: bool) -> torch.Tensor:
        parameter = torch.nn.Parameter(start.to(device))
        optimizer = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1, fused=fused)
        for _ in range(2):
            parameter.grad = gradient.to(device)
            optimizer.step()
        return parameter.detach()

    return error((stepped(DEVICE, True),), (stepped("cpu", False),))


def decode(dtype: torch.dtype, window: int = 95) -> float:
    """The cached attention of one new token in two sequences of different lengths."""
    ends = [96, 40]
    here = [x.to(dtype) for x in inputs(9, (2, 1, 4, 64), (2, 96, 4, 64), (2, 96, 4, 64))]
    rows = [
        attention(*(x[i : i + 1, :end].float() for x in here), window) for i, end in enumerate(ends)
    ]
    q, k, v = (x.to(DEVICE) for x in here)
    made = operations()
    last = torch.tensor(ends, device=DEVICE)[:, None] - 1
    recent = (last - window).clamp_min(0) + torch.arange(min(window + 1, 96), device=DEVICE)
    found = made.by_lengths(q, k, v, [1, 1], ends, lambda: recent, window)
    if found is None:
        places = torch.tensor(ends, device=DEVICE)[:, None] - 1
        found = made.masked(q, k, v, cache_mask(places, 96, window))
    return error((found,), (torch.cat(rows),))
