"""Whether a stage is finished, and the step that it resumes from."""

import contextlib
import errno
import fcntl
import os
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
from nanochat.checkpoint_manager.parts.held import Optimizers, State
from nanochat.checkpoint_manager.parts.rows import read_parameters
from nanochat.checkpoint_manager.same_run import RunSettings
from nanochat.common import UserError, log, parse_json, tr
from nanochat.device import Compute, barrier
from nanochat.runtime import fingerprint, parallel
from nanochat.runtime.tracking import read_metrics

Start = int | Literal["auto", "none"]  # a step, the newest, or from step 0
LOCK, LOCK_SECONDS = ".lock", 10.0  # a training that was killed may take seconds to free its memory


def finished(
    folder: Path,
    settings: RunSettings,
    compute: Compute,
    reported: bool = True,
    start: Start = "auto",
) -> bool:
    """Whether this stage was trained and measured to its end with these settings, and `reported`; logs it if so.

    Rank 0 decides for all ranks. A stage that is asked to start from a particular step is never finished. UserError if
    the settings differ from those of the checkpoint.
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
    lines = [line["step"] for line in read_metrics(folder)] if "line" in meta["state"] else [step]
    if not parallel.agree(int(step in lines and reported), compute):
        return False  # stopped after the last save
    if compute.main:
        log(tr("already done: {folder} has all {step:,} steps", folder=folder, step=step))
    return True


def hold(folder: Path, compute: Compute) -> None:
    """Keep other trainings out of a stage's folder until this one ends. UserError on every rank if one is there."""
    with parallel.together(f"the start in {folder}", compute):
        if compute.main:
            _lock(folder, compute)


def _lock(folder: Path, compute: Compute) -> None:
    """A record lock, because the workers that a process forks do not inherit it: it vanishes with a killed training."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    compute.ending.callback(os.close, file)
    given_up = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failure:
            if failure.errno not in (errno.EACCES, errno.EAGAIN):
                return None  # a file system without locks
            if time.monotonic() > given_up:
                raise UserError(
                    tr(
                        "{folder} is training already: another command trains there, and two would break each other's "
                        "checkpoints. Stop that command or wait until it ends. To train at the same time, give another "
                        "name",
                        folder=folder,
                    )
                ) from failure
        time.sleep(0.1)


def _begun_step(folder: Path, start: Start, compute: Compute) -> int:
    """Return the step whose meta.json describes the run that will resume; 0 if there is none.

    Rank 0 looks for all ranks. resume_stage() says what is wrong with a damaged step.
    """
    readable = 0
    if compute.main and start != "none":
        for step in reversed(steps(folder)) if start == "auto" else [int(start)]:
            with contextlib.suppress(UserError, OSError):
                read_meta(folder, step)
                readable = step
                break
    return parallel.agree(readable, compute)


def rows_per_step(folder: Path, start: Start, compute: Compute) -> int | None:
    """Return how many rows a step has in the run that will resume; None if there is none.

    An automatic batch size depends on the number of ranks, but within one run it must stay the same.
    """
    step = _begun_step(folder, start, compute)
    if not step:
        return None
    row = read_meta(folder, step)["state"].get("row", 0)
    return row // step or None if type(row) is int else None


def begun_settings(folder: Path, start: Start, compute: Compute) -> dict[str, Any]:
    """Return the settings of the run that will resume; {} if there is none."""
    step = _begun_step(folder, start, compute)
    return read_meta(folder, step)["config"] if step else {}


@dataclass(frozen=True)
class Resumed:
    """Where a stage resumes."""

    step: int
    state: dict[str, Any]  # what the stage saved; empty at step 0


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
    """Load a checkpoint into model and optimizers: the newest undamaged one ("auto"), or the step that `start` names.

    Without a checkpoint, or for "none", the stage starts at step 0 without state. Later steps are set aside unless
    `start` is "auto". `data` names the rows to train on, and `plan` is the number of steps and of rows in a step.
    UserError if the rows, the plan, the settings or (unless `other_code` is accepted) the code differ from those the
    run started with or differ between ranks, or if the named step is missing or damaged.
    """
    fingerprint.check({"the data": data}, compute)
    if compute.main:
        sweep(folder)
    barrier(compute)
    step = newest_whole(folder, compute) if start == "auto" else _named(folder, start, compute)
    meta = read_meta(folder, step) if step else {"state": {}}
    if step:
        same_run.check_settings(folder, meta, settings)
        same_run.check_data(folder, meta, data)
        same_run.check_code(folder, meta, other_code, compute)
        if plan is not None:
            same_run.check_plan(folder, meta, *plan)
    if start != "auto" and compute.main and (place := set_aside(folder, step or 0)):
        log(
            tr(
                "the steps after {step:,} were moved to {place}; delete that folder when you no longer need them",
                step=step or 0,
                place=place,
            )
        )
    barrier(compute)
    if not step:
        return Resumed(0, {})
    meta = restore(folder, step, model, optimizers)
    if compute.main:
        log(tr("resuming from step {step:,} of {folder}", step=step, folder=folder))
    return Resumed(step, meta["state"])


def _named(folder: Path, start: int | str, compute: Compute) -> int:
    """The step that was asked for; 0 for "none". UserError if the step is missing or damaged."""
    if start == "none":
        return 0
    there = steps(folder)
    if start not in there:
        raise UserError(
            f"--resume={start}: {folder} has steps {', '.join(map(str, there)) or 'none'}; name one of them",
            exit_code=2,
        )
    problem = [verify(step_dir(folder, int(start))) if compute.main else ""]
    if compute.world_size > 1:
        dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise UserError(
            f"--resume={start}: {step_dir(folder, int(start))} is damaged: {problem[0]}. Name another step"
        )
    return int(start)


def restore(
    folder: Path, step: int, model: nn.Module, optimizers: Optimizers | None
) -> dict[str, Any]:
    """Load parameters into a model of any sharding, and optimizer state if optimizers are given; return meta.json."""
    where = step_dir(folder, step)
    parallel.load_whole(model, read_parameters(where))
    if optimizers is not None:
        _restore_optimizer(where, optimizers)
    return read_meta(folder, step)


@torch.no_grad()
def _restore_optimizer(folder: Path, optimizers: Optimizers) -> None:
    """Fill each tensor that this rank holds from the files of all ranks whose rows overlap with it."""
    wanted = optimizers.state()
    missing = {name: value.shape[0] for name, (value, _, _) in wanted.items()}
    for path in sorted(folder.glob("optim-*.safetensors")):
        try:
            _fill(path, wanted, missing)
        except (
            SafetensorError,
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            RuntimeError,
        ) as failure:  # another format
            raise UserError(
                f"{path} cannot be read as optimizer state ({failure}). Delete {folder} to resume from the step before"
            ) from failure
    # runs begun before 2026-11-26 stepped every row in every step
    holes = [name for name, rows in missing.items() if rows > 0 and not name.endswith(".age")]
    if holes:
        raise UserError(
            f"{folder} holds no complete optimizer state: {holes[0]} and {len(holes) - 1} more lack rows. Delete this "
            "folder to resume from the step before."
        )
    optimizers.restored()


def _fill(path: Path, wanted: State, missing: dict[str, int]) -> None:
    """Copy the rows of one file that this rank holds, and count them in `missing`."""
    with safe_open(path, "pt") as part:
        layout = parse_json(part.metadata()["layout"])
        for name in set(layout) & set(wanted):
            target, _, first = wanted[name]
            begin = layout[name][1]
            held = part.get_tensor(name)
            low, high = max(begin, first), min(begin + held.shape[0], first + target.shape[0])
            if low < high:
                target[low - first : high - first] = held[low - begin : high - begin].to(
                    target.device
                )
                missing[name] -= high - low
