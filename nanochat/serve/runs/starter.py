"""Starts and stops runs for the page, lists those that it has started, and reads their logs."""

import contextlib
import dataclasses
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.files import latest_step, read_meta
from nanochat.common import UserError, visible
from nanochat.runtime.trackers.jsonl import being_written
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.runs import record
from nanochat.serve.runs.command import shown
from nanochat.serve.runs.describe import Run
from nanochat.serve.runs.record import Record

MOST_RUNNING = 1  # runs of the page at the same time: each takes its devices for itself
MOST_LISTED = 50  # runs that the page has started; the oldest are left out
LOG_BYTES = 1 << 16  # the most bytes of a log in one answer
SECRETS = {"NANOCHAT_API_KEY"}  # variables of the server that a run does not get


@dataclass(frozen=True)
class Start:
    """A run to start: its argument list, and what the form said."""

    run: Run
    argv: Sequence[str]
    values: Mapping[str, Any]
    processes: int
    language: str


class Starter:
    """Starts runs under a base folder. All of its methods belong to one thread."""

    def __init__(self, base: Path):
        self.base = base
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}  # children of this server

    def environment(self, language: str) -> dict[str, str]:
        """Return the environment of a run whose messages are in a language, "en" or "zh"."""
        inherited = {name: value for name, value in os.environ.items() if name not in SECRETS}
        settings = {"NANOCHAT_BASE_DIR": str(self.base), "NANOCHAT_LANG": language}
        # The launcher of several ranks waits 30 seconds by default, in which not every model saves.
        patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
        return {**patience, **inherited, **settings, "PYTHONUNBUFFERED": "1"}

    def start(self, start: Start) -> None:
        """Start a run.

        Raises ApiError (409) if this run, or the largest number of runs, is running already.
        """
        self._collect()
        run = start.run
        other_folders = self._running() - {run.folder}
        if len(other_folders) >= MOST_RUNNING:
            names = ", ".join(visible(folder.name) for folder in other_folders)
            text = (
                f"{names} is training, and one run takes all devices: stop it or wait for its end"
            )
            raise ApiError(409, "devices_taken", text)
        with contextlib.suppress(OSError):  # it has no metrics yet
            if being_written(run.metrics):
                raise _already_running(run)
        try:
            environment = self.environment(start.language)
            process = record.start(run.folder, start.argv, environment)
        except BlockingIOError:
            raise _already_running(run) from None
        except (OSError, UserError) as failure:
            text = f"the run could not be started: {failure}"
            raise ApiError(409, "not_started", text) from failure
        self._processes[run.folder] = process
        try:
            record.write(
                run.folder,
                Record(
                    process.pid,
                    record.born(process.pid) or "",
                    tuple(start.argv),
                    start.values,
                    start.processes,
                    time.time(),
                ),
            )
        except BaseException:
            process.terminate()  # without a record, nobody could stop it later
            raise

    def stop(self, run: Run) -> None:
        """Ask a run that the page has started to save and stop.

        Raises ApiError (409) if it does not run, or if the page has not started it.
        """
        self._collect()
        started = record.read(run.folder)
        if started is not None and started.alive and started.stopping:
            return  # a second signal could end its launcher before the ranks have saved
        if started is None or not record.ask_to_stop(started):
            text = "the page stops only runs that it has started and that are still running"
            raise ApiError(409, "not_running", text)
        record.write(run.folder, dataclasses.replace(started, stopping=True))

    def listed(self) -> dict[str, dict[str, Any]]:
        """Return a dict for each run that the page has started, by its key.

        Runs that are still running come first, and newer runs before older ones.
        """
        self._collect()
        records = [(record.read(run.folder), run) for run in self.runs()]
        started_runs = [(started, run) for started, run in records if started is not None]
        started_runs.sort(key=lambda pair: (not pair[0].alive, -pair[0].started_at))
        newest = started_runs[:MOST_LISTED]
        return {run.key: _described(started, run) for started, run in newest}

    def runs(self) -> list[Run]:
        """Return the runs that the page has started, in no particular order."""
        return [Run(stage, folder) for stage, folder in record.folders(self.base)]

    def log(self, run: Run, first: int | None) -> dict[str, Any]:
        """Return a part of a run's log as text, with the place where the next part begins.

        `first` is where it begins, in bytes, or None for the end of the log. A part ends with a
        line, unless a line is longer than a part or the run has ended. Raises ApiError (404) if
        there is no log.
        """
        try:
            place, data, size = record.read_log(run.folder, first, LOG_BYTES)
        except OSError:
            text = "this run has no log: the page has not started it"
            raise ApiError(404, "not_found", text) from None
        started = record.read(run.folder)
        if started is not None and started.alive:
            lines_end = data.rfind(b"\n") + 1
            is_long_line = not lines_end and len(data) == LOG_BYTES
            if not is_long_line:
                data = data[:lines_end]
        text = visible(data.decode(errors="replace").replace("\r\n", "\n"))
        return {"from": place, "next": place + len(data), "size": size, "text": text}

    def _running(self) -> set[Path]:
        """Return the folders of the runs that the page has started and that are still running.

        Ranks whose launcher is dead count too: they hold the lock on the log.
        """
        records = {run.folder: record.read(run.folder) for run in self.runs()}
        return {
            folder
            for folder, started in records.items()
            if started and (started.alive or record.is_locked(folder))
        }

    def _collect(self) -> None:
        """Write down the exit codes of the runs of this server that have ended."""
        for folder, process in list(self._processes.items()):
            code = process.poll()
            if code is None:
                continue
            del self._processes[folder]
            started = record.read(folder)
            if started is not None and started.pid == process.pid:
                with contextlib.suppress(OSError):  # the folder may be gone
                    record.write(folder, dataclasses.replace(started, code=code))


def saved_config(folder: Path) -> dict[str, Any] | None:
    """Return the settings in a run's newest checkpoint, or None if there is none to read."""
    newest = latest_step(folder)
    if newest is None:
        return None
    try:
        config = read_meta(folder, newest)["config"]
    except (OSError, UserError, KeyError):  # the script will say what is wrong
        return None
    return config if isinstance(config, dict) else None


def _already_running(run: Run) -> ApiError:
    """Return the refusal to start a run that is in progress."""
    name = visible(run.folder.name)
    text = f"{name} is training already: two runs would break each other's checkpoints"
    return ApiError(409, "already_running", text)


def _described(started: Record, run: Run) -> dict[str, Any]:
    """Return what the page shows about a run that it has started."""
    state = "ended"
    if started.alive:
        state = "stopping" if started.stopping else "running"
    return {
        "id": run.key,
        "stage": run.stage,
        "tag": visible(os.fsencode(run.folder.name).decode(errors="replace")),
        "state": state,
        "asked": started.stopping,
        "code": started.code,
        "saved": latest_step(run.folder),
        "command": visible(shown(started.argv)),
        "started_at": started.started_at,
    }
