"""Rounds tensors to Q8_0, llama.cpp's format of 8 bits a number.

32 neighbouring numbers of a row form a block, and share a scale in fp16: the largest absolute
number divided by 127. A block takes 34 bytes: the scale, and then 32 integers.
"""

import torch
from torch import Tensor

NUMBERS = 32  # in a block
BLOCK_BYTES = 2 + NUMBERS
ROWS = 1024  # rounded at a time, so that little memory is needed


def fits(shape: tuple[int, ...]) -> bool:
    """Return whether the rows of a tensor can be divided into blocks."""
    return shape[-1] % NUMBERS == 0


def quantized(x: Tensor) -> Tensor:  # (rows, numbers) fp32 -> (rows, bytes) uint8
    """Return the blocks of a matrix, with the bits that ggml's own quantizer gives.

    Every number must be finite, and at most 127 times the largest number in fp16. The source of the
    arithmetic is ggml's quantize_row_q8_0_ref, which the package `gguf` repeats.
    """
    return torch.cat([_quantized(rows) for rows in x.split(ROWS)])


def _quantized(rows: Tensor) -> Tensor:
    blocks = rows.unflatten(1, (-1, NUMBERS))
    scales = blocks.abs().amax(dim=2, keepdim=True) / 127
    inverse = 1 / scales
    inverse[inverse.isinf()] = 0  # blocks of zeros, and those whose scale is 0 in fp16
    scaled = blocks * inverse
    # Halves are rounded away from zero, and torch.round() would round them to even numbers.
    magnitudes = scaled.abs().floor()
    magnitudes += (2 * (scaled.abs() - magnitudes)).floor()
    integers = magnitudes.copysign(scaled).to(torch.int8)
    scale_bytes = scales.to(torch.float16).view(torch.uint8)
    return torch.cat((scale_bytes, integers.view(torch.uint8)), dim=2).flatten(1)
