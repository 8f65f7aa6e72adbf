"""Blocks of 8-bit integers: the bits of the package gguf, which has those of ggml."""

import gguf
import numpy as np
import torch

from nanochat.export.q8_0 import ROWS, quantized


def test_blocks_have_the_bits_of_gguf() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS + 3, 96, generator=generator)
    x *= torch.logspace(-9, 6, len(x))[:, None]  # scales from 0 in fp16 to nearly its largest number
    x[0] = 0
    x[1, :32] = torch.arange(-16.0, 16.0) + 0.5  # halves, of either sign
    x[1, 0] = 127
    theirs = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(quantized(x).numpy(), theirs)
