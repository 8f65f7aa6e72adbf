"""Runs functions in several processes over gloo, with the environment that torchrun gives."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanochat import device
from tests.support.meeting import join, open_meeting

# Processes are forked from one that has imported torch but not used it, which saves seconds for each.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch.distributed.fsdp", "nanochat.checkpoint_manager.resume", "nanochat.run"])


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 180) -> list[Any]:
    """Call `function(compute, *args)` on every rank, in fp32 unless NANOCHAT_DTYPE is set; return the results by rank.

    `function` must be defined at the top level of a module. An exception on any rank fails the test with its traceback.
    """
    environment = {"NANOCHAT_DTYPE": "float32", **os.environ, "WORLD_SIZE": str(world_size)}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        meeting = open_meeting()
        processes = [
            PROCESSES.Process(target=_rank, args=(rank, meeting.port, folder, environment, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        _wait(processes, timeout)
        errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
        codes = [process.exitcode for process in processes]
        assert not any(codes), "\n".join([f"exit codes {codes}", *errors])
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _wait(processes: list[Any], timeout: float) -> None:
    """Wait until all processes have ended. At the time limit, or 5 seconds after one fails, the others are killed."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        running = next((process for process in processes if process.is_alive()), None)
        if running is None:
            break
        running.join(0.2)
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + 5)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _rank(
    rank: int, port: int, folder: Path, environment: dict[str, str], function: Callable[..., Any], args: Any
) -> None:
    os.environ.clear()
    local_rank = rank % int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]))
    os.environ.update({**environment, "RANK": str(rank), "LOCAL_RANK": str(local_rank)})
    torch.set_num_threads(1)
    try:
        join(port, rank, int(environment["WORLD_SIZE"]))
        result = function(device.compute_init("cpu"), *args)
        torch.save(result, folder / f"{rank}.pt")
        device.compute_cleanup()
    except BaseException:  # the edge of a process: the test gets the traceback
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
