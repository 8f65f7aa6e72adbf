"""FP8 products for training, which round both factors to eight bits with one scale per tensor.

Activations and weights keep three bits of fraction (e4m3). Gradients keep two and have a wider
range (e5m2), as in "FP8 formats for deep learning" (arXiv 2209.05433). Scales are computed in every
pass, so checkpoints need not hold them.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.common import UserError, tr
from nanochat.linear import Multiply
from nanochat.model import Model
from nanochat.platforms.layers import check_sides, matrices_named

_scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
GRAIN = 16  # both sides of a matrix, and the tokens of a row, must be multiples of this
FINE = torch.float8_e4m3fn
WIDE = torch.float8_e5m2
LEAST = 1e-30  # replaces the largest number of a tensor of zeros
NORMED = ("c_q", "c_k", "c_v", "c_fc")  # the GPT's matrices whose input is the output of norm()
PROJECTION = "mlp.c_proj"  # not attention's, which is too small to gain from eight bits


# --- products ------------------------------------------------------------------------------------


def rounded(
    x: Tensor,
    form: torch.dtype,  # FINE or WIDE
    bound: float | None = None,  # no number in x exceeds this; None if it must be searched for
) -> tuple[Tensor, Tensor]:  # the shape of x, and () fp32
    """Return x divided by a factor and rounded to the 8-bit format `form`, and that factor."""
    if bound is None:
        largest = x.abs().amax().float()
    else:
        largest = torch.full((), bound, device=x.device)
    factor = largest.clamp_min(LEAST) / torch.finfo(form).max
    numbers = (x.float() / factor).to(form)
    return numbers, factor


def _times(
    a: Tensor,  # (M, K), stored by rows
    a_factor: Tensor,
    b: Tensor,  # (K, N), which the GPU reads by columns
    b_factor: Tensor,
    dtype: torch.dtype,  # the format of the product
    fast: bool = False,  # sum in fewer bits
) -> Tensor:  # (M, N)
    """Return the product of two 8-bit matrices, times both of their factors."""
    if b.stride(0) != 1:
        b = b.t().contiguous().t()
    return _scaled_mm(a, b, a_factor, b_factor, out_dtype=dtype, use_fast_accum=fast)


class _Product(torch.autograd.Function):
    """Multiplies x by a transposed weight in FP8, and computes both gradients in FP8 too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (M, K)
        weight: Tensor,  # (N, K)
        bound: float | None,
    ) -> Tensor:  # (M, N)
        a, a_factor = rounded(x, FINE, bound)
        b, b_factor = rounded(weight, FINE)
        ctx.save_for_backward(a, a_factor, b, b_factor)
        ctx.dtype = weight.dtype
        return _times(a, a_factor, b.t(), b_factor, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        a, a_factor, b, b_factor = ctx.saved_tensors
        dtype = grads[0].dtype
        g, g_factor = rounded(grads[0], WIDE)
        x_grad = _times(g, g_factor, b, b_factor, dtype)
        transposed = g.t().contiguous()
        weight_grad = _times(transposed, g_factor, a, a_factor, ctx.dtype)
        return x_grad, weight_grad, None


def product(
    x: Tensor,  # (..., K)
    weight: Tensor,  # (N, K)
    bound: float | None = None,  # no number in x exceeds this; if known, it saves a pass over x
) -> Tensor:  # (..., N)
    """Return x times the transposed weight, in FP8 only if gradients are enabled."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight.to(x.dtype))
    rows = x.flatten(0, -2)
    y: Any = _Product.apply(rows, weight, bound)
    return y.unflatten(0, x.shape[:-1])


def normed(channels: int) -> Multiply:
    """Return a version of product() whose bound holds for inputs that norm() has normalized.

    The mean square over a token's channels is at most 1, so no number exceeds the square root of
    `channels`.
    """
    return partial(product, bound=channels**0.5)


# --- a model -------------------------------------------------------------------------------------


def use(model: Model) -> None:
    """Make the large matrices in a GPT's layers multiply in FP8 during training.

    Raises UserError (exit code 2) if the model is not a GPT, or if the number of tokens in a row or
    a side of these matrices is not a multiple of 16.
    """
    matrices = matrices_named(model, (*NORMED, PROJECTION))
    if not matrices:
        raise UserError(
            tr("only a GPT trains in FP8, got another family: leave --matmul out"), exit_code=2
        )
    tokens = model.config.sequence_len  # the gradients of weights are sums over tokens
    if tokens % GRAIN:
        raise UserError(
            tr(
                "FP8 needs rows of a multiple of {grain} tokens, got {tokens}: choose "
                "another --max_seq_len, or leave --matmul out",
                grain=GRAIN,
                tokens=tokens,
            ),
            exit_code=2,
        )
    check_sides(matrices, GRAIN, "FP8")
    for name, matrix in matrices.items():
        if name.endswith(PROJECTION):
            matrix.multiply = product
        else:
            matrix.multiply = normed(matrix.in_features)
