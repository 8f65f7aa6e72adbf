"""Every task on which models can be evaluated, by its name."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from nanochat.common import UserError, tr
from nanochat.data.conversation import Task
from tasks.arc import ARC
from tasks.ceval import CEval
from tasks.choices import ChoiceTask
from tasks.cmmlu import CMMLU
from tasks.mgsm import MGSM
from tasks.mixtures import CURRICULA
from tasks.mmlu import MMLU
from tasks.mmlu_pro import MMLUPro

# Tasks that show examples, with the number that their authors show.
FEW_SHOT: Mapping[str, tuple[Callable[..., Task], int]] = {
    "C-Eval": (CEval, 5),
    "CMMLU": (CMMLU, 5),
    "MMLU-Pro": (MMLUPro, 5),
    "MGSM-zh": (MGSM, 8),
}


def use_task_data(folder: str | None) -> None:
    """Make tasks read their rows from the copies in a folder, by setting NANOCHAT_TASK_DIR.

    Does nothing if `folder` is None. Raises UserError (exit code 2) if there is no such folder.
    """
    if folder is not None:
        if not Path(folder).expanduser().is_dir():
            raise UserError(
                tr(
                    "--task_data names a folder with copies of data sets, and {folder} is "
                    "no folder",
                    folder=folder,
                ),
                2,
            )
        os.environ["NANOCHAT_TASK_DIR"] = folder


def chat_tasks(unsafe_exec: bool, shots: int | None = None) -> dict[str, Callable[[], Task]]:
    """Return functions that make the tasks of chat models, by name.

    `shots` is the number of examples to show, or None to show as many as the authors. The tasks of
    ChatCORE never show any, so that ChatCORE is the same everywhere.
    """
    tasks: dict[str, Callable[[], Task]] = {}
    for curriculum in CURRICULA.values():
        tasks |= curriculum.measures(unsafe_exec)
    for name, (make, usual_shots) in FEW_SHOT.items():
        tasks[name] = partial(make, shots=usual_shots if shots is None else shots)
    return tasks


def choice_tasks(shots: int | None = None) -> dict[str, Callable[[], ChoiceTask]]:
    """Return functions that make the tasks of base models, by name.

    `shots` is the number of examples to show, or None to show five. ARC never shows any.
    """
    five_shots = 5 if shots is None else shots
    return {
        "ARC-Easy": lambda: ARC("ARC-Easy", "test"),
        "ARC-Challenge": lambda: ARC("ARC-Challenge", "test"),
        "MMLU": lambda: MMLU("all", "test", shots=five_shots),
        "MMLU-Pro": lambda: MMLUPro(shots=five_shots),
        "C-Eval": lambda: CEval(shots=five_shots),
        "CMMLU": lambda: CMMLU(shots=five_shots),
    }
