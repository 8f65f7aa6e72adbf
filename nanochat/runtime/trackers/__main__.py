"""Runs a tracker: reads a Start and then metrics as JSON lines, and answers on a pipe.

python -m nanochat.runtime.trackers wandb

beside.py starts this program as a separate process, so that a tracker that fails, hangs or is
killed does not affect training.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TextIO

from nanochat.runtime.trackers.start import Shown, Start


def make(name: str, start: Start) -> Shown:
    """Create and return the tracker called `name`.

    Raises whatever the tracker's library raises, or ImportError if it cannot be imported.
    """
    module = importlib.import_module(f"nanochat.runtime.trackers.{name}")
    return getattr(module, name.capitalize())(start)


def serve(name: str, lines: TextIO, answers: TextIO) -> None:
    """Start a tracker, pass it the metrics in each line, and close it after the last line.

    The tracker's state is written to `answers`: "ready", then "done", or "failed" and why. The
    lines also end if the training process is killed.
    """

    def answer(**content: str) -> None:
        try:
            answers.write(json.dumps(content) + "\n")
            answers.flush()
        except BrokenPipeError:  # training was killed; the tracker may still finish its work
            pass

    try:
        start = json.loads(lines.readline() or "null")
        if start is None:
            return
        tracker = make(name, Start(**{**start, "folder": Path(start["folder"])}))
        answer(state="ready")
        for line in lines:
            tracker.log(json.loads(line))
        tracker.close()
        answer(state="done")
    except Exception as failure:  # the edge of this process
        text = " ".join(str(failure).split()) or type(failure).__name__
        answer(state="failed", why=text)


def main() -> None:
    """Serve the tracker named on the command line.

    Answers go to the pipe that was standard output, and whatever the tracker's library prints goes
    to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, answers)


if __name__ == "__main__":
    main()
