"""Fetches the files of a published corpus as shards, checks their columns, and keeps sizes and SHA-256s beside them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import UserError, base_dir, log, sha256_of, write_json
from nanochat.data.corpora import DROPPED, MAKE_TINYWORLD, Corpus
from nanochat.data.download import Patience, Remote, check_space, fetch_all, part_size, probe_size
from nanochat.data.shards import ABOUT, COLUMN, read_about, shard_paths
from nanochat.data.sources.hub import Host, hub_headers
from nanochat.data.sources.source import Source


class Bar(AbstractContextManager[Any], Protocol):
    """What shows how far a download is."""

    def advance(self, by: float, skipped: bool = False) -> None: ...
    def say(self, line: str) -> None: ...


Bars = Callable[[str, float | None, str], Bar]  # of a title, a total and its unit


def download(
    source: Source,
    count: int,
    bars: Bars,
    host: Host = "hub",
    parallel: int = 3,
    patience: Patience | None = None,
) -> Corpus:
    """Fetch `count` training files of a source and its validation file. Complete shards are kept, partial ones resumed.

    Uses HF_ENDPOINT, HF_TOKEN (for the hub itself only) and the usual proxy variables. corpus.json keeps the size and
    the SHA-256 of every shard, and a shard that is fetched again must have the same. UserError if the network or the
    server fails, if a file lacks a column, or if the disk is too small for all files. Shards that were copied into the
    folder are checked like downloaded ones.
    """
    corpus = Corpus(source.name, base_dir() / "base_data" / source.name)
    there = read_about(corpus.folder)
    known = there.get("shards", {})
    remotes = [
        Remote(source.url(number, host), corpus.folder / name, known.get(name, {}).get("sha256"))
        for number, name in ((number, source.shard(number)) for number in source.numbers(count))
    ]
    missing = [remote for remote in remotes if not remote.path.exists()]
    files = {path.name: known.get(path.name, {}) for path in shard_paths(corpus.folder)}
    files |= {
        name: _adopted(corpus.folder / name, source)
        for name in files
        if "sha256" not in files[name]
    }
    files |= {remote.path.name: known.get(remote.path.name, {}) for remote in missing}
    about = {DROPPED: there[DROPPED]} if DROPPED in there else {}
    about |= {"kind": "download", "make": source.make(len(files) - 1, host)}
    corpus.folder.mkdir(parents=True, exist_ok=True)

    def note() -> None:
        write_json(corpus.folder / ABOUT, {**about, "shards": dict(sorted(files.items()))})

    if missing:
        hint, headers = network_hint(missing[0].url), hub_headers(missing[0].url)
        size = (
            probe_size(missing[0].url, headers, patience, hint) or 0
        )  # the files are nearly equal
        begun = sum(part_size(remote.path) for remote in missing)
        check_space(corpus.folder, size * len(missing) - begun)
        note()  # before the download, so that a stopped one is known to be incomplete
        with bars(f"{corpus.name}, {len(missing)} shards", size * len(missing), "B") as bar:
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
            files[file.path.name] = {
                "bytes": file.bytes,
                "sha256": file.sha256 or sha256_of(file.path),
            }
    note()
    held = sum(path.stat().st_size for path in shard_paths(corpus.folder))
    log(
        f"{corpus.name}: {len(files) - 1} training shards and 1 for validation, {held / 1e9:.1f} GB in {corpus.folder}"
    )
    return corpus


def _adopted(path: Path, source: Source) -> dict[str, Any]:
    """What corpus.json says of a shard that is there without a recorded SHA-256, because somebody copied it in or a
    download was stopped."""
    try:
        has_columns(source)(path)
    except UserError:
        raise
    except ValueError as failure:
        raise UserError(
            f"{path}: {failure}. Delete the file and type the same command again, which fetches it"
        ) from failure
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def has_columns(source: Source) -> Callable[[Path], None]:
    """A check of a downloaded file. ValueError if it is no whole parquet file, such as a login page or a file that was
    cut; UserError if it lacks a column of the source, or if its documents are no text."""

    def check(path: Path) -> None:
        try:
            schema = pq.read_schema(path)
        except (pa.ArrowException, OSError) as failure:
            raise ValueError(
                f"the file is not parquet: {str(failure).splitlines()[0]}"
            ) from failure
        found = ", ".join(f"{field.name} ({field.type})" for field in schema)
        right = all(column in schema.names for column in source.columns)
        if not right or str(schema.field(COLUMN).type) not in ("string", "large_string"):
            raise UserError(
                f"{source.title} has changed: {path} has the columns {found}, and must have "
                f"{', '.join(source.columns)} with {COLUMN} as text. Delete the file and take another corpus, or "
                "import such files as your own with --data DIR --text_column COLUMN"
            )

    return check


def network_hint(url: str) -> str:
    """What to do if a host cannot be reached."""
    hub = (
        ""
        if "hf-mirror.com" in url or "/resolve/master/" in url
        else "set HF_ENDPOINT=https://hf-mirror.com, or "
    )
    return (
        f"If this machine cannot reach that host, {hub}set https_proxy, and type the same command again: it "
        f"resumes the download. Without a network, use TinyWorld: {MAKE_TINYWORLD}"
    )
