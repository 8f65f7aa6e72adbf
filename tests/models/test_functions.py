"""The functions that keep little for the backward pass; test_qwen.py compares what they compute with transformers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.models.qwen.functions import swiglu, weighted_norm
from tests.support.tensors import draw

Function = Callable[[Tensor, Tensor], Tensor]
GATE, WEIGHT = draw(2, 5, 8, seed=2, dtype=torch.bfloat16), draw(8, seed=2)


def bytes_kept(function: Function, other: Tensor) -> int:
    """The bytes that a call keeps for its backward pass."""
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        kept[value.data_ptr()] = value.nbytes
        return value

    x = draw(2, 5, 8, seed=1, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        function(x, other.clone().requires_grad_())
    return sum(kept.values())


@pytest.mark.parametrize(
    ("ours", "plain", "other"),
    [
        (swiglu, lambda gate, up: F.silu(gate) * up, GATE),
        (lambda x, w: weighted_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (8,), w, 1e-6), WEIGHT),
    ],
)
def test_less_is_kept_than_by_autograd(ours: Function, plain: Function, other: Tensor) -> None:
    assert bytes_kept(ours, other) < bytes_kept(plain, other)
