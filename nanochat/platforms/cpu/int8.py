"""Makes a GPT train with 8-bit integer products; products.py has the arithmetic.

Each large matrix of a layer gets an 8-bit product in its `multiply` attribute, which the fused
operators of operations.py recognize. The head computes the logits of a loss in 8 bits.
"""

from typing import Any, cast

import torch.nn as nn
from torch import Tensor

from nanochat.common import UserError, tr
from nanochat.model import Model
from nanochat.platforms import host
from nanochat.platforms.base import check_bf16
from nanochat.platforms.cpu.gradients import Product8, Trained
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.platforms.cpu.products import OUTPUTS
from nanochat.platforms.layers import OperatorHead, check_sides, matrices_named
from nanochat.platforms.operations import Operations

LARGE = ("c_q", "c_k", "c_v", "c_fc", "c_proj")  # all matrices of a layer except the gates


def is_faster() -> bool:
    """Return whether this processor multiplies 8-bit integers faster than bf16."""
    flags = host.cpu_flags()
    has_amx = "amx_bf16" in flags  # multiplies bf16 faster than VNNI multiplies 8 bits
    return "avx512_vnni" in flags and not has_amx


class Int8Head(OperatorHead):
    """An output head that computes the logits of its loss in 8 bits during training."""

    use: Trained

    def loss(
        self,
        x: Tensor,  # (N, C)
        targets: Tensor,  # (N,)
        weights: Tensor | None,  # (N,)
    ) -> Tensor:
        """Implement Head.loss with 8-bit logits in training on at least LOGIT_ROWS (256) tokens."""
        operations = cast(CpuOperations, self.operations)
        return operations.loss(
            x,
            self.weight,
            targets,
            self.criterion,
            weights=weights,
            chunk=self.loss_tokens,
            use8=self.use,
        )


def kernels_of(operations: Operations) -> Trained | None:
    """Return the kernels that train in 8 bits, or None if `operations` have none."""
    if not isinstance(operations, CpuOperations):
        return None
    return operations.in_int8()


def use_int8(model: Model, operations: Operations) -> None:
    """Make a GPT train with its large matrix products and the logits of its loss in 8 bits.

    Raises UserError (exit code 2) if the model is not a GPT or does not compute in bf16, if the
    kernels do not support its sizes, or if there are no kernels.
    """
    check_bf16(model, "int8")
    use = kernels_of(operations)
    if use is None:
        raise UserError(
            tr(
                "--matmul int8 needs the C++ kernels, but they were switched off (--kernels "
                "plain, NANOCHAT_KERNELS) or could not be compiled: switch them on, install "
                "g++, or leave --matmul out"
            ),
            exit_code=2,
        )
    module = cast(nn.Module, model)
    heads = [head for head in module.modules() if isinstance(head, OperatorHead)]
    if not heads:
        raise UserError(
            tr("only a GPT trains in int8, got another family: leave --matmul out"), exit_code=2
        )
    matrices = matrices_named(model, LARGE)
    check_sides(matrices, OUTPUTS, "int8")
    for matrix in matrices.values():
        matrix.multiply = Product8(use)
    for head in heads:
        swapped = cast(Any, head)
        swapped.__class__ = Int8Head
        swapped.use = use
