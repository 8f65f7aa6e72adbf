"""Reads safetensors files, and writes them one tensor at a time while hashing them."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nanochat.common import UserError, tr
from nanochat.data.library_words import in_words

# Number format -> its name in the header (huggingface.co/docs/safetensors).
FORMAT_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
BLOCK_BYTES = 1 << 24  # written at a time: enough for a disk's full speed

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, mapped into memory.

    Raises UserError if the file is missing or damaged, or if a tensor is not floating-point.
    """
    try:
        tensors = load_file(path)
    # KeyError: a number format that torch does not have
    except (SafetensorError, OSError, ValueError, KeyError) as failure:
        raise UserError(
            tr(
                "{path} is not a whole safetensors file ({failure}): delete its folder to "
                "use the step before it, or copy the file again",
                path=path,
                failure=in_words(failure),
            )
        ) from failure
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise UserError(
                tr(
                    "{path}: {name} holds {dtype}, and parameters must be floating-point "
                    "numbers: copy the file again",
                    path=path,
                    name=name,
                    dtype=tensor.dtype,
                )
            )
    return tensors


class TensorFile:
    """Writes one safetensors file, tensor by tensor.

    The header comes first, so all number formats and shapes must be known before the first tensor
    is written. While the calling thread writes a tensor, a second thread hashes it and a third
    flushes the file to disk. Only the current tensor is copied to the host. The methods raise
    OSError if the disk refuses a write.
    """

    def __init__(self, path: Path, shapes: Shapes, metadata: Mapping[str, str] | None = None):
        # Wide formats come first, so that every tensor starts at a multiple of its item size.
        self.names = sorted(shapes, key=lambda name: -shapes[name][0].itemsize)
        self._shapes = shapes
        self._path = path
        self._next = 0  # index in self.names of the tensor that add() begins next
        self._missing = 0  # elements of the current tensor that add() has yet to receive
        self._digest = hashlib.sha256()
        self._helpers = ThreadPoolExecutor(2)
        self._flush: Future[None] | None = None
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - open until close()
        try:
            # Users who may read the folder may read the file.
            path.chmod(path.parent.stat().st_mode & 0o666)
            self._write(memoryview(self._header(metadata or {})))
        except BaseException:
            self.abandon()
            raise

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        """Return the bytes before the first tensor: the length of the header, then its JSON."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for name in self.names:
            dtype, shape = self._shapes[name]
            begin = end
            end += math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": FORMAT_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, or its next rows; the tensors must come in the order of `names`."""
        if not self._missing:
            _, shape = self._shapes[self.names[self._next]]
            self._missing = math.prod(shape)
            self._next += 1
        expected = self.names[self._next - 1]
        dtype, shape = self._shapes[expected]
        fits = (
            tensor.dtype == dtype
            and tuple(tensor.shape[1:]) == shape[1:]
            and tensor.numel() <= self._missing
        )
        is_scalar = not shape
        assert name == expected and (fits or is_scalar), (name, expected, tensor.shape)
        self._missing -= tensor.numel()
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            self._write(flat.view(torch.uint8).numpy().data)

    def _write(self, data: memoryview) -> None:
        """Write bytes to the file while another thread hashes them."""
        hashing = self._helpers.submit(self._digest.update, data)
        try:
            for start in range(0, len(data), BLOCK_BYTES):
                self._write_block(data[start : start + BLOCK_BYTES])
                self._flush_beside()
        except OSError as failure:
            raise OSError(failure.errno, failure.strerror, str(self._path)) from failure
        finally:
            hashing.result()

    def _write_block(self, block: memoryview) -> None:
        written = 0
        while written < len(block):
            written += self._file.write(block[written:])

    def _flush_beside(self) -> None:
        """Start to flush the file in another thread, unless a flush is already running.

        This leaves less for close() to flush.
        """
        if self._flush is None or self._flush.done():
            self._check_flush()
            self._flush = self._helpers.submit(os.fsync, self._file.fileno())

    def _check_flush(self) -> None:
        """Wait for the last background flush, and raise its error if it failed.

        The operating system reports an error only once, so a later fsync may not report it again.
        """
        if self._flush is not None:
            self._flush.result()

    def close(self) -> dict[str, Any]:
        """Flush the file to disk, close it, and return its SHA-256 and size for meta.json."""
        complete = self._next == len(self.names) and not self._missing
        assert complete, self.names[self._next - 1 :]
        try:
            self._check_flush()
            os.fsync(self._file.fileno())
            size = self._file.tell()
        finally:
            self.abandon()
        return {"sha256": self._digest.hexdigest(), "bytes": size}

    def abandon(self) -> None:
        """Close the file, finished or not, and stop the helper threads."""
        self._helpers.shutdown()
        self._file.close()


def shapes_of(tensors: Iterable[tuple[str, Tensor]]) -> Shapes:
    """Return the number format and shape of each tensor by name, for a TensorFile.

    The shape of a sharded tensor is that of the whole tensor.
    """
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors}


def write_tensors(
    tensors: Mapping[str, Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write tensors to a safetensors file, and return its SHA-256 and size for meta.json.

    `beat` is called before each tensor is written. Raises OSError if the disk refuses a write.
    """
    file = TensorFile(path, shapes_of(tensors.items()), metadata)
    try:
        for name in file.names:
            beat()
            file.add(name, tensors[name])
        return file.close()
    except BaseException:
        file.abandon()
        raise
