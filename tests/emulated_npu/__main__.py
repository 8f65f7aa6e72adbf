"""Run a command on an emulated NPU: python -m tests.emulated_npu [--chip CHIP] [--devices N] -- CMD..."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from . import build, chips, host


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulated_npu", description=__doc__)
    parser.add_argument("--chip", choices=chips.CHIPS, default=chips.DEFAULT, help="what every card is")
    parser.add_argument("--devices", type=int, default=1, help="cards of the host, 0 to 8")
    parser.add_argument("--memory", type=float, help="GiB of each card, if not the chip's own")
    parser.add_argument("--lenient", action="store_true", help="compute in every dtype, as no chip does")
    parser.add_argument("--at-once", action="store_true", help="let non-blocking copies to the host arrive at once")
    parser.add_argument("--root", type=Path, help="make the pretended host here and keep it")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD...")
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("no command was given")
    if not 0 <= given.devices <= 8:
        parser.error(f"--devices must be 0 to 8, got {given.devices}")
    if why := build.missing():
        print(f"error: the emulated NPU cannot be compiled: {why}", file=sys.stderr)
        return 1
    settings = host.Settings(given.chip, given.devices, given.memory, not given.lenient, not given.at_once)
    if given.root:
        given.root.mkdir(parents=True, exist_ok=True)
        os.execvpe(command[0], command, host.environment(given.root.resolve(), settings))
    with tempfile.TemporaryDirectory(prefix="emulated-npu-") as folder:
        return host.run(command, host.environment(Path(folder), settings))


if __name__ == "__main__":
    sys.exit(main())
