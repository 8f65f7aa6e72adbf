"""Runs functions as ranks over gloo, in processes that start once for many tests or for one, as torchrun starts them."""

import contextlib
import io
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from nanochat import device
from tests.support.meeting import join, open_meeting

# Processes are forked from one that has imported torch but not used it, which saves seconds for each. What shards a
# model imports torch's compiler, which takes a second more.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["pytest", "torch._dynamo", "torch.distributed.fsdp", "scripts.base_train", "scripts.chat_rl"]
)
GRACE_SECONDS = 60  # after one rank fails, the others must end within this time


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: with a result, with a traceback, or killed by a signal."""

    result: Any = None
    error: str = ""
    killed_by: int = 0

    @property
    def fine(self) -> bool:
        return not self.error and not self.killed_by


class Pool:
    """A pool of ranks. Ranks that fail, die or hang are replaced: a group that did not form leaves torch's count of
    groups behind, and such a rank would wait for the next group under another name."""

    def __init__(self) -> None:
        self._idle: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **environment: str) -> list[Any]:
        """Call `function(compute, *args)` on every rank and return the results; an exception fails the test."""
        outcomes = self.outcomes(world_size, function, *args, **environment)
        assert all(outcome.fine for outcome in outcomes), "\n".join(
            outcome.error or f"killed by {outcome.killed_by}" for outcome in outcomes if not outcome.fine
        )
        return [outcome.result for outcome in outcomes]

    def outcomes(
        self, world_size: int, function: Callable[..., Any], *args: Any, seconds: float = 300, **environment: str
    ) -> list[Outcome]:
        """Like `run`, but ranks may fail or die. After `seconds`, or some time after the first failure, all are ended,
        and a rank that is still working then fails the test."""
        workers = [self._idle.pop() if self._idle else _start() for _ in range(world_size)]
        found: dict[int, Outcome] = {}
        meeting = open_meeting()
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((rank, world_size, meeting.port, {**os.environ, **environment}, function, args))
        end = time.monotonic() + seconds
        while len(found) < world_size and time.monotonic() < end:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(workers) if rank not in found}
            for pipe in wait(list(waiting), timeout=0.5):
                found[waiting[pipe]] = _heard(*workers[waiting[pipe]])
                if not found[waiting[pipe]].fine:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        for rank, worker in enumerate(workers):
            if rank in found and found[rank].fine:
                self._idle.append(worker)
            else:
                worker[0].kill()
                worker[0].join()
        missing = [rank for rank in range(world_size) if rank not in found]
        failed = "\n".join(outcome.error for outcome in found.values())
        assert not missing, f"rank(s) {missing} did not end\n{failed}"
        return [found[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all processes."""
        for process, _ in self._idle:
            process.kill()
            process.join()
        self._idle = []


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Like `Pool.run`, in processes that end with the call: what `function` changes in them stays nowhere."""
    with contextlib.closing(Pool()) as ranks:
        return ranks.run(world_size, function, *args)


def _start() -> tuple[Any, Connection]:
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that reading fails when the process ends
    return process, ours


def _heard(process: Any, pipe: Connection) -> Outcome:
    try:
        result, error = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        return Outcome(killed_by=-process.exitcode)
    return Outcome(torch.load(io.BytesIO(result), weights_only=False), error)


def _serve(pipe: Connection) -> None:
    """The body of a process, which serves as a rank in one group after another."""
    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, port, environment, function, args = pipe.recv()
        except EOFError:
            return
        os.environ.clear()
        local_rank = rank % int(environment.get("LOCAL_WORLD_SIZE", world_size))
        place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world_size)}
        os.environ.update({"NANOCHAT_DTYPE": "float32", **environment, **place})
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        result, error = None, ""
        try:
            join(port, rank, world_size, seconds=240)
            result = function(device.compute_init("cpu"), *args)
        except BaseException:  # the edge of a process: the test gets the traceback
            error = f"rank {rank}:\n{traceback.format_exc()}"
        device.compute_cleanup()
        kept = io.BytesIO()
        torch.save(result, kept)  # sending tensors themselves would share memory with a process that may end
        pipe.send((kept.getvalue(), error))
