"""Tokens to train on. It needs torch alone: processes of other checkouts import it too."""

import torch
from torch import Tensor

Passes = list[tuple[Tensor, Tensor]]  # inputs and targets of each pass, int64 (B, T) each


def inputs_and_targets(cells: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows of int64 (B, T + 1) into inputs and targets, (B, T) each."""
    return cells[:, :-1].contiguous(), cells[:, 1:].contiguous()


def random_passes(vocab_size: int, passes: int, rows: int, tokens: int, seed: int) -> Passes:
    """Return passes of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    size = (passes, rows, tokens + 1)
    cells = torch.randint(0, vocab_size, size, generator=generator)
    return [inputs_and_targets(row_cells) for row_cells in cells]


def pinned(passes: Passes) -> Passes:
    """Return the same passes in pinned memory."""
    return [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in passes]
