"""Records figures while a stage trains: always in metrics.jsonl, and in the trackers that --track and --run name."""

import importlib.util
from pathlib import Path
from typing import Any

from nanochat.common import UserError
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


def parse_trackers(text: str, run: str = "dummy") -> dict[str, str]:
    """The trackers in a list such as `swanlab,wandb:offline`, each with its mode or "".

    `run` names a wandb run, which adds wandb; "dummy" means that none is asked for. UserError (code 2) for an unknown
    name or mode, a repeated name, or a library that is not installed.
    """
    found: dict[str, str] = {}
    for word in (part.strip() for part in text.split(",")):
        name, colon, mode = word.partition(":")
        if name not in MODES or name in found:
            known = ", ".join(MODES)
            raise UserError(
                f"--track takes {known}, each at most once and with commas between them; got {text!r}",
                2,
            )
        if colon and mode not in MODES[name]:
            modes = f"the modes {', '.join(MODES[name])}" if MODES[name] else "no mode"
            raise UserError(f"--track: {name} has {modes}, got {mode!r}", 2)
        if name != "jsonl" and importlib.util.find_spec(name) is None:
            raise UserError(
                f"--track {name} needs the package {name}, which is not installed. Type `pip install {name}`, or leave "
                f"{name} out",
                2,
            )
        found[name] = mode
    if run != "dummy":
        if importlib.util.find_spec("wandb") is None:
            raise UserError(
                f"--run {run} needs wandb, which is not installed. Install wandb, or leave --run out"
            )
        found.setdefault("wandb", "")
    return found


class Tracker:
    """Hands the figures of a stage to metrics.jsonl and to other trackers; only rank 0 writes."""

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
        """Open the files after `step` updates; lines of later steps, which an interrupted run left, are dropped.

        `track` lists trackers; `name` is the name of the run that they show. `run` names a wandb run; "dummy" means
        that none is asked for. The attribute `last` is the step of the last kept line of metrics.jsonl, or -1.
        """
        self.last = -1
        self._jsonl: Jsonl | None = None
        self._beside: list[Beside] = []
        if not main:
            return
        wanted = parse_trackers(track, run)
        self._jsonl = Jsonl(folder, step)
        self.last = self._jsonl.last
        for tracker, mode in wanted.items():
            if tracker != "jsonl":
                shown = run if tracker == "wandb" and run != "dummy" else name
                self._beside.append(
                    Beside(tracker, Start(shown, folder.absolute(), settings, step, mode))
                )
                if shown is run:
                    self._refuse_if_failed(self._beside[-1], run)

    def _refuse_if_failed(self, tracker: Beside, run: str) -> None:
        """With --run, a wandb that cannot start ends the command before training, not after hours without curves."""
        if not tracker.started():
            for one in self._beside:
                one.abandon()
            raise UserError(
                f"wandb could not start run {run!r}: {tracker.failure}. Log in with `wandb login`, set "
                "WANDB_MODE=offline, or leave --run out"
            )

    def log(self, **figures: Any) -> None:
        """Write one line. Floats are written without rounding; a value that is not finite is read back as None."""
        if self._jsonl is not None:
            self._jsonl.log(figures)
        for tracker in self._beside:
            tracker.log(figures)

    def close(self) -> None:
        """Finish the files, and let the other trackers send what is left."""
        if self._jsonl is not None:
            self._jsonl.close()
        for tracker in self._beside:
            tracker.close()
