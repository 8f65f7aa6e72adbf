"""Records the metrics of a stage in metrics.jsonl and in the trackers of --track and --run."""

import importlib.util
from pathlib import Path
from typing import Any

from nanochat.common import UserError, tr
from nanochat.runtime.trackers.beside import Beside
from nanochat.runtime.trackers.jsonl import Jsonl
from nanochat.runtime.trackers.jsonl import read_metrics as read_metrics
from nanochat.runtime.trackers.start import Start

# Tracker -> the modes that may follow its name, as in wandb:offline.
MODES = {
    "jsonl": (),
    "wandb": ("online", "offline"),
    "swanlab": ("online", "local", "offline"),
    "tensorboard": (),
}
NO_RUN = "dummy"  # the value of --run that asks for no wandb run


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def parse_trackers(text: str, run: str = NO_RUN) -> dict[str, str]:
    """Return a dict from each tracker in `text`, such as swanlab,wandb:offline, to its mode or "".

    A `run` other than "dummy" names a wandb run, and adds wandb. Raises UserError if a name or mode
    is unknown, a name is repeated, or a tracker's library is not installed (exit code 2, or 1 if
    only `run` needs the library).
    """
    trackers: dict[str, str] = {}
    for word in text.split(","):
        name, colon, mode = word.strip().partition(":")
        if name not in MODES or name in trackers:
            raise UserError(
                tr(
                    "--track takes {modes}, each at most once and with commas between them; "
                    "got {text!r}",
                    modes=", ".join(MODES),
                    text=text,
                ),
                2,
            )
        if colon and mode not in MODES[name]:
            modes = tr("no mode")
            if MODES[name]:
                modes = tr("the modes {modes}", modes=", ".join(MODES[name]))
            raise UserError(
                tr("--track: {name} has {modes}, got {mode!r}", name=name, modes=modes, mode=mode),
                2,
            )
        if name != "jsonl" and not _is_installed(name):
            raise UserError(
                tr(
                    "--track {name} needs the package {name}, which is not installed. Type "
                    "`pip install {name}`, or leave {name} out",
                    name=name,
                ),
                2,
            )
        trackers[name] = mode
    if run != NO_RUN:
        if not _is_installed("wandb"):
            raise UserError(
                tr(
                    "--run {run} needs wandb, which is not installed. Install wandb, or "
                    "leave --run out",
                    run=run,
                )
            )
        trackers.setdefault("wandb", "")
    return trackers


class Tracker:
    """Passes the metrics of a stage to metrics.jsonl and to other trackers, on rank 0 only."""

    def __init__(
        self,
        folder: Path,
        run: str,
        settings: dict[str, Any],
        step: int,
        main: bool,
        track: str = "jsonl",
        name: str = "",
    ):
        """Open metrics.jsonl for a run that has made `step` updates, and start the other trackers.

        Lines of later steps, which an interrupted run has left, are dropped, as are all lines if
        `step` is 0. `track` lists the trackers, and `name` is the run's name in them. `run` names a
        wandb run; "dummy" means none. The attribute `last` is the step of the last line that is
        left, or -1. Raises UserError if `track` cannot be used, or wandb cannot start `run`.
        """
        self.last = -1
        self._jsonl: Jsonl | None = None
        self._beside: list[Beside] = []
        if not main:
            return
        trackers = parse_trackers(track, run)
        trackers.pop("jsonl", None)  # it is always written
        self._jsonl = Jsonl(folder, step)
        self.last = self._jsonl.last
        for tracker_name, mode in trackers.items():
            is_run = tracker_name == "wandb" and run != NO_RUN
            title = run if is_run else name
            start = Start(title, folder.absolute(), settings, step, mode)
            tracker = Beside(tracker_name, start)
            self._beside.append(tracker)
            if is_run:
                self._refuse_if_failed(tracker, run)

    def _refuse_if_failed(self, tracker: Beside, run: str) -> None:
        """Raise UserError before training if wandb cannot start the run that --run names.

        Without this check, the user would find out only hours later that nothing was tracked.
        """
        if tracker.started():
            return
        for started_tracker in self._beside:
            started_tracker.abandon()
        raise UserError(
            tr(
                "wandb could not start run {run!r}: {failure}. Log in with `wandb login`, "
                "set WANDB_MODE=offline, or leave --run out",
                run=run,
                failure=tracker.failure,
            )
        )

    def log(self, **figures: Any) -> None:
        """Record the metrics of one step.

        Floats are written without rounding. A value that is not finite is read back as None.
        """
        if self._jsonl is not None:
            self._jsonl.log(figures)
        for tracker in self._beside:
            tracker.log(figures)

    def close(self) -> None:
        """Close metrics.jsonl, and let the other trackers send what they have not sent yet."""
        if self._jsonl is not None:
            self._jsonl.close()
        for tracker in self._beside:
            tracker.close()
