"""Makes or fetches a corpus, a named folder of parquet shards: TinyWorld, a published corpus, or your own files.

python -m nanochat.dataset --data tinyworld          # made on this machine, no network
python -m nanochat.dataset -n 8                      # FineWeb-Edu: 8 training shards and the validation shard
python -m nanochat.dataset --data climbmix -n 8      # another published corpus; docs/data.md lists them
python -m nanochat.dataset --data DIR --name NAME    # your own .parquet, .jsonl, .txt or .md files
python -m nanochat.dataset --urls FILE --name NAME   # such files at the addresses that FILE lists
"""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

import tyro

from nanochat.common import UserError, log, run
from nanochat.data.corpora import MAKE_FINEWEB, MAKE_TINYWORLD, Corpus, existing, resolve, shards
from nanochat.data.shards import batches, check_sha256
from nanochat.data.sources.fetch import download
from nanochat.data.sources.folder import import_folder, make_tinyworld
from nanochat.data.sources.hub import Host
from nanochat.data.sources.table import SOURCES
from nanochat.data.sources.urls import download_urls
from nanochat.runtime.progress import Progress


@dataclass(frozen=True)
class Config:
    """Make or fetch training data."""

    num_files: Annotated[int | None, tyro.conf.arg(aliases=("-n",))] = None
    """How many training shards of a published corpus to fetch; -1 fetches all.
    The validation shard always comes with them."""
    data: str | None = None
    """What to make or fetch: tinyworld, fineweb, climbmix, fineweb-zh, fineweb-zh-v2.1, fineweb-zh-v2.2,
    or a file or folder of your own .parquet, .jsonl, .txt or .md files. With -n the default is fineweb."""
    host: Annotated[Host, tyro.conf.arg(name="from")] = "hub"
    """Where to fetch a published corpus from: the Hugging Face hub, which HF_ENDPOINT may replace by a mirror,
    or ModelScope."""
    urls: str | None = None
    """A file with addresses of .parquet, .jsonl, .txt or .md files, one a line.
    The SHA-256 of a file may follow its address."""
    name: str | None = None
    """The name of the corpus that is made from your own files or addresses. Default: the name of the file or folder."""
    text_column: str = "text"
    """The column or JSON field of your own files that holds the text."""
    num_workers: Annotated[int, tyro.conf.arg(aliases=("-w",))] = 3
    """How many files to fetch at the same time."""
    list_urls: bool = False
    """Only print the addresses of the files of a published corpus, to fetch them on another machine."""
    verify: bool = False
    """Only check a corpus: read every shard and compare its SHA-256 with the recorded one."""


def verify(corpus: Corpus) -> None:
    """Read every shard of a corpus, also those that were copied in and have no recorded SHA-256. UserError names the
    damaged shard and the command that fixes it."""
    paths = shards(corpus, "train") + shards(corpus, "val")
    for path in paths:
        check_sha256(path)
        for _ in batches(path):
            pass
    log(f"{corpus.name}: all {len(paths)} shards are intact")


def main(cfg: Config) -> None:
    """Do what the command line says, then name the next command."""
    if cfg.num_workers < 1:
        raise UserError(f"--num_workers must be at least 1, got {cfg.num_workers}", exit_code=2)
    published = (
        SOURCES.get(cfg.data or "fineweb") if cfg.data or cfg.num_files is not None else None
    )
    if cfg.verify:
        return verify(resolve(cfg.data))
    if cfg.urls is not None and cfg.data is None and cfg.num_files is None:
        corpus = download_urls(Path(cfg.urls), cfg.name, cfg.text_column, Progress, cfg.num_workers)
    elif cfg.urls is not None:
        raise UserError(
            "--urls lists every file to fetch, so it goes without --data and -n", exit_code=2
        )
    elif published is not None and cfg.num_files is not None:
        if cfg.list_urls:
            return print("\n".join(published.listing(cfg.num_files, cfg.host)))
        corpus = download(published, cfg.num_files, Progress, cfg.host, cfg.num_workers)
    elif published is not None or cfg.num_files is not None:
        raise UserError(
            f"-n N sets the number of shards of a published corpus ({', '.join(SOURCES)}), which needs it, and other "
            f"data cannot take it. Type for example: {published.make(8) if published else MAKE_FINEWEB}",
            exit_code=2,
        )
    elif cfg.data == "tinyworld":
        corpus = make_tinyworld(Progress)
    elif cfg.data is not None and (source := existing(cfg.data)) is not None:
        corpus = import_folder(source, cfg.name, cfg.text_column, Progress)
    else:
        what = (
            "no data was named" if cfg.data is None else f"there is no file or folder {cfg.data!r}"
        )
        raise UserError(
            f"{what}. Type one of\n  {MAKE_TINYWORLD}\n  {MAKE_FINEWEB}\n  python -m nanochat.dataset --data DIR\n"
            f"The published corpora are {', '.join(SOURCES)}.",
            exit_code=2,
        )
    log(f"next: python -m scripts.tok_train --data {quote(corpus.name)}")


if __name__ == "__main__":
    run(main, Config, __doc__)
