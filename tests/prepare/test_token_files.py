"""Token files: tokens are mapped as they were written, and damage is reported."""

import errno
import fcntl
import multiprocessing
import os
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from nanochat.common import UserError, write_json
from nanochat.prepare.token_files import META, dtype_for, locked, open_tokens, token_writer

TOKEN_BYTES = np.array([1, 1, 2, 3, 0], np.int32)


def write(folder: Path, dtype: str = "uint16", masked: bool = True) -> None:
    parts = []
    for name, documents in (("a", [[0, 1], [2]]), ("b", []), ("c", [[3, 3, 4]])):
        tokens = np.array([token for document in documents for token in document], np.uint16)
        lengths = np.array([len(document) for document in documents], np.int64)
        with token_writer(folder, name, dtype, masked) as writer:
            writer.add(tokens, lengths, TOKEN_BYTES, np.ones(len(tokens), np.uint8) if masked else None)
            parts.append(writer.finish({}))
    write_json(folder / META, {"dtype": dtype, "parts": parts})


def test_parts_are_mapped_back(tmp_path):
    write(tmp_path / "t")
    tokens = open_tokens(tmp_path / "t", verify=True)
    assert (tokens.documents, tokens.tokens, tokens.bytes) == (3, 6, 10)
    assert tokens.lengths().tolist() == [2, 1, 3] and tokens.part_starts == [0, 3, 3]
    assert [part.tokens.tolist() for part in tokens.parts] == [[0, 1, 2], [], [3, 3, 4]]
    assert tokens.parts[0].mask is not None and tokens.parts[0].mask.tolist() == [1, 1, 1]
    assert type(tokens.parts[0].tokens) is np.ndarray and tokens.parts[0].tokens.dtype == np.uint16
    assert not list((tmp_path / "t").glob(".tmp*"))


def test_large_vocabularies_take_four_bytes(tmp_path):
    assert (dtype_for(65_536), dtype_for(65_537)) == ("uint16", "uint32")
    write(tmp_path / "t", "uint32", masked=False)
    part = open_tokens(tmp_path / "t").parts[0]
    assert part.tokens.dtype == np.uint32 and part.mask is None


def test_equal_content_has_an_equal_key(tmp_path):
    for name, dtype in (("a", "uint16"), ("b", "uint16"), ("c", "uint32")):
        write(tmp_path / name, dtype)
    a, b, c = (open_tokens(tmp_path / name).key for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".mask"])
def test_damage_is_named_with_the_command_that_fixes_it(tmp_path, suffix):
    folder = tmp_path / "t"
    write(folder)
    path = folder / f"a{suffix}"
    good = path.read_bytes()
    mend = re.escape(f"Fix it with: rm -f {path}")
    for bad in (good[:-1], good + b"x"):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=rf"{path} is damaged: it has {len(bad)} bytes, expected .*{mend}"):
            open_tokens(folder)
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(UserError, match=rf"its SHA-256 is not .*{mend}"):
        open_tokens(folder)
    path.unlink()
    with pytest.raises(UserError, match=rf"is damaged: it is missing.*{mend}"):
        open_tokens(folder)


def test_an_unfinished_part_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), token_writer(tmp_path / "t", "a", "uint16", masked=True) as writer:
        writer.add(np.zeros(1, np.uint16), np.ones(1, np.int64), TOKEN_BYTES, np.ones(1, np.uint8))
        raise KeyboardInterrupt
    assert list((tmp_path / "t").iterdir()) == []


def hold(path: Path, log: Path) -> None:
    with locked(path):
        with open(log, "a") as f:
            f.write("in ")
        time.sleep(0.05)
        with open(log, "a") as f:
            f.write("out ")


def test_one_process_at_a_time_holds_the_lock(tmp_path):
    spawn = multiprocessing.get_context("fork")
    processes = [spawn.Process(target=hold, args=(tmp_path / ".lock", tmp_path / "log")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert (tmp_path / "log").read_text() == "in out in out in out "


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL])
def test_without_locks_on_the_file_system_this_host_holds_its_own(tmp_path, monkeypatch, capsys, code):
    """As on Lustre that is mounted without -o flock."""
    flock = fcntl.flock

    def only_temporary(file, how):
        if tmp_path / "shared" in Path(file.name).parents:
            raise OSError(code, os.strerror(code))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", only_temporary)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "")  # counts as not set, as for compute_init()
    for _ in range(2):
        with locked(tmp_path / "shared" / "a.lock") as lock:
            assert os.fstat(lock).st_ino != (tmp_path / "shared" / "a.lock").stat().st_ino
            with open(f"/proc/self/fd/{lock}", "rb") as again, pytest.raises(BlockingIOError):
                flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(tmp_path / "shared") in said
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UserError, match="flock"), locked(tmp_path / "shared" / "a.lock"):
        pass


@pytest.mark.parametrize("name", [".tmp-a.bin", ".tmp-a.mask", ".tmp-a.idx"])
def test_a_link_planted_at_a_temporary_name_is_not_written_through(tmp_path, name):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / name).symlink_to(tmp_path / "victim")
    write(tmp_path / "t")
    assert (tmp_path / "victim").read_text() == "mine"
    assert open_tokens(tmp_path / "t", verify=True).tokens == 6


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "a.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match=r"a\.lock"), locked(tmp_path / "a.lock"):
        pass
    assert not (tmp_path / "victim").exists()
