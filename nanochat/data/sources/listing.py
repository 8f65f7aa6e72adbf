"""Which files a path means: a file, the readable files in a folder, or those of a pattern."""

import glob
from collections.abc import Collection
from pathlib import Path

from nanochat.common import log, tr


def ending(path: Path) -> str:
    """Return the ending that says how a file is written, in lower case, such as .jsonl or .json.gz."""
    last = path.suffix.lower()
    if last == ".gz":
        return path.with_suffix("").suffix.lower() + last
    return last


def name_of(source: str) -> str:
    """Return the name of a file without its ending, or of the folder if a path is a pattern.

    The name of a folder is returned whole: the end of chats-1.5 says which data it is.
    """
    path = Path(source).expanduser()
    is_folder = path.is_dir()
    while glob.has_magic(path.name) and path.parent != path:
        path = path.parent
        is_folder = True
    name = path.name or path.resolve().name
    return name if is_folder else name[: len(name) - len(ending(path))]


def files_of(
    source: str,
    endings: Collection[str],
    say: bool = True,
) -> list[Path]:
    """Return the files that a path means, in order of path; none if there is no such file.

    A file is taken whatever its name is. A folder and its subfolders give the files with one of the
    endings, and a pattern such as chats/*.jsonl the files that it matches. Hidden files and folders
    are passed over, and so are files of macOS that begin with "._"; with `say`, a log line names
    their number.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return readable_files(path, endings, say)
    if glob.has_magic(source):
        matches = [Path(name) for name in glob.glob(str(path), recursive=True)]
        return sorted(match for match in matches if match.is_file())
    return []


def readable_files(
    folder: Path,
    endings: Collection[str],
    say: bool = True,
) -> list[Path]:
    """Return the files with one of the endings in a folder and its subfolders, except hidden ones.

    With `say`, a log line names the number of hidden files.
    """
    files: list[Path] = []
    hidden: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or ending(path) not in endings:
            continue
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        (hidden if is_hidden else files).append(path)
    if hidden and say:
        log(
            tr(
                "{folder}: {count:,} hidden files are passed over, such as {first}",
                folder=folder,
                count=len(hidden),
                first=hidden[0].name,
            )
        )
    return files
