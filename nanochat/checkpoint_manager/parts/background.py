"""Writes checkpoints beside training: a thread copies a rank's state and writes the copy."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from nanochat.checkpoint_manager.parts.model import Files
from nanochat.checkpoint_manager.parts.rank_state import HostMemory, Optimizers, RankState
from nanochat.checkpoint_manager.save import KEEP, Step, write_step
from nanochat.common import log, tr, warn
from nanochat.device import Compute, synchronize
from nanochat.runtime.watch import UNCOUNTED
from nanochat.tokenizer import Tokenizer


class Saver:
    """Writes the checkpoints of a run, one at a time. Every rank has a Saver and calls the same
    methods.

    Forward and backward passes change neither parameters nor optimizer state, so the thread copies
    them while the next step computes. settle() must be called before an update: it waits until the
    copy is complete. The threads of all ranks talk over a group of their own.
    """

    def __init__(
        self,
        compute: Compute,
        keep: int = KEEP,
        files: Files = "auto",
        ended: Callable[[float], None] = lambda cost: None,
    ):
        """`ended` is called by the thread when a save is over, with the seconds it cost training.

        On a host the cost is the whole save, because the host's processors train too. Elsewhere it
        is the time for which training stood still, and at least a thirtieth of the save, so that
        the disk is free for half of the time.
        """
        self.compute = compute
        self.keep = keep
        self.files: Files = files
        self.waited = 0.0  # seconds for which training stood still for the last save
        self.took = 0.0  # seconds from the begin of the last save until it was on disk
        self._ended = ended
        self._memory = HostMemory(compute)
        self._thread = ThreadPoolExecutor(1, "save")
        self._copied = Event()
        self._copied.set()
        self._writing: Future[None] | None = None
        self._group: Any = None

    def save(
        self,
        folder: Path,
        step: int,
        model: nn.Module,
        optimizers: Optimizers,
        tokenizer: Tokenizer,
        meta: dict[str, Any],
    ) -> None:
        """Begin to write step `step` once the save before it is on disk; see save.write_step().

        Where the host has no memory for a copy, training waits until the step is written. OSError
        on every rank if the save before it failed.
        """
        self.wait()
        start = time.monotonic()
        if self._group is None and self.compute.world_size > 1:
            self._group = dist.new_group(backend="gloo", group_desc=UNCOUNTED)
        described = Step.of(folder, step, model, tokenizer, meta, self.keep, self.files)
        state = RankState.of(model, optimizers)
        beside = self._memory.has_room(state)
        if beside:
            # The thread's copies do not wait for updates that the device has yet to compute.
            synchronize(self.compute)
            self._copied.clear()
        else:
            log(
                tr(
                    "training waits while step {step:,} is written, since the host has no memory "
                    "for a copy",
                    step=step,
                )
            )
        self._writing = self._thread.submit(self._write, described, state, beside, start)
        if not beside:
            self.wait()
        self.waited = time.monotonic() - start

    def _write(self, step: Step, state: RankState, beside: bool, start: float) -> None:
        """Copy the state, if training continues beside, and write it. Runs in the thread."""
        try:
            try:
                if beside:
                    state = self._memory.copy(state)
            finally:
                self._copied.set()
            write_step(step, state, self.compute, self._group)
        finally:
            self.took = time.monotonic() - start
            self._ended(self._cost(beside))

    def _cost(self, beside: bool) -> float:
        """Return the seconds that the last save cost training; see __init__()."""
        if not beside or not self.compute.platform.runs_beside_host:
            return self.took
        return max(self.waited, self.took / 30)

    def settle(self) -> None:
        """Wait until parameters and optimizer state may change."""
        if not self._copied.is_set():
            start = time.monotonic()
            self._copied.wait()
            self.waited += time.monotonic() - start

    @property
    def busy(self) -> bool:
        """Whether this rank is writing."""
        return self._writing is not None and not self._writing.done()

    @property
    def failed(self) -> bool:
        """Whether this rank has failed to write; wait() and the next save() raise the error."""
        if self._writing is None or not self._writing.done():
            return False
        return self._writing.exception() is not None

    def wait(self) -> None:
        """Wait until the step is on disk. OSError on every rank if the disk failed one rank."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            start = time.monotonic()
            writing.result()
            self.waited += time.monotonic() - start

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the step that is being written.

        If the run ends with an error of its own, a failed save is only a warning beside it.
        """
        try:
            self.wait()
        except (OSError, RuntimeError) as failure:
            if error is None:
                raise
            warn(tr("the last checkpoint could not be written: {failure}", failure=failure))
        finally:
            self._thread.shutdown()
