"""Find corpora by name.

A corpus is a folder of parquet shards in the base folder, made by nanochat.dataset.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import numpy as np

from nanochat.common import UserError, appendix, base_dir, sha256_of, tr, warn
from nanochat.data.shards import read_about, shard_paths
from nanochat.data.sources.published import SOURCES

MAKE_TINYWORLD = "python -m nanochat.dataset --data tinyworld"
MAKE_FINEWEB = "python -m nanochat.dataset -n 8"

# The key in corpus.json for documents that are left out, and the folder with a list for each shard.
DROPPED = "dropped"

Split = Literal["train", "val"]


@dataclass(frozen=True)
class Corpus:
    """A named folder of shards."""

    name: str
    folder: Path


def corpora() -> list[Corpus]:
    """Return the corpora in the base folder that have at least one shard, sorted by name."""
    root = base_dir() / "base_data"
    folders = sorted(root.iterdir()) if root.is_dir() else []
    found_corpora = []
    for folder in folders:
        is_hidden = folder.name.startswith(".")
        if folder.is_dir() and not is_hidden and shard_paths(folder):
            found_corpora.append(Corpus(folder.name, folder))
    return found_corpora


def existing(data: str) -> Path | None:
    """Return the path that a value of --data names, or None if there is no such file or folder."""
    try:
        path = Path(data).expanduser()
        return path if data and path.exists() else None
    except (OSError, RuntimeError):  # too long for a file name, or ~ with an unknown user
        return None


def resolve(data: str | None) -> Corpus:
    """Return the corpus called `data`, or else the corpus that was imported from the path `data`.

    None means the only corpus. Raises UserError (exit code 2) if no corpus, or more than one, fits.
    """
    available = corpora()
    if data is None:
        return _only_corpus(available)
    for corpus in available:
        if corpus.name == data:
            _warn_if_older(corpus)
            return corpus
    source = existing(data)
    if source is not None:
        return _imported(data, source, available)
    names = ", ".join(corpus.name for corpus in available)
    have = tr("there is no corpus yet")
    if names:
        have = tr("the corpora here are {names}", names=names)
    make = "python -m nanochat.dataset --data DIR"
    if data == "tinyworld":
        make = MAKE_TINYWORLD
    elif data in SOURCES:
        make = SOURCES[data].make(8)
    raise UserError(
        tr(
            "there is no corpus or folder {data!r}; {have}. Make it with: {make}",
            data=data,
            have=have,
            make=make,
        ),
        exit_code=2,
    )


def _only_corpus(available: list[Corpus]) -> Corpus:
    """Return the only one of the available corpora.

    Raises UserError (exit code 2) if there are none or several.
    """
    if len(available) == 1:
        _warn_if_older(available[0])
        return available[0]
    if available:
        raise UserError(
            tr(
                "there are several corpora ({names}); choose one with --data, such as "
                "--data {first}",
                names=", ".join(corpus.name for corpus in available),
                first=quote(available[0].name),
            ),
            2,
        )
    raise UserError(
        tr(
            "there is no training data in {folder}. Make some with one of\n"
            "  {tinyworld}    # small, made on this machine, no network\n"
            "  {fineweb}                # FineWeb-Edu, about 100 MB a shard\n"
            "and then train its tokenizer with\n  python -m scripts.tok_train",
            folder=base_dir() / "base_data",
            tinyworld=MAKE_TINYWORLD,
            fineweb=MAKE_FINEWEB,
        ),
        exit_code=2,
    )


def _imported(
    data: str,
    source: Path,
    available: list[Corpus],
) -> Corpus:
    """Return the corpus that was imported from the file or folder `source`.

    Raises UserError (exit code 2) if no corpus, or more than one, was imported from it.
    """
    imported = []
    for corpus in available:
        if read_about(corpus.folder).get("source") == str(source.resolve()):
            imported.append(corpus)
    if len(imported) == 1:
        return imported[0]
    if imported:
        names = tr(" and ").join(corpus.name for corpus in imported)
        raise UserError(
            tr(
                "{data} was imported as {names}; choose one with --data {name}",
                data=data,
                names=names,
                name=quote(imported[0].name),
            ),
            2,
        )
    raise UserError(
        tr(
            "{data} is not imported yet. Import it with: {command}",
            data=data,
            command=f"python -m nanochat.dataset --data {quote(data)}",
        ),
        2,
    )


def _warn_if_older(corpus: Corpus) -> None:
    """Warn if the corpus is a version of TinyWorld other than this package's."""
    about = read_about(corpus.folder)
    if about.get("kind") != "tinyworld":
        return
    tinyworld = appendix("nanochat.data.tinyworld.world")
    if tinyworld is not None and about.get("fingerprint") != tinyworld.VERSION:
        warn(
            tr(
                "the documents of TinyWorld in {folder} are of another version than the "
                "conversations of this program. A new model should learn from one version: "
                "make the documents again with `{tinyworld}`, then train a tokenizer and a "
                "base model under another --model_tag. Older models still chat.",
                folder=corpus.folder,
                tinyworld=MAKE_TINYWORLD,
            )
        )


def shards(corpus: Corpus, split: Split) -> list[Path]:
    """Return the paths of a split's shards: the last one for validation, the others for training.

    Raises UserError (exit code 2) if any are missing or there are fewer than two.
    """
    about = read_about(corpus.folder)
    recorded = about.get("shards", {})
    paths = shard_paths(corpus.folder)
    make = about.get("make", f"python -m nanochat.dataset --data {quote(corpus.name)}")
    missing = [name for name in recorded if not (corpus.folder / name).exists()]
    if missing:
        raise UserError(
            tr(
                "{count} of {all} shards of {corpus} are missing, the first is {first}. Get them "
                "with: {make}",
                count=len(missing),
                all=len(recorded),
                corpus=corpus.name,
                first=missing[0],
                make=make,
            ),
            exit_code=2,
        )
    if len(paths) < 2:
        raise UserError(
            tr(
                "a corpus needs at least two shards, one for training and one for "
                "validation; {folder} has {paths_count}. Get more with: {make}",
                folder=corpus.folder,
                paths_count=len(paths),
                make=make,
            ),
            exit_code=2,
        )
    return paths[-1:] if split == "val" else paths[:-1]


# --- documents that are left out, as prepare/clean.py has decided --------------------------------


def list_of_dropped(shard: Path) -> Path:
    """Return the path of the .npy file with the indices of the documents left out of a shard."""
    return shard.parent / DROPPED / f"{shard.stem}.npy"


def dropped_entry(shard: Path) -> dict[str, Any]:
    """Return the corpus.json entry for the documents left out of a shard, or {} if there are none.

    The entry holds the count of these documents and the SHA-256 of the file that lists them.
    """
    entries = read_about(shard.parent).get(DROPPED, {}).get("shards", {})
    entry = entries.get(shard.name, {})
    return entry if entry.get("documents") else {}


def dropped_documents(shard: Path) -> frozenset[int]:
    """Return the indices of the documents that are left out of a shard.

    The indices count from 0, in the order in which shards.batches() yields the documents. Raises
    UserError if the file that lists the indices is damaged or missing.
    """
    entry = dropped_entry(shard)
    if not entry:
        return frozenset()
    path = list_of_dropped(shard)
    if not path.exists() or sha256_of(path) != entry["sha256"]:
        problem = tr("damaged") if path.exists() else tr("missing")
        make = read_about(shard.parent)[DROPPED]["make"]
        raise UserError(
            tr(
                "{path}, the list of the documents that are left out, is {problem}. Make "
                "it again with: {make}",
                path=path,
                problem=problem,
                make=make,
            )
        )
    return frozenset(np.load(path).tolist())


def dropped_summary(chosen: Sequence[Corpus]) -> dict[str, str]:
    """Return a dict from label to report line, for the corpora that have left-out documents."""
    lines = {}
    for corpus in chosen:
        dropped = read_about(corpus.folder).get(DROPPED, {})
        count = dropped.get("documents")
        if count:
            total = dropped["of"]
            share = f"{count / total:.2%}"
            lines[f"left out of {corpus.name}"] = f"{count:,} of {total:,} documents ({share})"
    return lines
