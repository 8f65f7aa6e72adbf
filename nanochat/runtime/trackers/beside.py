"""Runs a tracker in a process of its own, so that its library cannot slow or change training."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from nanochat.common import tr, warn
from nanochat.runtime.trackers.start import Start

START_SECONDS = 100.0  # how long a tracker may take to start
FINISH_SECONDS = 60.0  # how long it may take to send the remaining lines, after the last step
EXIT_SECONDS = 10.0  # how long its process may take to exit after that
MOST_WAITING = 10_000  # lines that wait for a slow tracker


class Beside:
    """Runs a tracker in a process of its own, and hands it the metrics.

    log() never waits for a tracker. If a tracker fails, starts too slowly, falls too far behind or
    is killed, a single warning names it, and it gets no more lines.
    """

    def __init__(self, name: str, start: Start, start_seconds: float = START_SECONDS):
        self.name = name
        self.failure = ""
        self._failure_named = False
        self._started_at = time.monotonic()
        self._start_seconds = start_seconds
        self._state = "starting"
        self._changed = threading.Condition()
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nanochat.runtime.trackers", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C stops training, which then lets the tracker finish
        )
        first_line = {**asdict(start), "folder": str(start.folder)}
        self._lines.put(json.dumps(first_line, default=str))
        for work in (self._write_lines, self._read_answers):
            threading.Thread(target=work, name=f"{name} tracker", daemon=True).start()

    def log(self, figures: dict[str, Any]) -> None:
        """Hand over the metrics of one step without waiting."""
        waited = time.monotonic() - self._started_at
        if self._state == "starting" and waited > self._start_seconds:
            self._fail(self._too_slow())
        if not self.failure:
            self._hand_over(json.dumps(figures))  # Python reads back numbers that are not finite
        self._name_failure()

    def _too_slow(self) -> str:
        return f"it did not start within {self._start_seconds:g} s"

    def _hand_over(self, line: str | None) -> None:
        """Queue a line for the tracker, or None to mark the end."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._fail(f"it does not keep up: {MOST_WAITING:,} lines wait for it")

    def _wait_until(self, states: tuple[str, ...], seconds: float) -> bool:
        """Wait until the tracker has reached one of `states`; return whether it took too long."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._state in states, seconds)

    def started(self) -> bool:
        """Wait for the tracker to start, and return whether it did; if not, `failure` says why."""
        too_late = self._wait_until(("ready", "done", "failed"), self._start_seconds)
        if too_late:
            self._fail(self._too_slow())
        return not self.failure

    def close(self, seconds: float = FINISH_SECONDS) -> None:
        """Give the tracker at most `seconds` to send its remaining lines, then end its process."""
        if not self.failure:
            self._hand_over(None)
            too_late = self._wait_until(("done", "failed"), seconds)
            if too_late:
                self.failure = f"it did not finish within {seconds:g} s"
        self.abandon()
        self._name_failure()

    def abandon(self) -> None:
        """End the tracker's process, and any processes that its library has started in its group.

        A tracker that has reported that it is done gets a few seconds to exit by itself.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS if self._state == "done" else 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the process leads a group of its own
        self._process.wait()

    def _write_lines(self) -> None:
        """Write the queued lines to the process; runs in a thread."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            while (line := self._lines.get()) is not None:
                pipe.write(line + "\n")
                pipe.flush()
            pipe.close()
        except (OSError, ValueError):  # the process has ended; _read_answers() says why
            pass

    def _read_answers(self) -> None:
        """Read the process's answers and update the state; runs in a thread."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if answer["state"] == "failed":
                self._fail(answer["why"])
                return
            with self._changed:
                self._state = answer["state"]
                self._changed.notify_all()
        if self._state != "done":
            self._fail(f"its process ended early, with code {self._process.wait()}")

    def _fail(self, why: str) -> None:
        with self._changed:
            self.failure = self.failure or why
            self._state = "failed"
            self._changed.notify_all()

    def _name_failure(self) -> None:
        if self.failure and not self._failure_named:
            self._failure_named = True
            warn(
                tr(
                    "{name} failed and is off for the rest of this run: {failure}",
                    name=self.name,
                    failure=self.failure,
                )
            )
