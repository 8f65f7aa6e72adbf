"""Matrices in 4 bits on an emulated chip, which refuses operators and number formats that the hardware lacks."""

import pytest
import torch
from torch import Tensor

from nanochat.models.nf4 import Nf4, Tables
from tests.emulated_npu.worker import on_npu

pytestmark = pytest.mark.npu

NPU = "npu:0"


def results(device: str, dtype: torch.dtype) -> list[Tensor]:
    """The codes, the dequantised matrix, a product and its gradient, moved to the host."""
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(70, 320, generator=generator), torch.randn(6, 320, generator=generator)
    matrix = Nf4(70, 320, Tables(dtype)).to_empty(device=device)
    matrix.fill(lambda first, count: weight[first : first + count])
    x = x.to(device, dtype).requires_grad_()
    y = matrix(x)
    (gradient,) = torch.autograd.grad(y.float().sum(), x)
    return [tensor.detach().float().cpu() for tensor in (matrix.codes, matrix.dequantised(), y, gradient)]


@on_npu()
def test_a_910b3_quantises_and_multiplies_as_the_host_does() -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        (codes, *numbers), (host_codes, *host_numbers) = results(NPU, dtype), results("cpu", dtype)
        assert torch.equal(codes, host_codes)
        for number, host_number in zip(numbers, host_numbers, strict=True):
            torch.testing.assert_close(number, host_number, atol=tolerance, rtol=tolerance)


@on_npu(chip="910A")
def test_a_910a_multiplies_in_fp16() -> None:
    for number, host_number in zip(results(NPU, torch.float16), results("cpu", torch.float16), strict=True):
        torch.testing.assert_close(number, host_number, atol=1e-2, rtol=1e-2)
