"""Tensors that are made once: which are kept, which are evicted, and what a compiler gets."""

import pytest
import torch
from torch import Tensor

from nanochat import attention
from nanochat.attention import TensorCache


class Maker:
    """Makes tensors and counts them."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> Tensor:
        self.made += 1
        return torch.full((2,), float(self.made))


def test_a_tensor_is_made_once_and_the_one_unused_for_longest_is_evicted() -> None:
    store, make = TensorCache(2), Maker()
    first = store.get("a", make)
    store.get("b", make)
    assert store.get("a", make) is first and make.made == 2
    store.get("c", make)
    assert len(store) == 2
    assert store.get("a", make) is first  # it was used after b
    store.get("b", make)
    assert make.made == 4


def test_a_tensor_made_while_sampling_can_be_trained_with() -> None:
    store = TensorCache(1)
    with torch.inference_mode():
        store.get("a", Maker())
    weight = torch.ones(2, requires_grad=True)
    (weight * store.get("a", Maker())).sum().backward()
    assert weight.grad is not None


def test_a_compiled_model_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store, make = TensorCache(1), Maker()
    monkeypatch.setattr(attention, "is_compiling", lambda: True)
    assert store.get("a", make) is not store.get("a", make)
    assert len(store) == 0
