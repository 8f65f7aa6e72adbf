"""Processes that are started once and then serve many tests as ranks that talk over gloo."""

import io
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from nanochat import device
from tests.support.ranks import PROCESSES

PROCESSES.set_forkserver_preload(["torch.distributed.fsdp", "scripts.base_train", "scripts.chat_rl"])
GRACE_SECONDS = 60  # in which the other ranks must end after one has failed


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: its result, or its traceback, or the signal that killed it."""

    result: Any = None
    error: str = ""
    killed_by: int = 0

    @property
    def fine(self) -> bool:
        return not self.error and not self.killed_by


class Pool:
    """Ranks on call; those that failed or died are replaced."""

    def __init__(self) -> None:
        self._idle: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **environment: str) -> list[Any]:
        """Call `function(compute, *args)` on every rank and return the results; what a rank raises fails the test."""
        outcomes = self.outcomes(world_size, function, *args, **environment)
        assert all(outcome.fine for outcome in outcomes), "\n".join(
            outcome.error or f"killed by {outcome.killed_by}" for outcome in outcomes if not outcome.fine
        )
        return [outcome.result for outcome in outcomes]

    def outcomes(
        self, world_size: int, function: Callable[..., Any], *args: Any, seconds: float = 300, **environment: str
    ) -> list[Outcome]:
        """The same, but ranks may fail or die. After `seconds`, or a while after the first failure, all are ended:
        a rank that is then still at work fails the test."""
        workers = [self._idle.pop() if self._idle else _start() for _ in range(world_size)]
        found: dict[int, Outcome] = {}
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(workers):
                pipe.send((rank, world_size, folder, {**os.environ, **environment}, function, args))
            end = time.monotonic() + seconds
            while len(found) < world_size and time.monotonic() < end:
                waiting = {pipe: rank for rank, (_, pipe) in enumerate(workers) if rank not in found}
                for pipe in wait(list(waiting), timeout=0.5):
                    found[waiting[pipe]] = _heard(*workers[waiting[pipe]])
                    if not found[waiting[pipe]].fine:
                        end = min(end, time.monotonic() + GRACE_SECONDS)
        for rank, worker in enumerate(workers):
            if rank in found and not found[rank].killed_by:
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


def _start() -> tuple[Any, Connection]:
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that reading ends with the process
    return process, ours


def _heard(process: Any, pipe: Connection) -> Outcome:
    try:
        result, error = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        return Outcome(killed_by=-process.exitcode)
    return Outcome(torch.load(io.BytesIO(result), weights_only=False), error)


def _serve(pipe: Connection) -> None:
    """One process: a rank in one group after another."""
    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, folder, environment, function, args = pipe.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update({"NANOCHAT_DTYPE": "float32", **environment, "RANK": str(rank), "LOCAL_RANK": str(rank),
                           "WORLD_SIZE": str(world_size)})  # fmt: skip
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        result, error = None, ""
        try:
            # A file in place of a port, which another test could take meanwhile.
            dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size,
                                    timeout=timedelta(seconds=240))  # fmt: skip
            result = function(device.compute_init("cpu"), *args)
        except BaseException:  # the edge of a process: the traceback is handed to the test
            error = f"rank {rank}:\n{traceback.format_exc()}"
        device.compute_cleanup()
        kept = io.BytesIO()
        torch.save(result, kept)  # a pipe would share the memory of tensors with a process that may be gone
        pipe.send((kept.getvalue(), error))
