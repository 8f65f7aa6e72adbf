"""Products in FP8 for training: both factors are rounded to eight bits, each tensor with one scale.

Activations and weights keep three bits of fraction (e4m3); gradients keep two, and have a wider range (e5m2), as in
"FP8 formats for deep learning" (arXiv 2209.05433). Scales are found anew in every pass, so nothing has to be saved.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.common import UserError
from nanochat.linear import Linear, Multiply
from nanochat.model import Model

_scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
GRAIN = 16  # both sides of a matrix, and the tokens of a row, must be multiples of this
FINE, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-30  # what the largest number of a tensor of zeros counts as
NORMED = ("c_q", "c_k", "c_v", "c_fc")  # the GPT's matrices that multiply what norm() gives
PROJECTION = "mlp.c_proj"  # attention's is left out: it is too small to gain from eight bits


def rounded(
    x: Tensor,
    form: torch.dtype,  # FINE or WIDE
    bound: float | None = None,  # that no number in x exceeds; None: the largest is looked for
) -> tuple[Tensor, Tensor]:  # as x, and () fp32
    """The numbers in eight bits, and the factor that gives them their size again."""
    largest = x.abs().amax().float() if bound is None else torch.full((), bound, device=x.device)
    factor = largest.clamp_min(LEAST) / torch.finfo(form).max
    return (x.float() / factor).to(form), factor


def _times(
    a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, out: torch.dtype, short: bool = False
) -> Tensor:
    """a (M, K) in rows, times b (K, N), which the GPU wants in columns. `short` sums in fewer bits, and is faster."""
    b = b if b.stride(0) == 1 else b.t().contiguous().t()
    return _scaled_mm(a, b, of_a, of_b, out_dtype=out, use_fast_accum=short)


class _Product(torch.autograd.Function):
    """x (M, K) times the transposed weight (N, K), and both gradients, each of which is a product in FP8 too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bound: float | None) -> Tensor:
        a, of_a = rounded(x, FINE, bound)
        b, of_b = rounded(weight, FINE)
        ctx.save_for_backward(a, of_a, b, of_b)
        ctx.dtype = weight.dtype
        return _times(a, of_a, b.t(), of_b, x.dtype, short=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        a, of_a, b, of_b = ctx.saved_tensors
        g, of_g = rounded(grads[0], WIDE)
        to_x = _times(g, of_g, b, of_b, grads[0].dtype)
        return to_x, _times(g.t().contiguous(), of_g, a, of_a, ctx.dtype), None


def product(
    x: Tensor,  # (..., K)
    weight: Tensor,  # (N, K)
    bound: float | None = None,  # that no number in x exceeds, if one is known: saves a pass over x
) -> Tensor:  # (..., N)
    """x times the transposed weight. Passes without gradients, such as validations, never use 8 bits."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight.to(x.dtype))
    return _Product.apply(x.flatten(0, -2), weight, bound).unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


def use(model: Model) -> None:
    """Let the large matrices inside a GPT's layers multiply in FP8 in training. UserError for other models, and for
    sizes that the GPU does not take."""
    matrices = {
        name: matrix
        for name, matrix in cast(nn.Module, model).named_modules()
        if isinstance(matrix, Linear) and name.endswith((*NORMED, PROJECTION))
    }
    if not matrices:
        raise UserError(
            "only a GPT trains in FP8, got another family: leave --fp8 out", exit_code=2
        )
    if (tokens := model.config.sequence_len) % GRAIN:  # over which the gradients of weights sum
        raise UserError(
            f"FP8 needs rows of a multiple of {GRAIN} tokens, got {tokens}: choose another --max_seq_len, "
            "or leave --fp8 out",
            exit_code=2,
        )
    for name, matrix in matrices.items():
        if wrong := [size for size in (matrix.in_features, matrix.out_features) if size % GRAIN]:
            raise UserError(
                f"FP8 needs matrices whose sides are multiples of {GRAIN}, and {name} has {wrong[0]}: choose another "
                "--model_dim, or leave --fp8 out",
                exit_code=2,
            )
        matrix.multiply = product if name.endswith(PROJECTION) else normed(matrix.in_features)


def normed(channels: int) -> Multiply:
    """product() for what norm() gives: the mean square of a token's channels is 1, so none exceeds their root."""
    return partial(product, bound=channels**0.5)
