"""Writes GGUF, the single-file format of llama.cpp and Ollama: metadata first, then tensors.

The format is described in github.com/ggml-org/ggml/blob/master/docs/gguf.md. All numbers are
little-endian.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanochat.common import UserError, atomic_path, tr
from nanochat.export import q8_0

VERSION = 3
ALIGNMENT = 32  # bytes; every tensor starts at a multiple of it


@dataclass(frozen=True)
class Format:
    """How ggml stores the numbers of a tensor."""

    code: int  # ggml's
    block: int  # numbers that are stored together
    block_bytes: int


FORMATS = {
    "float32": Format(0, 1, 4),
    "float16": Format(1, 1, 2),
    "bfloat16": Format(30, 1, 2),
    "q8_0": Format(8, q8_0.NUMBERS, q8_0.BLOCK_BYTES),
}
# GGUF's codes for the types of metadata values.
UINT32 = 4
INT32 = 5
FLOAT32 = 6
BOOL = 7
STRING = 8
ARRAY = 9

Scalar = bool | int | float | str
Value = Scalar | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write to a GGUF file; `compute` returns what is stored just before the write.

    `format` is a key of FORMATS. What is stored in q8_0 is the uint8 tensor of q8_0.quantized().
    """

    name: str
    shape: tuple[int, ...]  # in numbers
    format: str
    compute: Callable[[], Tensor]

    @property
    def stored_bytes(self) -> int:
        """The number of bytes in the file."""
        stored_as = FORMATS[self.format]
        return math.prod(self.shape) // stored_as.block * stored_as.block_bytes


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _type(value: Scalar) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return UINT32
    return FLOAT32 if isinstance(value, float) else STRING


def _bytes(value: Scalar) -> bytes:
    """Return the bytes of a single metadata value. An int is stored as uint32."""
    if isinstance(value, str):
        return _text(value)
    code = {BOOL: "<?", UINT32: "<I", FLOAT32: "<f"}[_type(value)]
    return struct.pack(code, value)


def _value(value: Value) -> bytes:
    """Return the bytes of a metadata value, its type first. Ints in a list are stored as int32."""
    if isinstance(value, bool | int | float | str):
        return struct.pack("<I", _type(value)) + _bytes(value)
    element_type = _type(value[0])
    if element_type == UINT32:
        element_type = INT32
        data = struct.pack(f"<{len(value)}i", *value)
    else:
        data = b"".join(map(_bytes, value))
    return struct.pack("<IIQ", ARRAY, element_type, len(value)) + data


def _padding(size: int) -> bytes:
    return bytes(-size % ALIGNMENT)


def _header(metadata: Mapping[str, Value], tensors: Sequence[PlannedTensor]) -> bytes:
    """Return the bytes of the file before the first tensor, with padding."""
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for name, value in metadata.items():
        parts += [_text(name), _value(value)]
    offset = 0
    for tensor in tensors:
        sizes = tensor.shape[::-1]  # the innermost dimension comes first
        parts.append(_text(tensor.name))
        parts.append(struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        parts.append(struct.pack("<IQ", FORMATS[tensor.format].code, offset))
        size = tensor.stored_bytes
        offset += size + len(_padding(size))
    header = b"".join(parts)
    return header + _padding(len(header))


def write(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Sequence[PlannedTensor],
) -> None:
    """Write a GGUF file atomically, with only one computed tensor in memory at a time.

    Raises UserError (exit code 2) if the file already exists.
    """
    if path.exists():
        raise UserError(
            tr("{path} exists already: name another file, or delete it", path=path), exit_code=2
        )
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(_header(metadata, tensors))
        for planned in tensors:
            tensor = planned.compute().detach().cpu().contiguous()
            assert tensor.shape[:-1] == planned.shape[:-1], (planned.name, tensor.shape)
            data = tensor.view(torch.uint8).numpy().data
            assert data.nbytes == planned.stored_bytes, (planned.name, tensor.dtype)
            file.write(data)
            file.write(_padding(data.nbytes))
