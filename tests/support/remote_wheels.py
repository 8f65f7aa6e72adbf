"""Wheels of the package index, of which only the text is read: a few ranges of each file over HTTP.

A wheel is 40 MB and more, nearly all of it compiled. Its Python files, operator lists and metadata are kept as a small
zip in the user's cache folder.
"""

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html import unescape
from io import BytesIO
from pathlib import Path
from urllib.parse import urljoin

from tools_npu.versions import order

GAP = 256 << 10  # bytes between two wanted members that are cheaper to read than another request
SECONDS = 60.0
TAIL = 2 << 20  # the end of a wheel, where its table of contents is


@dataclass(frozen=True)
class Wheels:
    """The wheels of a project for one platform, and which of their members are wanted."""

    project: str  # as the file names spell it
    platform: re.Pattern[str]  # of a whole file name, with the version as its group
    wanted: re.Pattern[str]
    where: str  # the platform in words


# One platform's wheels serve all machines, because only their text is read.
TORCH_NPU = Wheels(
    "torch_npu",
    re.compile(r"torch_npu-([^-]+)-cp311-cp311-manylinux\w+_x86_64[\w.]*\.whl"),
    re.compile(r".*(\.py|\.yaml|/METADATA)"),
    "Python 3.11 on x86_64",
)
TORCH_FOR_MACS = Wheels(
    "torch",
    re.compile(r"torch-([^-]+)-cp312-cp312-macosx\w+_arm64\.whl"),
    re.compile(
        r"torch/(mps/\w+|backends/mps/__init__|random)\.py|torchgen/packaged/ATen/native/native_functions\.yaml"
    ),
    "Python 3.12 on a Mac",
)


class NoNetwork(Exception):
    """Raised with the reason if the index or a wheel cannot be read."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanochat-tests" / "wheels"


def index() -> str:
    """The address of the package index that pip uses.

    pip is not imported here: afterwards setuptools, and so torch's compiler, could not be.
    """
    if given := os.environ.get("PIP_INDEX_URL"):
        return given
    default = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    for command in (["-m", "pip", "config", "get", "global.index-url"], ["-c", default]):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if given := done.stdout.strip():
            return given
    raise RuntimeError("pip tells no package index")


@cache
def releases(wheels: Wheels = TORCH_NPU) -> dict[str, str]:
    """Version -> address of every wheel on the index, the oldest first, release candidates left out."""
    page = f"{index().rstrip('/')}/{wheels.project.replace('_', '-')}/"
    text = _get(page).decode("utf-8", "replace")
    found: dict[str, str] = {}
    for address, name in re.findall(r'<a [^>]*href="([^"]+)"[^>]*>([^<]+)</a>', text):
        named = wheels.platform.fullmatch(name.strip())
        if named and re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?", named[1]):
            found[named[1]] = urljoin(page, unescape(address).split("#")[0])
    return dict(sorted(found.items(), key=lambda item: order(item[0])))


def text_of(version: str, wheels: Wheels = TORCH_NPU) -> Path:
    """A zip of the text of a version's wheel, from the cache or from the index; NoNetwork if that fails."""
    kept = cache_folder() / f"{wheels.project}-{version}-text.zip"
    if not kept.exists():
        if version not in releases(wheels):
            raise NoNetwork(f"the index has no {wheels.project} {version} for {wheels.where}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}.part")
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as out:
            for name, content in _members(releases(wheels)[version], wheels.wanted):
                out.writestr(name, content)
        os.replace(draft, kept)
    return kept


def _get(address: str, start: int | None = None, end: int | None = None) -> bytes:
    """A whole page; or the bytes from `start` up to `end`, or the last -start bytes."""
    headers = {"Accept": "text/html"}
    if start is not None:
        headers = {"Range": f"bytes={start}-{'' if end is None else end - 1}" if start >= 0 else f"bytes={start}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=SECONDS) as answer:
            content: bytes = answer.read()
            whole = start is not None and answer.status != 206
    except (urllib.error.URLError, OSError) as failure:
        raise NoNetwork(f"{address}: {failure}") from failure
    return content[start:end] if whole else content  # a server that knows no ranges sends everything


class _Sparse(BytesIO):
    """A file of which only some spans are there; zipfile reads no others."""

    def __init__(self, size: int, spans: list[tuple[int, bytes]]):
        super().__init__()
        self.size, self.spans, self.place = size, spans, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self.place = offset + (0, self.place, self.size)[whence]
        return self.place

    def tell(self) -> int:
        return self.place

    def read(self, size: int | None = -1) -> bytes:
        end = self.size if size is None or size < 0 else min(self.place + size, self.size)
        for start, content in self.spans:
            if start <= self.place and end <= start + len(content):
                found = content[self.place - start : end - start]
                self.place = end
                return found
        raise OSError(f"bytes {self.place} to {end} were not fetched")


def _members(address: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the wanted members of a wheel."""
    with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=SECONDS) as answer:
        size = int(answer.headers["Content-Length"])
    spans = [(max(size - TAIL, 0), _get(address, -min(TAIL, size)))]
    table = zipfile.ZipFile(_Sparse(size, spans))
    wanted = sorted(
        (one for one in table.infolist() if pattern.fullmatch(one.filename)), key=lambda one: one.header_offset
    )
    ends = [
        (one.header_offset, one.header_offset + one.compress_size + 30 + 2 * len(one.filename) + 256) for one in wanted
    ]
    start, end = ends[0]
    for first, last in [*ends[1:], (size + GAP + 1, 0)]:
        if first > end + GAP:
            spans.append((start, _get(address, start, min(end, size))))
            start, end = first, last
        end = max(end, last)
    whole = zipfile.ZipFile(_Sparse(size, spans))
    yield from ((one.filename, whole.read(one)) for one in wanted)
