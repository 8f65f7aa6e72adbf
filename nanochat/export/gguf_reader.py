"""Reads GGUF files with the package `gguf`, which also dequantises their tensors."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat.common import UserError, tr
from nanochat.data.library_words import in_words


def copy_again() -> str:
    """Return the advice for damaged files, in the user's language."""
    return tr("Copy the file again from its source")


class GGUFFile:
    """A GGUF file that is mapped into memory: its metadata, and its tensors by name.

    The sizes of a tensor are in torch's order, with the rows first.
    """

    def __init__(self, path: Path):
        """Open the file.

        Raises UserError (exit code 2) if the file is missing, damaged, of another format or only a
        part of a model, or if the package `gguf` is missing.
        """
        if not path.is_file():
            raise UserError(tr("{path} is not a file: name a GGUF file", path=path), exit_code=2)
        with open(path, "rb") as file:
            begins_right = file.read(4) == b"GGUF"
        if not begins_right:
            raise UserError(
                tr(
                    "{path} is no GGUF file, because it does not begin with the letters "
                    "GGUF. Name a file that llama.cpp can read",
                    path=path,
                ),
                exit_code=2,
            )
        try:
            self._gguf = importlib.import_module("gguf")
        except ModuleNotFoundError as missing:
            raise UserError(
                tr(
                    "reading a GGUF file needs the package gguf. Install it with `pip install gguf`"
                ),
                exit_code=2,
            ) from missing
        self.path = path
        try:
            reader = self._gguf.GGUFReader(path)
            self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OverflowError) as failure:
            raise UserError(
                tr(
                    "{path} is damaged ({failure}). {copy}",
                    path=path,
                    failure=in_words(failure),
                    copy=copy_again(),
                ),
                2,
            ) from failure
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        parts = self.get("split.count", 1)
        if parts > 1:
            raise UserError(
                tr(
                    "{path} is one of the {parts} files of a model. Join the files with "
                    "`llama-gguf-split --merge FIRST-FILE JOINED-FILE`, which llama.cpp has",
                    path=path,
                    parts=parts,
                ),
                exit_code=2,
            )

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value of the metadata.

        Raises UserError (exit code 2) if the value is missing and there is no default.
        """
        value = self.metadata.get(name, default)
        if value is None:
            raise UserError(
                tr(
                    "{path} has no {name} in its metadata. {copy}",
                    path=self.path,
                    name=name,
                    copy=copy_again(),
                ),
                2,
            )
        return value

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in fp32.

        Raises UserError (exit code 2) if `gguf` cannot dequantise the tensor.
        """
        stored = self._tensors[name]
        try:
            values = self._gguf.quants.dequantize(stored.data, stored.tensor_type)
        except (NotImplementedError, KeyError, ValueError) as failure:
            raise UserError(
                tr(
                    "{name} in {path} is stored as {format}, which the package gguf cannot "
                    "dequantise. Use another file of this model, such as the one in Q8_0",
                    name=name,
                    path=self.path,
                    format=stored.tensor_type.name,
                ),
                exit_code=2,
            ) from failure
        copy = np.array(values, np.float32)  # torch wants memory that it may write to
        return torch.from_numpy(copy).view(self.shapes[name])
