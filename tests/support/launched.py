"""Runs a training script under torchrun and injects a fault: `python tests/support/launched.py FOLDER MODULE FLAGS...`

Rank R writes `pid-R` to FOLDER, and `code-R` if it ends by itself. FAULT in the environment is `KIND RANK STEP`: in
that step the rank is killed or hangs, but only once, however often the script is started. `evaluate 0 STEP` makes
validations endless instead.
"""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

from nanochat.evals import loss as loss_eval  # noqa: E402 - after the path is known
from nanochat.run import Run  # noqa: E402
from nanochat.runtime import watch  # noqa: E402

watch.CONFIRM_SECONDS = 1.5  # of two ranks, the one that asks has no other to mistake for the dead one


def inject(folder: Path, rank: int) -> None:
    """Prepare the fault that the environment names."""
    if not os.environ.get("FAULT"):
        return
    kind, whom, when = os.environ["FAULT"].split()
    if kind == "evaluate":
        real = loss_eval.bits_per_byte

        def endless(model: Any, steps: Any, *rest: Any) -> float:
            batches = list(steps)
            (folder / f"evaluating-{rank}").touch()
            return real(model, (batch for _ in iter(int, 1) for batch in batches), *rest)

        loss_eval.bits_per_byte = endless
        return
    real_update = Run.update
    count = 0

    def update(run: Run, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if rank == int(whom) and count == int(when) and not (folder / "struck").exists():
            (folder / "struck").touch()
            while run._saver.busy:  # a test knows then which step is on disk
                time.sleep(0.01)
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()
        return real_update(run, *arguments, **options)

    Run.update = update  # type: ignore[method-assign]


def main() -> None:
    folder, module, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    inject(folder, rank)
    sys.argv = [module, *sys.argv[3:]]
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        raise
    finally:
        (folder / f"code-{rank}").write_text(str(code))


if __name__ == "__main__":
    main()
