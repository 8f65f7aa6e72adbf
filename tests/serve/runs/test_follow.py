"""A metrics.jsonl is followed while it is written: nothing is read twice, and no line can do harm."""

import json
import os
from pathlib import Path

import pytest

from nanochat.runtime.tracking import Tracker
from nanochat.serve.runs import follow
from nanochat.serve.runs.follow import CHUNK_BYTES, LONGEST_LINE, Follower, figures_of


def steps(follower: Follower) -> list[int]:
    return follower.table.since("", 0)["steps"]


def test_only_new_lines_are_read_and_a_half_written_one_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps({"step": step, "loss": 1 / step, "note": "猫"}, ensure_ascii=False) + "\n"
                    for step in range(1, 6)).encode()  # fmt: skip
    follower = Follower(path)
    for end in range(len(whole) + 1):  # every cut, inside characters too
        path.write_bytes(b"")  # keeps the inode
        os.truncate(path, 0)
        path.write_bytes(whole[:end])
        follower.read()
        assert len(steps(follower)) == whole[:end].count(b"\n")
        assert follower.done == end and follower.bad == 0
    assert steps(follower) == [1, 2, 3, 4, 5]


def test_a_run_that_resumes_replaces_the_file_and_the_figures(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, "dummy", {}, 0, main=True)
    follower = Follower(tmp_path / "metrics.jsonl")
    for step in range(1, 5):
        tracker.log(step=step, loss=float(step))
    follower.read()
    edition = follower.table.edition
    tracker.close()
    tracker = Tracker(tmp_path, "dummy", {}, 2, main=True)
    tracker.log(step=3, loss=30.0)
    follower.read()
    assert steps(follower) == [1, 2, 3] and follower.table.edition != edition
    assert follower.table.since("", 0)["figures"]["loss"]["mean"] == [1.0, 2.0, 30.0]
    tracker.close()


def test_a_run_that_resumes_twice_between_two_looks_replaces_the_figures(tmp_path: Path) -> None:
    """The file system may give the third file the number of the first one."""
    follower = Follower(tmp_path / "metrics.jsonl")
    for loss in (1.0, 20.0, 300.0):
        tracker = Tracker(tmp_path, "dummy", {}, 1 if loss > 1 else 0, main=True)
        for step in range(1 if loss == 1 else 2, 5):
            tracker.log(step=step, loss=loss)
        tracker.close()
        if loss != 20:
            follower.read()
    assert follower.table.since("", 0)["figures"]["loss"]["mean"] == [1.0, 300.0, 300.0, 300.0]


def test_a_file_that_was_written_over_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    for first in (1, 5):
        path.write_text("".join(f'{{"step": {step}}}\n' for step in range(first, 2 * first + 1)))
        follower.read()
    assert (steps(follower), follower.bad) == ([5, 6, 7, 8, 9, 10], 0)


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    follower = Follower(path)
    follower.read()
    path.write_text('{"step": 7}\n')
    follower.read()
    assert steps(follower) == [7]


HOSTILE = [
    b"[]", b"null", b'"step"', b"{}", b'{"step": "1"}', b'{"step": true}', b'{"step": 1.5}', b'{"step": -1}',
    b'{"step": NaN}', b'{"step": 1' + b"0" * 30 + b"}", b'{"step": ' + b"9" * 5000 + b"}", b"\xff\xfe", b"[" * 60_000,
    b'{"a":' * 12_000, b'{"step": 1} {"step": 2}',
]  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_that_holds_no_figures_is_counted_and_left_out(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n\n{"step": 2}\n')
    follower = Follower(path)
    follower.read()
    assert (steps(follower), follower.bad) == ([1, 2], 1)


def test_only_finite_numbers_are_figures() -> None:
    line = {"step": 3, "loss": 2, "nan": float("nan"), "inf": float("-inf"), "huge": 10**400, "text": "x", "yes": True,
            "none": None, "list": [1], "__proto__": 1.5, "x" * 65: 1}  # fmt: skip
    assert figures_of(json.dumps(line).encode()) == (3, {"step": 3.0, "loss": 2.0, "__proto__": 1.5})


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"step": 1}\n' + b"x" * (3 * CHUNK_BYTES))
        follower = Follower(path)
        for _ in range(4):
            follower.read()
            assert len(follower._begun) <= LONGEST_LINE
        file.write(b"x" * 100 + b'\n{"step": 2}\n')
        file.flush()
        follower.read()
    assert (steps(follower), follower.bad, follower.behind) == ([1, 2], 1, False)


def test_a_long_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "CHUNK_BYTES", 1000)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(500)))
    follower, reads = Follower(path), 0
    while reads == 0 or follower.behind:
        follower.read()
        reads += 1
    assert reads == -(-path.stat().st_size // 1000) and steps(follower) == list(range(500))


@pytest.mark.parametrize("kind", ["pipe", "folder", "missing", "device"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics.jsonl"
    make = {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "missing": lambda: None,
            "device": lambda: path.symlink_to("/dev/zero")}  # fmt: skip
    make[kind]()
    with pytest.raises(OSError):
        Follower(path).read()
