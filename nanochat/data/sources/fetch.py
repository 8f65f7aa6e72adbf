"""Fetch the files of a published corpus as shards.

Each file's columns are checked, and its size and SHA-256 are recorded in corpus.json.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import UserError, base_dir, log, sha256_of, tr, write_json
from nanochat.data.corpora import DROPPED, MAKE_TINYWORLD, Corpus
from nanochat.data.library_words import in_words
from nanochat.data.shards import ABOUT, COLUMN, read_about, shard_paths
from nanochat.data.sources.download import (
    Patience,
    Remote,
    check_space,
    fetch_all,
    part_size,
    probe_size,
)
from nanochat.data.sources.hub import Host, hub_headers
from nanochat.data.sources.published import Source


class Bar(AbstractContextManager[Any], Protocol):
    """A progress bar, used as a context manager."""

    def advance(self, by: float, skipped: bool = False) -> None: ...
    def say(self, line: str) -> None: ...


Bars = Callable[[str, float | None, str], Bar]  # takes a title, a total and the unit of the total


def download(
    source: Source,
    count: int,
    bars: Bars,
    host: Host = "hub",
    parallel: int = 3,
    patience: Patience | None = None,
) -> Corpus:
    """Fetch `count` training files of a source and its validation file, and return the corpus.

    Existing shards stay as they are, and partial ones are resumed. Uses HF_ENDPOINT, HF_TOKEN (for
    the hub itself only) and the usual proxy variables. corpus.json records the size and SHA-256 of
    every shard. A shard that is fetched again must have the recorded SHA-256, and the columns of an
    existing shard without one are checked. Raises UserError (exit code 2) if `count` is out of
    range or `host` has no known copy, and UserError if a download fails, a file lacks a column, or
    the disk is too small.
    """
    corpus = Corpus(source.name, base_dir() / "base_data" / source.name)
    about_before = read_about(corpus.folder)
    recorded = about_before.get("shards", {})
    missing = []
    for number in source.numbers(count):
        name = source.shard(number)
        sha256 = recorded.get(name, {}).get("sha256")
        remote = Remote(source.url(number, host), corpus.folder / name, sha256)
        if not remote.path.exists():
            missing.append(remote)

    entries: dict[str, dict[str, Any]] = {}  # the new entries of corpus.json, by shard
    for path in shard_paths(corpus.folder):
        entry = recorded.get(path.name, {})
        entries[path.name] = entry if "sha256" in entry else _adopted(path, source)
    for remote in missing:
        entries[remote.path.name] = recorded.get(remote.path.name, {})
    about: dict[str, Any] = {}
    if DROPPED in about_before:
        about[DROPPED] = about_before[DROPPED]
    about["kind"] = "download"
    about["make"] = source.make(len(entries) - 1, host)
    corpus.folder.mkdir(parents=True, exist_ok=True)

    def write_about() -> None:
        write_json(corpus.folder / ABOUT, {**about, "shards": dict(sorted(entries.items()))})

    if missing:
        url = missing[0].url
        hint = network_hint(url)
        headers = hub_headers(url)
        file_size = probe_size(url, headers, patience, hint) or 0  # the files are nearly equal
        total = file_size * len(missing)
        begun = sum(part_size(remote.path) for remote in missing)
        check_space(corpus.folder, total - begun)
        write_about()  # before the download, so that a stopped one is known to be incomplete
        with bars(
            tr("{corpus}, {count} shards", corpus=corpus.name, count=len(missing)), total, "B"
        ) as bar:
            bar.advance(begun, skipped=True)
            arrived = fetch_all(
                missing,
                headers,
                patience,
                parallel,
                hint,
                has_columns(source),
                bar.advance,
                bar.say,
            )
        for file in arrived:
            sha256 = file.sha256 or sha256_of(file.path)
            entries[file.path.name] = {"bytes": file.bytes, "sha256": sha256}
    write_about()
    disk_bytes = sum(path.stat().st_size for path in shard_paths(corpus.folder))
    log(
        tr(
            "{name}: {entries_count} training shards and 1 for validation, {disk_bytes:.1f} "
            "GB in {folder}",
            name=corpus.name,
            entries_count=len(entries) - 1,
            disk_bytes=disk_bytes / 1e9,
            folder=corpus.folder,
        )
    )
    return corpus


def _adopted(path: Path, source: Source) -> dict[str, Any]:
    """Return a new corpus.json entry for a shard that has no recorded SHA-256.

    Such a shard was copied into the folder, or its download was stopped before the entry was
    written. Raises UserError if the shard is not a parquet file with the columns of `source`.
    """
    try:
        has_columns(source)(path)
    except UserError:
        raise
    except ValueError as failure:
        raise UserError(
            tr(
                "{path}: {failure}. Delete the file and type the same command again, which "
                "fetches it",
                path=path,
                failure=in_words(failure),
            )
        ) from failure
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def has_columns(source: Source) -> Callable[[Path], None]:
    """Return a function that checks the columns of the downloaded file at a path.

    The function raises ValueError if the file has no readable parquet footer (such as a login
    page), and UserError if the file lacks a column of `source` or its documents are not text.
    """

    def check(path: Path) -> None:
        try:
            schema = pq.read_schema(path)
        except (pa.ArrowException, OSError) as failure:
            reason = in_words(failure).splitlines()[0]
            raise ValueError(tr("the file is not parquet: {reason}", reason=reason)) from failure
        has_all = all(column in schema.names for column in source.columns)
        if not has_all or str(schema.field(COLUMN).type) not in ("string", "large_string"):
            columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
            raise UserError(
                tr(
                    "{title} has changed: {path} has the columns {columns}, and must have "
                    "{needed} with {column} as text. Delete the file and take another "
                    "corpus, or import such files as your own with --data DIR "
                    "--text_column COLUMN",
                    title=source.title,
                    path=path,
                    columns=columns,
                    needed=", ".join(source.columns),
                    column=COLUMN,
                )
            )

    return check


def network_hint(url: str) -> str:
    """Return advice for the user in case the host of `url` cannot be reached."""
    is_mirror = "hf-mirror.com" in url or "/resolve/master/" in url
    if is_mirror:
        return tr(
            "If this machine cannot reach that host, set https_proxy, and type the same command "
            "again: it resumes the download. Without a network, use TinyWorld: {tinyworld}",
            tinyworld=MAKE_TINYWORLD,
        )
    return tr(
        "If this machine cannot reach that host, set HF_ENDPOINT=https://hf-mirror.com, or set "
        "https_proxy, and type the same command again: it resumes the download. Without a network, "
        "use TinyWorld: {tinyworld}",
        tinyworld=MAKE_TINYWORLD,
    )
