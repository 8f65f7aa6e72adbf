"""Run a command on an emulated NPU: python -m tests.emulated_npu [--chip CHIP] [--devices N] -- CMD..."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from . import build, chips, host


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulated_npu", description=__doc__)
    parser.add_argument("--chip", choices=chips.CHIPS, default=chips.DEFAULT, help="chip of every card")
    parser.add_argument("--devices", type=int, default=1, help="number of cards, 0 to 8 (default: 1)")
    parser.add_argument("--memory", type=float, help="memory of each card in GiB (default: the chip's own)")
    parser.add_argument("--lenient", action="store_true", help="compute in every dtype, which no real chip does")
    parser.add_argument("--at-once", action="store_true", help="finish non-blocking copies to the host immediately")
    parser.add_argument("--root", type=Path, help="make the fake host in this folder, and keep it (default: temporary)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD...")
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("no command was given; write it after --")
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
