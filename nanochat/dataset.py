"""Makes or fetches a corpus, which is a named folder of parquet shards.

A corpus is TinyWorld, a published corpus, or made from your own files.

python -m nanochat.dataset --data tinyworld          # made on this machine, no network
python -m nanochat.dataset -n 8                      # FineWeb-Edu: 8 training shards, 1 to validate
python -m nanochat.dataset --data climbmix -n 8      # another published corpus, see docs/data.md
python -m nanochat.dataset --data DIR --name NAME    # your own parquet, JSON, CSV, .txt or .md files
python -m nanochat.dataset --urls FILE --name NAME   # such files at the addresses that FILE lists
"""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

import tyro

from nanochat.common import UserError, log, tr
from nanochat.data.command_line import given, run
from nanochat.data.corpora import MAKE_FINEWEB, MAKE_TINYWORLD, Corpus, existing, resolve, shards
from nanochat.data.shards import batches, check_sha256
from nanochat.data.sources.fetch import download
from nanochat.data.sources.folder import import_folder, make_tinyworld
from nanochat.data.sources.hub import Host
from nanochat.data.sources.published import SOURCES
from nanochat.data.sources.urls import download_urls
from nanochat.runtime.progress import Progress


@dataclass(frozen=True)
class Config:
    """The flags of `python -m nanochat.dataset`."""

    num_files: Annotated[int | None, tyro.conf.arg(aliases=("-n",))] = None
    """How many training shards of a published corpus to fetch; -1 fetches all.
    The validation shard always comes with them."""
    data: str | None = None
    """What to make or fetch: tinyworld, fineweb, climbmix, fineweb-zh, fineweb-zh-v2.1,
    fineweb-zh-v2.2, or a file or folder of your own .parquet, .jsonl, .json, .csv, .txt or .md files.
    All but .parquet may be compressed as .gz.
    With -n the default is fineweb."""
    host: Annotated[Host, tyro.conf.arg(name="from")] = "hub"
    """Where to fetch a published corpus from:
    the Hugging Face hub, which HF_ENDPOINT may replace by a mirror, or ModelScope."""
    urls: str | None = None
    """A file with addresses of such files, one a line.
    The SHA-256 of a file may follow its address."""
    name: str | None = None
    """The name of the corpus that is made from your own files or addresses.
    Default: the name of the file or folder."""
    text_column: str = "text"
    """The column or JSON field of your own files that holds the text."""
    skip_bad_lines: bool = False
    """Leave out the lines of your own files that are not JSON or not text, and say how many they are.
    By default such a file is refused."""
    num_workers: Annotated[int, tyro.conf.arg(aliases=("-w",))] = 3
    """How many files to fetch at the same time."""
    list_urls: bool = False
    """Only print the addresses of the files of a published corpus,
    to fetch them on another machine."""
    verify: bool = False
    """Only check a corpus: read every shard and compare its SHA-256 with the recorded one."""


def verify(corpus: Corpus) -> None:
    """Read every shard of a corpus, check its SHA-256 if one was recorded, and log the result.

    Shards that were copied in have no recorded SHA-256. Raises UserError if a shard is damaged or
    missing, naming the shard and the command that fixes it.
    """
    paths = shards(corpus, "train") + shards(corpus, "val")
    for path in paths:
        check_sha256(path)
        for _ in batches(path):
            pass
    log(tr("{name}: all {paths_count} shards are intact", name=corpus.name, paths_count=len(paths)))


def main(cfg: Config) -> None:
    """Do what the command line asks; after making a corpus, print the command that comes next."""
    _check_flags(cfg)
    if cfg.verify:
        verify(resolve(cfg.data))
        return
    if cfg.list_urls and cfg.num_files is not None:
        published = SOURCES.get(cfg.data or "fineweb")
        if published is not None:
            print("\n".join(published.listing(cfg.num_files, cfg.host)))
            return
    corpus = make_corpus(cfg)
    log(tr("next: python -m scripts.tok_train --data {name}", name=quote(corpus.name)))


def _check_flags(cfg: Config) -> None:
    """Raise UserError (exit code 2) if a flag is out of range or not for the data that is named."""
    if cfg.num_workers < 1:
        raise UserError(
            tr("--num_workers must be at least 1, got {num_workers}", num_workers=cfg.num_workers),
            exit_code=2,
        )
    is_published = cfg.urls is None and (cfg.num_files is not None or cfg.data in SOURCES)
    if not is_published:
        for flag in given(cfg, ("host", "list_urls")):
            _refuse_unused("from" if flag == "host" else flag, tr("published corpora"))
    if is_published or (cfg.urls is None and cfg.data == "tinyworld"):
        for flag in given(cfg, ("name", "text_column", "skip_bad_lines")):
            _refuse_unused(flag, tr("your own files and addresses"))


def _refuse_unused(flag: str, uses: str) -> None:
    """Raise UserError (exit code 2) for a given flag that is only for `uses`, not for this data."""
    raise UserError(
        tr("--{flag} is for {uses} only: leave it out", flag=flag, uses=uses), exit_code=2
    )


def make_corpus(cfg: Config) -> Corpus:
    """Make or fetch the corpus that the command line names, and return it.

    Raises UserError (exit code 2) if the command line names no data, or data that does not exist.
    """
    if cfg.urls is not None:
        return _from_addresses(cfg, cfg.urls)
    if cfg.num_files is not None or cfg.data in SOURCES:
        return _from_publisher(cfg)
    if cfg.data == "tinyworld":
        return make_tinyworld(Progress)
    source = existing(cfg.data) if cfg.data is not None else None
    if source is not None:
        return import_folder(
            source,
            cfg.name,
            cfg.text_column,
            Progress,
            skip_bad_lines=cfg.skip_bad_lines,
        )
    problem = tr("no data was named")
    if cfg.data is not None:
        problem = tr("there is no file or folder {data!r}", data=cfg.data)
    raise UserError(
        tr(
            "{problem}. Type one of\n  {tinyworld}\n  {fineweb}\n  python -m nanochat.dataset "
            "--data DIR\n"
            "The published corpora are {corpora}.",
            problem=problem,
            tinyworld=MAKE_TINYWORLD,
            fineweb=MAKE_FINEWEB,
            corpora=", ".join(SOURCES),
        ),
        exit_code=2,
    )


def _from_addresses(cfg: Config, urls: str) -> Corpus:
    """Fetch the files that --urls lists, and return the corpus made from them.

    Raises UserError (exit code 2) if --data or -n is given as well.
    """
    if cfg.data is not None or cfg.num_files is not None:
        raise UserError(
            tr("--urls lists every file to fetch, so it goes without --data and -n"), exit_code=2
        )
    return download_urls(
        Path(urls),
        cfg.name,
        cfg.text_column,
        Progress,
        cfg.num_workers,
        skip_bad_lines=cfg.skip_bad_lines,
    )


def _from_publisher(cfg: Config) -> Corpus:
    """Fetch -n training shards of a published corpus and its validation shard; return the corpus.

    Raises UserError (exit code 2) if -n is missing or --data does not name a published corpus.
    """
    published = SOURCES.get(cfg.data or "fineweb")
    if published is None or cfg.num_files is None:
        example = published.make(8) if published else MAKE_FINEWEB
        raise UserError(
            tr(
                "-n N sets the number of shards of a published corpus ({corpora}), which "
                "needs it, and other data cannot take it. Type for example: {example}",
                corpora=", ".join(SOURCES),
                example=example,
            ),
            exit_code=2,
        )
    return download(published, cfg.num_files, Progress, cfg.host, cfg.num_workers)


if __name__ == "__main__":
    run(main, Config, __doc__)
