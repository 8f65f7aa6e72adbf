"""A script whose ranks fail in the way that FAULT names; tests start it under a launcher."""

import os
import signal
import time
from dataclasses import dataclass

from nanochat.common import UserError
from nanochat.data import command_line


@dataclass(frozen=True)
class Config:
    """Its only flag."""

    depth: int = 4
    """layers"""


def main(cfg: Config) -> None:
    """Fail as FAULT says: `refuse all`, `refuse 1`, `bug 1` or `kill 1`."""
    fault, _, whom = os.environ["FAULT"].partition(" ")
    if whom not in ("all", os.environ["RANK"]):
        time.sleep(600)  # the launcher ends this rank
    if whom == "1":
        command_line.RANK_0_SECONDS = 0
    if fault == "refuse":
        raise UserError("depth must be a multiple of 3, got 4; write --depth=3")
    if fault == "bug":
        raise ZeroDivisionError("one too many")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    command_line.run(main, Config)
