"""The training stages on two ranks: the losses of one, and the command that the README shows."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.runtime import fingerprint
from nanochat.runtime.tracking import read_metrics
from tests.support.ranks import run_ranks
from tests.support.small_world import make_corpus, run_stage, small_chain, stage_folder, up_to
from tests.support.tiny_model import on_cpu

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 6

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base folder with a few steps of every stage by one process."""
    with small_chain(tmp_path_factory.mktemp("alone"), num_iterations=STEPS, eval_every=STEPS) as base:
        yield base


def a_part(compute: Compute, mode: str, stop: int) -> None:
    run_stage("base", compute, num_iterations=STEPS, eval_every=STEPS, shard=mode, stop_at=stop)


def test_a_run_goes_on_with_other_ranks_and_another_sharding(alone: Path, base_folder: Path) -> None:
    up_to("base", alone, base_folder)
    run_ranks(2, a_part, "none", 2)
    run_ranks(4, a_part, "full", 4)
    a_part(on_cpu(), "grad", STEPS)
    one, mixed = (read_metrics(stage_folder(base, "base")) for base in (alone, base_folder))
    assert [line["step"] for line in mixed] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in mixed] == pytest.approx([line["loss"] for line in one], abs=1e-4)


@pytest.mark.slow
def test_torchrun_gives_the_losses_of_one_process(base_folder: Path) -> None:
    make_corpus(base_folder)
    flags = "--depth=2 --num_iterations=20 --total_batch_size=4096 --max_seq_len=256 --device_batch_size=4".split()
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "NANOCHAT_DTYPE": "float32", "OMP_NUM_THREADS": "1"}
    losses = []
    for start, tag in ((program, "two"), ([sys.executable], "one")):
        words = [*start, "-m", "scripts.base_train", "--", *flags, f"--model_tag={tag}", "--no_compile"]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = read_metrics(base_folder / "base_checkpoints" / tag)
        losses.append([line["loss"] for line in lines])
    assert len(losses[0]) == 20 and losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize(("stage", "flag"), [("sft", "target_examples_per_step"), ("rl", "examples_per_step")])
def test_a_step_that_ranks_cannot_share_is_refused(stage: str, flag: str, alone: Path, base_folder: Path) -> None:
    up_to(stage, alone, base_folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "check_start", lambda *_: None)
        patch.setattr("nanochat.run.finished", lambda *_: False)
        patch.setattr("nanochat.run.rows_per_step", lambda *_: None)
        with pytest.raises(UserError, match=f"^{flag} must be a multiple of the 3 ranks, got 8") as refused:
            run_stage(stage, on_cpu(0, 3), **{flag: 8})
    assert refused.value.exit_code == 2
