"""Runs side by side: every measure, cost and setting of each, and what is no report is refused."""

from pathlib import Path
from typing import Any

import pytest

from nanochat.common import UserError, read_json, write_json
from nanochat.report import __main__ as report
from nanochat.report.compare import Run, compare, differences, figures, load_run, measures, named
from tests.support.finished_run import a_run


@pytest.fixture
def runs(base_folder: Path) -> list[Run]:
    """A run, and the same run with a better model of twice the depth that took three times as long."""
    a_run(base_folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw", lambda *_: b"")
        report.generate()
    changed: dict[str, Any] = read_json(base_folder / "report" / "report.json")
    changed["table"]["tinyworld_zh"]["sft"] = 0.9
    changed["table"]["CORE"] = {}
    changed["summary"]["minutes"] *= 3
    changed["sections"]["base_train"]["settings"]["depth"] = 4
    del changed["sections"]["rl_train"]
    write_json(base_folder / "other" / "report.json", changed)
    return [load_run(str(base_folder)), load_run(f"deep={base_folder / 'other'}")]


def test_a_run_is_named_by_its_folder_or_as_asked(runs: list[Run], base_folder: Path) -> None:
    assert [run.name for run in runs] == [base_folder.name, "deep"]
    assert [run.name for run in named([runs[1], runs[0], runs[1]])] == ["deep (1)", base_folder.name, "deep (2)"]


def test_a_path_may_contain_an_equals_sign(runs: list[Run], tmp_path: Path) -> None:
    folder = tmp_path / "lr=1e-3"
    write_json(folder / "report.json", runs[0].report)
    assert [load_run(f"{prefix}{folder}").name for prefix in ("", "high=")] == ["lr=1e-3", "high"]


def test_measures_stand_side_by_side_with_their_intervals(runs: list[Run]) -> None:
    rows = {row[0]: row[1:] for row in measures(runs)}
    assert rows["tinyworld_zh, after SFT"] == ["71.9 % (61.9–81.9)", "90.0 % (61.9–81.9)"]
    assert rows["CORE, after BASE"] == ["0.0625", ""]
    assert rows["bits per byte of answers, after SFT"] == ["0.8750", "0.8750"]


def test_costs_have_a_price_if_one_is_given(runs: list[Run]) -> None:
    rows = {row[0]: row[1:] for row in figures(runs, price_per_hour=8)}
    assert rows["time"] == ["7 min 30 s", "22 min 30 s"] and rows["cost at 8 an hour"] == ["1.00", "3.00"]
    assert rows["RL: training steps"] == ["2", ""]
    assert not any(row[0].startswith("cost") for row in figures(runs, None))


def test_only_settings_that_differ_are_listed(runs: list[Run]) -> None:
    assert differences(runs) == [["base_train: depth", "2", "4"]]
    assert differences([runs[0], runs[0]]) == []


def test_the_comparison_is_one_page_with_the_curves_of_both(runs: list[Run], tmp_path: Path) -> None:
    text = compare(runs, tmp_path / "out").read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 3  # RL ran once only
    assert "<td>base_train: depth</td>" in text


def test_the_command_line_writes_the_page_and_refuses_what_is_no_report(runs: list[Run], base_folder: Path) -> None:
    report.main(report.Config("compare", (str(base_folder), f"b={base_folder / 'other'}"), price_per_hour=2.5))
    assert (base_folder / "report" / "compare" / "compare.html").exists()
    for words in (("compare", (str(base_folder),)), ("show", ("x",))):
        with pytest.raises(UserError, match=r"got (1|x)"):
            report.main(report.Config(*words))
    with pytest.raises(UserError, match=r"no report\.json"):
        load_run(str(base_folder / "nowhere"))
    for wrong in ([], {"table": {}, "sections": [], "stages": {}, "summary": {}, "environment": {}}):
        write_json(base_folder / "wrong.json", wrong)
        with pytest.raises(UserError, match=r"wrong.json .*sections"):
            load_run(str(base_folder / "wrong.json"))


def test_of_a_run_whose_stages_were_typed_only_the_time_of_training_is_known(runs: list[Run]) -> None:
    runs[1].report["summary"] |= {"cpu_minutes": 0.0, "memory_gb": 0.0}
    rows = {row[0]: row[1:] for row in figures(runs, price_per_hour=8)}
    assert rows["time"][1] == "22 min 30 s of training"
    assert rows["CPU time"][0] and rows["CPU time"][1] == rows["memory in GB"][1] == ""
    runs[0].report["summary"]["minutes"] = 0.0
    assert ["cost at 8 an hour", "", "3.00"] in figures(runs, price_per_hour=8)


def test_a_report_without_training_has_no_cost_and_no_curves(runs: list[Run], tmp_path: Path) -> None:
    """As where base_loss ran again in a base folder of its own: what is not known must not stand there as 0."""
    for run in runs:
        run.report["summary"] |= {"minutes": 0.0, "cpu_minutes": 0.0, "memory_gb": 0.0}
        run.report["sections"] = {}
    assert not any(name in ("time", "CPU time", "memory in GB") for name, *_ in figures(runs, None))
    assert "Curves" not in compare(runs, tmp_path / "out").read_text(encoding="utf-8")
