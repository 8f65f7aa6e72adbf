"""Ranks watch each other: if one dies or hangs, all end soon, and the error names its number and its step."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed.distributed_c10d as c10d

from nanochat.common import UserError, log, note_end, tr
from nanochat.device import Compute, with_compute
from nanochat.runtime import signals

if TYPE_CHECKING:
    from types import FrameType

BEAT_SECONDS = 1.0  # between signs of life
GONE_SECONDS = 30.0  # silence after which a rank counts as dead; a launcher waits as long for the others to end
CONFIRM_SECONDS = 5.0  # the same, after a collective has failed
UNCOUNTED = "saves"  # description of a group whose collectives belong to another thread; calls() leaves them out
HERE = Path(__file__).resolve().parent.parent.parent


class Watch:
    """A thread of each rank that writes where the rank is to the launcher's store, and reads where the others are.

    A rank moves when it calls pulse.beat(): at each step, pass of a measurement and tensor of a save. If a rank has not
    moved for `seconds`, the ranks compare how many collectives each has begun. Ranks that wait in a collective have
    begun it, so the rank that hangs has begun the fewest.
    """

    def __init__(self, compute: Compute, seconds: float):
        self.compute, self.seconds = compute, seconds
        self.store = c10d.PrefixStore("watch", c10d._get_default_store())
        self._beats, self._over = 0, threading.Event()
        self._main, self._parent = threading.main_thread().ident, os.getppid()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    # --- what this rank says -------------------------------------------------------------------------

    def _beat(self) -> None:
        self._beats += 1
        said = {
            "beats": self._beats,
            "calls": calls(),
            "step": self.compute.pulse.step,
            "place": self._place(),
        }
        self.store.set(str(self.compute.rank), json.dumps(said))

    def _place(self) -> str:
        """The innermost line of this project's code that the main thread is running."""
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        innermost = frame
        while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(HERE):
            frame = frame.f_back
        frame = frame or innermost
        if frame is None:
            return "unknown"
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"

    # --- what it sees of the others --------------------------------------------------------------------

    def said(self) -> dict[int, dict[str, Any]]:
        """The last message of each rank."""
        ranks = [
            str(rank) for rank in range(self.compute.world_size) if self.store.check([str(rank)])
        ]
        return {int(rank): json.loads(self.store.get(rank)) for rank in ranks}

    def _run(self) -> None:
        try:
            self._look()
        except (RuntimeError, ValueError) as failure:  # the store went with the launcher
            if not self._over.wait(BEAT_SECONDS) and os.getppid() == self._parent:
                print(
                    f"warning: rank {self.compute.rank} watches no longer: {failure}",
                    file=sys.stderr,
                    flush=True,
                )
        if (
            not self._over.is_set() and os.getppid() != self._parent
        ):  # nobody would end these ranks, or start them again
            self.compute.pulse.ask("the launcher's end")

    def _look(self) -> None:
        neighbour = (self.compute.rank + 1) % self.compute.world_size
        heard, beats = time.monotonic(), -1  # of the neighbour
        moved, moments = time.monotonic(), 0  # of this rank
        while not self._over.wait(min(BEAT_SECONDS, self.seconds / 5)):
            now = time.monotonic()
            if os.getppid() != self._parent:
                return
            self._beat()
            if self.store.check(["verdict"]):
                self._end(self.store.get("verdict").decode())
            if self.compute.pulse.moments != moments:
                moved, moments = now, self.compute.pulse.moments
            said = (
                json.loads(self.store.get(str(neighbour)))
                if self.store.check([str(neighbour)])
                else {}
            )
            if said.get("beats", -1) != beats or not moments:
                heard, beats = now, said.get("beats", -1)
            if now - heard > max(GONE_SECONDS, 2 * BEAT_SECONDS) and not said.get("over"):
                self._judge(
                    f"rank {neighbour} is gone in step {self.compute.pulse.step + 1}: nothing was heard of it "
                    f"for {now - heard:.0f} s, last at {said.get('place', 'its start')}"
                )
            if moments and now - moved > self.seconds:
                self._judge(hanging(self.said(), now - moved))

    def _judge(self, words: str) -> None:
        """End every rank, with the words of the rank that judged first."""
        self._end(self.store.compare_set("verdict", "", words).decode())

    def _end(self, words: str) -> None:
        if not self._over.is_set():
            words = f"error: {words}. All ranks end; the same command, without --resume, resumes from the newest save."
            note_end(words)
            print(f"{words} (rank {self.compute.rank})", file=sys.stderr, flush=True)
            os._exit(1)  # the main thread waits in a collective that will never end

    def gone(self) -> str:
        """After a collective has failed: which ranks are dead, in words; "" if all ranks are alive."""
        before, deadline = self.said(), time.monotonic() + CONFIRM_SECONDS
        silent = {
            rank for rank in before if rank != self.compute.rank and not before[rank].get("over")
        }
        while silent and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 4)
            now = self.said()
            silent = {rank for rank in silent if now[rank] == before[rank]}
        step = (
            self.compute.pulse.step + 1
        )  # a rank's own message may be a second old, but all ranks are in the same step
        return "; ".join(
            f"rank {rank} is gone in step {step}, last heard of at {before[rank]['place']}"
            for rank in sorted(silent)
        )


def calls() -> int:
    """How many collectives the main thread of this rank has begun, summed over all groups that count them."""
    begun = 0
    for group in [group for group in list(c10d._world.pg_map) if group.group_desc != UNCOUNTED]:
        # A group with one backend for the CPU and another for the device has no count of its own. One backend may
        # serve several kinds of devices, and is then counted once.
        backends: dict[int, Any] = {}
        for kind in group._device_types:  # pyright: ignore[reportAttributeAccessIssue]
            with suppress(RuntimeError):  # not all kinds have a backend
                backend = group._get_backend(kind)
                backends[id(backend)] = backend
        for backend in backends.values():
            with suppress(RuntimeError):  # not all backends count
                begun += backend._get_sequence_number_for_group()
    return begun


def hanging(said: Mapping[int, Mapping[str, Any]], seconds: float) -> str:
    """Which ranks hang, according to the last message of each; all ranks if they wait in the same place."""
    said = {rank: one for rank, one in said.items() if not one.get("over")}
    fewest = min(one["calls"] for one in said.values())
    behind = [rank for rank, one in said.items() if one["calls"] == fewest]
    if len(behind) == len(said):
        return f"all ranks hang in one place: no step for {seconds:.0f} s, rank 0 {_where(said[min(said)])}"
    words = "; ".join(f"rank {rank} hangs {_where(said[rank])}" for rank in behind)
    return f"{words}: the others have waited for {seconds:.0f} s"


def _where(said: Mapping[str, Any]) -> str:
    return f"in step {said['step'] + 1}, at {said['place']}"


@contextmanager
def over(compute: Compute, seconds: float) -> Iterator[None]:
    """Watch the ranks inside this block; with 0 seconds, or one rank, do nothing.

    If a collective fails because a rank is gone, a UserError that names the rank replaces the collective's error.
    """
    if compute.world_size == 1 or seconds <= 0:
        yield
        return
    watch = Watch(compute, seconds)
    watch.start()
    try:
        yield
    except RuntimeError as failure:
        words = watch.gone()
        if not words:
            raise
        first = str(failure).splitlines()[0].partition(". ")[0]
        raise UserError(
            tr(
                "{words}. The same command, without --resume, resumes from the newest checkpoint. (A collective failed "
                "with: {first})",
                words=words,
                first=first,
            )
        ) from failure
    finally:
        watch.close()
        with suppress(RuntimeError, ValueError):
            watch.store.set(str(compute.rank), json.dumps({"over": True}))


def guarded(work: Callable[[Any, Compute], Any]) -> Callable[[Any], None]:
    """A main function for a training script: signals save and stop the run, and ranks watch each other."""

    def guard(cfg: Any, compute: Compute) -> None:
        with signals.caught(compute.pulse), over(compute, cfg.hang_seconds):
            try:
                work(cfg, compute)
            except signals.Stopped:
                log("stopped by a signal before the first step; type the same command to start")

    return with_compute(guard)
