"""Makes or fetches a corpus, a named folder of parquet shards: TinyWorld, FineWeb-Edu, or your own files.

python -m nanochat.dataset --data tinyworld          # made on this machine, no network
python -m nanochat.dataset -n 8                      # FineWeb-Edu: 8 training shards and the validation shard
python -m nanochat.dataset --data DIR --name NAME    # your own .parquet, .jsonl or .txt files
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from nanochat.common import UserError, base_dir, log, run, visible, write_json
from nanochat.data.corpora import MAKE_FINEWEB, MAKE_TINYWORLD, Corpus, resolve, shards
from nanochat.data.download import Patience, Remote, check_space, fetch_all, part_size, probe_size
from nanochat.data.hub import endpoint, hub_headers
from nanochat.data.shards import ABOUT, check_parquet, check_sha256, read_about, shard_name, shard_paths, write_shards
from nanochat.data.textfiles import READERS, documents
from nanochat.data.tinyworld import world as tinyworld
from nanochat.runtime.progress import Progress, amount

FINEWEB_PATH = "datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main"
FINEWEB_LAST = 1822  # the validation shard, whatever the number of training shards


# --- TinyWorld -----------------------------------------------------------------------------------


def make_tinyworld() -> Corpus:
    """Write TinyWorld, unless the version of this package is already there."""
    corpus = Corpus("tinyworld", base_dir() / "base_data" / "tinyworld")
    about = {"kind": "tinyworld", "make": MAKE_TINYWORLD, "fingerprint": tinyworld.VERSION}
    if _is_made(corpus, about):
        return corpus
    return _make(corpus, tinyworld.documents(), about)


def _is_made(corpus: Corpus, about: dict[str, Any]) -> bool:
    """Whether a complete corpus with exactly this description exists."""
    there = read_about(corpus.folder)
    if {key: there.get(key) for key in about} != about:
        return False
    if any(not (corpus.folder / name).exists() for name in there["shards"]):
        return False
    log(f"{corpus.name} is already there: {_summary(there)} in {corpus.folder}")
    return True


def _make(corpus: Corpus, source: Iterable[str], about: dict[str, Any]) -> Corpus:
    with Progress(corpus.name, None, "documents") as progress:

        def counted() -> Iterator[str]:
            for text in source:
                yield text
                progress.advance(1)

        made = write_shards(corpus.folder, counted(), about=about)
    log(f"wrote {_summary(made)} to {corpus.folder}")
    return corpus


def _summary(about: dict[str, Any]) -> str:
    counts, characters = about["documents"], about["characters"]
    return (
        f"{counts['train']:,} documents ({characters['train']:,} characters) for training, "
        f"{counts['val']:,} held out, {len(about['shards'])} shards"
    )


# --- FineWeb-Edu ---------------------------------------------------------------------------------


def fineweb_urls(count: int) -> list[str]:
    """The addresses of the first `count` training shards and of the validation shard; -1 means all."""
    if count < -1 or count == 0 or count > FINEWEB_LAST:
        raise UserError(f"FineWeb-Edu has 1 to {FINEWEB_LAST} training shards, or -1 for all, got {count}", 2)
    numbers = [*range(FINEWEB_LAST if count == -1 else count), FINEWEB_LAST]
    return [f"{endpoint()}/{FINEWEB_PATH}/{shard_name(number)}" for number in numbers]


def download_fineweb(count: int, parallel: int = 3, patience: Patience | None = None) -> Corpus:
    """Fetch training shards 0 .. count-1 and the validation shard. Complete shards are kept, partial ones resumed.

    Uses HF_ENDPOINT, HF_TOKEN (for the hub itself only) and the usual proxy variables. UserError if the network or the
    server fails, or if the disk is too small.
    """
    corpus = Corpus("fineweb", base_dir() / "base_data" / "fineweb")
    remotes = [Remote(url, corpus.folder / url.rpartition("/")[2]) for url in fineweb_urls(count)]
    missing = [remote for remote in remotes if not remote.path.exists()]
    files = {path.name: {"bytes": path.stat().st_size} for path in shard_paths(corpus.folder)}
    files |= {remote.path.name: {} for remote in missing}
    for name, known in read_about(corpus.folder).get("shards", {}).items():
        if name in files and (corpus.folder / name).exists():
            files[name] = known
    most = sum(name != shard_name(FINEWEB_LAST) for name in files)
    about = {"kind": "download", "make": f"python -m nanochat.dataset -n {most}"}
    corpus.folder.mkdir(parents=True, exist_ok=True)

    def note() -> None:
        write_json(corpus.folder / ABOUT, {**about, "shards": dict(sorted(files.items()))})

    if missing:
        hint = _network_hint(missing[0].url)
        headers = hub_headers(missing[0].url)
        size = probe_size(missing[0].url, headers, patience, hint) or 0  # the shards are nearly equal
        begun = sum(part_size(remote.path) for remote in missing)
        check_space(corpus.folder, size * len(missing) - begun)
        note()  # before the download, so that a stopped one is known to be incomplete
        with Progress(f"{corpus.name}, {len(missing)} shards", size * len(missing), "B") as progress:
            progress.advance(begun, skipped=True)
            arrived = fetch_all(
                missing, headers, patience, parallel, hint, check_parquet, progress.advance, progress.say
            )
        files |= {file.path.name: {"bytes": file.bytes, "sha256": file.sha256} for file in arrived}
    note()
    held = sum(path.stat().st_size for path in shard_paths(corpus.folder))
    log(f"{corpus.name}: {len(files) - 1} training shards and 1 for validation, {amount(held, 'B')} in {corpus.folder}")
    return corpus


def _network_hint(url: str) -> str:
    mirror = "" if "hf-mirror.com" in url else "set HF_ENDPOINT=https://hf-mirror.com, or "
    return (
        f"If this machine cannot reach that host, {mirror}set https_proxy, and type the same command again: it "
        f"resumes the download. Without a network, use TinyWorld: {MAKE_TINYWORLD}"
    )


# --- your own files ------------------------------------------------------------------------------


def import_folder(source: Path, name: str | None = None, text_column: str = "text") -> Corpus:
    """Make a corpus from a .parquet, .jsonl or .txt file, or from all such files in a folder and its subfolders.

    Files are read in order of path. A .txt file is one document, split at lines `<|endoftext|>` and, beyond 20,000
    characters, at the next blank line. UserError names the file and line that cannot be read.
    """
    source = source.expanduser().resolve()
    name = name or source.stem
    if not name or name.startswith(".") or {*"/:,"} & {*name} or visible(name) != name:
        raise UserError(
            "the name of a corpus must be a plain folder name without / : , and control characters, got "
            f"{name!r}; choose one with --name",
            2,
        )
    if visible(str(source)) != str(source):
        raise UserError(f"the path {source} has control characters or is not UTF-8: rename the file or folder", 2)
    corpus = Corpus(name, base_dir() / "base_data" / name)
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    files = [path for path in files if path.suffix in READERS]
    if not files:
        raise UserError(
            f"{source} holds no {', '.join(READERS)} file, so there is nothing to import; check the path, or convert "
            "your files to one of these formats",
            exit_code=2,
        )
    state = hashlib.sha256(str([(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]).encode())
    make = f"python -m nanochat.dataset --data {source} --name {name}"
    make += f" --text_column {text_column}" if text_column != "text" else ""
    about = {"kind": "import", "make": make, "source": str(source), "fingerprint": state.hexdigest()}
    if _is_made(corpus, about):
        return corpus
    if name in ("tinyworld", "fineweb") or (
        corpus.folder.exists() and read_about(corpus.folder).get("source") != str(source)
    ):
        raise UserError(f"another corpus is already named {name!r}; choose another name with --name", exit_code=2)
    return _make(corpus, documents(files, text_column), about)


# --- command line --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Make or fetch training data."""

    num_files: Annotated[int | None, tyro.conf.arg(aliases=("-n",))] = None
    """How many training shards of FineWeb-Edu to fetch, about 100 MB each; -1 fetches all.
    The validation shard always comes with them."""
    data: str | None = None
    """What to make or fetch: tinyworld, fineweb, or a file or folder of your own .parquet, .jsonl or .txt files."""
    name: str | None = None
    """The name of the corpus that is made from your own files. Default: the name of the file or folder."""
    text_column: str = "text"
    """The column or JSON field of your own files that holds the text."""
    num_workers: Annotated[int, tyro.conf.arg(aliases=("-w",))] = 3
    """How many shards of FineWeb-Edu to fetch at the same time."""
    list_urls: bool = False
    """Only print the addresses of the FineWeb-Edu shards, to fetch them on another machine."""
    verify: bool = False
    """Only check a corpus: read every shard and compare its SHA-256 with the recorded one."""


def main(cfg: Config) -> None:
    """Do what the command line says, then name the next command."""
    if cfg.verify:
        corpus = resolve(cfg.data)
        paths = shards(corpus, "train") + shards(corpus, "val")
        for path in paths:
            check_sha256(path)
        log(f"{corpus.name}: all {len(paths)} shards are intact")
        return
    if cfg.num_files is not None or cfg.data == "fineweb":
        if cfg.num_files is None or cfg.data not in (None, "fineweb"):
            raise UserError(
                f"-n N sets the number of FineWeb-Edu shards: FineWeb-Edu needs it and other data cannot take it. "
                f"Type for example: {MAKE_FINEWEB}",
                exit_code=2,
            )
        if cfg.list_urls:
            print("\n".join(fineweb_urls(cfg.num_files)))
            return
        corpus = download_fineweb(cfg.num_files, cfg.num_workers)
    elif cfg.data == "tinyworld":
        corpus = make_tinyworld()
    elif cfg.data is not None and Path(cfg.data).expanduser().exists():
        corpus = import_folder(Path(cfg.data), cfg.name, cfg.text_column)
    else:
        what = "no data was named" if cfg.data is None else f"there is no file or folder {cfg.data!r}"
        raise UserError(
            f"{what}. Type one of\n  {MAKE_TINYWORLD}\n  {MAKE_FINEWEB}\n  python -m nanochat.dataset --data DIR",
            exit_code=2,
        )
    log(f"next: python -m scripts.tok_train --data {corpus.name}")


if __name__ == "__main__":
    run(main, Config, __doc__)
