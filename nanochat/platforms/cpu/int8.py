"""Products of activations with matrices in training, in integers of 8 bits or in the activations' own format.

Activations are rounded to 8 bits token by token and matrices output by output, each with a factor of its own, wherever
activations are multiplied with a matrix: forward, and for the gradient of the activations (SwitchBack, Wortsman et al.
2023, arXiv:2304.13013). For the gradient of a matrix, a sum over tokens, each channel has a factor for every 256
tokens. The head's logits are made in 8 bits too, but not what follows from their gradient, which has a few large
numbers and thousands of tiny ones. dev/LOG.md has what all this saves in time and costs in loss. Passes without
gradients, such as validations, never use 8 bits.
"""

import functools
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from nanochat.common import UserError
from nanochat.platforms import host
from nanochat.platforms.cpu.kernels import Kernels
from nanochat.platforms.cpu.training import Training

OUTPUTS = 32  # as in int8.h: a matrix must have multiples of them, and as many inputs


def reason() -> str:
    """Why models of bf16 train with products in 8 bits on this host; "" if they do not. NANOCHAT_INT8 decides, or else
    whether the processor multiplies 8 bits faster. UserError (code 2) if it is neither 0 nor 1."""
    setting = os.environ.get("NANOCHAT_INT8") or "auto"
    if setting not in ("auto", "0", "1"):
        raise UserError(f"NANOCHAT_INT8 must be 0 or 1, got {setting!r}", exit_code=2)
    flags = host.cpu_flags()
    if (
        setting == "auto" and "avx512_vnni" in flags and "amx_bf16" not in flags
    ):  # AMX multiplies bf16 faster than VNNI 8
        return "the CPU has avx512_vnni"
    return "NANOCHAT_INT8" if setting == "1" else ""


class Matrix:
    """Matrices of which each row gives an output, below one another, in the format of the activations."""

    def __init__(self, kernels: Kernels, masters: Sequence[Tensor], dtype: torch.dtype):
        """`masters` are (outputs, inputs) each."""
        self.kernels = kernels
        self.weight = masters[0].new_empty(sum(map(len, masters)), masters[0].size(1), dtype=dtype)
        for copy, master in zip(self.weight.split([*map(len, masters)]), masters, strict=True):
            copy.copy_(master)

    def times(self, x: Tensor) -> Tensor:  # (N, inputs) -> (N, outputs)
        """All outputs."""
        return x @ self.weight.mT

    def squared_relu(self, x: Tensor) -> Tensor:  # (N, inputs) -> (N, outputs)
        """relu(y)^2 of all outputs y."""
        return self.kernels.squared_relu(y := self.times(x), y)

    def back(self, g: Tensor) -> Tensor:  # (N, outputs) -> (N, inputs)
        """The gradient of x, from the gradient of the outputs."""
        return g @ self.weight

    def slope(
        self, g: Tensor, x: Tensor
    ) -> Tensor:  # (N, outputs), (N, inputs) -> (outputs, inputs)
        """The gradient of the matrices, from the gradient of the outputs."""
        return g.mT @ x


class Matrix8(Matrix):
    """Such matrices in integers of 8 bits, which are made from the masters."""

    def __init__(self, training: Training, masters: Sequence[Tensor]):
        self.training = training
        # Several ranks gather masters as bf16, and --shard=full frees what it gathered before the gradient is made
        alone = len(masters) == 1 and masters[0].dtype == torch.float32
        self.weight = (masters[0] if alone else torch.cat([*masters])).detach().contiguous()

    def times(self, x: Tensor) -> Tensor:
        """See Matrix.times."""
        return self.training.product_int8(x, *self._packed)

    @functools.cached_property
    def _packed(self) -> tuple[Tensor, Tensor]:
        return self.training.pack_int8(self.weight.float(), back=False)

    def squared_relu(self, x: Tensor) -> Tensor:
        """See Matrix.squared_relu."""
        return self.training.product_int8(x, *self._packed, squared=True)

    def back(self, g: Tensor) -> Tensor:
        """See Matrix.back."""
        return self.training.product_int8(
            g, *self.training.pack_int8(self.weight.float(), back=True)
        )

    def slope(self, g: Tensor, x: Tensor) -> Tensor:
        """See Matrix.slope."""
        return self.training.gradient_int8(g, x)


def fits(masters: Sequence[Tensor]) -> bool:
    """Whether Matrix8 can multiply with these matrices, forward and back."""
    inputs = masters[0].size(1)
    fills_blocks = sum(map(len, masters)) % OUTPUTS == 0 and inputs % OUTPUTS == 0
    return fills_blocks and all(
        master.dtype in (torch.float32, torch.bfloat16) for master in masters
    )
