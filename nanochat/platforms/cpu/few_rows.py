"""Multiplies a few rows with fp32 matrices, which stay in torch's layout.

torch's own product takes twice as long for two to four rows as for one, and rounds a row in another
way when more rows are multiplied with it.
"""

from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from nanochat.platforms.cpu.kernels import Kernels

FEW_ROWS = 4  # with eight rows, torch's own product is as fast


class FewRows:
    """The product with an fp32 matrix, by a C++ kernel if there are few rows and one thread.

    The kernel reads the matrix once for all rows, and a row's outputs do not depend on the others.
    """

    def __init__(self, kernels: Kernels):
        self._kernels = kernels

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x (..., inputs) times the transposed matrix; this is the `multiply` of a Linear."""
        if is_compiling() or torch.is_grad_enabled() or torch.get_num_threads() > 1:
            return F.linear(x, weight.to(x.dtype))
        has_few_rows = x.numel() <= FEW_ROWS * x.size(-1)
        if not has_few_rows or not x.dtype == weight.dtype == torch.float32:
            return F.linear(x, weight.to(x.dtype))
        return self._kernels.multiply_rows(x, weight)


def use_few_rows(model: nn.Module, kernels: Kernels) -> None:
    """Let every fp32 matrix of a model whose `multiply` is unused multiply a few rows faster."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "multiply") or not isinstance(weight, nn.Parameter):
            continue
        if not weight.numel() or weight.dtype != torch.float32:
            continue
        if cast(Any, module).multiply is None:
            cast(Any, module).multiply = FewRows(kernels)
