"""Progress prints a bar if standard output is a terminal, and lines otherwise."""

import os
import sys
from pathlib import Path

import pytest

from nanochat.runtime.progress import Progress, amount, duration, memory, plain_duration


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (12, "B", "12 B"),
        (2.5e6, "B", "2.5 MB"),
        (3e9, "B", "3.0 GB"),
        (1234, "rows", "1,234 rows"),
        (7, "rows", "7 rows"),
        (0.524, "rows", "0.52 rows"),
    ],
)
def test_amounts_are_short(value, unit, text):
    assert amount(value, unit) == text


def test_memory_counts_as_data_sheets_of_cards_do():
    assert [memory(64 << 30), memory(15 << 19)] == ["64.0 GiB", "7.5 MiB"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.6, "1 min"),
        (245, "4 min 5 s"),
        (3_560, "59 min 20 s"),
        (12_000, "3 h 20 min"),
        (190_000, "2 d 5 h"),
    ],
)
def test_durations_have_two_units(seconds, text):
    assert duration(seconds) == plain_duration(seconds) == text


def test_units_of_time_follow_the_language_but_not_in_lines_that_scripts_parse(monkeypatch):
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    assert [duration(seconds) for seconds in (8.3, 200, 190_000)] == ["8.3 秒", "3 分 20 秒", "2 天 5 小时"]
    assert plain_duration(200) == "3 min 20 s"


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(capsys):
    with Progress("fetch", 100, "rows", every_seconds=0) as progress:
        progress.advance(40, skipped=True)
        progress.advance(30)
        progress.say("something happened")
        progress.advance(30)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fetch: 40 of 100 rows (40%)"
    assert lines[1].startswith("fetch: 70 of 100 rows (70%), ") and lines[1].endswith(" left")
    assert lines[2] == "something happened"
    assert lines[-1].startswith("fetch: 100 of 100 rows (100%) in 0.0 s") and len(lines) == 5


def test_a_failure_prints_no_last_line(capsys):
    with pytest.raises(ValueError), Progress("fetch", None, "rows") as progress:
        progress.advance(1)
        raise ValueError
    assert capsys.readouterr().out == ""


def test_a_log_gets_the_line_of_every_step_and_no_note(capsys):
    progress = Progress("base", 3, "steps", completed=1)
    for step in (2, 3):
        progress.show(step, "a note", f"step {step}")
    progress.close()
    assert capsys.readouterr().out == "step 2\nstep 3\n"


def test_only_the_process_that_shows_prints(capsys):
    with Progress("base", 3, "steps", every_seconds=0, shown=False) as progress:
        progress.show(1, "a note", "step 1")
        progress.advance(2)
        progress.say("something happened")
    assert capsys.readouterr().out == ""


def test_more_work_than_was_foreseen_has_no_time_left(capsys):
    with Progress("search", 2, "runs", every_seconds=0) as progress:
        for _ in range(3):
            progress.advance(1)
    lines = capsys.readouterr().out.splitlines()
    assert "left" in lines[0] and lines[2].startswith("search: 3 of 2 runs (150%)") and "left" not in lines[2]


def test_units_of_earlier_runs_count_as_done_but_not_as_speed(capsys):
    with Progress("base", 4, "steps", every_seconds=0, completed=2) as progress:
        progress.advance(0)
    assert capsys.readouterr().out.splitlines()[0] == "base: 2 of 4 steps (50%)"


class Terminal:
    """A pseudo-terminal in the place of standard output and error, from `with` to its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        self.patch, self.drawn = monkeypatch, ""

    def __enter__(self) -> "Terminal":
        self.screen, keyboard = os.openpty()
        self.stream = open(keyboard, "w")
        # not in a fixture: pytest puts its own streams back before the test itself
        self.patch.setattr(sys, "stdout", self.stream)
        self.patch.setattr(sys, "stderr", self.stream)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
        print(end="\0", file=self.stream, flush=True)  # marks the end, since a terminal gives its text in pieces
        drawn = b""
        while not drawn.endswith(b"\0"):
            drawn += os.read(self.screen, 1 << 16)
        self.drawn = drawn[:-1].decode()
        self.stream.close()
        os.close(self.screen)


def test_a_terminal_gets_a_bar_with_a_note_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal(monkeypatch) as terminal:
        progress = Progress("base [d4]", 5000, "steps", completed=10)
        progress.show(1000, "1000/5000 loss 3.456", "step 01000/05000")
        progress.say("something happened")
        progress.close()
    text = terminal.drawn
    assert "base [d4]" in text and "1000/5000 loss 3.456" in text and "something happened" in text
    assert "step 01000/05000" not in text
    assert text.endswith("\x1b[2K"), "the last thing drawn erases the bar"


def test_a_terminal_gets_the_amount_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal(monkeypatch) as terminal, Progress("fetch", 100, "rows") as progress:
        progress.advance(30)
    assert terminal.drawn.count("30 of 100 rows (30%), ") >= 1 and " left" in terminal.drawn
    assert "fetch: 30 of 100 rows (30%) in " in terminal.drawn


@pytest.mark.parametrize("variable", [("TERM", "dumb"), ("TTY_INTERACTIVE", "0")])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    with Terminal(monkeypatch) as terminal:
        monkeypatch.setenv(*variable)
        progress = Progress("base", 3, "steps")
        progress.show(1, "a note", "step 1")
        progress.close()
    assert terminal.drawn == "step 1\r\n"


def test_a_file_gets_lines_while_errors_go_to_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m scripts.base_train > log`; FORCE_COLOR must not bring the bar into the file."""
    log = tmp_path / "log"
    with Terminal(monkeypatch), open(log, "w") as stdout:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr(sys, "stdout", stdout)
        progress = Progress("base", 3, "steps")
        for step in (1, 2, 3):
            progress.show(step, "a note", f"step {step}")
        progress.close()
    assert log.read_text() == "step 1\nstep 2\nstep 3\n"


def test_a_file_gets_the_errors_while_the_bar_is_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = tmp_path / "errors"
    with Terminal(monkeypatch) as terminal, open(errors, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        progress = Progress("base", 3, "steps")
        print("warning: something", file=sys.stderr)
        progress.show(2, "a note", "step 2")
        progress.close()
    assert errors.read_text() == "warning: something\n"
    assert "a note" in terminal.drawn and "something" not in terminal.drawn
