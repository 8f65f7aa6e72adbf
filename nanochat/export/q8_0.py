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
    parts = [_quantized(part) for part in x.split(ROWS)]
    return torch.cat(parts)


def _quantized(x: Tensor) -> Tensor:
    blocks = x.unflatten(1, (-1, NUMBERS))
    scales = blocks.abs().amax(dim=2, keepdim=True) / 127
    inverse = 1 / scales
    inverse[inverse.isinf()] = 0  # blocks of zeros, and those whose scale is 0 in fp16
    scaled = blocks * inverse
    whole = scaled.abs().floor()
    # Halves are rounded away from zero, and torch.round() would round them to even numbers.
    whole += (2 * (scaled.abs() - whole)).floor()
    integers = whole.copysign(scaled).to(torch.int8)
    stored_scales = scales.to(torch.float16)
    pieces = (stored_scales.view(torch.uint8), integers.view(torch.uint8))
    return torch.cat(pieces, dim=2).flatten(1)
