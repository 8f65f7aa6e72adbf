"""Finds corpora by name: each corpus is a folder of parquet shards in the base folder, made by dataset.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import numpy as np

from nanochat.common import UserError, base_dir, sha256_of, tr, warn
from nanochat.data.shards import read_about, shard_paths
from nanochat.data.sources.table import SOURCES
from nanochat.data.tinyworld import world as tinyworld

MAKE_TINYWORLD = "python -m nanochat.dataset --data tinyworld"
MAKE_FINEWEB = "python -m nanochat.dataset -n 8"

DROPPED = "dropped"  # in corpus.json, and the folder with a list for each shard: the documents that are left out

Split = Literal["train", "val"]


@dataclass(frozen=True)
class Corpus:
    """A named folder of shards."""

    name: str
    folder: Path


def corpora() -> list[Corpus]:
    """Every corpus in the base folder that has at least one shard, sorted by name."""
    root = base_dir() / "base_data"
    folders = sorted(root.iterdir()) if root.is_dir() else []
    known = [f for f in folders if f.is_dir() and not f.name.startswith(".")]
    return [Corpus(f.name, f) for f in known if shard_paths(f)]


def existing(data: str) -> Path | None:
    """The file or folder that a value of --data names; None if there is none, or if no file can have this name."""
    try:
        path = Path(data).expanduser()
        return path if data and path.exists() else None
    except (OSError, RuntimeError):  # too long for a file, or ~ with a user whom nobody knows
        return None


def resolve(data: str | None) -> Corpus:
    """The corpus with a name, or the corpus that was imported from a folder; None means the only corpus.

    UserError (code 2) with the command to type if there is no such corpus, or if `data` is None and there are several.
    """
    there = corpora()
    names = ", ".join(corpus.name for corpus in there)
    if data is None:
        if len(there) == 1:
            _warn_if_older(there[0])
            return there[0]
        if there:
            raise UserError(
                tr(
                    "there are several corpora ({names}); choose one with --data, such as --data {first}",
                    names=names,
                    first=quote(there[0].name),
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
    for corpus in there:
        if corpus.name == data:
            _warn_if_older(corpus)
            return corpus
    if (source := existing(data)) is not None:
        imported = [c for c in there if read_about(c.folder).get("source") == str(source.resolve())]
        if len(imported) == 1:
            return imported[0]
        if imported:
            names = " and ".join(c.name for c in imported)
            raise UserError(
                f"{data} was imported as {names}; choose one with --data {quote(imported[0].name)}",
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
    make = "python -m nanochat.dataset --data DIR"
    make = (
        MAKE_TINYWORLD
        if data == "tinyworld"
        else SOURCES[data].make(8)
        if data in SOURCES
        else make
    )
    have = (
        tr("the corpora here are {names}", names=names) if names else tr("there is no corpus yet")
    )
    raise UserError(
        tr(
            "there is no corpus or folder {data!r}; {have}. Make it with: {make}",
            data=data,
            have=have,
            make=make,
        ),
        exit_code=2,
    )


def _warn_if_older(corpus: Corpus) -> None:
    """Say so if TinyWorld was made by another version of this package, whose facts and stories can differ."""
    about = read_about(corpus.folder)
    if about.get("kind") == "tinyworld" and about.get("fingerprint") != tinyworld.VERSION:
        warn(
            f"the documents of TinyWorld in {corpus.folder} are of another version than the conversations of this "
            f"program. A new model should learn from one version: make the documents again with `{MAKE_TINYWORLD}`, "
            "then train a tokenizer and a base model under another --model_tag. Older models still chat."
        )


def shards(corpus: Corpus, split: Split) -> list[Path]:
    """The shards of a split: the last shard is for validation, the others for training. UserError (code 2) if the
    corpus is incomplete."""
    about = read_about(corpus.folder)
    paths = shard_paths(corpus.folder)
    make = about.get("make", f"python -m nanochat.dataset --data {quote(corpus.name)}")
    missing = [name for name in about.get("shards", {}) if not (corpus.folder / name).exists()]
    if missing:
        raise UserError(
            tr(
                "{count} of {all} shards of {corpus} are missing, the first is {first}. Get them with: {make}",
                count=len(missing),
                all=len(about["shards"]),
                corpus=corpus.name,
                first=missing[0],
                make=make,
            ),
            exit_code=2,
        )
    if len(paths) < 2:
        raise UserError(
            f"a corpus needs at least two shards, one for training and one for validation; {corpus.folder} has "
            f"{len(paths)}. "
            f"Get more with: {make}",
            exit_code=2,
        )
    return paths[-1:] if split == "val" else paths[:-1]


def list_of_dropped(shard: Path) -> Path:
    """The file with the numbers of the documents of a shard that are left out."""
    return shard.parent / DROPPED / f"{shard.stem}.npy"


def dropped_of(shard: Path) -> dict[str, Any]:
    """What corpus.json says about the documents of a shard that are left out: how many, and the SHA-256 of their list.
    {} if all are kept."""
    known = read_about(shard.parent).get(DROPPED, {}).get("shards", {}).get(shard.name, {})
    return known if known.get("documents") else {}


def told_of_dropped(those: Sequence[Corpus]) -> dict[str, str]:
    """For the report: how many documents of each corpus are left out, of those that leave out any."""
    about = {corpus.name: read_about(corpus.folder).get(DROPPED, {}) for corpus in those}
    return {
        f"left out of {name}": f"{one['documents']:,} of {one['of']:,} documents ({one['documents'] / one['of']:.2%})"
        for name, one in about.items()
        if one.get("documents")
    }


def dropped_documents(shard: Path) -> frozenset[int]:
    """The numbers of the documents of a shard that are left out, counted as `batches` gives them. UserError if their
    list is damaged."""
    known, path = dropped_of(shard), list_of_dropped(shard)
    if not known:
        return frozenset()
    if not path.exists() or sha256_of(path) != known["sha256"]:
        raise UserError(
            f"{path}, the list of the documents that are left out, is {'damaged' if path.exists() else 'missing'}. "
            f"Make it again with: {read_about(shard.parent)[DROPPED]['make']}"
        )
    return frozenset(np.load(path).tolist())
