"""Compiled kernels as another processor would have them."""

import ctypes
from pathlib import Path

import pytest

from nanochat.platforms.cpu import kernels
from nanochat.platforms.cpu.training import Training


def made_without(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Training:
    """The functions of training, compiled into a folder with more flags, such as those that leave out instructions."""
    command = kernels.compiler()
    assert command is not None
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "FLAGS", (*kernels.FLAGS, *flags))
        return Training(ctypes.CDLL(str(kernels.compiled(folder, command, kernels.TRAINING))))
