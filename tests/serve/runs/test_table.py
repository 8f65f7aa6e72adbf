"""The table of a run stays small, and says of every row what a slow count over all lines says."""

import random

import pytest

from nanochat.serve.runs.table import MOST_FIGURES, MOST_ROWS, Table


def filled(values: list[float], name: str = "loss") -> Table:
    table = Table()
    for step, value in enumerate(values, 1):
        table.add(step, {name: value})
    return table


@pytest.mark.parametrize("count", [1, MOST_ROWS, MOST_ROWS + 1, 5 * MOST_ROWS + 3])
def test_rows_are_means_and_extremes_of_the_lines_that_they_hold(count: int) -> None:
    draw = random.Random(count)
    values = [draw.uniform(-5, 5) for _ in range(count)]
    told = filled(values).since("", 0)
    assert len(told["steps"]) <= MOST_ROWS and told["steps"][-1] == count
    begin = 0
    for row, end in enumerate(told["steps"]):
        held = values[begin:end]
        assert len(held) <= told["width"]
        assert told["figures"]["loss"]["mean"][row] == pytest.approx(sum(held) / len(held), rel=1e-4, abs=1e-5)
        if told["width"] > 1:
            assert told["figures"]["loss"]["low"][row] == pytest.approx(min(held), rel=1e-5)
            assert told["figures"]["loss"]["high"][row] == pytest.approx(max(held), rel=1e-5)
        begin = end
    assert begin == count


def test_a_reader_who_asks_after_every_line_has_the_same_as_one_who_asks_once() -> None:
    table = Table()
    edition, steps, means = "", [], []
    for step in range(1, 3 * MOST_ROWS):
        table.add(step, {"loss": float(step % 17)})
        told = table.since(edition, len(steps))
        assert told["edition"] != edition or len(told["steps"]) <= 2  # only what is new
        edition = told["edition"]
        steps = steps[: told["from"]] + told["steps"]
        means = means[: told["from"]] + told["figures"]["loss"]["mean"]
    whole = table.since("", 0)
    assert (steps, means) == (whole["steps"], whole["figures"]["loss"]["mean"])


def test_a_reader_of_another_edition_or_of_rows_that_are_not_there_gets_all() -> None:
    table = filled([1.0, 2.0, 3.0])
    for edition, known in (("other", 3), (table.edition, 0), (table.edition, 4)):
        assert table.since(edition, known)["from"] == 0
    told = table.since(table.edition, 3)
    assert (told["from"], told["steps"]) == (2, [3])


def test_a_figure_that_is_measured_now_and_then_is_null_elsewhere() -> None:
    table = Table()
    table.add(1, {"loss": 3.0})
    table.add(2, {"loss": 2.0, "val_bpb": 0.0})
    assert table.since("", 0)["figures"] == {"loss": {"mean": [3.0, 2.0]}, "val_bpb": {"mean": [None, 0.0]}}


def test_two_lines_of_a_step_are_one_row_and_earlier_steps_are_left_out() -> None:
    table = filled([1.0, 2.0, 3.0])
    table.add(3, {"accuracy": 0.5})
    table.add(2, {"loss": 99.0})
    assert table.since("", 0)["figures"] == {"loss": {"mean": [1.0, 2.0, 3.0]}, "accuracy": {"mean": [None, None, 0.5]}}


def test_names_of_figures_are_bounded() -> None:
    table = Table()
    for step in range(100):
        table.add(step, {f"figure {step}": 1.0})
    assert len(table.since("", 0)["figures"]) == MOST_FIGURES
