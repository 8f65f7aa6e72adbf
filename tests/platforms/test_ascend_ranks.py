"""Every --shard mode on two emulated NPUs over hccl, against one process on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.runtime.tracking import read_metrics
from tests.emulated_npu.worker import skip_without_compiler
from tests.support.small_world import make_corpus

ROOT = Path(__file__).resolve().parent.parent.parent
FLAGS = """
    --depth=2 --model_dim=64 --head_dim=32 --window_pattern=L --max_seq_len=128 --total_batch_size=2048
    --num_iterations=3 --eval_every=0 --save_seconds=0 --no_compile
""".split()

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.npu]


def losses(base: Path, tag: str, *start: str) -> tuple[list[float], str]:
    """Train three steps with a command; returns what the command printed."""
    own = "--device_type=cpu" if tag == "cpu" else f"--shard={tag}"
    words = [*start, "-m", "scripts.base_train", "--", *FLAGS, f"--model_tag={tag}", own]
    environment = {**os.environ, "NANOCHAT_DTYPE": "float32", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line["loss"] for line in read_metrics(base / "base_checkpoints" / tag)], done.stdout


def test_every_mode_on_two_cards_has_the_losses_of_one_cpu(base_folder: Path) -> None:
    """The size of a pass is probed on both cards."""
    skip_without_compiler()
    make_corpus(base_folder)
    alone, _ = losses(base_folder, "cpu", sys.executable)
    npu = [sys.executable, "-m", "tests.emulated_npu", "--devices", "2", "--", sys.executable]
    for mode in ("none", "grad", "full"):
        found, said = losses(
            base_folder, mode, *npu, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"
        )
        assert "2 ranks over hccl" in said and "device_batch_size: 8 rows a pass, 1 pass(es)" in said
        assert found == pytest.approx(alone, abs=5e-4), mode
