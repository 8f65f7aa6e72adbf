"""SwanLab: on its server with a key, in local files without one; runs in the tracker's own process."""

import importlib.util
import os
from typing import Any

import swanlab

from nanochat.runtime.trackers.start import Start, numbers


def _mode() -> str:
    """The mode that works here: online with a key; without one local, or offline where its page is not installed."""
    if swanlab.Settings().api_key:
        return "online"
    return (
        "local" if importlib.util.find_spec("swanboard") else "offline"
    )  # of `pip install swanlab[dashboard]`


class Swanlab:
    """A SwanLab run. The files are in the folder swanlab of the stage; `swanlab watch` or `swanlab sync` reads them.

    The mode is the one that the user gave, else SWANLAB_MODE, else the one that works here.
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
        """Send the numbers of one step; SwanLab takes no other values and no missing ones."""
        swanlab.log(numbers(figures), step=figures.get("step"))

    def close(self) -> None:
        """Finish the run, which sends what has not been sent yet."""
        swanlab.finish()
