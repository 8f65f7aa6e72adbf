"""Runs a tracker in a process of its own, so that its library can neither slow training down nor change it."""

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

from nanochat.common import warn
from nanochat.runtime.trackers.start import Start

START_SECONDS = 100.0  # how long a tracker may take to start
FINISH_SECONDS = 60.0  # how long it may take to send what is left, after the last step
EXIT_SECONDS = 10.0  # how long its process may take to exit after that
MOST_WAITING = 10_000  # lines that wait for a slow tracker


class Beside:
    """A tracker in a process of its own. Training hands over lines and never waits for them to be shown.

    A tracker that fails, does not start in time, does not keep up or is killed is named in one warning and left out
    from then on.
    """

    def __init__(self, name: str, start: Start, start_seconds: float = START_SECONDS):
        self.name, self.failure = name, ""
        self._named = False
        self._since, self._start_seconds = time.monotonic(), start_seconds
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
        self._lines.put(json.dumps({**asdict(start), "folder": str(start.folder)}, default=str))
        for work in (self._write, self._read):
            threading.Thread(target=work, name=f"{name} tracker", daemon=True).start()

    def log(self, figures: dict[str, Any]) -> None:
        """Hand over the figures of one step."""
        if self._state == "starting" and time.monotonic() - self._since > self._start_seconds:
            self._fail(f"it did not start within {self._start_seconds:g} s")
        if not self.failure:
            try:
                self._lines.put_nowait(json.dumps(figures))  # Python reads back what is not finite
            except queue.Full:
                self._fail(f"it does not keep up: {MOST_WAITING:,} lines wait for it")
        self._name_failure()

    def started(self) -> bool:
        """Wait until the tracker has started. False if it has failed; `failure` says why."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._state != "starting", self._start_seconds):
                self._state, self.failure = (
                    "failed",
                    f"it did not start within {self._start_seconds:g} s",
                )
        return not self.failure

    def close(self, seconds: float = FINISH_SECONDS) -> None:
        """Let the tracker send what is left, for at most `seconds`, and end its process."""
        if not self.failure:
            try:
                self._lines.put_nowait(None)
            except queue.Full:
                self._fail(f"it does not keep up: {MOST_WAITING:,} lines wait for it")
            with self._changed:
                if not self._changed.wait_for(lambda: self._state in ("done", "failed"), seconds):
                    self.failure = f"it did not finish within {seconds:g} s"
        self.abandon()
        self._name_failure()

    def abandon(self) -> None:
        """End the process, with those that its library started: at once, or, after it is done, once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS if self._state == "done" else 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the process leads a group of its own
        self._process.wait()

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            while (line := self._lines.get()) is not None:
                pipe.write(line + "\n")
                pipe.flush()
            pipe.close()
        except (OSError, ValueError):  # the process has ended; _read() says why
            pass

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if said["state"] == "failed":
                return self._fail(said["why"])
            with self._changed:
                self._state = said["state"]
                self._changed.notify_all()
        if self._state != "done":
            self._fail(f"its process ended early, with code {self._process.wait()}")

    def _fail(self, why: str) -> None:
        with self._changed:
            self.failure = self.failure or why
            self._state = "failed"
            self._changed.notify_all()

    def _name_failure(self) -> None:
        if self.failure and not self._named:
            self._named = True
            warn(f"{self.name} failed and is off for the rest of this run: {self.failure}")
