"""Writes GGUF, the one-file format of llama.cpp and Ollama: metadata first, then tensors.

The format is described in github.com/ggml-org/ggml/blob/master/docs/gguf.md. All numbers are little-endian.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanochat.common import UserError, atomic_path

VERSION = 3
ALIGNMENT = 32  # bytes; every tensor starts at a multiple of it
FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # ggml's numbers of the formats
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9

Value = bool | int | float | str | Sequence[str] | Sequence[bool] | Sequence[int]


@dataclass(frozen=True)
class Planned:
    """A tensor of the file, which is computed when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _one(value: bool | int | float | str) -> tuple[int, bytes]:
    """The type and the bytes of a single value; an int is unsigned."""
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return UINT32, struct.pack("<I", value)
    if isinstance(value, float):
        return FLOAT32, struct.pack("<f", value)
    return STRING, _text(value)


def _value(value: Value) -> bytes:
    """The type and the bytes of a value; a list of ints is signed."""
    if isinstance(value, bool | int | float | str):
        kind, data = _one(value)
        return struct.pack("<I", kind) + data
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        kind, data = INT32, struct.pack(f"<{len(value)}i", *value)
    else:
        kind, data = _one(value[0])[0], b"".join(_one(one)[1] for one in value)
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + data


def _padding(size: int) -> bytes:
    return bytes(-size % ALIGNMENT)


def _header(metadata: Mapping[str, Value], tensors: Sequence[Planned]) -> bytes:
    """Everything before the first tensor."""
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [_text(name) + _value(value) for name, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        sizes = tensor.shape[::-1]  # the innermost dimension comes first
        about = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, FORMATS[tensor.dtype], offset)
        parts.append(_text(tensor.name) + about)
        size = math.prod(sizes) * tensor.dtype.itemsize
        offset += size + len(_padding(size))
    header = b"".join(parts)
    return header + _padding(len(header))


def write(path: Path, metadata: Mapping[str, Value], tensors: Sequence[Planned]) -> None:
    """Write a file, whole or not at all; one tensor is in memory at a time beside what `make` holds.

    UserError (code 2) if the file exists.
    """
    if path.exists():
        raise UserError(f"{path} exists already: name another file, or delete it", exit_code=2)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(_header(metadata, tensors))
        for planned in tensors:
            value = planned.make().detach().cpu().contiguous()
            assert (tuple(value.shape), value.dtype) == (planned.shape, planned.dtype), (
                planned.name,
                value.shape,
            )
            data = value.view(torch.uint8).numpy().data
            file.write(data)
            file.write(_padding(data.nbytes))
