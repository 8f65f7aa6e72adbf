"""Files are complete or absent, whoever shares the folder; the base folder; and the messages of ranks."""

import errno
import hashlib
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat import common
from nanochat.common import UserError, atomic_path, read_json, write_atomic, write_json

ROOT = Path(__file__).parent.parent


def test_write_atomic_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_atomic(path, "a long old content")
    write_atomic(path, "新")
    assert path.read_bytes() == "新".encode()
    write_atomic(path, b"\xff\x00")
    assert path.read_bytes() == b"\xff\x00"
    assert list(path.parent.iterdir()) == [path]


def test_json_keeps_chinese_readable_and_values_equal(tmp_path: Path) -> None:
    value = {"名": "北京", "n": 1e-12, "list": [1, None, True]}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert "北京" in (tmp_path / "x.json").read_text(encoding="utf-8")


def test_an_exception_while_writing_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    with pytest.raises(RuntimeError, match="midway"), atomic_path(path) as temporary:
        temporary.write_text("half of the n")
        raise RuntimeError("midway")
    assert path.read_text() == "old"
    assert list(tmp_path.glob("**/.file*")) == []


def test_a_full_disk_names_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(OSError, match="No space") as full, atomic_path(path):
        raise OSError(errno.ENOSPC, "No space left on device")  # as write() says, which knows no name
    assert full.value.filename == str(path)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.ENOSYS])
def test_a_file_system_that_cannot_flush_folders_takes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    flush = os.fsync

    def no_folders(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(code, os.strerror(code))
        flush(file)

    monkeypatch.setattr(os, "fsync", no_folders)
    write_atomic(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"

    def no_files(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", no_files)
    with pytest.raises(OSError, match=re.escape(os.strerror(code))):
        common.fsync_path(tmp_path / "file")


def test_a_link_planted_at_the_temporary_name_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".file.tmp-{os.getpid()}").symlink_to(victim)
    write_atomic(tmp_path / "file", "new")
    assert victim.read_text() == "mine" and not (tmp_path / "file").is_symlink()
    monkeypatch.setattr(common.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".file.tmp-guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "file", "newer")
    assert victim.read_text() == "mine" and (tmp_path / "file").read_text() == "new"


def test_what_a_killed_process_left_is_removed_a_day_later(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".file.tmp-1234", tmp_path / ".file.tmp-5678"
    for path in (old, fresh):
        path.write_text("half")
    os.utime(old, (0, 0))
    write_atomic(tmp_path / "file", "new")
    assert not old.exists() and fresh.exists(), "another process may be writing the fresh one"


def test_a_folder_is_listed_once_and_not_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    scandir = os.scandir

    def count(folder: str) -> object:
        listed.append(str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", count)
    for i in range(5):
        write_atomic(tmp_path / f"file-{i}", "new")
    assert listed.count(str(tmp_path)) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from nanochat import common
path, phase = Path(sys.argv[1]), sys.argv[2]
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
if phase == "writing":
    with common.atomic_path(path) as temporary:
        temporary.write_text("half of the n")
        die()
setattr(os, {"sync": "fsync", "rename": "replace"}.get(phase, "none"), die)
if phase == "after": common.fsync_path = die
common.write_atomic(path, "new")
"""


@pytest.mark.parametrize(("phase", "left"), [("writing", "old"), ("sync", "old"), ("rename", "old"), ("after", "new")])
def test_a_kill_leaves_the_old_content_or_the_new(tmp_path: Path, phase: str, left: str) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), phase], cwd=ROOT, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == left


def test_sha256_of_a_file_larger_than_a_block(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "x").write_bytes(data)
    assert common.sha256_of(tmp_path / "x") == hashlib.sha256(data).hexdigest()


def test_only_rank_0_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    common.log("one")
    common.warn("two")
    monkeypatch.setenv("RANK", "1")
    common.log("three")
    common.warn("four")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("one\n", "warning: two\n")


def test_the_base_folder_is_the_one_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, folder in [("~/base", tmp_path / "base"), (str(tmp_path / "new" / "deep"), tmp_path / "new" / "deep")]:
        monkeypatch.setenv("NANOCHAT_BASE_DIR", given)
        assert common.base_dir() == folder and folder.is_dir()
    monkeypatch.delenv("NANOCHAT_BASE_DIR")
    assert common.base_dir() == tmp_path / ".cache" / "nanochat"


def shown(**environment: str) -> subprocess.CompletedProcess[str]:
    """What `python -m nanochat.common` prints, which the scripts take for the base folder."""
    whole = {name: value for name, value in os.environ.items() if name not in ("HOME", "NANOCHAT_BASE_DIR")}
    return subprocess.run([sys.executable, "-m", "nanochat.common"], cwd=ROOT, env={**whole, **environment},
                          capture_output=True, text=True)  # fmt: skip


def test_scripts_are_told_the_base_folder_that_python_means(tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s a "base"'
    assert shown(NANOCHAT_BASE_DIR=str(odd)).stdout == f"{odd}\n"


def test_a_base_folder_that_cannot_be_used_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    done = shown(NANOCHAT_BASE_DIR=str(tmp_path / "file" / "base"))
    assert done.returncode == 1 and done.stderr.startswith("error: the base folder cannot be made: ")
    assert "Set NANOCHAT_BASE_DIR to a folder that you may write" in done.stderr and done.stderr.count("\n") == 1
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # in earnest root may write everywhere
    with pytest.raises(UserError, match=r"the base folder .* cannot be written\. Set NANOCHAT_BASE_DIR"):
        common.folder_for_scripts()
