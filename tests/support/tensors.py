"""Tensors to compute with in tests."""

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0, size: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers with a standard deviation of `size`, the same for each seed."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)
