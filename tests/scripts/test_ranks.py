"""A few steps of every stage by one process, which others compare with, and steps that ranks cannot share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nanochat.common import UserError
from nanochat.runtime import fingerprint
from tests.support.small_world import run_stage, small_chain, up_to
from tests.support.tiny_model import on_cpu

STEPS = 6


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base folder with a few steps of every stage by one process."""
    with small_chain(tmp_path_factory.mktemp("alone"), num_iterations=STEPS, eval_every=STEPS) as base:
        yield base


@pytest.mark.parametrize(("stage", "flag"), [("sft", "target_examples_per_step"), ("rl", "examples_per_step")])
def test_a_step_that_ranks_cannot_share_is_refused(
    stage: str, flag: str, alone: Path, base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up_to(stage, alone, base_folder)
    monkeypatch.setattr(fingerprint, "check_start", lambda *_: None)
    monkeypatch.setattr("nanochat.run.finished", lambda *_: False)
    monkeypatch.setattr("nanochat.run.begun_sizes", lambda *_: (None, None))
    with pytest.raises(UserError, match=f"^{flag} must be a multiple of the 3 ranks, got 8") as refused:
        run_stage(stage, on_cpu(0, 3), **{flag: 8})
    assert refused.value.exit_code == 2
