"""This process's place in its job, as torchrun and nanochat.runtime.launch tell it in variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from nanochat.common import UserError

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # which process this is
MEETING = ("MASTER_ADDR", "MASTER_PORT")  # where the processes meet


@dataclass(frozen=True)
class Ranks:
    """Which process of a job this is; by default the only one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    meets: bool = False  # whether the launcher named a place where the processes meet


def read(met: bool, environ: Mapping[str, str] = os.environ) -> Ranks:
    """This process's place in its job. A variable that is empty counts as not set.

    `met`: the processes have met already, so that no variable needs to say where. UserError (code 2) if variables are
    missing or out of range: a process that guessed would wait for the others forever, or train without them.
    """
    variables = {name: environ.get(name, "").strip() for name in (*PLACE, *MEETING, "LOCAL_WORLD_SIZE")}
    if not any(variables[name] for name in PLACE):
        return Ranks()
    meets = all(variables[name] for name in MEETING)
    if variables["WORLD_SIZE"] == "1":
        return Ranks(_number(variables, "RANK", 0, 0), _number(variables, "LOCAL_RANK", 0, 0), 1,
                     meets and variables["RANK"] != "")  # fmt: skip
    missing = [name for name in (*PLACE, *(() if met else MEETING)) if not variables[name]]
    if missing:
        present = [name for name in PLACE if variables[name]]
        raise UserError(
            f"{', '.join(f'{name}={variables[name]}' for name in present)}: this process is part of a job of several, "
            f"but {', '.join(missing)} must be set too. Start the job with torchrun or python -m "
            f"nanochat.runtime.launch, which set them all; to run one process alone: unset {' '.join(present)}",
            exit_code=2,
        )
    world_size = _number(variables, "WORLD_SIZE", 1)
    here = _number(variables, "LOCAL_WORLD_SIZE", 1, world_size) or world_size
    if not met:
        _number(variables, "MASTER_PORT", 1, 65_535)
    rank, local_rank = _number(variables, "RANK", 0, world_size - 1), _number(variables, "LOCAL_RANK", 0, here - 1)
    return Ranks(rank, local_rank, world_size, meets)


def _number(variables: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    """The number in a variable, 0 if the variable is not set. UserError (code 2) if the number is out of range."""
    word = variables[name]
    if not word:
        return 0
    if not word.isdecimal() or int(word) < least or (most is not None and int(word) > most):
        rule = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise UserError(
            f"{name} must be a number {rule}, got {word!r}. torchrun and python -m nanochat.runtime.launch set it; to "
            f"run one process alone: unset {' '.join(PLACE)}",
            exit_code=2,
        )
    return int(word)
