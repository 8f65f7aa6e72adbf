"""Compares each operation that training needs on one NPU with fp32 on the host.

This file is imported only after torch_npu has been loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanochat.attention import cache_mask
from nanochat.loss import Softcapped, chunked_loss
from nanochat.platforms.ascend.platform import Ascend
from nanochat.platforms.base import requested_kernels
from nanochat.platforms.operations import Operations

DEVICE = "npu:0"
# The largest allowed error, relative to the largest value: one rounding step times the growth of
# the error in sums.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensor]


def operations() -> Operations:
    """Return the operations that the project uses on the card.

    Raises UserError if some of them are missing.
    """
    return Operations() if DEVICE == "cpu" else Ascend().operations(requested_kernels("auto"))


def error(results: Tensors, expected: Tensors) -> float:
    """Return the largest difference, relative to the largest value.

    The result is infinity if any value is not finite.
    """
    largest_error = 0.0
    for result, reference in zip(results, expected, strict=True):
        result = result.detach().cpu().float()
        reference = reference.detach()
        if not torch.isfinite(result).all():
            return float("inf")
        difference = (result - reference).abs().max()
        scale = reference.abs().max().clamp_min(1e-6)
        largest_error = max(largest_error, float(difference / scale))
    return largest_error


def inputs(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return fp32 tensors on the host, filled from a standard normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def with_gradients(function: Function, tensors: list[Tensor]) -> Tensors:
    """Return the output of a function, and the gradients of a weighted sum of that output."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    (weights,) = inputs(10, tuple(output.shape))
    weighted = output.float() * weights.to(output.device)
    gradients = torch.autograd.grad(weighted.sum(), leaves)
    return output, *gradients


def compare(
    function: Function,
    reference: Function,
    tensors: list[Tensor],
    dtype: torch.dtype,
    backward: bool = True,
) -> float:
    """Return the error of a function on the NPU in `dtype`, compared with a reference in fp32."""
    rounded = [tensor.to(dtype) for tensor in tensors]
    on_card = [tensor.to(DEVICE) for tensor in rounded]
    on_host = [tensor.float() for tensor in rounded]
    if backward:
        return error(with_gradients(function, on_card), with_gradients(reference, on_host))
    result = function(*on_card)
    expected = reference(*on_host)
    return error((result,), (expected,))


# --- references -----------------------------------------------------------------------------------


def attention(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hkv, D)
    v: Tensor,  # (B, S, Hkv, D)
    window: int,
) -> Tensor:  # (B, T, H, D)
    """Return plain softmax attention.

    A query sees its own key and at most `window` keys before it.
    """
    queries_per_key = q.size(2) // k.size(2)
    q = q.transpose(1, 2)
    k = k.repeat_interleave(queries_per_key, 2).transpose(1, 2)
    v = v.repeat_interleave(queries_per_key, 2).transpose(1, 2)
    query_positions = torch.arange(q.size(2)) + k.size(2) - q.size(2)
    key_positions = torch.arange(k.size(2))
    distance = query_positions[:, None] - key_positions[None]
    hidden = (distance < 0) | (distance > window)
    scores = (q @ k.mT) * q.size(-1) ** -0.5
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2)


def rms(x: Tensor) -> Tensor:
    """Return the RMS norm over the last dimension."""
    mean_square = x.square().mean(-1, keepdim=True)
    return x * torch.rsqrt(mean_square + 1.19e-7)


# --- checks: each returns its error --------------------------------------------------------------


def matmul(dtype: torch.dtype) -> float:
    """Return the error of a product of two matrices, forward and backward."""
    a, b = inputs(
        0,
        (256, 384),
        (384, 320),
    )
    return compare(torch.matmul, torch.matmul, [a, b], dtype)


def stacked_matmul(dtype: torch.dtype) -> float:
    """Return the error of baddbmm over a stack of matrices, which Muon computes."""
    a, b, c = inputs(
        1,
        (6, 64, 64),
        (6, 64, 96),
        (6, 96, 64),
    )
    return compare(torch.baddbmm, torch.baddbmm, [a, b, c], dtype, backward=False)


def there_and_back() -> float:
    """Return the error of a copy from pinned memory to the card, a sum there, and a copy back."""
    (x,) = inputs(
        2,
        (1024, 1024),
    )
    on_card = x.pin_memory().to(DEVICE, non_blocking=True)
    result = (on_card + 1).to("cpu", non_blocking=True)
    torch.npu.synchronize()  # type: ignore[attr-defined]
    return error((result,), (x + 1,))


def attend(dtype: torch.dtype, window: int, kv_heads: int = 4) -> float:
    """Return the error of the attention of training, forward and backward.

    A `window` below 255 makes the attention a band.
    """
    kernels = operations()
    q, k, v = inputs(
        3,
        (2, 256, 4, 64),
        (2, 256, kv_heads, 64),
        (2, 256, kv_heads, 64),
    )

    def on_card(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernels.attend(q, k, v, window)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, window)

    return compare(on_card, reference, [q, k, v], dtype)


def norm(dtype: torch.dtype) -> float:
    """Return the error of the RMS norm, forward and backward."""
    return compare(operations().norm, rms, inputs(4, (4, 128, 768)), dtype)


def rotary(dtype: torch.dtype) -> float:
    """Return the error of the rotary embedding, forward and backward."""
    (x,) = inputs(
        5,
        (2, 128, 4, 64),
    )
    channels = torch.arange(0, 64, 2.0)
    frequencies = 100_000 ** (-channels / 64)
    positions = torch.arange(128.0)
    angles = torch.outer(positions, frequencies)[:, None]

    def reference(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos = angles.cos()
        sin = angles.sin()
        rotated_first = first * cos + second * sin
        rotated_second = second * cos - first * sin
        return torch.cat((rotated_first, rotated_second), dim=-1)

    kernels = operations()
    tables = kernels.rotary_tables(128, 64, torch.device(DEVICE), dtype)
    cos, sin = (table[None, :, None] for table in tables)
    return compare(lambda x: kernels.rotary(x, cos, sin), reference, [x], dtype)


def loss(dtype: torch.dtype) -> float:
    """Return the error of the chunked loss and its gradients.

    The reference is the plain cross-entropy of softcapped logits.
    """
    x, weight = inputs(
        6,
        (96, 64),
        (256, 64),
    )
    generator = torch.Generator().manual_seed(7)
    targets = torch.randint(0, 250, (96,), generator=generator)
    targets[:8] = -1
    card_targets = targets.to(DEVICE)

    def on_card(x: Tensor, weight: Tensor) -> Tensor:
        return chunked_loss(
            x,
            weight,
            card_targets,
            Softcapped(250),
            chunk=32,
        )

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        logits = (x @ weight.mT)[:, :250]
        logits = 15 * torch.tanh(logits / 15)
        return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")

    return compare(on_card, reference, [x, weight], dtype)


def adamw() -> float:
    """Return the error of two steps of the fused AdamW on an fp32 parameter."""
    start, gradient = inputs(
        8,
        (64, 64),
        (64, 64),
    )

    def after_two_steps(device: str, fused: bool) -> Tensor:
        parameter = torch.nn.Parameter(start.to(device))
        optimizer = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1, fused=fused)
        for _ in range(2):
            parameter.grad = gradient.to(device)
            optimizer.step()
        return parameter.detach()

    result = after_two_steps(DEVICE, fused=True)
    expected = after_two_steps("cpu", fused=False)
    return error((result,), (expected,))


def decode(dtype: torch.dtype, window: int = 95) -> float:
    """Return the error of cached attention, for one new token in each of two sequences.

    The sequences have different lengths.
    """
    lengths = [96, 40]
    rounded = inputs(
        9,
        (2, 1, 4, 64),
        (2, 96, 4, 64),
        (2, 96, 4, 64),
    )
    rounded = [x.to(dtype) for x in rounded]
    expected = []
    for i, length in enumerate(lengths):
        q, k, v = (x[i : i + 1, :length].float() for x in rounded)
        expected.append(attention(q, k, v, window))
    q, k, v = (x.to(DEVICE) for x in rounded)
    kernels = operations()
    last = torch.tensor(lengths, device=DEVICE)[:, None] - 1

    def recent() -> Tensor:
        first = (last - window).clamp_min(0)
        return first + torch.arange(min(window + 1, 96), device=DEVICE)

    result = kernels.by_lengths(q, k, v, [1, 1], lengths, recent, window)
    if result is None:
        result = kernels.masked(q, k, v, cache_mask(last, 96, window))
    return error((result,), (torch.cat(expected),))
