"""Products of activations with matrices in training, in integers of 8 bits or in bf16 or fp32.

Activations are rounded to 8 bits token by token and matrices output by output, each with a factor
of its own, wherever activations are multiplied with a matrix: forward, and for the gradient of the
activations (SwitchBack, Wortsman et al. 2023, arXiv:2304.13013). For the gradient of a matrix, a sum
over tokens, each channel has a factor for every 256 tokens. The head's logits are made in 8 bits
too, but not what follows from their gradient, which has a few large numbers and thousands of tiny
ones. dev/LOG.md has what all this saves in time and costs in loss. Passes without gradients, such as
validations, never use 8 bits.
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
    """Return why models of bf16 train with products in 8 bits on this host; "" if they do not.

    NANOCHAT_INT8 decides, or else whether the processor multiplies 8 bits faster than bf16. Raises
    UserError (code 2) if the variable is neither 0 nor 1.
    """
    setting = os.environ.get("NANOCHAT_INT8") or "auto"
    if setting not in ("auto", "0", "1"):
        raise UserError(f"NANOCHAT_INT8 must be 0 or 1, got {setting!r}", exit_code=2)
    if setting == "1":
        return "NANOCHAT_INT8"
    flags = host.cpu_flags()
    has_vnni = "avx512_vnni" in flags
    has_amx = "amx_bf16" in flags  # it multiplies bf16 faster than VNNI multiplies 8 bits
    if setting == "auto" and has_vnni and not has_amx:
        return "the CPU has avx512_vnni"
    return ""


class Matrix:
    """Matrices of which each row gives an output, below one another, in the activations' format."""

    def __init__(
        self,
        kernels: Kernels,
        masters: Sequence[Tensor],  # (outputs, inputs) each
        dtype: torch.dtype,
    ):
        self.kernels = kernels
        heights = [len(master) for master in masters]
        inputs = masters[0].size(1)
        self.weight = masters[0].new_empty(sum(heights), inputs, dtype=dtype)
        places = self.weight.split(heights)
        for place, master in zip(places, masters, strict=True):
            place.copy_(master)

    def times(self, x: Tensor) -> Tensor:  # (N, inputs) -> (N, outputs)
        """Return all outputs."""
        return x @ self.weight.mT

    def squared_relu(self, x: Tensor) -> Tensor:  # (N, inputs) -> (N, outputs)
        """Return relu(y)^2 of all outputs y."""
        y = self.times(x)
        return self.kernels.squared_relu(y, y)

    def back(self, g: Tensor) -> Tensor:  # (N, outputs) -> (N, inputs)
        """Return the gradient of x, from the gradient of the outputs."""
        return g @ self.weight

    def slope(
        self,
        g: Tensor,  # (N, outputs)
        x: Tensor,  # (N, inputs)
    ) -> Tensor:  # (outputs, inputs)
        """Return the gradient of the matrices, from the gradient of the outputs."""
        return g.mT @ x


class Matrix8(Matrix):
    """Such matrices in integers of 8 bits, which are made from the masters."""

    def __init__(
        self,
        training: Training,
        masters: Sequence[Tensor],  # (outputs, inputs) each
    ):
        self.training = training
        # Several ranks gather masters as bf16, and --shard=full frees what it gathered before the
        # gradient is made.
        if len(masters) == 1 and masters[0].dtype == torch.float32:
            weight = masters[0]
        else:
            weight = torch.cat([*masters])
        self.weight = weight.detach().contiguous()

    @functools.cached_property
    def _packed(self) -> tuple[Tensor, Tensor]:
        return self.training.pack_int8(self.weight.float(), back=False)

    def times(self, x: Tensor) -> Tensor:
        """See Matrix.times."""
        packed, factors = self._packed
        return self.training.product_int8(x, packed, factors)

    def squared_relu(self, x: Tensor) -> Tensor:
        """See Matrix.squared_relu."""
        packed, factors = self._packed
        return self.training.product_int8(x, packed, factors, squared=True)

    def back(self, g: Tensor) -> Tensor:
        """See Matrix.back."""
        packed, factors = self.training.pack_int8(self.weight.float(), back=True)
        return self.training.product_int8(g, packed, factors)

    def slope(self, g: Tensor, x: Tensor) -> Tensor:
        """See Matrix.slope."""
        return self.training.gradient_int8(g, x)


def fits(masters: Sequence[Tensor]) -> bool:
    """Return whether Matrix8 can multiply with these matrices, forward and back."""
    inputs = masters[0].size(1)
    outputs = sum(len(master) for master in masters)
    if inputs % OUTPUTS or outputs % OUTPUTS:
        return False
    formats = {master.dtype for master in masters}
    return formats <= {torch.float32, torch.bfloat16}
