"""A slow reader of GGUF files, written from the format's description alone."""

import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SINGLE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FORMATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
Q8_0 = 8  # 34 bytes for 32 numbers, read as the bytes they are


class Reader:
    """The metadata and the tensors of a file, which must hold nothing else."""

    def __init__(self, path: Path):
        self.data, self.at = path.read_bytes(), 0
        assert self.take(4) == b"GGUF" and self.one("I") == 3
        tensors, values = self.one("Q"), self.one("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(values):
            name = self.text()
            assert name not in self.metadata
            self.metadata[name] = self.value(self.one("I"))
        infos = []
        for _ in range(tensors):
            name = self.text()
            sizes = [self.one("Q") for _ in range(self.one("I"))]
            kind = self.one("I")
            if kind == Q8_0:
                sizes[0] = sizes[0] // 32 * 34
            infos.append((name, sizes[::-1], torch.uint8 if kind == Q8_0 else FORMATS[kind], self.one("Q")))
        self.pad()
        begin = self.at
        self.tensors: dict[str, Tensor] = {}
        for name, shape, dtype, offset in infos:
            assert name not in self.tensors and begin + offset == self.at and offset % 32 == 0
            size = dtype.itemsize
            for length in shape:
                size *= length
            self.tensors[name] = torch.frombuffer(bytearray(self.take(size)), dtype=dtype).view(shape)
            self.pad()
        assert self.at == len(self.data)

    def take(self, size: int) -> bytes:
        assert self.at + size <= len(self.data)
        self.at += size
        return self.data[self.at - size : self.at]

    def pad(self) -> None:
        assert not any(self.take(-self.at % 32))

    def one(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def text(self) -> str:
        return self.take(self.one("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            inner = self.one("I")
            return [self.value(inner) for _ in range(self.one("Q"))]
        return self.one(SINGLE[kind])
