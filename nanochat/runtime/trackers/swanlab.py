"""Records a run with SwanLab, on its server or in local files, in the tracker's own process."""

import importlib.util
import os
from typing import Any

import swanlab

from nanochat.runtime.trackers.start import Start, numbers


def _mode() -> str:
    """Return the best mode that works on this machine.

    That is "online" with an API key, else "local" if SwanLab's dashboard is installed, else
    "offline".
    """
    if swanlab.Settings().api_key:
        return "online"
    has_dashboard = importlib.util.find_spec("swanboard")  # from `pip install swanlab[dashboard]`
    return "local" if has_dashboard else "offline"


class Swanlab:
    """A SwanLab run, whose files are in the folder `swanlab` of the stage.

    `swanlab watch` and `swanlab sync` read the files. The mode is the one that the user gave, else
    SWANLAB_MODE, else the best that works on this machine.
    """

    def __init__(self, start: Start):
        mode: Any = start.mode or os.environ.get("SWANLAB_MODE") or _mode()
        folder = start.folder / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project="nanochat",
            name=start.name,
            config=start.settings,
            mode=mode,
            log_dir=str(folder),
        )

    def log(self, figures: dict[str, Any]) -> None:
        """Send the finite numbers of one step, since SwanLab accepts no other values."""
        swanlab.log(numbers(figures), step=figures.get("step"))

    def close(self) -> None:
        """Finish the run, which sends the metrics that have not been sent yet."""
        swanlab.finish()
