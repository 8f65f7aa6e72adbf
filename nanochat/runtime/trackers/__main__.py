"""The process of a tracker: reads a Start and then figures as JSON lines, and answers.

python -m nanochat.runtime.trackers wandb

tracking.py starts this process, so a tracker that fails, hangs or is killed
does not change training.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TextIO

from nanochat.runtime.trackers.start import Shown, Start


def make(name: str, start: Start) -> Shown:
    """Return the tracker of a name. The import of its library may fail, too."""
    module = importlib.import_module(f"nanochat.runtime.trackers.{name}")
    return getattr(module, name.capitalize())(start)


def serve(name: str, lines: TextIO, answers: TextIO) -> None:
    """Start the tracker, pass it every line, and close it after the last line.

    The lines also end if training was killed.
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
    """Answer on the pipe that was standard output; the library prints to standard error instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, answers)


if __name__ == "__main__":
    main()
