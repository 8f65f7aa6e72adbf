"""What the fault tests share: a corpus, and a stage of twenty small steps on any number of pooled ranks."""

import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nanochat.device import Compute
from tests.support.small_world import make_corpus, run_stage, shrink, tensors

STEPS = 20


def stage(compute: Compute, name: str = "base", **changes: Any) -> None:
    """Train a stage on this rank, in the base folder that the environment names."""
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        run_stage(name, compute, **{"eval_every": 10, **changes})


def base_stage(compute: Compute, changes: dict[str, Any]) -> None:
    """Train the base stage; a pool can call this."""
    stage(compute, **changes)


def digests(base: Path) -> dict[str, str]:
    """SHA-256 of the tensor files in the last checkpoint of the base stage."""
    return tensors(base, "base", STEPS)


@functools.lru_cache(maxsize=1)
def _made() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    make_corpus(Path(folder.name))
    return folder


def corpus(base: Path) -> Path:
    """Make a base folder with a corpus and its tokenizer, and point the environment to it."""
    shutil.copytree(_made().name, base, dirs_exist_ok=True)
    os.environ["NANOCHAT_BASE_DIR"] = str(base)
    return base
