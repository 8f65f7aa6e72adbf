"""Lets ranks watch each other: if one dies or hangs, all ranks end soon and an error names it."""

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

from nanochat.common import UserError, log, tr
from nanochat.data.command_line import note_end, with_rank
from nanochat.data.library_words import in_words
from nanochat.device import Compute, with_compute
from nanochat.runtime import signals

if TYPE_CHECKING:
    from types import FrameType

BEAT_SECONDS = 1.0  # between signs of life
# Silence after which a rank counts as dead; a launcher waits as long for the other ranks to end.
GONE_SECONDS = 30.0
CONFIRM_SECONDS = 5.0  # the same silence, after a collective has failed
# The description of the group for saves, which run in another thread; calls() does not count it.
UNCOUNTED = "saves"
PROJECT = Path(__file__).resolve().parent.parent.parent

# A rank's sign of life in the store: {"beats", "calls", "step", "place"}, or {"over": True}.
Beat = Mapping[str, Any]


class Watch:
    """A thread on each rank that reports the rank's progress, and checks that of other ranks.

    Ranks report their progress in the launcher's store. A rank makes progress when it calls
    pulse.beat(), for example in each step. A rank that has made progress before, but none for
    `seconds`, compares how many collectives each rank has begun. Ranks that wait in a collective
    have begun it, so the rank that hangs has begun the fewest.
    """

    def __init__(self, compute: Compute, seconds: float):
        self.compute = compute
        self.seconds = seconds
        self.store = c10d.PrefixStore("watch", c10d._get_default_store())
        self._beats = 0
        self._over = threading.Event()
        self._main_thread = threading.main_thread().ident
        self._parent = os.getppid()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait until it has ended."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    # --- what this rank writes -------------------------------------------------------------------

    def _beat(self) -> None:
        """Write this rank's progress to the store, as a sign of life."""
        self._beats += 1
        beat = {
            "beats": self._beats,
            "calls": calls(),
            "step": self.compute.pulse.step,
            "place": self._place(),
        }
        self.store.set(str(self.compute.rank), json.dumps(beat))

    def _place(self) -> str:
        """Return the main thread's position as "file:line function", or "unknown".

        This is the innermost frame in this project, if there is one.
        """
        innermost: FrameType | None = sys._current_frames().get(self._main_thread or 0)
        frame = innermost
        while frame is not None and not _is_ours(frame):
            frame = frame.f_back
        frame = frame or innermost
        if frame is None:
            return "unknown"
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"

    # --- what it reads from other ranks ----------------------------------------------------------

    def _last_beat(self, rank: int) -> Beat:
        """Return the last beat that a rank has written to the store, or {} if there is none."""
        key = str(rank)
        if not self.store.check([key]):
            return {}
        return json.loads(self.store.get(key))

    def last_beats(self) -> dict[int, Beat]:
        """Return a dict of each rank's last beat, without ranks that have written none."""
        beats = {rank: self._last_beat(rank) for rank in range(self.compute.world_size)}
        return {rank: beat for rank, beat in beats.items() if beat}

    def _launcher_is_gone(self) -> bool:
        return os.getppid() != self._parent

    def _run(self) -> None:
        """Watch until close() is called, the launcher ends or its store fails.

        If the launcher has ended, ask this rank to save and stop.
        """
        try:
            self._watch_ranks()
        except (RuntimeError, ValueError) as failure:  # the store ends with the launcher
            if not self._over.wait(BEAT_SECONDS) and not self._launcher_is_gone():
                print(
                    tr(
                        "warning: rank {rank} watches no longer: {failure}",
                        rank=self.compute.rank,
                        failure=in_words(failure),
                    ),
                    file=sys.stderr,
                    flush=True,
                )
        # Without a launcher, nobody would end these ranks or start them again.
        if not self._over.is_set() and self._launcher_is_gone():
            self.compute.pulse.ask(tr("the launcher's end"))

    def _watch_ranks(self) -> None:
        """Write beats, and check the next rank and this one, until close() or the launcher's end.

        If the next rank is silent or this rank makes no progress for too long, end all ranks. If
        another rank has ended all ranks, end this one.
        """
        pulse = self.compute.pulse
        neighbour = (self.compute.rank + 1) % self.compute.world_size
        heard_at = time.monotonic()  # when the neighbour's last beat was read
        heard_beats = -1
        moved_at = time.monotonic()  # when this rank moved last
        moments = 0  # how often this rank had moved when that was last checked
        while not self._over.wait(min(BEAT_SECONDS, self.seconds / 5)):
            now = time.monotonic()
            if self._launcher_is_gone():
                return
            self._beat()
            if self.store.check(["verdict"]):
                self._end(self.store.get("verdict").decode())
            if pulse.moments != moments:
                moved_at = now
                moments = pulse.moments
            beat = self._last_beat(neighbour)
            beats = beat.get("beats", -1)
            if beats != heard_beats or not moments:
                heard_at = now
                heard_beats = beats
            silence = now - heard_at
            if silence > max(GONE_SECONDS, 2 * BEAT_SECONDS) and not beat.get("over"):
                self._end_all(
                    tr(
                        "rank {rank} is gone in step {step}: nothing was heard of it for "
                        "{silence:.0f} s, last at {place}",
                        rank=neighbour,
                        step=pulse.step + 1,
                        silence=silence,
                        place=beat.get("place", tr("its start")),
                    )
                )
            if moments and now - moved_at > self.seconds:
                self._end_all(hanging(self.last_beats(), now - moved_at))

    def _end_all(self, words: str) -> None:
        """End this rank and, through the store, all others, with an error message.

        If several ranks call this, all show the message of the first.
        """
        self._end(self.store.compare_set("verdict", "", words).decode())

    def _end(self, words: str) -> None:
        """Print why all ranks end, and end this process; after close(), do nothing."""
        if not self._over.is_set():
            words = tr(
                "error: {words}. All ranks end; the same command, without --resume, resumes from "
                "the newest save.",
                words=words,
            )
            if not note_end(words):
                print(with_rank(words, self.compute.rank), file=sys.stderr, flush=True)
            os._exit(1)  # the main thread waits in a collective that will never end

    def gone(self) -> str:
        """Return a message that names the ranks that have died, or "" if there are none.

        Call this after a collective has failed. Ranks that have not finished and write no beat
        within the next few seconds (CONFIRM_SECONDS) count as dead.
        """
        before = self.last_beats()
        deadline = time.monotonic() + CONFIRM_SECONDS
        silent = {
            rank
            for rank, beat in before.items()
            if rank != self.compute.rank and not beat.get("over")
        }
        while silent and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 4)
            now = self.last_beats()
            silent = {rank for rank in silent if now[rank] == before[rank]}
        # A rank's own beat may be a second old, but all ranks are in the same step.
        step = self.compute.pulse.step + 1
        return "; ".join(
            tr(
                "rank {rank} is gone in step {step}, last heard of at {place}",
                rank=rank,
                step=step,
                place=before[rank]["place"],
            )
            for rank in sorted(silent)
        )


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame is executing this project's code."""
    return Path(frame.f_code.co_filename).is_relative_to(PROJECT)


def calls() -> int:
    """Return how many collectives this rank has begun, summed over groups.

    The group for saves, which run in another thread, is not counted, and neither are backends that
    do not count their collectives.
    """
    begun = 0
    for group in list(c10d._world.pg_map):
        if group.group_desc == UNCOUNTED:
            continue
        # A group with one backend for the CPU and another for the device has no count of its own.
        # A backend that serves several kinds of devices is counted once.
        backends: dict[int, Any] = {}
        for kind in group._device_types:  # pyright: ignore[reportAttributeAccessIssue]
            with suppress(RuntimeError):  # not all kinds have a backend
                backend = group._get_backend(kind)
                backends[id(backend)] = backend
        for backend in backends.values():
            with suppress(RuntimeError):  # not all backends count
                begun += backend._get_sequence_number_for_group()
    return begun


def hanging(beats: Mapping[int, Beat], seconds: float) -> str:
    """Return a message that names the ranks that hang, given the last beat of each rank.

    Of the ranks that have not finished, these have begun the fewest collectives. If all have begun
    the same number, the message says that they all hang in one place.
    """
    running = {rank: beat for rank, beat in beats.items() if not beat.get("over")}
    fewest_calls = min(beat["calls"] for beat in running.values())
    behind = [rank for rank, beat in running.items() if beat["calls"] == fewest_calls]
    if len(behind) == len(running):
        first_rank = min(running)
        beat = running[first_rank]
        return tr(
            "all ranks hang in one place: no step for {seconds:.0f} s, rank {rank} in step {step}, "
            "at {place}",
            seconds=seconds,
            rank=first_rank,
            step=beat["step"] + 1,
            place=beat["place"],
        )
    phrases = [
        tr(
            "rank {rank} hangs in step {step}, at {place}",
            rank=rank,
            step=running[rank]["step"] + 1,
            place=running[rank]["place"],
        )
        for rank in behind
    ]
    words = "; ".join(phrases)
    return tr("{words}: the others have waited for {seconds:.0f} s", words=words, seconds=seconds)


@contextmanager
def over(compute: Compute, seconds: float) -> Iterator[None]:
    """Let the ranks watch each other inside this block; with 0 seconds or one rank, do nothing.

    If a rank stops making progress for `seconds`, all ranks end with an error that names the one
    that hangs. If the block raises RuntimeError, as a failed collective does, and other ranks or
    the launcher of the first host have ended, raise a UserError that names them instead.
    """
    if compute.world_size == 1 or seconds <= 0:
        yield
        return
    watch = Watch(compute, seconds)
    watch.start()
    try:
        yield
    except RuntimeError as failure:
        try:
            words = watch.gone()
        except (RuntimeError, ValueError):  # the store ends with the launcher that holds it
            words = tr("the launcher of the first host is gone")
        if not words:
            raise
        first_sentence = str(failure).splitlines()[0].partition(". ")[0]
        raise UserError(
            tr(
                "{words}. The same command, without --resume, resumes from the newest checkpoint. "
                "(A collective failed with: {first})",
                words=words,
                first=first_sentence,
            )
        ) from failure
    finally:
        watch.close()
        with suppress(RuntimeError, ValueError):
            watch.store.set(str(compute.rank), json.dumps({"over": True}))


def guarded(work: Callable[[Any, Compute], Any]) -> Callable[[Any], None]:
    """Return a training script's main function, which calls `work` with the flags and a Compute.

    While `work` runs, a signal makes it save and stop, and the ranks watch each other; see over().
    """

    def guard(cfg: Any, compute: Compute) -> None:
        with signals.caught(compute.pulse), over(compute, cfg.hang_seconds):
            try:
                work(cfg, compute)
            except signals.Stopped:
                log(tr("stopped by a signal before the first step; type the same command to start"))

    return with_compute(guard)
