"""Products of activations with matrices in training, in 8-bit integers, bf16 or fp32.

The 8-bit products are those of SwitchBack (Wortsman et al. 2023, arXiv:2304.13013). Wherever
activations are multiplied with a matrix, in the forward pass and for the gradient of the
activations, each token and each output of the matrix is rounded to 8 bits with a factor of its own.
The gradient of a matrix is a sum over tokens, so there each channel has a factor for every 256
tokens.

The head's logits are computed in 8 bits too, but not the products with their gradient, which has a
few large numbers and thousands of tiny ones. dev/LOG.md lists what all this saves in time and costs
in loss. Passes without gradients, such as validation, do not use these 8-bit products.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from nanochat.platforms.cpu.kernels import Kernels
from nanochat.platforms.cpu.training import ProductsInt8

OUTPUTS = 32  # as in int8.h; the outputs and inputs of a Matrix8 must be multiples of this


class Matrix:
    """One or more matrices, stacked by rows and cast to the format of the activations."""

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
        parts = self.weight.split(heights)
        for part, master in zip(parts, masters, strict=True):
            part.copy_(master)

    def times(self, x: Tensor) -> Tensor:  # (N, inputs) -> (N, outputs)
        """Return the outputs for activations x."""
        return x @ self.weight.mT

    def squared_relu(self, x: Tensor) -> Tensor:  # (N, inputs) -> (N, outputs)
        """Return the squared ReLU of the outputs for activations x."""
        y = self.times(x)
        return self.kernels.squared_relu(y, y)

    def back(self, g: Tensor) -> Tensor:  # (N, outputs) -> (N, inputs)
        """Return the gradient of x, given the gradient of the outputs."""
        return g @ self.weight

    def slope(
        self,
        g: Tensor,  # (N, outputs)
        x: Tensor,  # (N, inputs)
    ) -> Tensor:  # (outputs, inputs)
        """Return the gradient of the matrices, given the gradient of the outputs."""
        return g.mT @ x


class Matrix8(Matrix):
    """One or more matrices, stacked by rows, whose products are computed in 8-bit integers."""

    def __init__(
        self,
        products: ProductsInt8,
        masters: Sequence[Tensor],  # (outputs, inputs) each
    ):
        self._products = products
        # With several ranks, masters are gathered as bf16, and --shard=full frees them before the
        # gradient is computed.
        if len(masters) == 1 and masters[0].dtype == torch.float32:
            weight = masters[0]
        else:
            weight = torch.cat([*masters])
        self.weight = weight.detach().contiguous()

    @functools.cached_property
    def _packed(self) -> tuple[Tensor, Tensor]:
        return self._products.pack_int8(self.weight.float(), back=False)

    def times(self, x: Tensor) -> Tensor:
        """Return the outputs for activations x, computed in 8 bits."""
        packed, factors = self._packed
        return self._products.product_int8(x, packed, factors)

    def squared_relu(self, x: Tensor) -> Tensor:
        """Return the squared ReLU of the outputs for activations x, computed in 8 bits."""
        packed, factors = self._packed
        return self._products.product_int8(x, packed, factors, squared=True)

    def back(self, g: Tensor) -> Tensor:
        """Return the gradient of x, given the gradient of the outputs, computed in 8 bits."""
        packed, factors = self._products.pack_int8(self.weight.float(), back=True)
        return self._products.product_int8(g, packed, factors)

    def slope(self, g: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the matrices, computed in 8 bits."""
        return self._products.gradient_int8(g, x)
