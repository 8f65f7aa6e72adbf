"""The functions that keep little, against autograd, in values, gradients and bytes kept."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.models.qwen.functions import swiglu, weighted_norm
from tests.support.tensors import draw

Function = Callable[[Tensor, Tensor], Tensor]
CASES: dict[str, tuple[Function, Function, tuple[int, ...]]] = {
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, (2, 5, 8)),
    "norm": (lambda x, w: weighted_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (8,), w, 1e-6), (8,)),
}


def passed(function: Function, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[list[Tensor], int]:
    """Value and gradients, and the bytes kept for the backward pass."""
    x = draw(2, 5, 8, seed=1).to(dtype).requires_grad_()
    other = draw(*shape, seed=2).to(torch.float32 if len(shape) == 1 and function is CASES["norm"][0] else dtype)
    other.requires_grad_()
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        kept[value.data_ptr()] = value.numel() * value.element_size()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = function(x, other)
    (y.float() * draw(2, 5, 8, seed=3)).sum().backward()
    assert x.grad is not None and other.grad is not None
    return [y.detach().float(), x.grad.float(), other.grad.float()], sum(kept.values())


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_autograd(name: str) -> None:
    ours, plain, shape = CASES[name]
    mine, _ = passed(ours, torch.float32, shape)
    for value, wanted in zip(mine, passed(plain, torch.float64, shape)[0], strict=True):
        torch.testing.assert_close(value, wanted, atol=2e-6, rtol=1e-5)
    rounded, _ = passed(ours, torch.bfloat16, shape)
    for value, wanted in zip(rounded, mine, strict=True):
        torch.testing.assert_close(value, wanted, atol=0.06, rtol=0.06)


@pytest.mark.parametrize("name", CASES)
def test_less_is_kept_than_by_autograd(name: str) -> None:
    ours, plain, shape = CASES[name]
    assert passed(ours, torch.bfloat16, shape)[1] < passed(plain, torch.bfloat16, shape)[1]
