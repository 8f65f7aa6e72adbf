"""Every task that can be measured, by its name."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from nanochat.common import UserError
from nanochat.data.conversation import Task
from tasks.arc import ARC
from tasks.ceval import CEval
from tasks.choices import ChoiceTask
from tasks.cmmlu import CMMLU
from tasks.mgsm import MGSM
from tasks.mixtures import CURRICULA
from tasks.mmlu import MMLU
from tasks.mmlu_pro import MMLUPro

FEW_SHOT: Mapping[
    str, tuple[Callable[..., Task], int]
] = {  # with the number of examples that the authors show
    "C-Eval": (CEval, 5),
    "CMMLU": (CMMLU, 5),
    "MMLU-Pro": (MMLUPro, 5),
    "MGSM-zh": (MGSM, 8),
}


def use_task_data(folder: str | None) -> None:
    """Read the rows of tasks from copies in a folder, as NANOCHAT_TASK_DIR does. UserError (code 2) if it is none."""
    if folder is not None:
        if not Path(folder).expanduser().is_dir():
            raise UserError(
                f"--task_data names a folder with copies of data sets, and {folder} is no folder", 2
            )
        os.environ["NANOCHAT_TASK_DIR"] = folder


def chat_tasks(unsafe_exec: bool, shots: int | None = None) -> dict[str, Callable[[], Task]]:
    """Functions that make the tasks of chat models. `shots`: examples to show; None: as many as the authors show.

    The tasks of ChatCORE show none in any case, so that ChatCORE is the same everywhere.
    """
    found = {
        name: make for one in CURRICULA.values() for name, make in one.measures(unsafe_exec).items()
    }
    for name, (make, usual) in FEW_SHOT.items():
        found[name] = lambda make=make, usual=usual: make(shots=usual if shots is None else shots)
    return found


def choice_tasks(shots: int | None = None) -> dict[str, Callable[[], ChoiceTask]]:
    """Functions that make the tasks of base models, which continue a text; `shots` as above."""

    def usual(number: int) -> int:
        return number if shots is None else shots

    return {
        "ARC-Easy": lambda: ARC("ARC-Easy", "test"),
        "ARC-Challenge": lambda: ARC("ARC-Challenge", "test"),
        "MMLU": lambda: MMLU("all", "test", shots=usual(5)),
        "MMLU-Pro": lambda: MMLUPro(shots=usual(5)),
        "C-Eval": lambda: CEval(shots=usual(5)),
        "CMMLU": lambda: CMMLU(shots=usual(5)),
    }
