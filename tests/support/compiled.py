"""Compiled kernels as another processor would have them."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest

from nanochat.platforms.cpu import kernels
from nanochat.platforms.cpu.training import ATTENTION, FUNCTIONS, PRODUCTS, ProductsInt8, Training


def made_without(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Training:
    """The functions of training, compiled into a folder with more flags, such as those that leave out instructions."""
    return Training(_library(kernels.TRAINING, folder, monkeypatch, flags), FUNCTIONS | ATTENTION)


def products_without(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> ProductsInt8:
    """The 8-bit products, compiled as made_without() compiles the functions of training."""
    return ProductsInt8(_library(kernels.INT8, folder, monkeypatch, flags), PRODUCTS)


def _library(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, flags: Sequence[str]) -> ctypes.CDLL:
    command = kernels.compiler()
    assert command is not None
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "FLAGS", (*kernels.FLAGS, *flags))
        return ctypes.CDLL(str(kernels.compiled(folder, command, source)))
