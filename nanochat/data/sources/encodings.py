"""Opens text files: plain or compressed with gzip, in UTF-8 or, with a mark at the start, UTF-16.

The format is recognised by the file's first bytes, not by its name.
"""

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import BinaryIO, cast

from nanochat.common import UserError, tr
from nanochat.data.library_words import in_words

_GZIP = b"\x1f\x8b"
_MARKS = (
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
# Encodings to suggest, most likely first. A file is in one of them if all of it can be read so and
# then holds what such files hold.
_OTHER_ENCODINGS = (
    ("GB18030", r"[\u4e00-\u9fff]"),
    ("BIG5", r"[\u4e00-\u9fff]"),
    ("SHIFT_JIS", r"[\u3040-\u30ff]"),
    ("EUC-KR", r"[\uac00-\ud7a3]"),
)
_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, read with surrogateescape


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the index (from 1) and the text of each line of a file.

    Bytes that are not UTF-8 become lone surrogates, which problem_of() finds. Raises UserError if
    the file is damaged or of another kind.
    """
    number = 0
    try:
        with _opened(path) as file:
            start = file.peek(64)[:64]  # pyright: ignore[reportAttributeAccessIssue]
            for number, line in enumerate(_decoded(file, _encoding(start, path)), start=1):
                yield number, line
    except (EOFError, OSError, zlib.error, UnicodeDecodeError) as failure:
        raise UserError(
            tr(
                "{path} is damaged after line {number:,}: {failure}. Get the file again or leave "
                "it out",
                path=path,
                number=number,
                failure=in_words(failure),
            )
        ) from failure


def _opened(path: Path) -> BinaryIO:
    """Return a file opened to read its bytes, unpacked if it is compressed with gzip."""
    with open(path, "rb") as file:
        is_compressed = file.read(2) == _GZIP
    return cast(BinaryIO, gzip.open(path, "rb") if is_compressed else open(path, "rb"))


def _encoding(start: bytes, path: Path) -> str:
    """Return the encoding of a file from its first bytes. Raises UserError if it is not text."""
    for beginning, kind, remedy in _other_kinds(quote(path.name)):
        if start.startswith(beginning):
            raise UserError(
                tr(
                    "{path} is not text but {kind}; {advice}",
                    path=path,
                    kind=kind,
                    advice=remedy,
                )
            )
    for mark, encoding in _MARKS:
        if start.startswith(mark):
            return encoding
    if b"\0" in start:
        order = "UTF-16LE" if start[1:2] == b"\0" else "UTF-16BE"
        raise UserError(
            tr(
                "{path} is not UTF-8: it holds bytes of value 0, as UTF-16 without a byte "
                "order mark does. Convert the file: {command}",
                path=path,
                command=_iconv(order, path),
            )
        )
    return "utf-8-sig"


def _other_kinds(name: str) -> Iterator[tuple[bytes, str, str]]:
    """Yield what other files begin with, what they are, and what to do with the file `name`."""
    table = tr("a zip archive or a spreadsheet")
    yield b"PK\x03\x04", table, tr("unpack it, or save the sheet as CSV")
    yield b"\x28\xb5\x2f\xfd", tr("compressed with zstd"), _unpack(f"zstd -d {name}")
    yield b"\xfd7zXZ", tr("compressed with xz"), _unpack(f"xz -dk {name}")
    yield b"BZh", tr("compressed with bzip2"), _unpack(f"bunzip2 -k {name}")
    yield b"%PDF", tr("a PDF"), tr("convert it to text")
    pointer = tr("a pointer of Git LFS")
    yield b"version https://git-lfs", pointer, tr("fetch the file with: git lfs pull")


def _unpack(command: str) -> str:
    return tr("unpack it with: {command}", command=command)


def _decoded(file: BinaryIO, encoding: str) -> Iterator[str]:
    errors = "surrogateescape" if encoding == "utf-8-sig" else "strict"
    return io.TextIOWrapper(file, encoding=encoding, errors=errors)


def _iconv(encoding: str, path: Path) -> str:
    target = quote(f"utf8-{path.name}")
    return f"iconv -f {encoding} -t UTF-8 {quote(str(path))} > {target}"


def problem_of(line: str, path: Path) -> str:
    """Return why a line is not text, or "" if it is text.

    Raises UserError if the whole file is in another encoding, with the command that converts it.
    """
    if line.isascii() or not _ESCAPED.search(line):
        return ""
    encoding = _other_encoding(path)
    if encoding:
        raise UserError(
            tr(
                "{path} is not UTF-8 but {encoding}. Convert the file: {command}",
                path=path,
                encoding=encoding,
                command=_iconv(encoding, path),
            )
        )
    return tr("bytes that are not UTF-8; write the line again, or remove it")


def _other_encoding(path: Path) -> str:
    """Return the encoding other than UTF-8 in which all of a file can be read, or ""."""
    with _opened(path) as file:
        data = file.read()
    for encoding, letters in _OTHER_ENCODINGS:
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if re.search(letters, text):
            return encoding
    return ""
