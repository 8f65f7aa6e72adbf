"""Records a run with Weights & Biases, online or offline, in the tracker's own process."""

from typing import Any

import wandb

from nanochat.runtime.trackers.start import Start


class Wandb:
    """A wandb run; a mode that the user gives in --track takes precedence over WANDB_MODE."""

    def __init__(self, start: Start):
        mode: Any = start.mode or None
        self._run = wandb.init(
            project="nanochat", name=start.name, config=start.settings, mode=mode
        )

    def log(self, figures: dict[str, Any]) -> None:
        """Send the metrics of one step."""
        self._run.log(figures, step=figures.get("step"))

    def close(self) -> None:
        """Finish the run, which sends the metrics that have not been sent yet."""
        self._run.finish()
