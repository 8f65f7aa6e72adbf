"""Fetch the files named in a list of web addresses, and import them like the user's own files.

Downloaded files are kept as long as they are listed, and checked against any SHA-256 in the list.
"""

import hashlib
import re
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit

from nanochat.common import UserError, base_dir, log, sha256_of, tr, visible
from nanochat.data.corpora import Corpus
from nanochat.data.library_words import in_words
from nanochat.data.sources.download import (
    Patience,
    Remote,
    check_space,
    fetch_all,
    part_size,
    probe_size,
)
from nanochat.data.sources.fetch import Bars, network_hint
from nanochat.data.sources.folder import check_name, import_folder
from nanochat.data.sources.hub import hub_headers
from nanochat.data.sources.listing import ending
from nanochat.data.sources.textfiles import READERS

# Characters of up to four bytes each: with the hash and the endings, a name may have 255 bytes.
LONGEST_STEM = 50
SHA256 = re.compile("[0-9a-f]{64}")


def download_urls(
    path: Path,
    name: str | None,
    text_column: str,
    bars: Bars,
    parallel: int = 3,
    patience: Patience | None = None,
    skip_bad_lines: bool = False,
) -> Corpus:
    """Fetch the files named in a list of web addresses, import them, and return the corpus.

    The corpus is named after the list unless `name` is given. Listed files stay below `downloads/`
    in the base folder, so a stopped download resumes, and a longer list fetches only new files.
    Files that are no longer listed are deleted there. `skip_bad_lines` is as in import_folder().
    Raises UserError (exit code 2) if the list or name cannot be used, and UserError if a file
    cannot be fetched or imported.
    """
    path = path.expanduser().resolve()
    name = name or path.stem
    check_name(name)
    list_digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    folder = base_dir() / "downloads" / name / list_digest
    remotes = read_list(path, folder)
    _use_existing_files(remotes, folder)
    missing = [remote for remote in remotes if not remote.path.exists()]
    if missing:
        _fetch(missing, name, folder, bars, parallel, patience)
    listed = {remote.path for remote in remotes}
    for file in _readable_files(folder):
        if file not in listed:
            file.unlink()
    make = f"python -m nanochat.dataset --urls {quote(str(path))} --name {quote(name)}"
    if text_column != "text":
        make += f" --text_column {quote(text_column)}"
    if skip_bad_lines:
        make += " --skip_bad_lines"
    return import_folder(folder, name, text_column, bars, make, skip_bad_lines)


def read_list(path: Path, folder: Path) -> list[Remote]:
    """Return a Remote for each file in a list of web addresses, with its local path in `folder`.

    Each line holds an address and, optionally, the SHA-256 of the file. Blank lines, lines that
    begin with # and repeated lines are skipped. The local name contains a hash of the line, so a
    changed line does not match the old file. Raises UserError (exit code 2) if the list cannot be
    read or is empty, or if a line is not the address of a file of one of the types in READERS.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        raise UserError(
            tr(
                "--urls names a file with an address on each line, and {path} cannot be "
                "read: {failure}",
                path=path,
                failure=in_words(failure),
            ),
            2,
        ) from failure
    remotes: dict[Path, Remote] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name = _file_name(words[0])
        if not _is_importable(name) or not _is_sha256_or_nothing(words[1:]):
            raise UserError(
                tr(
                    "{path} line {number} must be the address of a {readers} file, and after "
                    "it the file's SHA-256 or nothing; got {strip!r}",
                    path=path,
                    number=number,
                    readers=", ".join(READERS),
                    strip=line.strip()[:200],
                ),
                2,
            )
        digest = hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]
        suffix = ending(Path(name))
        stem = name[: -len(suffix)][:LONGEST_STEM]
        local = folder / f"{stem}-{digest}{suffix}"
        sha256 = words[1] if len(words) == 2 else None
        remotes[local] = Remote(words[0], local, sha256)
    if not remotes:
        raise UserError(tr("{path} names no address; write one on each line", path=path), 2)
    return list(remotes.values())


def _file_name(address: str) -> str:
    """Return the name of the file at an address, or "" if the address is not http or https."""
    try:
        parts = urlsplit(address)
    except ValueError:  # such as http://[::1/x.txt
        return ""
    if parts.scheme not in ("http", "https"):
        return ""
    return unquote(parts.path).rpartition("/")[2]


def _is_importable(name: str) -> bool:
    if name.startswith(".") or visible(name) != name:
        return False
    return ending(Path(name)) in READERS


def _is_sha256_or_nothing(words: list[str]) -> bool:
    return not words or (len(words) == 1 and SHA256.fullmatch(words[0]) is not None)


def _readable_files(folder: Path) -> list[Path]:
    """Return the files directly in a folder whose type can be imported."""
    return [path for path in folder.glob("*") if ending(path) in READERS]


def _use_existing_files(remotes: list[Remote], folder: Path) -> None:
    """Reuse files in `folder`, so that as few as possible are fetched again.

    A file that does not have the listed SHA-256 is deleted. An unlisted file that has the SHA-256
    of a missing one is renamed. Files from an earlier version of this program have no hash in their
    names, so their addresses are unknown; if the list gives no SHA-256, they are fetched again,
    which is logged.
    """
    for remote in remotes:
        if remote.sha256 and remote.path.exists() and sha256_of(remote.path) != remote.sha256:
            log(
                tr(
                    "{path} does not have the SHA-256 {sha256} and is fetched again",
                    path=remote.path,
                    sha256=remote.sha256,
                )
            )
            remote.path.unlink()
    listed = {remote.path for remote in remotes}
    unlisted = [path for path in _readable_files(folder) if path not in listed]
    missing = [remote for remote in remotes if not remote.path.exists()]
    if any(remote.sha256 for remote in missing):
        by_digest = {sha256_of(path): path for path in unlisted}
        for remote in missing:
            same_file = by_digest.pop(remote.sha256 or "", None)
            if same_file is not None:
                same_file.rename(remote.path)
    old_names = {re.sub("^[0-9]{5}-", "", path.name) for path in unlisted if path.exists()}
    fetched_again = []
    for remote in missing:
        if not remote.path.exists() and _file_name(remote.url) in old_names:
            fetched_again.append(remote.url)
    if fetched_again:
        log(
            tr(
                "{count} file(s) of an earlier version of this program are fetched again: "
                "nothing tells whether they came from the same addresses; the first is "
                "{first}",
                count=len(fetched_again),
                first=fetched_again[0],
            )
        )


def _fetch(
    missing: list[Remote],
    name: str,
    folder: Path,
    bars: Bars,
    parallel: int,
    patience: Patience | None,
) -> None:
    """Fetch the missing files, sending the access token only for files on the hub."""
    total = 0
    hub_files = []
    other_files = []
    for remote in missing:
        headers = hub_headers(remote.url)
        total += probe_size(remote.url, headers, patience, network_hint(remote.url)) or 0
        group = hub_files if headers else other_files
        group.append(remote)
    begun = sum(part_size(remote.path) for remote in missing)
    check_space(folder, total - begun)
    with bars(
        tr("{name}, {count} files", name=name, count=len(missing)), total or None, "B"
    ) as bar:
        bar.advance(begun, skipped=True)
        for group in (hub_files, other_files):
            if group:
                fetch_all(
                    group,
                    hub_headers(group[0].url),
                    patience,
                    parallel,
                    network_hint(group[0].url),
                    advance=bar.advance,
                    say=bar.say,
                )
