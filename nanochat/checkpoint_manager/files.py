"""Manages step folders, which appear only when complete and are verified by sizes and hashes."""

import contextlib
import hashlib
import json
import os
import reprlib
import shutil
import time
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.parts.index import INDEX, read_index
from nanochat.common import (
    UserError,
    fsync_path,
    read_json,
    sha256_of,
    to_json,
    tr,
    warn,
    write_json,
)
from nanochat.data.library_words import in_words, os_problem

FORMAT = 1
# The types of the entries that meta.json must have (NEEDED) or may have (OPTIONAL), and of those
# that its "state" (STATE) and its "made_with" (CODE) may have.
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
NUMBERS = ("meter", "scale", "norms")  # entries of the state that hold only numbers
# The parameters of a step are in MODEL, or in one file per rank with an INDEX. Those of an adapter
# are in ADAPTER, the file that peft reads.
MODEL = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."  # begins all names in that file
HASH_THREADS = 4  # files verified at once: Python releases its lock while hashing


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` on success and removed on failure.

    Raises UserError (exit code 2) if `folder` already exists.
    """
    if folder.exists():
        raise UserError(
            tr("{folder} exists already: name another folder, or delete it", folder=folder),
            exit_code=2,
        )
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
    """Return a list of the complete steps in the folder of a run, in ascending order."""
    numbers = []
    for path in folder.glob("step_*/meta.json"):
        number = path.parent.name.removeprefix("step_")
        if number.isdecimal() and path.parent == step_dir(folder, int(number)):
            numbers.append(int(number))
    return sorted(numbers)


def latest_step(folder: Path) -> int | None:
    """Return the newest complete step in the folder of a run, or None if there is none."""
    return max(steps(folder), default=None)


def step_dir(folder: Path, step: int) -> Path:
    """Return the path of a step's folder in the folder of a run."""
    return folder / f"step_{step:06d}"


# --- writing -------------------------------------------------------------------------------------


def seal(path: Path) -> dict[str, Any]:
    """Flush a file to disk, and return a dict with its SHA-256 and size, for meta.json."""
    fsync_path(path)
    return {"sha256": sha256_of(path), "bytes": path.stat().st_size}


def write_meta(folder: Path, record: dict[str, Any]) -> None:
    """Write `record` and its SHA-256 to the meta.json of a folder.

    The hash reveals damage that leaves the file valid JSON, such as a flipped bit.
    """
    content = json.loads(to_json(record))
    write_json(folder / "meta.json", {**content, "sha256": _digest(content)})


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def publish(temporary: Path, final: Path) -> None:
    """Rename a complete folder to its final name, so that readers never see an incomplete step.

    An existing folder of that name is removed first.
    """
    fsync_path(temporary)
    if os.path.lexists(final):
        delete(final)
    os.rename(temporary, final)
    fsync_path(final.parent)


def delete(folder: Path) -> None:
    """Remove the folder of a step, or whatever else has its name; links are not followed.

    The folder is renamed first, so that a killed process leaves no partial step.
    """
    doomed = folder.with_name(f".deleted-{folder.name}")
    _remove(doomed)
    os.rename(folder, doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    """Remove a folder with its content, a file or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def prune(folder: Path, keep: int, newest: int) -> None:
    """Remove all steps up to `newest` except the last `keep`; a `keep` of 0 removes none.

    Steps after `newest`, which are damaged ones that the run did not resume from, are neither
    counted nor removed. Failure to remove a step only causes a warning.
    """
    if keep <= 0:
        return
    counted_steps = [step for step in steps(folder) if step <= newest]
    for step in counted_steps[:-keep]:
        doomed = step_dir(folder, step)
        try:
            delete(doomed)
        except OSError as failure:
            warn(
                tr(
                    "{doomed} could not be removed ({failure}); training continues: delete "
                    "it yourself",
                    doomed=doomed,
                    failure=in_words(failure),
                )
            )


def set_aside(folder: Path, after: int) -> Path | None:
    """Move all steps later than `after` to a new subfolder, and return the subfolder's path.

    Returns None if there are no such steps. metrics.jsonl and samples.jsonl are copied there, too.
    Without the move, a run restarted from `after` could later resume from one of these steps.
    """
    later_steps = [step for step in steps(folder) if step > after]
    if not later_steps:
        return None
    target = _unused(folder / f"set-aside-{time.strftime('%Y%m%d-%H%M%S')}")
    target.mkdir()
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (folder / name).exists():
            shutil.copy2(folder / name, target)
    # The newest step goes first: if the process is killed, the run resumes from an older one.
    for step in reversed(later_steps):
        os.rename(step_dir(folder, step), step_dir(target, step))
    fsync_path(target)
    fsync_path(folder)
    return target


def _unused(path: Path) -> Path:
    """Return `path` if nothing exists there, else `path` with the first free suffix -2, -3, ..."""
    candidate = path
    number = 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def sweep(folder: Path) -> None:
    """Remove the leftovers of killed saves and deletions from the folder of a run.

    Only one rank calls this, at the start of a stage.
    """
    for pattern in (".tmp-*", ".deleted-*"):
        for leftover in folder.glob(pattern):
            with contextlib.suppress(OSError):
                _remove(leftover)


# --- verifying -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seal:
    """The size and the hash that meta.json records for a file."""

    size: int
    sha256: str


def verify(folder: Path, training: bool = True) -> str:
    """Return what is wrong with the step in a folder, or "" if the step is undamaged.

    Every file that meta.json lists must have the size and hash recorded there. If `training` is
    false, the optimizer files are not checked.
    """
    try:
        meta = read_json(folder / "meta.json")
        expected_digest = meta.pop("sha256", None)  # steps of early versions do not have it
        seals = {
            name: _Seal(int(record["bytes"]), record["sha256"])
            for name, record in meta["files"].items()
        }
        is_intact = expected_digest in (None, _digest(meta))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as failure:  # not our format
        reason = failure if isinstance(failure, OSError) else failure.__cause__
        cause = in_words(reason) if reason else repr(failure)
        return tr("meta.json cannot be read ({cause})", cause=cause)
    if not is_intact:
        return tr("meta.json has a wrong SHA-256")
    outside = [name for name in seals if Path(name).name != name]
    if outside:
        return tr(
            "meta.json names a file outside its folder ({file})", file=reprlib.repr(outside[0])
        )
    if not training:
        seals = {
            name: expected for name, expected in seals.items() if not name.startswith("optim-")
        }
    problem = _size_problem(folder, seals) or _hash_problem(folder, seals)
    if not problem and INDEX in seals:
        problem = _index_problem(folder, seals)
    return problem


def _size_problem(folder: Path, seals: Mapping[str, _Seal]) -> str:
    """Return a message about a missing, irregular or wrongly sized file, or "" if all are right."""
    for name, expected in seals.items():
        path = folder / name
        if not path.exists():
            return tr("{name} is missing", name=name)
        if not path.is_file():
            return tr("{name} is not a regular file", name=name)
        size = path.stat().st_size
        if size != expected.size:
            return tr(
                "{name} has {size:,} bytes, not {expected:,}",
                name=name,
                size=size,
                expected=expected.size,
            )
    return ""


def _hash_problem(folder: Path, seals: Mapping[str, _Seal]) -> str:
    """Return a message about an unreadable or changed file, or "" if all hashes are right."""
    paths = [folder / name for name in seals]
    try:
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            digests = list(pool.map(sha256_of, paths))
    except OSError as failure:
        file = failure.filename or tr("a file")
        return tr("{file} cannot be read ({strerror})", file=file, strerror=os_problem(failure))
    for name, digest in zip(seals, digests, strict=True):
        if digest != seals[name].sha256:
            return tr("{name} has a wrong SHA-256", name=name)
    return ""


def _index_problem(folder: Path, verified_files: Container[str]) -> str:
    """Return what is wrong with the index of a step's parameter files, or "" if nothing is.

    Every file that the index names must exist and be one of `verified_files`.
    """
    try:
        places = read_index(folder)
    except (ValueError, OSError) as failure:
        return in_words(failure)
    indexed_files = {piece.file for pieces in places.values() for piece in pieces}
    unknown = sorted(file for file in indexed_files if file not in verified_files)
    if unknown:
        return tr(
            "{index} names {file}, which meta.json does not know", index=INDEX, file=unknown[0]
        )
    return ""


# --- meta.json -----------------------------------------------------------------------------------


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """Return the content of a step's meta.json, without checking its hash.

    Raises OSError if the file is missing, and UserError if it is not JSON, has another format or
    has an invalid value.
    """
    where = step_dir(folder, step)
    try:
        meta = read_json(where / "meta.json")
    except ValueError as damage:
        raise _damaged(where, str(damage.__cause__)) from damage
    if not isinstance(meta, dict):
        raise _damaged(where, tr("it is not an object"))
    if meta.get("format") != FORMAT:
        raise UserError(
            tr(
                "{where} has checkpoint format {saved_format}, this version reads {format}: use the "
                "version that wrote it, or name another checkpoint",
                where=where,
                saved_format=reprlib.repr(meta.get("format")),
                format=FORMAT,
            )
        )
    problem = _type_problem(meta, step)
    if problem:
        raise _damaged(where, problem)
    return meta


def weights_hash(meta: dict[str, Any]) -> str:
    """Return a hash of a step's parameters, from the content of the step's meta.json.

    This is the recorded hash of the parameter file or, if there are several, the SHA-256 of the
    names and hashes of these files and their index.
    """
    files = meta["files"]
    if INDEX not in files:
        name = MODEL if MODEL in files else ADAPTER
        return files[name]["sha256"]
    hashes = {name: record["sha256"] for name, record in files.items() if name.startswith("model")}
    return _digest(hashes)


def _damaged(where: Path, why: str) -> UserError:
    return UserError(
        tr(
            "{where} is damaged ({why}): delete {folder} to use the step before it",
            where=where / "meta.json",
            why=why,
            folder=where,
        )
    )


def _type_problem(meta: dict[str, Any], step: int) -> str:
    """Return a description of an invalid value in meta.json, or "" if there is none.

    A value is invalid if its type is wrong, if it is required but missing, or if it is a step other
    than `step`.
    """
    problem = _wrong_kind(meta, NEEDED, missing_is_wrong=True)
    if problem:
        return problem
    corpus = meta["config"].get("corpus", "")
    if meta["step"] != step or not isinstance(corpus, str):
        return tr(
            "it describes step {step} of corpus {corpus}",
            step=meta["step"],
            corpus=reprlib.repr(corpus),
        )
    return (
        _wrong_kind(meta, OPTIONAL)
        or _wrong_kind(meta["state"], STATE)
        or _wrong_kind(meta.get("made_with", {}), CODE)
        or _wrong_numbers(meta["state"])
        or _wrong_files(meta["files"])
    )


def _wrong_kind(
    table: Mapping[str, Any], kinds: Mapping[str, type], missing_is_wrong: bool = False
) -> str:
    for name, kind in kinds.items():
        if name not in table and not missing_is_wrong:
            continue
        value = table.get(name)
        if type(value) is not kind:
            return tr(
                "its {name!r} is {value}, expected {kind}",
                name=name,
                value=reprlib.repr(value),
                kind=kind.__name__,
            )
    return ""


def _wrong_numbers(state: Mapping[str, Any]) -> str:
    for name in NUMBERS:
        content = state.get(name, [])
        values = content.values() if isinstance(content, dict) else content
        for value in values:
            if type(value) not in (int, float):
                return tr(
                    "its {name!r} holds {value}, expected a number",
                    name=name,
                    value=reprlib.repr(value),
                )
    return ""


def _wrong_files(files: Mapping[str, Any]) -> str:
    for name, record in files.items():
        is_complete = isinstance(record, dict)
        if is_complete:
            has_size = type(record.get("bytes")) is int
            is_complete = has_size and type(record.get("sha256")) is str
        if not is_complete:
            return tr(
                "its file {name} is described by {record}",
                name=reprlib.repr(name),
                record=reprlib.repr(record),
            )
    return ""
