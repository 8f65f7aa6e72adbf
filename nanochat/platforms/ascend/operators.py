"""Operators that are chosen one by one, for the Ascend 950, the 310B and unknown chips.

The operators of an unknown chip are tested before use. torch_npu has no derivatives for two
operators of the Ascend 950 (op-plugin's derivatives.yaml does not list them), so their backward
passes are written here. npu_apply_rotary_pos_emb also overwrites its arguments.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from nanochat.common import log, tr
from nanochat.platforms.ascend.kernels import EPSILON, AscendChunked, AscendFused, missing
from nanochat.platforms.operations import Operations

# The operators that can do each job, best first. Without any, attention is computed with matmuls,
# and the rest with torch's operators.
ATTENTION = "npu_fusion_attention"
DECODING = "npu_fused_infer_attention_score"
NORMS = ("npu_rms_norm", "npu_add_rms_norm")
ROTATIONS = ("npu_rotary_mul", "npu_apply_rotary_pos_emb")
# An operator with an error above this share of the largest value counts as broken. In bf16 the
# error reaches 0.01.
WRONG = 0.03


class AscendListed(AscendFused):
    """Computes with those fused operators that `operators` lists, and with torch's for the rest."""

    name = "listed"

    def __init__(
        self,
        operators: Collection[str],
        stacks_matrices: bool = True,
        saturates: bool = False,
    ):
        super().__init__(stacks_matrices, saturates)
        self.operators = frozenset(operators)

    # --- norms -----------------------------------------------------------------------------------

    def norm(self, x: Tensor) -> Tensor:
        """Implement Operations.norm with npu_rms_norm, npu_add_rms_norm or torch's operators."""
        if "npu_rms_norm" in self.operators:
            return super().norm(x)
        if "npu_add_rms_norm" not in self.operators:
            return Operations.norm(self, x)
        return _DoubledNorm.apply(x, self.ones(x))  # type: ignore[no-any-return]

    def add_norm(
        self,
        x: Tensor,  # (..., C)
        y: Tensor,  # (..., C)
    ) -> tuple[Tensor, Tensor]:
        """Implement Operations.add_norm with npu_add_rms_norm if it is the chip's only fused norm.

        Otherwise, the sum and the norm are separate operators.
        """
        has_norm = "npu_rms_norm" in self.operators
        if has_norm or "npu_add_rms_norm" not in self.operators:
            return Operations.add_norm(self, x, y)
        return _AddNorm.apply(x, y, self.ones(x))  # type: ignore[no-any-return]

    def weighted_norm(
        self,
        x: Tensor,  # (..., C)
        weight: Tensor,  # (C,) fp32, or (H, C) for x (..., H, C)
        epsilon: float,
    ) -> Tensor:
        """Implement Operations.weighted_norm with npu_rms_norm if the chip has it."""
        if "npu_rms_norm" in self.operators:
            return super().weighted_norm(x, weight, epsilon)
        return Operations.weighted_norm(self, x, weight, epsilon)

    # --- rotary embedding ------------------------------------------------------------------------

    def rotary_tables(
        self,
        length: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        base: float = 100_000,
        divisors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines in the layout that rotary() reads on this chip."""
        if self.operators.intersection(ROTATIONS):
            return super().rotary_tables(length, head_dim, device, dtype, base, divisors)
        return Operations.rotary_tables(self, length, head_dim, device, dtype, base, divisors)

    def rotary(
        self,
        x: Tensor,  # (B, T, H, D)
        cos: Tensor,  # (1 or B, T, 1, D or D/2), from rotary_tables
        sin: Tensor,
    ) -> Tensor:
        """Implement Operations.rotary with npu_rotary_mul, npu_apply_rotary_pos_emb or torch."""
        if "npu_rotary_mul" in self.operators:
            return super().rotary(x, cos, sin)
        if "npu_apply_rotary_pos_emb" not in self.operators:
            return Operations.rotary(self, x, cos, sin)
        return _Rotation.apply(x, cos, sin)  # type: ignore[no-any-return]

    # --- attention -------------------------------------------------------------------------------

    def sharpened(self, qk: Tensor, sharpen: float) -> Tensor:
        """Return queries and keys, multiplied by `sharpen` if attention is not fused.

        For fused attention, softmax_scale() includes the factor instead.
        """
        if ATTENTION in self.operators:
            return qk
        return qk * sharpen

    def softmax_scale(self, head_dim: int, sharpen: float) -> float | None:
        """Return the factor for the scores, or None if attention is not fused.

        None stands for the default factor, 1/sqrt(D).
        """
        if ATTENTION in self.operators:
            return super().softmax_scale(head_dim, sharpen)
        return None

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """Implement PlainAttention.attend with fused attention if the chip has it."""
        if ATTENTION in self.operators:
            return super().attend(q, k, v, window, scale)
        return AscendChunked.attend(self, q, k, v, window, scale)

    def by_lengths(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D)
        v: Tensor,  # (B, K, Hkv, D)
        new: Sequence[int],
        ends: Sequence[int],
        recent: Callable[[], Tensor],
        window: int,
        scale: float | None = None,
    ) -> Tensor | None:
        """Implement PlainAttention.by_lengths with the fused decoding operator.

        Returns None if the chip lacks the operator.
        """
        if DECODING not in self.operators:
            return None
        return super().by_lengths(q, k, v, new, ends, recent, window, scale)


# --- backward passes -----------------------------------------------------------------------------


class _DoubledNorm(torch.autograd.Function):
    """Computes the RMS norm of x as npu_add_rms_norm(x, x) with four times the epsilon.

    The result is the same, because 2x has four times the mean square of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., C)
        ones: Tensor,  # (C,)
    ) -> Tensor:
        import torch_npu  # pyright: ignore[reportMissingImports]

        y, half_rstd, _ = torch_npu.npu_add_rms_norm(x, x, ones, 4 * EPSILON)
        ctx.save_for_backward(y, half_rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        y, half_rstd = ctx.saved_tensors
        x_grad = _through_norm(grads[0], y, 2 * half_rstd)
        return x_grad, None


class _AddNorm(torch.autograd.Function):
    """Computes norm(x + y) and x + y with npu_add_rms_norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., C)
        y: Tensor,  # (..., C)
        ones: Tensor,  # (C,)
    ) -> tuple[Tensor, Tensor]:
        import torch_npu  # pyright: ignore[reportMissingImports]

        normed, rstd, total = torch_npu.npu_add_rms_norm(x, y, ones, EPSILON)
        ctx.save_for_backward(normed, rstd)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, rstd = ctx.saved_tensors
        normed_grad, total_grad = grads
        grad = _through_norm(normed_grad, normed, rstd)
        grad.add_(total_grad)
        return grad, grad, None


def _through_norm(
    g: Tensor,  # (..., C) gradient of the norm's output
    normed: Tensor,  # (..., C) the norm's output
    rstd: Tensor,  # (..., 1) fp32 factor that the norm applied
) -> Tensor:  # (..., C)
    """Return the gradient of an RMS norm's input."""
    g = g.float()
    along = (g * normed).mean(dim=-1, keepdim=True)
    across = g - normed * along
    return (across * rstd).to(normed.dtype)


class _Rotation(torch.autograd.Function):
    """Rotates x with npu_apply_rotary_pos_emb."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (B, T, H, D)
        cos: Tensor,  # (1 or B, T, 1, D)
        sin: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        x_grad = _rotated(grads[0], cos, -sin)  # the transpose of a rotation reverses it
        return x_grad, None, None


def _rotated(
    x: Tensor,  # (B, T, H, D)
    cos: Tensor,  # (1 or B, T, 1, D)
    sin: Tensor,
) -> Tensor:
    """Return x, rotated by npu_apply_rotary_pos_emb.

    The operator overwrites its arguments, so it gets copies. It also requires keys. A copy of one
    head of x serves as keys, which is cheaper than splitting x into queries and keys.
    """
    import torch_npu  # pyright: ignore[reportMissingImports]

    queries = x.clone(memory_format=torch.contiguous_format)
    one_head = x[:, :, :1].clone(memory_format=torch.contiguous_format)
    return torch_npu.npu_apply_rotary_pos_emb(queries, one_head, cos, sin, "BSND", "half")[0]


# --- testing -------------------------------------------------------------------------------------

Trial = Callable[[Operations, list[Tensor]], Tensor]  # computes something from q, k and v


def try_operators(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of the fused operators to use on this card, at most one for each job.

    A job gets the first of its operators whose results and gradients are close to those of fp32 on
    the host. Logs why an operator does not work.
    """
    trials = {
        (ATTENTION,): _attends,
        NORMS: _norms,
        ROTATIONS: _rotates,
        (DECODING,): _decodes,
    }
    usable = []
    for operators, trial in trials.items():
        for operator in operators:
            why = _why_not(operator, trial, device, dtype)
            if not why:
                usable.append(operator)
                break
            log(tr("{operator} cannot be used here: {why}", operator=operator, why=why))
    return tuple(usable)


def _why_not(
    operator: str,
    trial: Trial,
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Return why an operator cannot be used, or "" if it works.

    It works if the tensors in _results() are close to those of fp32 on the host.
    """
    if missing((operator,)):
        return tr("this torch_npu does not have it")
    generator = torch.Generator().manual_seed(0)
    on_device = []
    on_host = []
    for heads in (4, 2, 2):
        x = torch.randn((2, 64, heads, 32), generator=generator).to(dtype)
        on_device.append(x.to(device))
        on_host.append(x.float())
    try:
        results = [
            result.float().cpu()  # raises the card's errors, which come late
            for result in _results(trial, AscendListed((operator,)), on_device)
        ]
    except RuntimeError as failure:
        lines = str(failure).strip().splitlines() or [repr(failure)]
        return lines[0][:200]
    expected = _results(trial, Operations(), on_host)
    errors = []
    for result, reference in zip(results, expected, strict=True):
        difference = (result - reference).abs().max()
        errors.append(difference / reference.abs().max())
    error = float(torch.stack(errors).max())  # max() of floats may lose a NaN
    if error <= WRONG:
        return ""
    return tr("its error is {error:.3g} of the largest value", error=error)


def _results(
    trial: Trial,
    operations: Operations,
    qkv: list[Tensor],
) -> list[Tensor]:
    """Return a list: a trial's result and, except for decoding, gradients of the inputs it uses."""
    if trial is _decodes:
        with torch.no_grad():
            return [trial(operations, qkv)]
    leaves = [x.requires_grad_() for x in qkv]
    with torch.enable_grad():
        out = trial(operations, leaves)
        weight = torch.linspace(-1, 1, out.size(-1)).to(out)
        total = (out * weight).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    used = [grad for grad in grads if grad is not None]
    return [out.detach(), *used]


def _attends(operations: Operations, qkv: list[Tensor]) -> Tensor:
    q, k, v = qkv
    return operations.attend(q, k, v, 24)


def _norms(operations: Operations, qkv: list[Tensor]) -> Tensor:
    return operations.norm(qkv[0])


def _rotates(operations: Operations, qkv: list[Tensor]) -> Tensor:
    q = qkv[0]
    T = q.size(1)
    D = q.size(3)
    cos, sin = operations.rotary_tables(T, D, q.device, q.dtype)
    return operations.rotary(q, cos[None, :, None], sin[None, :, None])


def _decodes(operations: Operations, qkv: list[Tensor]) -> Tensor:
    q, k, v = qkv
    query = q[:, :1]
    ends = (64, 40)
    rows = operations.by_lengths(query, k, v, (1, 1), ends, lambda: k, 63)
    if rows is not None:
        return rows
    singles = []
    for i, end in enumerate(ends):
        row = slice(i, i + 1)
        visible = torch.ones(1, 1, 1, end, dtype=torch.bool, device=q.device)
        y = operations.masked(query[row], k[row, :end], v[row, :end], visible)
        singles.append(y)
    return torch.cat(singles)
