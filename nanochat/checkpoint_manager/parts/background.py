"""Writes checkpoints during training: a thread copies a rank's state and writes the copy."""

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
from nanochat.data.library_words import in_words
from nanochat.device import Compute, synchronize
from nanochat.runtime.watch import UNCOUNTED
from nanochat.tokenizer import Tokenizer


class Saver:
    """Writes the checkpoints of a run during training, one at a time.

    Every rank has a Saver and calls the same methods. Forward and backward passes change neither
    parameters nor optimizer state, so a thread copies both during the next step's passes. settle(),
    which waits until the copy is complete, must be called before each update. The threads of all
    ranks communicate over a process group of their own.
    """

    def __init__(
        self,
        compute: Compute,
        keep: int = KEEP,
        files: Files = "auto",
        ended: Callable[[float], None] = lambda cost: None,
    ):
        """Prepare to save.

        After each save, the thread calls `ended` with the cost of the save in seconds: the save's
        whole duration if training waited for all of it, or if the device is the host, whose
        processors both train and save. Otherwise the cost is the time for which training waited,
        but at least 1/30 of the duration: meter.SaveClock waits 30 times the cost, so the disk is
        free for at least half of the time.
        """
        self.compute = compute
        self.keep = keep
        self.files: Files = files
        self.waited = 0.0  # seconds that training waited for the last save
        self.took = 0.0  # seconds from the start of the last save until it was on disk
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
        """Wait until the previous save is on disk, and start to write step `step`.

        If the host has no memory for a copy, this also waits until the step is written. Raises
        OSError on every rank if any rank failed in a save that this waits for.
        """
        self.wait()
        start = time.monotonic()
        if self._group is None and self.compute.world_size > 1:
            self._group = dist.new_group(backend="gloo", group_desc=UNCOUNTED)
        description = Step.of(folder, step, model, tokenizer, meta, self.keep, self.files)
        state = RankState.of(model, optimizers)
        in_background = self._memory.has_room(state)
        if in_background:
            # The thread's copies would not wait for updates that the device has yet to compute.
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
        self._writing = self._thread.submit(self._write, description, state, in_background, start)
        if not in_background:
            self.wait()
        self.waited = time.monotonic() - start

    def _write(self, step: Step, state: RankState, in_background: bool, start: float) -> None:
        """Write a step in the thread, from a copy of `state` if training continues meanwhile."""
        try:
            try:
                if in_background:
                    state = self._memory.copy(state)
            finally:
                self._copied.set()
            write_step(step, state, self.compute, self._group)
        finally:
            self.took = time.monotonic() - start
            self._ended(self._cost(in_background))

    def _cost(self, in_background: bool) -> float:
        """Return how many seconds the last save cost training, as defined in __init__()."""
        if not in_background or not self.compute.platform.runs_beside_host:
            return self.took
        return max(self.waited, self.took / 30)

    def settle(self) -> None:
        """Wait until the state is copied, after which parameters and optimizer state may change."""
        if not self._copied.is_set():
            start = time.monotonic()
            self._copied.wait()
            self.waited += time.monotonic() - start

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing a step."""
        return self._writing is not None and not self._writing.done()

    @property
    def failed(self) -> bool:
        """Whether this rank's last write failed with an error that wait() or save() will raise."""
        if self._writing is None or not self._writing.done():
            return False
        return self._writing.exception() is not None

    def wait(self) -> None:
        """Wait until the step being written, if any, is on disk.

        Raises OSError on every rank if any rank failed to write.
        """
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
        """Wait until the step being written, if any, is on disk, and stop the thread.

        If the run itself ends with an error, a failed save only causes a warning.
        """
        try:
            self.wait()
        except (OSError, RuntimeError) as failure:
            if error is None:
                raise
            warn(
                tr("the last checkpoint could not be written: {failure}", failure=in_words(failure))
            )
        finally:
            self._thread.shutdown()
