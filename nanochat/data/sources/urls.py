"""Files at a list of addresses: fetched into a folder, checked against their SHA-256s, and imported like your own."""

import hashlib
import re
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit

from nanochat.common import UserError, base_dir, log, sha256_of, visible
from nanochat.data.corpora import Corpus
from nanochat.data.download import Patience, Remote, check_space, fetch_all, part_size, probe_size
from nanochat.data.sources.fetch import Bars, network_hint
from nanochat.data.sources.folder import check_name, import_folder
from nanochat.data.sources.hub import hub_headers
from nanochat.data.textfiles import READERS

LONGEST_STEM = (
    50  # characters of up to four bytes: with what is added, a file name may have 255 bytes
)


def read_list(path: Path, folder: Path) -> list[Remote]:
    """The files that a list names: an address on each line, and after it the file's SHA-256 if you know it.

    Blank lines, lines that begin with # and repeated lines are skipped. The name of a local file has a hash of its
    address and SHA-256, so that a changed line never finds the file of the old one. UserError (code 2) names the line
    that is no address of a .parquet, .jsonl, .txt or .md file.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        raise UserError(
            f"--urls names a file with an address on each line, and {path} cannot be read: {failure}",
            2,
        ) from failure
    remotes: dict[Path, Remote] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name = _file_name(words[0])
        if (
            Path(name).suffix not in READERS
            or name.startswith(".")
            or visible(name) != name
            or len(words) > 2
            or (len(words) == 2 and not re.fullmatch("[0-9a-f]{64}", words[1]))
        ):
            raise UserError(
                f"{path} line {number} must be the address of a {', '.join(READERS)} file, and after it the file's "
                f"SHA-256 or nothing; got {line.strip()[:200]!r}",
                2,
            )
        digest = hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]
        local = folder / f"{Path(name).stem[:LONGEST_STEM]}-{digest}{Path(name).suffix}"
        remotes[local] = Remote(words[0], local, words[1] if len(words) == 2 else None)
    if not remotes:
        raise UserError(f"{path} names no address; write one on each line", 2)
    return list(remotes.values())


def _file_name(address: str) -> str:
    """The name of the file at a web address, "" if it is none."""
    try:
        parts = urlsplit(address)
    except ValueError:  # such as http://[::1/x.txt
        return ""
    return unquote(parts.path).rpartition("/")[2] if parts.scheme in ("http", "https") else ""


def _use_what_is_there(remotes: list[Remote], folder: Path) -> None:
    """Fetch damaged files again, and rename files whose SHA-256 is in the list but that have another name.

    A file from an earlier version of this program has a name without a hash: nothing tells which address it came from,
    so without a SHA-256 it is fetched again, and the log says so.
    """
    for remote in remotes:
        if remote.sha256 and remote.path.exists() and sha256_of(remote.path) != remote.sha256:
            log(f"{remote.path} does not have the SHA-256 {remote.sha256} and is fetched again")
            remote.path.unlink()
    unnamed = {path for path in folder.glob("*") if path.suffix in READERS} - {
        remote.path for remote in remotes
    }
    missing = [remote for remote in remotes if not remote.path.exists()]
    digests = (
        {sha256_of(path): path for path in unnamed}
        if any(remote.sha256 for remote in missing)
        else {}
    )
    for remote in missing:
        if found := digests.pop(remote.sha256 or "", None):
            found.rename(remote.path)
    names = {re.sub("^[0-9]{5}-", "", path.name) for path in unnamed if path.exists()}
    if again := [
        remote.url
        for remote in missing
        if not remote.path.exists() and _file_name(remote.url) in names
    ]:
        log(
            f"{len(again)} file(s) of an earlier version of this program are fetched again: nothing tells whether they "
            f"came from the same addresses; the first is {again[0]}"
        )


def download_urls(
    path: Path,
    name: str | None,
    text_column: str,
    bars: Bars,
    parallel: int = 3,
    patience: Patience | None = None,
) -> Corpus:
    """Fetch the files of a list and import them as a corpus, named after the list unless `name` says otherwise.

    The files stay in `downloads/` of the base folder, so a stopped download resumes and a longer list fetches only what
    is new. UserError as for downloads and imports.
    """
    path = path.expanduser().resolve()
    name = name or path.stem
    check_name(name)
    folder = base_dir() / "downloads" / name / hashlib.sha256(str(path).encode()).hexdigest()[:8]
    remotes = read_list(path, folder)
    _use_what_is_there(remotes, folder)
    missing = [remote for remote in remotes if not remote.path.exists()]
    if missing:
        sizes = [
            probe_size(r.url, hub_headers(r.url), patience, network_hint(r.url)) or 0
            for r in missing
        ]
        begun = sum(part_size(remote.path) for remote in missing)
        check_space(folder, sum(sizes) - begun)
        with bars(f"{name}, {len(missing)} files", sum(sizes) or None, "B") as bar:
            bar.advance(begun, skipped=True)
            of_hub = [bool(hub_headers(remote.url)) for remote in missing]
            for wanted in (True, False):  # only the hub's files are asked for with its token
                some = [
                    remote for remote, hub in zip(missing, of_hub, strict=True) if hub == wanted
                ]
                if some:
                    fetch_all(
                        some,
                        hub_headers(some[0].url),
                        patience,
                        parallel,
                        network_hint(some[0].url),
                        advance=bar.advance,
                        say=bar.say,
                    )
    stale = {file for file in folder.iterdir() if file.suffix in READERS} - {
        remote.path for remote in remotes
    }
    for file in stale:  # the list no longer names it
        file.unlink()
    make = f"python -m nanochat.dataset --urls {quote(str(path))} --name {quote(name)}"
    make += f" --text_column {quote(text_column)}" if text_column != "text" else ""
    return import_folder(folder, name, text_column, bars, make)
