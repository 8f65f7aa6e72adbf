"""The step folders of a checkpoint: each gets its name only when complete; sizes and SHA-256 hashes verify it."""

import contextlib
import hashlib
import json
import os
import reprlib
import shutil
import time
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.parts.index import INDEX, read_index
from nanochat.common import UserError, fsync_path, read_json, sha256_of, to_json, warn, write_json

FORMAT = 1
# What meta.json must hold, and what of a resumed run's state and program it may hold, with the types.
NEEDED = {
    "step": int,
    "steps": int,
    "stage": str,
    "tokenizer_hash": str,
    "files": dict,
    "model": dict,
    "config": dict,
    "state": dict,
}
OPTIONAL = {"family": str, "made_with": dict, "base": dict, "lora": dict}
STATE = {"meter": dict, "scale": dict, "norms": list, "line": dict, "data": str}
CODE = {"code": dict, "other_code": dict}
# The parameters of a step: as one file, or in files of all ranks with an INDEX; of an adapter, as peft has them.
MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
HASHERS = 4  # threads that verify files: Python releases its lock while hashing


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder, which gets the name `folder` on success and is removed on failure. UserError (code 2)
    if `folder` exists already."""
    if folder.exists():
        raise UserError(f"{folder} exists already: name another folder, or delete it", exit_code=2)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, folder)
        fsync_path(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def seal(path: Path) -> dict[str, Any]:
    """Flush a file to disk; return its size and hash for meta.json."""
    fsync_path(path)
    return {"sha256": sha256_of(path), "bytes": path.stat().st_size}


def write_meta(folder: Path, record: dict[str, Any]) -> None:
    """Write meta.json with a hash of its content, because a flipped bit may leave the JSON readable."""
    content = json.loads(to_json(record))
    write_json(folder / "meta.json", {**content, "sha256": _digest(content)})


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def publish(temporary: Path, final: Path) -> None:
    """Rename a complete folder to its final name, so that no reader ever sees an incomplete step."""
    fsync_path(temporary)
    if final.exists():
        delete(final)
    os.rename(temporary, final)
    fsync_path(final.parent)


def delete(folder: Path) -> None:
    """Remove a step. Rename it first, so that a kill in the middle leaves no half step behind."""
    doomed = folder.with_name(f".deleted-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def prune(folder: Path, keep: int, newest: int) -> None:
    """Keep the last `keep` steps up to step `newest`, and remove the steps before them; 0 keeps all.

    Steps after `newest` do not count: they are damaged, and the run fell back from them. If a step cannot be removed,
    this function only warns, because the run can continue.
    """
    for old in [step for step in steps(folder) if step <= newest][:-keep] if keep > 0 else []:
        try:
            delete(step_dir(folder, old))
        except OSError as failure:
            warn(
                f"{step_dir(folder, old)} could not be removed ({failure}); training continues: delete it yourself"
            )


def set_aside(folder: Path, after: int) -> Path | None:
    """Move the steps after `after`, with a copy of the metrics, to a new folder; return it, or None without steps.

    A run that starts again at `after` saves lower step numbers, so these steps would pass for newer ones.
    """
    later = [step for step in steps(folder) if step > after]
    if not later:
        return None
    base = folder / f"set-aside-{time.strftime('%Y%m%d-%H%M%S')}"
    target, number = base, 1
    while target.exists():
        number += 1
        target = base.with_name(f"{base.name}-{number}")
    target.mkdir()
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (folder / name).exists():
            shutil.copy2(folder / name, target)
    for step in reversed(
        later
    ):  # after a kill in between, a run resumes from the older steps that are left
        os.rename(step_dir(folder, step), step_dir(target, step))
    fsync_path(target)
    fsync_path(folder)
    return target


def sweep(folder: Path) -> None:
    """Remove what a killed save or deletion left behind. One rank calls this at the start of a stage."""
    for pattern in (".tmp-*", ".deleted-*"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


# --- reading -------------------------------------------------------------------------------------


def verify(folder: Path, training: bool = True) -> str:
    """What is wrong with the files of a step, or "" if all sizes and hashes agree with meta.json.

    Without `training`, the optimizer's files are not checked; they are twice as large as the model.
    """
    try:
        meta = read_json(folder / "meta.json")
        digest = meta.pop("sha256", None)  # steps of early versions do not have it
        files = {
            name: (int(known["bytes"]), known["sha256"]) for name, known in meta["files"].items()
        }
        right = digest is None or digest == _digest(meta)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as failure:  # not in our format
        return f"meta.json cannot be read ({failure.__cause__ or failure!r})"
    if not right:
        return "meta.json has a wrong SHA-256"
    if outside := [name for name in files if Path(name).name != name]:
        return f"meta.json names a file outside its folder ({reprlib.repr(outside[0])})"
    if not training:
        files = {name: known for name, known in files.items() if not name.startswith("optim-")}
    for name, (size, _) in files.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if not path.is_file():
            return f"{name} is not a regular file"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes, not {size:,}"
    try:
        with ThreadPoolExecutor(HASHERS) as pool:
            digests = pool.map(sha256_of, (folder / name for name in files))
            wrong = [
                name
                for name, digest in zip(files, digests, strict=True)
                if digest != files[name][1]
            ]
    except OSError as failure:
        return f"{failure.filename or 'a file'} cannot be read ({failure.strerror})"
    if wrong:
        return f"{wrong[0]} has a wrong SHA-256"
    return _index_problem(folder, files) if INDEX in files else ""


def _index_problem(folder: Path, files: Container[str]) -> str:
    """What is wrong with the index of a step whose ranks wrote a file each: every file that it names must be there, and
    be one of those that were checked."""
    try:
        named = {file for pieces in read_index(folder).values() for file, _, _ in pieces}
    except (ValueError, OSError) as failure:
        return str(failure)
    unknown = sorted(file for file in named if file not in files)
    return f"{INDEX} names {unknown[0]}, which meta.json does not know" if unknown else ""


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """The content of a step's meta.json. UserError if it is damaged, of another format, or of a wrong type anywhere."""
    where = step_dir(folder, step)
    try:
        meta = read_json(where / "meta.json")
    except ValueError as damage:
        raise _damaged(where, str(damage.__cause__)) from damage
    if not isinstance(meta, dict):
        raise _damaged(where, "it is not an object")
    if meta.get("format") != FORMAT:
        raise UserError(
            f"{where} has checkpoint format {reprlib.repr(meta.get('format'))}, this version reads {FORMAT}: use the "
            "version that wrote it, or name another checkpoint"
        )
    if wrong := _wrong_types(meta, step):
        raise _damaged(where, wrong)
    return meta


def weights_hash(meta: dict[str, Any]) -> str:
    """The SHA-256 of the parameters that the meta.json of a step describes."""
    files = meta["files"]
    if INDEX not in files:
        return files[MODEL if MODEL in files else ADAPTER]["sha256"]
    named = {name: known["sha256"] for name, known in files.items() if name.startswith("model")}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _damaged(where: Path, why: str) -> UserError:
    return UserError(
        f"{where / 'meta.json'} is damaged ({why}): delete {where} to use the step before it"
    )


def _wrong_types(meta: dict[str, Any], step: int) -> str:
    """The first value of meta.json that has a wrong type, or ""."""
    for name, kind in NEEDED.items():
        if type(meta.get(name)) is not kind:
            return f"its {name!r} is {reprlib.repr(meta.get(name))}, expected {kind.__name__}"
    corpus = meta["config"].get("corpus", "")
    if meta["step"] != step or not isinstance(corpus, str):
        return f"it describes step {meta['step']} of corpus {reprlib.repr(corpus)}"
    made_with = meta.get("made_with", {})
    for table, kinds in ((meta, OPTIONAL), (meta["state"], STATE), (made_with, CODE)):
        for name, kind in kinds.items():
            if name in table and type(table[name]) is not kind:
                return f"its {name!r} is {reprlib.repr(table[name])}, expected {kind.__name__}"
    for name in ("meter", "scale", "norms"):
        held = meta["state"].get(name, [])
        values = list(held.values()) if isinstance(held, dict) else held
        if odd := [value for value in values if type(value) not in (int, float)]:
            return f"its {name!r} holds {reprlib.repr(odd[0])}, expected a number"
    for name, known in meta["files"].items():
        if not (
            isinstance(known, dict)
            and type(known.get("bytes")) is int
            and type(known.get("sha256")) is str
        ):
            return f"its file {reprlib.repr(name)} is described by {reprlib.repr(known)}"
    return ""
