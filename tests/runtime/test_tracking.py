"""metrics.jsonl survives stops, kills and resumes."""

from pathlib import Path

import pytest

from nanochat.runtime.trackers import jsonl
from nanochat.runtime.tracking import Tracker, read_metrics


def write_lines(folder: Path, *steps: int) -> None:
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": {step / 7!r}}}\n' for step in steps))


def test_figures_are_read_back_exactly_as_measured(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "new") == []
    tracker = Tracker(tmp_path / "new", "dummy", {}, 0, main=True)
    tracker.log(step=1, loss=0.1 + 0.2, skipped=False)
    tracker.log(step=2, loss=1e-12, note="猫")
    tracker.close()
    assert read_metrics(tmp_path / "new") == [
        {"step": 1, "loss": 0.1 + 0.2, "skipped": False}, {"step": 2, "loss": 1e-12, "note": "猫"}
    ]  # fmt: skip


def test_what_is_not_finite_is_null_since_json_has_no_nan(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, "dummy", {}, 0, main=True)
    tracker.log(step=1, loss=float("nan"), grad_norm=float("inf"), samples=[float("-inf"), 2.0])
    tracker.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert line == '{"step": 1, "loss": null, "grad_norm": null, "samples": [null, 2.0]}'
    Tracker(tmp_path, "dummy", {}, 1, main=True).close()
    assert read_metrics(tmp_path)[0]["loss"] is None


def test_a_line_is_there_before_the_file_is_closed(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, "dummy", {}, 0, main=True)
    tracker.log(step=1)
    assert read_metrics(tmp_path) == [{"step": 1}]
    tracker.close()


def test_lines_after_the_step_gone_on_from_are_dropped(tmp_path: Path) -> None:
    write_lines(tmp_path, 1, 2, 3, 4, 5)
    tracker = Tracker(tmp_path, "dummy", {}, 3, main=True)
    tracker.log(step=4, loss=9.0)
    tracker.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert [line["loss"] for line in read_metrics(tmp_path)] == [1 / 7, 2 / 7, 3 / 7, 9.0]


def test_a_new_run_begins_an_empty_file(tmp_path: Path) -> None:
    write_lines(tmp_path, 1, 2)
    Tracker(tmp_path, "dummy", {}, 0, main=True).close()
    assert read_metrics(tmp_path) == []


def test_a_file_is_locked_while_a_training_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = Tracker(tmp_path, "dummy", {}, 0, main=True)
    assert jsonl.being_written(path) is True
    tracker.close()
    assert jsonl.being_written(path) is False


def test_somebody_who_looks_at_the_lock_delays_a_training_and_stops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []

    def busy_once(*given: object) -> None:
        tries.append(given)
        if len(tries) == 1:
            raise BlockingIOError

    monkeypatch.setattr(jsonl.fcntl, "flock", busy_once)
    Tracker(tmp_path, "dummy", {}, 0, main=True).log(step=1)
    assert len(tries) == 2


def test_without_locks_nobody_knows_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(jsonl.fcntl, "flock", refuse)
    tracker = Tracker(tmp_path, "dummy", {}, 0, main=True)
    tracker.log(step=1)
    assert jsonl.being_written(tmp_path / "metrics.jsonl") is None
    tracker.close()


@pytest.mark.parametrize("cut", [1, 5, 15])
def test_a_last_line_cut_by_a_kill_is_left_out(tmp_path: Path, cut: int) -> None:
    write_lines(tmp_path, 1, 2, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    whole = [1, 2, 3] if cut == 1 else [1, 2]  # a line without its newline is still complete
    assert [line["step"] for line in read_metrics(tmp_path)] == whole
    tracker = Tracker(tmp_path, "dummy", {}, 2, main=True)
    tracker.log(step=3)
    tracker.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_line_cut_inside_a_character_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes('{"step": 1}\n{"step": 2, "text": "猫'.encode()[:-1])
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_the_old_lines_survive_a_kill_while_they_are_cut_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path, 1, 2, 3)

    def killed(path: Path, data: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jsonl, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        Tracker(tmp_path, "dummy", {}, 2, main=True)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "other", "some-run", {}, 0, main=False)
    tracker.log(step=1)
    tracker.close()
    assert not (tmp_path / "other").exists()
