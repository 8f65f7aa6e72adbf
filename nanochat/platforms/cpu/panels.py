"""Matrices in panels, for serving models that compute in fp32.

A processor without bf16 products computes in fp32, where a decoding step takes as long as reading
every matrix once. A published model's weights are bf16 numbers in fp32 tensors: panels keep them in
two bytes, and each product widens them in registers, so that nothing is lost and half is read. With
8-bit weights, it is a quarter. dev/LOG.md compares the products with torch's.
"""

import torch
from torch import Tensor

from nanochat.platforms import host
from nanochat.platforms.cpu.kernels import PANEL, Kernels

MEASURED = {"avx512f", "avx2"}  # features of processors on which kernels beat torch's own operators


def serve_here(dtype: torch.dtype) -> bool:
    """Return whether panels are faster here for a model that computes in `dtype`.

    The C++ kernels are needed too.
    """
    return dtype == torch.float32 and bool(MEASURED & host.cpu_flags())


class Panels:
    """Multiplies fp32 activations by a matrix that is stored in panels of 16 outputs.

    The result for a row does not depend on how many rows are multiplied together.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,  # (outputs, inputs) fp32, or int8 with scales
        scales: Tensor | None = None,  # (outputs,) fp32, a factor for each output
    ):
        weight = weight.detach()
        self.shape = weight.shape
        self._kernels = kernels
        self.scales = scales
        if weight.dtype == torch.float32:
            weight = in_two_bytes(weight)
        outputs, inputs = weight.shape
        padded = weight.new_zeros(-(-outputs // PANEL) * PANEL, inputs)
        padded[:outputs] = weight
        panels = padded.view(-1, PANEL, inputs).transpose(1, 2)
        self.panels = panels.contiguous()  # (outputs / 16, inputs, 16)
        self.dtype = self.panels.dtype
        self.address = self.panels.data_ptr()

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return x (..., inputs) times the transposed matrix, as (..., outputs).

        This is the `multiply` hook of a Linear; `weight` is ignored.
        """
        return self._kernels.multiply_panels(x, self.panels, self.scales, self.shape[0])

    def rows(self, numbers: Tensor) -> Tensor:  # (...) -> (..., inputs) fp32
        """Return rows of the matrix by their numbers, as an embedding table does."""
        rows = self.panels[numbers // PANEL, :, numbers % PANEL].float()
        if self.scales is None:
            return rows
        return rows * self.scales[numbers][..., None]


def in_two_bytes(weight: Tensor) -> Tensor:
    """Return fp32 weights as bf16 if every one of them is a bf16 number, or else unchanged."""
    short = weight.bfloat16()
    return short if torch.equal(short.float(), weight) else weight
