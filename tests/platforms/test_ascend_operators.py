"""Chips whose operators are a list, on the emulated 950 and on one that the project does not know."""

import contextlib
import io

import pytest
import torch
from torch import Tensor

from nanochat import device
from nanochat.platforms.ascend import operators as ascend_operators
from nanochat.platforms.ascend.chips import OPERATORS_950
from nanochat.platforms.ascend.operators import AscendListed
from nanochat.platforms.operations import Operations
from tests.emulated_npu.worker import on_npu


def result(operations: Operations, work: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of an operation on (B, T, H, D), and the gradient of a weighted sum of it."""
    x = x.detach().requires_grad_()
    if work == "norm":
        out = operations.norm(x)
    else:
        cos, sin = operations.rotary_tables(x.size(1), x.size(3), x.device, x.dtype)
        out = operations.rotary(x, cos[None, :, None], sin[None, :, None])
    (gradient,) = torch.autograd.grad((out * torch.linspace(-1, 1, out.size(-1), device=x.device)).sum(), x)
    return out.detach().cpu(), gradient.cpu()


@pytest.mark.parametrize("work", ["norm", "rotary"])
@on_npu(chip="950")
def test_operators_without_a_derivative_get_the_right_gradients(work: str) -> None:
    x = torch.randn((2, 24, 3, 16), generator=torch.Generator().manual_seed(1))
    before = x.npu()
    found = result(AscendListed(OPERATORS_950), work, before)
    assert torch.equal(before.cpu(), x)  # the operator overwrites what it is given, and is given a copy
    for here, there in zip(found, result(Operations(), work, x), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)


@on_npu(chip="950")
def test_a_950_uses_the_operators_of_its_row_and_no_other() -> None:
    from tests.emulated_npu import log

    operations = device.compute_init("npu").operations
    x = torch.randn(2, 24, 3, 16).npu()
    with log.record() as seen:
        result(operations, "norm", x)
        result(operations, "rotary", x)
        operations.attend(x, x, x, 24)
    assert {name for name in seen.operators if name.startswith("npu_")} == set(OPERATORS_950)
    half = x.half()
    assert operations.by_lengths(half, half, half, [24] * 2, [24] * 2, lambda: x, 24) is None


@on_npu(chip="SoC999", NANOCHAT_PEAK_TFLOPS="")
def test_an_unknown_chip_is_tried_and_every_refusal_is_logged() -> None:

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        compute = device.compute_init("npu")
    assert isinstance(compute.operations, AscendListed)
    assert compute.operations.operators == {"npu_rms_norm", "npu_apply_rotary_pos_emb"}
    words = said.getvalue()
    assert "SoC 999 is not in the table of chips, so its operators are tried" in words
    assert "npu_fusion_attention cannot be used here: call aclnn kernel" in words
    assert "does not exist on Ascend999" in words and "npu_rms_norm cannot" not in words
    assert "kernels: listed (npu_rms_norm, npu_apply_rotary_pos_emb)" in words
    assert compute.chip is not None and (compute.chip.memory_gib, compute.chip.tflops) == (40, 0)
    flops, source = device.peak_flops(compute)
    assert flops > 0 and source.startswith("unknown peak; ")


@pytest.mark.parametrize("part", ["result", "gradient"])
@on_npu()
def test_an_operator_that_answers_wrongly_is_not_used(part: str) -> None:
    import torch_npu  # pyright: ignore[reportMissingImports]

    right = torch_npu.npu_rotary_mul

    def with_nan_gradient(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return right(x, cos, sin) + (x - x.detach()).abs().sqrt()

    wrong = {"result": lambda x, cos, sin: right(x, cos, -sin), "gradient": with_nan_gradient}
    torch_npu.npu_rotary_mul = wrong[part]
    try:
        works = ascend_operators.try_operators(torch.device("npu", 0), torch.bfloat16)
    finally:
        torch_npu.npu_rotary_mul = right
    assert "npu_rotary_mul" not in works
    assert "npu_fused_infer_attention_score" in works and "npu_fusion_attention" in works
