"""What progress prints where there is no terminal."""

import pytest

from nanochat.runtime.progress import Progress, amount, duration


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (12, "B", "12 B"),
        (1_500, "B", "1.5 kB"),
        (2.5e6, "B", "2.5 MB"),
        (3e9, "B", "3.0 GB"),
        (1234, "rows", "1,234 rows"),
    ],
)
def test_amounts_are_short(value, unit, text):
    assert amount(value, unit) == text


@pytest.mark.parametrize(("seconds", "text"), [(8.26, "8.3 s"), (245, "4:05"), (3845, "1:04:05")])
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(capsys):
    with Progress("fetch", 100, "rows", every_seconds=0) as progress:
        progress.advance(40, skipped=True)
        progress.advance(30)
        progress.say("something happened")
        progress.advance(30)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fetch: 40 rows of 100 rows (40%)"
    assert lines[1].startswith("fetch: 70 rows of 100 rows (70%), ") and lines[1].endswith(" left")
    assert lines[2] == "something happened"
    assert lines[-1].startswith("fetch: 100 rows of 100 rows (100%) in 0.0 s") and len(lines) == 5


def test_a_failure_prints_no_last_line(capsys):
    with pytest.raises(ValueError), Progress("fetch", None, "rows") as progress:
        progress.advance(1)
        raise ValueError
    assert capsys.readouterr().out == ""
