"""Files at a list of addresses: fetched into a folder, checked against their SHA-256s, and imported like your own."""

import hashlib
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nanochat.common import UserError, base_dir
from nanochat.data.corpora import Corpus
from nanochat.data.download import Patience, Remote, check_space, fetch_all, part_size, probe_size
from nanochat.data.sources.fetch import Bars, network_hint
from nanochat.data.sources.folder import check_name, import_folder
from nanochat.data.sources.hub import hub_headers
from nanochat.data.textfiles import READERS


def read_list(path: Path, folder: Path) -> list[Remote]:
    """The files that a list names: an address on each line, and after it the file's SHA-256 if you know it.

    Blank lines and lines that begin with # are skipped. Files of the same name get a number in front. UserError (code
    2) names the line that is no address of a .parquet, .jsonl, .txt or .md file.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        raise UserError(f"--urls names a file with an address on each line, and {path} cannot be read: {failure}", 2) \
            from failure  # fmt: skip
    remotes: list[Remote] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        parts = urlsplit(words[0])
        name = unquote(parts.path).rpartition("/")[2]
        if (
            parts.scheme not in ("http", "https") or Path(name).suffix not in READERS or name.startswith(".")
            or len(words) > 2 or (len(words) == 2 and not re.fullmatch("[0-9a-f]{64}", words[1]))
        ):  # fmt: skip
            raise UserError(
                f"{path} line {number} must be the address of a {', '.join(READERS)} file, and after it the file's "
                f"SHA-256 or nothing; got {line.strip()[:200]!r}",
                2,
            )
        taken = {remote.path.name for remote in remotes}
        name = f"{number:05d}-{name}" if name in taken else name
        remotes.append(Remote(words[0], folder / name, words[1] if len(words) == 2 else None))
    if not remotes:
        raise UserError(f"{path} names no address; write one on each line", 2)
    return remotes


def download_urls(
    path: Path, name: str | None, text_column: str, bars: Bars, parallel: int = 3, patience: Patience | None = None
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
    missing = [remote for remote in remotes if not remote.path.exists()]
    if missing:
        sizes = [probe_size(r.url, hub_headers(r.url), patience, network_hint(r.url)) or 0 for r in missing]
        begun = sum(part_size(remote.path) for remote in missing)
        check_space(folder, sum(sizes) - begun)
        with bars(f"{name}, {len(missing)} files", sum(sizes) or None, "B") as bar:
            bar.advance(begun, skipped=True)
            of_hub = [bool(hub_headers(remote.url)) for remote in missing]
            for wanted in (True, False):  # only the hub's files are asked for with its token
                some = [remote for remote, hub in zip(missing, of_hub, strict=True) if hub == wanted]
                if some:
                    fetch_all(some, hub_headers(some[0].url), patience, parallel, network_hint(some[0].url),
                              advance=bar.advance, say=bar.say)  # fmt: skip
    stale = {file for file in folder.iterdir() if file.suffix in READERS} - {remote.path for remote in remotes}
    for file in stale:  # the list no longer names it
        file.unlink()
    make = f"python -m nanochat.dataset --urls {path} --name {name}"
    make += f" --text_column {text_column}" if text_column != "text" else ""
    return import_folder(folder, name, text_column, bars, make)
