"""Decides whether a stage is finished, finds the step to resume from, and restores that step."""

import contextlib
import errno
import fcntl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors import SafetensorError, safe_open

from nanochat.checkpoint_manager import same_run
from nanochat.checkpoint_manager.files import read_meta, set_aside, step_dir, steps, sweep, verify
from nanochat.checkpoint_manager.load import newest_whole
from nanochat.checkpoint_manager.parts.model import read_parameters
from nanochat.checkpoint_manager.parts.rank_state import Optimizers
from nanochat.checkpoint_manager.same_run import RunSettings
from nanochat.common import UserError, log, parse_json, tr
from nanochat.data.library_words import in_words
from nanochat.data.locks import open_regular
from nanochat.device import Compute, barrier
from nanochat.runtime import fingerprint, parallel
from nanochat.runtime.parallel import State
from nanochat.runtime.tracking import read_metrics

Start = int | Literal["auto", "none"]  # a step, the newest step, or no step
LOCK = ".lock"
# How long to wait for the lock: a killed process may need seconds to free its memory.
LOCK_SECONDS = 10.0


def finished(
    folder: Path,
    settings: RunSettings,
    compute: Compute,
    reported: bool = True,
    start: Start = "auto",
) -> bool:
    """Return whether the run in a folder is finished, and log a message if so.

    A finished run has saved its last step, measured it (unless that checkpoint has no metrics), and
    written its report, as `reported` says. If `start` is not "auto", the result is False. Rank 0
    decides for all ranks. Raises UserError if the settings differ from the checkpoint's.
    """
    if start != "auto":
        return False
    step = newest_whole(folder, compute, training=False)
    if step is None:
        return False
    meta = read_meta(folder, step)
    same_run.check_settings(folder, meta, settings)
    if step < meta["steps"]:
        return False
    has_metrics = "line" in meta["state"]
    measured_steps = [line["step"] for line in read_metrics(folder)] if has_metrics else [step]
    # If the last step was not measured, the stage was stopped after its last save.
    is_finished = step in measured_steps and reported
    if not parallel.agree(int(is_finished), compute):
        return False
    if compute.main:
        log(tr("already done: {folder} has all {step:,} steps", folder=folder, step=step))
    return True


def hold(folder: Path, compute: Compute) -> None:
    """Lock the folder of a run until this process stops training. Every rank must call this.

    Raises UserError on every rank if another training process keeps the lock.
    """
    with parallel.together(tr("the start in {folder}", folder=folder), compute):
        if compute.main:
            _lock(folder, compute)


def _lock(folder: Path, compute: Compute) -> None:
    """Create a folder if needed, and lock it until this process stops training.

    The lock is a record lock: forked workers do not inherit it, so it vanishes when this process is
    killed. Raises UserError if another process still holds it after 10 seconds, or if it is a link
    or a special file. On a file system without locks, nothing is locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = compute.ending.enter_context(open_regular(folder / LOCK, owned=False))
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as failure:
            if failure.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            if time.monotonic() > deadline:
                raise UserError(
                    tr(
                        "{folder} is training already: another command trains there, and two would "
                        "break each other's checkpoints. Stop that command or wait until it ends. "
                        "To train at the same time, give another name",
                        folder=folder,
                    )
                ) from failure
        time.sleep(0.1)


def _begun_step(folder: Path, start: Start, compute: Compute) -> int:
    """Return a step whose meta.json describes the run that will resume, or 0 if there is none.

    This is the newest step with a readable meta.json or, if `start` is a step, only that one. Rank
    0 decides for all ranks. Damaged steps are skipped silently, because resume_stage() reports
    them.
    """
    readable_step = 0
    if compute.main and start != "none":
        for step in reversed(steps(folder)) if start == "auto" else [int(start)]:
            with contextlib.suppress(UserError, OSError):
                read_meta(folder, step)
                readable_step = step
                break
    return parallel.agree(readable_step, compute)


def begun_sizes(
    folder: Path, start: Start, compute: Compute
) -> tuple[int | None, dict[str, int] | None]:
    """Return the rows of each step and the shape of the model of the run that will resume.

    Each is None if it is unknown. All ranks get the same result. A resumed run must keep both,
    although an automatic batch size depends on the number of ranks, and an automatic context on the
    kind of device. The shape has the whole numbers of `model` in meta.json.
    """
    step = _begun_step(folder, start, compute)
    if not step:
        return None, None
    meta = read_meta(folder, step)
    rows_done = meta["state"].get("row", 0)
    rows = rows_done // step or None if type(rows_done) is int else None
    return rows, {name: size for name, size in meta["model"].items() if type(size) is int}


def begun_settings(folder: Path, start: Start, compute: Compute) -> dict[str, Any]:
    """Return the saved settings of the run that will resume, or {} if there is none."""
    step = _begun_step(folder, start, compute)
    return read_meta(folder, step)["config"] if step else {}


@dataclass(frozen=True)
class Resumed:
    """The step that a stage resumes from, and the state that the stage saved with it."""

    step: int
    state: dict[str, Any]  # empty at step 0


def resume_stage(
    folder: Path,
    model: nn.Module,
    optimizers: Optimizers,
    settings: RunSettings,
    compute: Compute,
    data: str = "",
    start: Start = "auto",
    other_code: bool = False,
    plan: tuple[int, int] | None = None,
) -> Resumed:
    """Load the step to resume from into the model and the optimizers, and return it with its state.

    `start` is a step, "auto" for the newest undamaged step, or "none". With "none", or if "auto"
    finds no step, the stage starts at step 0 with an empty state. Unless `start` is "auto", all
    later steps are moved to a subfolder. `data` identifies the rows to train on, and `plan` is
    (steps, rows or problems per step).

    Raises UserError if the named step is missing or damaged, if `data` differs between ranks, or if
    the checks in same_run find other settings, data or code, or another plan. Changed code is
    accepted if `other_code` is true.
    """
    fingerprint.check({"the data": data}, compute)
    if compute.main:
        sweep(folder)
    barrier(compute)
    step = _start_step(folder, start, compute)
    if step:
        meta = read_meta(folder, step)
        same_run.check_settings(folder, meta, settings)
        same_run.check_data(folder, meta, data)
        same_run.check_code(folder, meta, other_code, compute)
        same_run.warn_of_unknown_matmul(folder, meta, settings)
        if plan is not None:
            same_run.check_plan(folder, meta, *plan)
    if start != "auto" and compute.main:
        _set_later_steps_aside(folder, step)
    barrier(compute)
    if not step:
        return Resumed(0, {})
    meta = restore(folder, step, model, optimizers)
    if compute.main:
        log(tr("resuming from step {step:,} of {folder}", step=step, folder=folder))
    return Resumed(step, meta["state"])


def _set_later_steps_aside(folder: Path, step: int) -> None:
    """Move all steps after `step`, if any, to a subfolder, and log its path."""
    new_folder = set_aside(folder, step)
    if new_folder:
        log(
            tr(
                "the steps after {step:,} were moved to {place}; delete that folder when you no "
                "longer need them",
                step=step,
                place=new_folder,
            )
        )


def _start_step(folder: Path, start: int | str, compute: Compute) -> int:
    """Return the step to resume from, or 0 to start from the beginning.

    Raises UserError if the step that `start` names is missing (exit code 2) or damaged.
    """
    if start == "auto":
        return newest_whole(folder, compute) or 0
    if start == "none":
        return 0
    complete_steps = steps(folder)
    if start not in complete_steps:
        listed = ", ".join(map(str, complete_steps)) or tr("none")
        raise UserError(
            tr(
                "--resume={start}: {folder} has steps {steps}; name one of them",
                start=start,
                folder=folder,
                steps=listed,
            ),
            exit_code=2,
        )
    path = step_dir(folder, int(start))
    problems = [verify(path) if compute.main else ""]
    if compute.world_size > 1:
        dist.broadcast_object_list(problems, src=0)
    if problems[0]:
        raise UserError(
            tr(
                "--resume={start}: {path} is damaged: {problem}. Name another step",
                start=start,
                path=path,
                problem=problems[0],
            )
        )
    return int(start)


def restore(
    folder: Path, step: int, model: nn.Module, optimizers: Optimizers | None
) -> dict[str, Any]:
    """Load a step into a model and its optimizers, and return the content of the step's meta.json.

    The model may be sharded. If `optimizers` is None, only the model is loaded.
    """
    where = step_dir(folder, step)
    parallel.load_whole(model, read_parameters(where))
    if optimizers is not None:
        _restore_optimizer(where, optimizers)
    return read_meta(folder, step)


@torch.no_grad()
def _restore_optimizer(folder: Path, optimizers: Optimizers) -> None:
    """Fill this rank's optimizer state from the optimizer files of a step.

    A different number of ranks may have written these files. Raises UserError if a file is damaged,
    or if a tensor lacks rows, unless its name ends with ".age": old runs did not save such tensors.
    """
    state = optimizers.state()
    missing_rows = {name: tensor.shape[0] for name, (tensor, _, _) in state.items()}
    for path in sorted(folder.glob("optim-*.safetensors")):
        try:
            _fill(path, state, missing_rows)
        except (
            SafetensorError,
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            RuntimeError,
        ) as failure:  # not our format
            raise UserError(
                tr(
                    "{path} cannot be read as optimizer state ({failure}). Delete {folder} "
                    "to resume from the step before",
                    path=path,
                    failure=in_words(failure),
                    folder=folder,
                )
            ) from failure
    # Runs that began before 2026-11-26 have no ages, because they updated every row in every step.
    incomplete = [
        name for name, rows in missing_rows.items() if rows > 0 and not name.endswith(".age")
    ]
    if incomplete:
        raise UserError(
            tr(
                "{folder} holds no complete optimizer state: {incomplete} and "
                "{incomplete_count} more lack rows. Delete this folder to resume from the "
                "step before.",
                folder=folder,
                incomplete=incomplete[0],
                incomplete_count=len(incomplete) - 1,
            )
        )
    optimizers.restored()


def _fill(path: Path, state: State, missing_rows: dict[str, int]) -> None:
    """Copy the rows that this rank needs from one file, and lower `missing_rows` by their count."""
    with safe_open(path, "pt") as file:
        layout = parse_json(file.metadata()["layout"])
        for name in set(layout) & set(state):
            target, _, target_first = state[name]
            _, source_first = layout[name]
            source = file.get_tensor(name)
            first = max(source_first, target_first)
            end = min(source_first + source.shape[0], target_first + target.shape[0])
            if first < end:
                rows = source[first - source_first : end - source_first]
                target[first - target_first : end - target_first] = rows.to(target.device)
                missing_rows[name] -= end - first
