"""The operations that a device may do its own way: attention, norm, rotary embedding, the loss.

Shapes: B batch, T time, H heads, D head dimension, C channels, V vocabulary. CPU and CUDA compute with torch's own
operators. On an NPU `--kernels` decides: plain is the same as there; auto takes what the chip has.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from nanochat import device
from nanochat.common import UserError, log
from nanochat.device import Compute
from nanochat.nn import plain_attention
from nanochat.nn.blocked_attention import BlockedAttention
from nanochat.platforms import ascend_kernels as npu_kernels
from nanochat.platforms import nvidia_attention as gpu_attention
from nanochat.platforms.ascend import Kernels

Asked = Literal["auto", "fused", "plain"]


@dataclass
class _Choice:
    """What was asked for, and what it means on this process's NPU; decided at its first use."""

    asked: str | None = None  # by select(); None: by NANOCHAT_KERNELS
    npu: Kernels | Literal["plain"] | None = None


_choice = _Choice()


def asked() -> str:
    """auto, fused or plain: by --kernels, else by NANOCHAT_KERNELS."""
    name = _choice.asked or os.environ.get("NANOCHAT_KERNELS") or "auto"
    if name not in ("auto", "fused", "plain"):
        raise UserError(f"NANOCHAT_KERNELS must be auto, fused or plain, got {name!r}", exit_code=2)
    return name


def select(name: Asked, compute: Compute) -> None:
    """Use these kernels from now on: UserError where they were asked for and cannot be. NANOCHAT_KERNELS is auto's."""
    _choice.asked, _choice.npu = None if name == "auto" else name, None
    if compute.device_type == "npu":
        operators = ", ".join(npu_kernels.NEEDS[kind]) if (kind := _kind_on_npu()) != "plain" else ""
        log(f"kernels: {kind}" + (f" ({operators})" if operators else ""))
        return
    if asked() == "fused":
        raise UserError(f"--kernels fused is for NPUs, and the device is {compute.device_type}; leave it out")
    if compute.device_type == "cuda":
        log(f"attention: {gpu_attention.prepare(asked() == 'plain', torch.cuda.get_device_capability()[0])}")


def _kind_on_npu() -> Kernels | Literal["plain"]:
    """What this process's NPU computes with, decided once."""
    if _choice.npu is None:
        name, chip = asked(), device.chip("npu")
        if name == "plain" or (chip is None and name == "auto"):
            _choice.npu = "plain"
            return _choice.npu
        if chip is None or (name == "fused" and chip.kernels != "fused"):
            what = "this chip, whose SoC version is not known," if chip is None else f"a {chip.name}"
            raise UserError(f"--kernels fused was asked for, but {what} has no fused attention for training; use auto")
        if lacking := npu_kernels.missing(chip.kernels):
            raise UserError(
                f"torch_npu lacks {', '.join(lacking)}, which a {chip.name} computes with; "
                "install one that fits CANN (python check_npu.py), or give --kernels plain"
            )
        _choice.npu = chip.kernels
    return _choice.npu


def _kind(x: Tensor) -> Kernels | Literal["plain"]:
    """How the operations on this tensor are computed."""
    return _kind_on_npu() if x.device.type == "npu" else "plain"


def _finite(x: Tensor) -> bool:
    """Whether masks must be finite: a chip that saturates would take the inf of an fp16 mask for an overflow."""
    chip = device.chip("npu") if x.device.type == "npu" and x.dtype == torch.float16 else None
    return chip is not None and chip.saturates


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, without parameters."""
    return npu_kernels.norm(x) if _kind(x) == "fused" else F.rms_norm(x, (x.size(-1),))


def rotary_tables(length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each (length, D/2), base 100,000 (RoFormer, arXiv 2104.09864).

    For a fused operator the tables are as it reads them: (length, D), both halves alike, and minus the sine.
    """
    frequency = 100_000 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequency)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    if _kind(angle) == "fused":
        return torch.cat((cos, cos), dim=-1), -torch.cat((sin, sin), dim=-1)
    return cos, sin


def rotary(
    x: Tensor,  # (B, T, H, D)
    cos: Tensor,  # (1 or B, T, 1, D/2), from rotary_tables
    sin: Tensor,  # (1 or B, T, 1, D/2)
) -> Tensor:
    """Rotate pairs (i, i + D/2) of channels by -theta, as upstream does: only relative angles matter."""
    if _kind(x) == "fused":
        return npu_kernels.rotary(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


def heads(
    x: Tensor,  # (B, T, C)
    matrices: Sequence[nn.Module],  # to queries, keys and values
    head_dim: int,
    cos: Tensor,  # from rotary_tables
    sin: Tensor,
    sharpen: float,
) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D)
    """Queries and keys, rotated, normed and multiplied by `sharpen`, and values.

    Where launching operators is dear, one matmul makes all three, and queries and keys are rotated and normed
    together. With a fused attention `sharpen` is left to its scale: see softmax_scale.
    """
    kind = _kind(x)
    if kind == "plain":
        q, k, v = (matrix(x).unflatten(-1, (-1, head_dim)) for matrix in matrices)
        q = norm(rotary(q, cos, sin)) * sharpen
        k = norm(rotary(k, cos, sin)) * sharpen
        return q, k, v
    weights = [cast(Tensor, matrix.weight) for matrix in matrices]
    counts = [weight.size(0) // head_dim for weight in weights]
    both = F.linear(x, torch.cat(weights).to(x.dtype)).unflatten(-1, (-1, head_dim))
    qk, v = both.split((counts[0] + counts[1], counts[2]), dim=2)
    qk = norm(rotary(qk, cos, sin))
    if kind != "fused":
        qk = qk * sharpen
    q, k = qk.split((counts[0], counts[1]), dim=2)
    return q, k, v


def softmax_scale(x: Tensor, head_dim: int, sharpen: float) -> float | None:
    """The factor of the scores where heads() has left `sharpen` to it; None, 1/sqrt(D), where it has not."""
    return sharpen**2 * head_dim**-0.5 if _kind(x) == "fused" else None


class _SquaredRelu(torch.autograd.Function):
    """relu(x)^2 with two operators in either direction: where x < 0 the root of the output is 0 already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = F.relu(x)
        ctx.save_for_backward(root)
        return root * root

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return (grads[0] * root).mul_(2.0)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2."""
    return F.relu(x).square() if _kind(x) == "plain" else _SquaredRelu.apply(x)  # type: ignore[no-any-return]


def square_sums(gradients: Sequence[Tensor]) -> Tensor:  # (number of gradients,) fp32
    """The sum of squares of each tensor."""
    if _kind(gradients[0]) == "plain" and gradients[0].device.type != "cuda":
        return torch.stack([g.float().square().sum() for g in gradients])
    norms = torch._foreach_norm([g.float() for g in gradients])  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).square()


def loss_chunk(x: Tensor) -> int:
    """How many tokens' logits are held at a time."""
    return 8192 if x.device.type == "cuda" else 1024 if _kind(x) == "plain" else 2048


def attend(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
    window: int,
    scale: float | None = None,  # of the scores, default 1/sqrt(D)
) -> Tensor:  # (B, T, H, D)
    """Causal attention in which a query also sees at most `window` keys before its own."""
    grouped = k.size(2) != q.size(2)
    if (kind := _kind(q)) != "plain":
        return _attend_on_npu(kind, q, k, v, window, scale)
    if q.device.type == "cuda" and (out := gpu_attention.attend(q, k, v, window, scale)) is not None:
        return out
    if is_compiling() and q.device.type == "cpu" and q.dtype == torch.bfloat16 and not grouped:
        return BlockedAttention.apply(q, k, v, window)  # type: ignore[no-any-return]
    return plain_attention.attend(q, k, v, window, scale, _finite(q))


def _attend_on_npu(
    kind: Kernels, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None
) -> Tensor:  # (B, T, H, D)
    """attend() as a chip can: by its fused operator, by that of an inference card, or by matmuls over blocks."""
    if kind == "fused":
        return npu_kernels.attend(q, k, v, window, q.size(3) ** -0.5 if scale is None else scale)
    if kind == "inference":
        return npu_kernels.prompt(q, k, v, _causal(q.size(1), window, q.device))
    group = q.size(2) // k.size(2)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    return BlockedAttention.apply(q, k, v, window)  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _causal(length: int, window: int, device: torch.device) -> Tensor:
    """(1, 1, T, T) which keys each query sees."""
    return cache_mask(torch.arange(length, device=device)[None], length, window)


def cache_mask(
    positions: Tensor,  # (B, T) the place of each query in its sequence
    keys: int,  # how many places of the cache are looked at
    window: int,
) -> Tensor:  # (B, 1, T, keys) bool, True = seen
    """Which cached keys each query sees: none after its own place, at most `window` before it."""
    distance = positions[:, :, None] - torch.arange(keys, device=positions.device)
    return ((distance >= 0) & (distance <= window))[:, None]


def attend_cached(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, K, Hkv, D) cached keys, those of this call included
    v: Tensor,  # (B, K, Hkv, D)
    mask: Tensor,  # (B, 1, T, K) from cache_mask
    scale: float | None = None,  # of the scores, default 1/sqrt(D)
) -> Tensor:  # (B, T, H, D)
    """Attention of new queries over a cache; rows may be at different places."""
    if _kind(q) == "inference" and q.dtype == torch.float16:
        return npu_kernels.prompt(q, k, v, mask)
    return plain_attention.masked(q, k, v, mask, scale, _finite(q))


def takes_lengths(q: Tensor) -> bool:
    """Whether attention over a cache of these queries (B, T, H, D) reads rows' lengths instead of a mask.

    The operators for it multiply 16-bit numbers, in units of 16 channels; that of inference cards takes one query.
    """
    kind = _kind(q)
    if q.element_size() != 2 or q.size(3) % 16:
        return False
    return kind == "fused" or (kind == "inference" and q.size(1) == 1)


def attend_lengths(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, K, Hkv, D) cached keys, those of this call included
    v: Tensor,  # (B, K, Hkv, D)
    fresh: Sequence[int],  # of each row, how many of the T tokens are real
    ends: Sequence[int],  # of each row, how many keys it holds
    last: Tensor | None,  # (B, W + 1) places of the last keys of each row; given where there is one query
    window: int,
    scale: float | None = None,
) -> Tensor:  # (B, T, H, D)
    """attend_cached() where takes_lengths() says so; a short window of one query reads no more keys than it sees."""
    if last is not None and max(ends) > window + 1:
        rows = torch.arange(k.size(0), device=k.device)[:, None]
        k, v, ends = k[rows, last], v[rows, last], [min(end, window + 1) for end in ends]
    if _kind(q) == "inference":
        return npu_kernels.decode(q, k, v, ends)
    return npu_kernels.attend_lengths(q, k, v, fresh, ends, window, q.size(3) ** -0.5 if scale is None else scale)
