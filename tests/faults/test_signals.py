"""Faults T10, T11 and T12: signals, dead ranks and hung ranks under torchrun, and the loop that starts it again."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager import files as step_files
from nanochat.runtime.tracking import read_metrics
from tests.support.faults import base_stage, corpus, digests
from tests.support.ranks import Pool
from tests.support.small_world import run_stage, stage_folder, words
from tests.support.tiny_model import on_cpu

ROOT = Path(__file__).resolve().parent.parent.parent
LONG = 300  # seconds in which all must have ended by itself, on however busy a machine; gloo itself waits for 2,400

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@dataclass
class Launch:
    """Two ranks of the base stage under torchrun."""

    folder: Path  # where tests/support/launched.py leaves its notes
    process: subprocess.Popen[str]
    saved: Path

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def until(self, there: Callable[[], bool]) -> None:
        """Wait until the run has come so far."""
        end = time.monotonic() + LONG
        while not there() and time.monotonic() < end and self.process.poll() is None:
            time.sleep(0.05)
        assert there(), self.end()

    def training(self) -> bool:
        return len(read_metrics(self.saved)) >= 3

    def end(self) -> str:
        """What it said, when it has ended by itself."""
        said, _ = self.process.communicate(timeout=LONG)
        return said

    def codes(self) -> list[str]:
        """Of each rank that ended by itself."""
        paths = [self.folder / f"code-{rank}" for rank in range(2)]
        return [path.read_text() if path.exists() else "none" for path in paths]


ENDLESS = {"num_iterations": 100_000, "eval_every": 0}
OURS = "nanochat.runtime.launch"


def launch(
    base: Path, fault: str = "", before: list[str] | None = None, launcher: str = "torch.distributed.run", **flags: Any
) -> Launch:
    """Start it; `fault` as in tests/support/launched.py."""
    corpus(base)
    folder = base / "notes"
    folder.mkdir()
    environment = {**os.environ, "FAULT": fault, "NANOCHAT_DTYPE": "float32", "NANOCHAT_DEVICE": "cpu",
                   "OMP_NUM_THREADS": "1", "SUPERVISE_PAUSE": "0"}  # fmt: skip
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    launched = [sys.executable, "-m", launcher, "--standalone", "--nproc_per_node=2", "tests/support/launched.py"]
    command = [*(before or []), *launched, str(folder), "scripts.base_train", *words("base", **{**ENDLESS, **flags})]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True)  # fmt: skip
    return Launch(folder, process, stage_folder(base, "base"))


def one_whole_step(run: Launch) -> int:
    """The only step there is, which the figures agree with."""
    (step,) = step_files.steps(run.saved)
    assert step_files.verify(run.saved / f"step_{step:06d}") == ""
    assert step_files.read_meta(run.saved, step)["world_size"] == 2
    return step


def test_sigterm_saves_on_every_rank(base_folder: Path) -> None:
    """T10. Injects: SIGTERM to the launcher of two ranks in the middle of training. Must follow: both ranks save their
    current step and exit with code 0; no step that was logged is lost.

    注入：训练途中向两个进程的启动器发送 SIGTERM。必须：两个进程都保存当前这一步并以 0 退出；已记录的步一步也不丢。
    """
    run = launch(base_folder)
    run.until(run.training)
    os.kill(run.process.pid, signal.SIGTERM)
    said = run.end()
    assert run.codes() == ["0", "0"], said
    assert f"saved step {one_whole_step(run)} and stopping" in said
    assert read_metrics(run.saved)[-1]["step"] == one_whole_step(run)


def test_sigterm_in_an_evaluation_saves_on_every_rank(base_folder: Path) -> None:
    """T10. Injects: SIGTERM to one rank of two in the middle of an evaluation that never ends. Must follow: both ranks
    leave the evaluation, save the step before it and exit with code 0; the next start runs the evaluation.

    注入：在一次不会结束的评测途中，向两个进程之一发送 SIGTERM。必须：两个进程都离开评测，保存评测之前的那一步，
    并以 0 退出；下次启动补做评测。
    """
    run = launch(base_folder, "evaluate 0 0", num_iterations=8, eval_every=4)
    run.until(lambda: all((run.folder / f"evaluating-{rank}").exists() for rank in range(2)))
    os.kill(run.pid(1), signal.SIGTERM)
    said = run.end()
    assert run.codes() == ["0", "0"] and run.process.returncode == 0, said
    assert one_whole_step(run) == 4
    assert [line["step"] for line in read_metrics(run.saved)] == [1, 2, 3]
    run_stage("base", on_cpu(), num_iterations=8, eval_every=4)
    lines = read_metrics(run.saved)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["step"] for line in lines if "val_bpb" in line] == [4, 8]


def test_a_dead_rank_ends_the_others_by_name(base_folder: Path) -> None:
    """T11. Injects: kill -9 of one rank of two. Must follow: the other rank and the launcher exit by themselves, and
    name the dead rank and the step; the newest save is complete.

    注入：kill -9 两个进程之一。必须：另一个进程和启动器自行结束，并指出死掉的进程和所在的步；最新的保存完整。
    """
    run = launch(base_folder, "kill 0 7", save_every=5)
    said = run.end()
    assert run.process.returncode not in (0, None)
    assert "error: rank 0 is gone in step 7, last heard of at " in said, said
    assert one_whole_step(run) == 5


def test_a_hung_rank_ends_the_others_by_name(base_folder: Path) -> None:
    """T12. Injects: one rank of two waits forever in step 7. Must follow: within --hang_seconds both ranks and the
    launcher exit by themselves, and name the hung rank, the step and the line; the newest save is complete.

    注入：两个进程之一在第 7 步永远等待。必须：在 --hang_seconds 之内，两个进程和启动器自行结束，
    并指出卡住的进程、所在的步和代码行；最新的保存完整。
    """
    run = launch(base_folder, "hang 1 7", save_every=5, hang_seconds=10, launcher=OURS)
    said = run.end()
    assert run.process.returncode not in (0, None)
    assert said.splitlines()[-1].startswith("error: rank 1 hangs in step 7, at launched.py:"), said
    assert one_whole_step(run) == 5


def test_a_run_that_lost_a_rank_is_started_again(base_folder: Path, tmp_path: Path, pool: Pool) -> None:
    """T11. Injects: kill -9 of one rank of two under runs/supervise.sh, which saves every 5 of 20 steps. Must follow:
    the script names the dead rank, the step and the signal, and restarts the run with a fresh rendezvous; the result is
    the same as without the fault, bit for bit.

    注入：在 runs/supervise.sh 之下 kill -9 两个进程之一，20 步中每 5 步保存一次。必须：它指出死掉的进程、所在的步和信号，
    并以新的会合点重新启动；最终结果与没有故障的训练逐位相同。
    """
    supervised = ["bash", "runs/supervise.sh"]
    run = launch(base_folder, "kill 1 13", supervised, launcher=OURS, num_iterations=20, save_every=5)
    said = run.end()
    assert run.process.returncode == 0, said
    named = r"^error: rank 1 is gone in step 13, last heard of at .*Rank 1 was killed \(SIGKILL\)"
    assert re.search(named, said, re.M), said
    assert "supervise: start 1 ended with code 1" in said and "resuming from step 10 of" in said, said
    other = corpus(tmp_path / "straight")
    pool.run(2, base_stage, {"eval_every": 0}, NANOCHAT_BASE_DIR=str(other))
    assert digests(base_folder) == digests(other)
