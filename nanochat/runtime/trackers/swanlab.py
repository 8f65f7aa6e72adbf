"""SwanLab, on its server with a key or in local files; runs in the tracker's own process."""

import importlib.util
import os
from typing import Any

import swanlab

from nanochat.runtime.trackers.start import Start, numbers


def _mode() -> str:
    """Return the mode that works here: online with a key, else local, or offline without a page."""
    if swanlab.Settings().api_key:
        return "online"
    has_page = importlib.util.find_spec("swanboard")  # of `pip install swanlab[dashboard]`
    return "local" if has_page else "offline"


class Swanlab:
    """A SwanLab run, with its files in the folder swanlab of the stage.

    `swanlab watch` or `swanlab sync` reads them. The mode is the user's, else SWANLAB_MODE, else
    the mode that works here.
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
        """Finish the run, which sends the figures that have not been sent yet."""
        swanlab.finish()
