"""Chips whose fused operators are a list: the Ascend 950, and chips that no table knows, whose operators are tried.

Two operators of the Ascend 950 have no derivative in torch_npu (op-plugin's derivatives.yaml has none), so that the
backward passes are written here. npu_apply_rotary_pos_emb also overwrites what it is given.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from nanochat.common import log
from nanochat.platforms.ascend.kernels import EPSILON, AscendChunked, AscendFused, missing
from nanochat.platforms.operations import Operations

# What may do each work, the best first. Without any, attention is made of matmuls and the rest of torch's operators.
ATTENTION = "npu_fusion_attention"
DECODING = "npu_fused_infer_attention_score"
NORMS = ("npu_rms_norm", "npu_add_rms_norm")
ROTATIONS = ("npu_rotary_mul", "npu_apply_rotary_pos_emb")
WRONG = 0.03  # from this error on, relative to the largest value, a tried operator counts as broken; bf16 reaches 0.01


class AscendListed(AscendFused):
    """Uses the fused operators that are listed, and torch's own for the rest."""

    name = "listed"

    def __init__(
        self, operators: Collection[str], stacks_matrices: bool = True, saturates: bool = False
    ):
        super().__init__(stacks_matrices, saturates)
        self.operators = frozenset(operators)

    def norm(self, x: Tensor) -> Tensor:
        """See Operations.norm."""
        if "npu_rms_norm" in self.operators:
            return super().norm(x)
        if "npu_add_rms_norm" not in self.operators:
            return Operations.norm(self, x)
        return _DoubledNorm.apply(x, self.ones(x))  # type: ignore[no-any-return]

    def add_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """See Operations.add_norm. The fused operator's backward pass is written here, in torch's operators."""
        if "npu_rms_norm" in self.operators or "npu_add_rms_norm" not in self.operators:
            return Operations.add_norm(self, x, y)
        return _AddNorm.apply(x, y, self.ones(x))  # type: ignore[no-any-return]

    def weighted_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See Operations.weighted_norm."""
        if "npu_rms_norm" in self.operators:
            return super().weighted_norm(x, weight, epsilon)
        return Operations.weighted_norm(self, x, weight, epsilon)

    def rotary_tables(
        self,
        length: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        base: float = 100_000,
    ) -> tuple[Tensor, Tensor]:
        """Tables for the operator that rotates: see AscendFused.rotary_tables and Operations.rotary_tables."""
        tables = (
            super().rotary_tables
            if self.operators.intersection(ROTATIONS)
            else super(AscendFused, self).rotary_tables
        )
        return tables(length, head_dim, device, dtype, base)

    def rotary(
        self,
        x: Tensor,  # (B, T, H, D)
        cos: Tensor,  # (1 or B, T, 1, D or D/2), from rotary_tables
        sin: Tensor,
    ) -> Tensor:
        """See Operations.rotary."""
        if "npu_rotary_mul" in self.operators:
            return super().rotary(x, cos, sin)
        if "npu_apply_rotary_pos_emb" not in self.operators:
            return Operations.rotary(self, x, cos, sin)
        return _Rotation.apply(x, cos, sin)  # type: ignore[no-any-return]

    def sharpened(self, qk: Tensor, sharpen: float) -> Tensor:
        """Queries and keys as attend() reads them: only the fused operator takes a factor of the scores."""
        return qk if ATTENTION in self.operators else qk * sharpen

    def softmax_scale(self, head_dim: int, sharpen: float) -> float | None:
        """See Operations.softmax_scale."""
        return super().softmax_scale(head_dim, sharpen) if ATTENTION in self.operators else None

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """See PlainAttention.attend."""
        if ATTENTION in self.operators:
            return super().attend(q, k, v, window, scale)
        return AscendChunked.attend(self, q, k, v, window, scale)

    def by_lengths(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        new: Sequence[int],
        ends: Sequence[int],
        recent: Callable[[], Tensor],
        window: int,
        scale: float | None = None,
    ) -> Tensor | None:
        """See PlainAttention.by_lengths."""
        if DECODING not in self.operators:
            return None
        return super().by_lengths(q, k, v, new, ends, recent, window, scale)


class _DoubledNorm(torch.autograd.Function):
    """The RMS norm of x by npu_add_rms_norm(x, x): doubling x and taking four times epsilon changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ones: Tensor) -> Tensor:
        import torch_npu  # pyright: ignore[reportMissingImports]

        y, half_rstd, _ = torch_npu.npu_add_rms_norm(x, x, ones, 4 * EPSILON)
        ctx.save_for_backward(y, half_rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        y, half_rstd = ctx.saved_tensors
        return _through_norm(grads[0], y, 2 * half_rstd), None


class _AddNorm(torch.autograd.Function):
    """norm(x + y) and x + y by npu_add_rms_norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, ones: Tensor) -> tuple[Tensor, Tensor]:
        import torch_npu  # pyright: ignore[reportMissingImports]

        normed, rstd, total = torch_npu.npu_add_rms_norm(x, y, ones, EPSILON)
        ctx.save_for_backward(normed, rstd)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad = _through_norm(grads[0], *ctx.saved_tensors).add_(grads[1])
        return grad, grad, None


def _through_norm(
    g: Tensor,  # (..., C) gradient of the normed
    normed: Tensor,  # (..., C)
    rstd: Tensor,  # (..., 1) fp32 factor by which the norm multiplied
) -> Tensor:  # (..., C)
    """The gradient of what an RMS norm was given."""
    g = g.float()
    along = (g * normed).mean(dim=-1, keepdim=True)
    return ((g - normed * along) * rstd).to(normed.dtype)


class _Rotation(torch.autograd.Function):
    """The rotation by npu_apply_rotary_pos_emb, which overwrites a tensor of queries and one of keys."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None  # the transpose of a rotation turns back


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` rotated. The operator wants keys too; one head more is cheaper than parting queries and keys."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    copy, one_head = (
        tensor.clone(memory_format=torch.contiguous_format) for tensor in (x, x[:, :, :1])
    )
    return torch_npu.npu_apply_rotary_pos_emb(copy, one_head, cos, sin, "BSND", "half")[0]


# --- trying ----------------------------------------------------------------------------------------


def try_operators(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """The fused operators that work on this card, each compared with fp32 on the host; logs why others do not."""
    works: list[str] = []
    for group, trial in (
        ((ATTENTION,), _attends),
        (NORMS, _norms),
        (ROTATIONS, _rotates),
        ((DECODING,), _decodes),
    ):
        for operator in group:
            why = _why_not(operator, trial, device, dtype)
            if not why:
                works.append(operator)
                break
            log(f"{operator} cannot be used here: {why}")
    return tuple(works)


def _why_not(
    operator: str,
    trial: Callable[[Operations, list[Tensor]], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Why an operator cannot be used; "" if it gives what the host gives, forward and backward."""
    if missing((operator,)):
        return "this torch_npu does not have it"
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn((2, 64, heads, 32), generator=generator).to(dtype) for heads in (4, 2, 2)]
    backward = trial is not _decodes

    def results(operations: Operations, tensors: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.requires_grad_(backward) for tensor in tensors]
        with torch.set_grad_enabled(backward):
            out = trial(operations, leaves)
            weight = torch.linspace(-1, 1, out.size(-1)).to(out)
            parts = (
                torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
                if backward
                else ()
            )
        return [out.detach(), *(grad for grad in parts if grad is not None)]

    try:
        outputs = [
            output.float().cpu()
            for output in results(AscendListed((operator,)), [x.to(device) for x in qkv])
        ]
    except RuntimeError as failure:
        return (str(failure).strip().splitlines() or [repr(failure)])[0][:200]
    expected = results(Operations(), [x.float() for x in qkv])
    error = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(outputs, expected, strict=True)
    )
    return "" if error <= WRONG else f"its error is {error:.3g} of the largest value"


def _attends(operations: Operations, qkv: list[Tensor]) -> Tensor:
    return operations.attend(qkv[0], qkv[1], qkv[2], 24)


def _norms(operations: Operations, qkv: list[Tensor]) -> Tensor:
    return operations.norm(qkv[0])


def _rotates(operations: Operations, qkv: list[Tensor]) -> Tensor:
    q = qkv[0]
    cos, sin = operations.rotary_tables(q.size(1), q.size(3), q.device, q.dtype)
    return operations.rotary(q, cos[None, :, None], sin[None, :, None])


def _decodes(operations: Operations, qkv: list[Tensor]) -> Tensor:
    q, k, v = qkv
    ends: Sequence[int] = (64, 40)
    rows = operations.by_lengths(q[:, :1], k, v, (1, 1), ends, lambda: k, 63)
    if rows is not None:
        return rows
    singles = []
    for i, end in enumerate(ends):
        row = slice(i, i + 1)
        visible = torch.ones(1, 1, 1, end, dtype=torch.bool, device=q.device)
        singles.append(operations.masked(q[row, :1], k[row, :end], v[row, :end], visible))
    return torch.cat(singles)
