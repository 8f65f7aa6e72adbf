"""The folders of a checkpoint on disk: one a step, under its name only when whole, checked by size and SHA-256."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nanochat.common import UserError, fsync_dir, read_json, sha256_of

FORMAT = 1


def steps(folder: Path) -> list[int]:
    """The complete steps in a folder, oldest first."""
    names = (path.parent.name.removeprefix("step_") for path in folder.glob("step_*/meta.json"))
    return sorted(int(name) for name in names if name.isdecimal())


def latest_step(folder: Path) -> int | None:
    """The newest complete step, or None."""
    found = steps(folder)
    return found[-1] if found else None


def step_dir(folder: Path, step: int) -> Path:
    """The folder of one step."""
    return folder / f"step_{step:06d}"


# --- writing -------------------------------------------------------------------------------------


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file that others may read as far as they may read the folder; OSError where the disk refuses."""
    try:
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, path, metadata)
    except SafetensorError as failure:
        code = re.search(r"os error (\d+)", str(failure))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from failure
    path.chmod(path.parent.stat().st_mode & 0o666)  # it was made readable to its owner only


def seal(path: Path) -> dict[str, Any]:
    """Make a file's content durable; return its size and hash, for meta.json."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return {"sha256": sha256_of(path), "bytes": path.stat().st_size}


def publish(temporary: Path, final: Path) -> None:
    """Give a complete folder its name; the name never shows a part."""
    fsync_dir(temporary)
    if final.exists():
        delete(final)
    os.rename(temporary, final)
    fsync_dir(final.parent)


def delete(folder: Path) -> None:
    """Remove a step: first its name, so that a kill in the middle leaves no half step behind."""
    doomed = folder.with_name(f".deleted-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def sweep(folder: Path) -> None:
    """Remove what a killed save or deletion left behind; called at the start of a stage, by one rank."""
    for pattern in (".tmp-*", ".deleted-*"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


# --- reading -------------------------------------------------------------------------------------


def verify(folder: Path, training: bool = True) -> str:
    """What is wrong with a step's files, or "" if sizes and hashes agree with meta.json.

    Without `training` the optimizer's files, twice as large as the model, are left out.
    """
    try:
        meta = read_json(folder / "meta.json")
        files = {name: (known["bytes"], known["sha256"]) for name, known in meta["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:  # not JSON, or not ours any more
        return f"meta.json cannot be read ({failure!r})"
    for name, (size, digest) in files.items():
        path = folder / name
        if name.startswith("optim-") and not training:
            continue
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes, not {size:,}"
        if sha256_of(path) != digest:
            return f"{name} has a wrong SHA-256"
    return ""


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """meta.json of a step."""
    where = step_dir(folder, step)
    try:
        meta = read_json(where / "meta.json")
    except ValueError as damage:
        raise UserError(
            f"{where / 'meta.json'} is damaged ({damage}); delete {where} to use the step before"
        ) from damage
    if meta.get("format") != FORMAT:
        raise UserError(f"{where} has checkpoint format {meta.get('format')}, this version reads {FORMAT}")
    return meta
