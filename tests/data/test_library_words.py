"""Reasons that Python and its libraries give are told in the user's language."""

import ast
import errno
import json
import os
import re
import socket
from pathlib import Path

import pytest

from dev.messages import ROOT, source_files
from nanochat.common import UserError, read_json
from nanochat.data.library_words import in_words

BROKEN = ["", "{", '{"a" 1}', '{"a": 1 "b"', '"a', '"a\nb"', r'"\x"', r'"\u12"', "1 2", "[1, ]", '{"a": 1,}', "[1 2]"]
ERRORS = "ENOENT EACCES EPERM EROFS ENOSPC EIO EEXIST EISDIR ENOTDIR ENAMETOOLONG ELOOP EMFILE ECONNREFUSED ETIMEDOUT"
LIBRARYS = {"OSError", "ValueError", "json.JSONDecodeError", "UnicodeDecodeError", "socket.gaierror", "csv.Error"}
ENGLISH = re.compile("[A-Za-z]{5,}")


def failures() -> list[Exception]:
    failures: list[Exception] = []
    for name in ERRORS.split():
        number = getattr(errno, name)
        failures.append(OSError(number, os.strerror(number)))
    failures += [socket.gaierror(-2, "Name or service not known"), KeyError("n")]
    for text in BROKEN:
        with pytest.raises(ValueError) as caught:
            json.loads(text)
        failures.append(caught.value)
    return failures


def test_common_reasons_are_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    words = [in_words(failure) for failure in failures()]
    assert [text for text in words if ENGLISH.search(text) or not re.search("[\u4e00-\u9fff]", text)] == []


def test_other_reasons_keep_their_words() -> None:
    assert in_words(ValueError("depth is 3")) == "depth is 3" and in_words(ValueError()) == "ValueError"
    assert in_words(OSError(errno.ENOENT, "gone", "a.txt")).endswith(": a.txt")
    assert in_words(OSError(errno.ENOTTY, "no typewriter")) == "no typewriter"


def test_a_damaged_file_is_explained_in_chinese(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    (tmp_path / "a.json").write_text('{"a": ')
    with pytest.raises(UserError) as refusal:
        read_json(tmp_path / "a.json")
    assert "Expecting" not in str(refusal.value) and "第 1 行" in str(refusal.value)


def test_no_message_quotes_a_reason_raw() -> None:
    """A field with !r shows an unforeseen exception with its type, as a bug report needs it."""
    raw = []
    for path in source_files(ROOT):
        for handler in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(handler, ast.ExceptHandler) or not handler.type or not handler.name:
                continue
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            if not LIBRARYS & {ast.unparse(kind) for kind in kinds}:
                continue
            raw += [f"{path.relative_to(ROOT)}:{line}" for line in outside_of_tr(handler, handler.name)]
            quotes = {handler.name, f"{handler.name}.strerror", f"{handler.name}.msg"}
            for call in ast.walk(handler):
                if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "tr":
                    continue
                template = ast.literal_eval(call.args[0])
                for value in call.keywords:
                    if ast.unparse(value.value) in quotes and f"{{{value.arg}!r}}" not in template:
                        raw.append(f"{path.relative_to(ROOT)}:{value.value.lineno}")
    assert raw == []


def outside_of_tr(handler: ast.ExceptHandler, name: str) -> list[int]:
    """Return the lines that take an exception's text as it is, unless another OSError is made of it."""
    copies = (
        call
        for call in ast.walk(handler)
        if (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "OSError") or isinstance(call, ast.Dict)
    )
    copied = {part for copy in copies for part in ast.walk(copy)}
    return [
        node.lineno
        for node in ast.walk(handler)
        if isinstance(node, ast.Attribute | ast.Call)
        and ast.unparse(node) in (f"{name}.strerror", f"str({name})")
        and node not in copied
    ]
