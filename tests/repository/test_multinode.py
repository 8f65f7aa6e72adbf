"""Two launchers on this host, as on two hosts: they train what one process trains."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.data.command_line import parse
from nanochat.runtime.tracking import read_metrics
from scripts import base_train
from tests.support.small_world import make_corpus
from tests.support.tiny_model import on_cpu

ROOT = Path(__file__).resolve().parent.parent.parent
FLAGS = "--depth=2 --num_iterations=6 --total_batch_size=4096 --max_seq_len=256 --no_compile --save_seconds=0".split()

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(*flags: str) -> list[subprocess.CompletedProcess[str]]:
    """Run the README's command with two ranks on each of two hosts, and return the launchers' output."""
    meeting = f"--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:{free_port()} --rdzv_id=test"
    words = [sys.executable, "-m", "torch.distributed.run", *meeting.split(), "--nproc_per_node=2",
             "-m", "scripts.base_train", "--", *FLAGS, *flags]  # fmt: skip
    environment = {**os.environ, "NANOCHAT_DTYPE": "float32", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            words, cwd=ROOT, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    ended = []
    try:
        for process in started:
            said, complained = process.communicate(timeout=300)
            ended.append(subprocess.CompletedProcess(words, process.returncode, said, complained))
    finally:
        for process in started:
            process.kill()
    return ended


def test_two_launchers_train_what_one_process_trains(base_folder: Path) -> None:
    make_corpus(base_folder)
    ended = launch("--model_tag=two")
    assert [done.returncode for done in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    together = "".join(done.stdout for done in ended)
    assert "parameters: --shard=grad, 2 replica(s) of 2 shard(s)" in together
    assert together.count("step 00006/00006") == 1  # only rank 0 prints, for both hosts
    base_train.train(parse(base_train.Config, [*FLAGS, "--model_tag=one"]), on_cpu())
    two, one = (read_metrics(base_folder / "base_checkpoints" / tag) for tag in ("two", "one"))
    assert [line["step"] for line in two] == [line["step"] for line in one] == list(range(1, 7))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], abs=1e-4)
