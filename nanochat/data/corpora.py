"""Corpora by name: each is a folder of parquet shards in the base folder; dataset.py makes them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanochat.common import UserError, base_dir
from nanochat.data.shards import read_about, shard_paths

MAKE_TINYWORLD = "python -m nanochat.dataset --data tinyworld"
MAKE_FINEWEB = "python -m nanochat.dataset -n 8"

Split = Literal["train", "val"]


@dataclass(frozen=True)
class Corpus:
    """A named folder of shards."""

    name: str
    folder: Path


def corpora() -> list[Corpus]:
    """Every corpus in the base folder that has a shard, by name."""
    root = base_dir() / "base_data"
    folders = sorted(root.iterdir()) if root.is_dir() else []
    known = [f for f in folders if f.is_dir() and not f.name.startswith(".")]
    return [Corpus(f.name, f) for f in known if shard_paths(f)]


def resolve(data: str | None) -> Corpus:
    """The corpus of a name, or of the folder it was imported from; None means the only one there is.

    UserError with exit code 2 and the commands to type if there is none, or several and none was named.
    """
    there = corpora()
    names = ", ".join(corpus.name for corpus in there)
    if data is None:
        if len(there) == 1:
            return there[0]
        if there:
            raise UserError(f"there are several corpora ({names}); choose one, such as --data {there[0].name}", 2)
        raise UserError(
            f"no training data in {base_dir() / 'base_data'}. Make some with one of\n"
            f"  {MAKE_TINYWORLD}    # small, made on this machine, no network\n"
            f"  {MAKE_FINEWEB}                # FineWeb-Edu, about 100 MB a shard\n"
            "and then train its tokenizer with\n  python -m scripts.tok_train",
            exit_code=2,
        )
    for corpus in there:
        if corpus.name == data:
            return corpus
    source = Path(data).expanduser()
    if source.exists():
        imported = [c for c in there if read_about(c.folder).get("source") == str(source.resolve())]
        if len(imported) == 1:
            return imported[0]
        if imported:
            raise UserError(f"{data} was imported as {' and '.join(c.name for c in imported)}; name one of them", 2)
        raise UserError(f"{data} is not imported yet. Do it with: python -m nanochat.dataset --data {data}", 2)
    make = {"tinyworld": MAKE_TINYWORLD, "fineweb": MAKE_FINEWEB}.get(data, "python -m nanochat.dataset --data DIR")
    have = f"there is {names}" if names else "there is none yet"
    raise UserError(f"no corpus or folder {data!r}; {have}. Make it with: {make}", exit_code=2)


def shards(corpus: Corpus, split: Split) -> list[Path]:
    """The shards to train on, or the last one, which validates. UserError (code 2) if the corpus is incomplete."""
    about = read_about(corpus.folder)
    paths = shard_paths(corpus.folder)
    make = about.get("make", f"python -m nanochat.dataset --data {corpus.name}")
    missing = [name for name in about.get("shards", {}) if not (corpus.folder / name).exists()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(about['shards'])} shards of {corpus.name} are missing, the first {missing[0]}. "
            f"Go on with: {make}",
            exit_code=2,
        )
    if len(paths) < 2:
        raise UserError(
            f"a corpus needs two shards, one to train on and one to validate; {corpus.folder} has {len(paths)}. "
            f"Get more with: {make}",
            exit_code=2,
        )
    return paths[-1:] if split == "val" else paths[:-1]
