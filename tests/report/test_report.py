"""The report has the same figures in both files, leaves out missing sections, and knows a finished run by its key."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanochat.common import UserError, read_json, write_json
from nanochat.report import __main__ as report
from nanochat.report import summary
from nanochat.report.sections import (
    has_training_section,
    read_sections,
    report_dir,
    training_section,
    write_section,
)
from nanochat.report.summary import environment
from nanochat.report.words import titles
from nanochat.runtime.cost import stages_file
from nanochat.runtime.progress import plain_duration
from tests.support.english_lines import CHINESE, english_lines
from tests.support.finished_run import COSTS, a_run, line, score, trained

ROOT = Path(__file__).resolve().parent.parent.parent


def generated(key: str = "", drawn: bool = False) -> tuple[dict[str, Any], str]:
    """The report as JSON and as Markdown; its pictures, each of which takes a second, are drawn only if asked for."""
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(report, "draw", lambda *_: b"")
        path = report.generate(key)
    return read_json(path.with_suffix(".json")), path.read_text(encoding="utf-8")


def test_the_table_compares_stages(base_folder: Path) -> None:
    a_run(base_folder)
    table = generated()[0]["table"]
    of_each = {name: row for name, row in table.items() if name.startswith("bits per byte of ")}
    assert [row for row in of_each.values()] == [{"base": 1.25}, {"mid": 1.125}, {"sft": 0.875}]  # other texts
    assert table["CORE"] == {"base": 0.0625}
    assert table["tinyworld_zh"] == {"mid": 0.25, "sft": 0.71875, "rl": 0.6875}
    assert table["mental"]["rl"] > 0 and "ChatCORE" not in table


def test_bits_of_another_corpus_do_not_stand_beside_those_of_the_base_corpus(base_folder: Path) -> None:
    for stage, corpus in (("base", "web"), ("mid", "web"), ("sft", "books"), ("rl", "books")):
        losses = {"val": {"bits_per_byte": 1.5}, "domains": {"zh": {"bits_per_byte": 1.25}}}
        write_section(f"{stage}_loss", {"tag": "d2", "corpus": corpus, **losses})
    table = generated()[0]["table"]
    assert table["bits per byte of the base corpus"] == {"base": 1.5, "mid": 1.5}
    assert table["bits per byte of the base corpus: zh"] == {"base": 1.25, "mid": 1.25}
    assert table["bits per byte of books"] == {"sft": 1.5, "rl": 1.5}


def test_the_summary_has_the_figures_after_sft_as_fractions_and_the_costs(base_folder: Path) -> None:
    a_run(base_folder)
    found = generated()[0]["summary"]
    assert (found["tinyworld_en"], found["tinyworld_zh"], found["calculator"]) == (0.96875, 0.71875, 1.0)
    assert (found["minutes"], found["cpu_minutes"], found["memory_gb"]) == (7.5, 14.0, 1.25)
    assert found["mental_after_rl"] == 0.9375 / 2


def test_markdown_shows_what_the_json_says(base_folder: Path) -> None:
    a_run(base_folder)
    found, text = generated()
    for name, row in found["table"].items():
        shown = next(one for one in text.splitlines() if one.startswith(f"| {name} |"))
        cells = [cell.strip() for cell in shown.split("|")[2:-1]]
        assert cells == [f"{row[stage]:.4f}" if stage in row else "" for stage in ("base", "mid", "sft", "rl")]
    for name, cost in found["stages"].items():
        assert (
            f"| {name} | {plain_duration(60 * cost['minutes'])} | {plain_duration(60 * cost['cpu_minutes'])} |" in text
        )
    assert "7 min 30 s, 14 min of CPU time, at most 1.25 GB" in text
    assert "capital 9/10" in text and "colour" not in text.split("relations with wrong answers")[1].splitlines()[0]
    for word in ("法国的首都是哪里？", "巴黎。", "(wrong)", "东京", "a CPU", "| 中文 | 2.5000 |"):
        assert word in text
    for block in re.split(r"\n(?!\|)", text.replace("\\|", "")):  # no cell breaks its table
        widths = {one.count("|") for one in block.splitlines() if one.startswith("|")}
        assert len(widths) <= 1, block


def test_a_tuned_published_model_has_a_column_of_its_own(base_folder: Path) -> None:
    a_run(base_folder)
    folder = base_folder / "tuned_checkpoints" / "mine"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(line(1, val_bpb=0.5))
    training_section("tune", "mine", folder, {"parent": "Qwen3-0.6B abc", "corpus": "own"}, {"device": "a CPU"})
    found, text = generated()
    assert set(found["sections"]) == {"tune_train"}
    assert "| measure | TUNE |" in text and "| bits per byte of answers of your own data | 0.5000 |" in text
    (folder / "metrics.jsonl").write_text(line(1, val_accuracy=0.75))
    training_section("tune", "mine", folder, {"parent": "Qwen3-0.6B abc", "corpus": "own"}, {"device": "a CPU"})
    text = generated()[1]
    assert (
        "| preferences of your own data that the model follows | 0.7500 |" in text
        and "bits per byte of ans" not in text
    )


def test_every_picture_named_is_there(base_folder: Path) -> None:
    a_run(base_folder)
    text = generated(drawn=True)[1]
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert pictures == [f"{stage}_train.png" for stage in ("base", "mid", "sft", "rl")]
    for name in pictures:
        assert (report_dir() / name).read_bytes().startswith(b"\x89PNG")


def test_a_training_section_sums_up_its_metrics(base_folder: Path) -> None:
    trained(base_folder, "base", *(line(step) for step in range(1, 6)))
    section = read_sections()["base_train"]
    assert section["minutes"] == 0.5 and section["tokens_per_second"] == 1003.0 and section["skipped_updates"] == 1
    assert (section["first_loss"], section["last_loss"], section["steps"]) == (3.9, 3.75, 5)
    assert "val_bpb" not in section and section["loss"][-1] == [5, 3.75]
    assert has_training_section("base", "d2")
    assert not has_training_section("base", "d4") and not has_training_section("mid", "d2")


@pytest.mark.parametrize("bad", [[1], [3], [1, 2, 3]], ids=str)
def test_updates_that_were_not_finite_are_counted_and_left_out_of_the_curves(base_folder: Path, bad: list[int]) -> None:
    nothing: dict[str, Any] = {"loss": None, "grad_norm": None, "skipped": True}
    lines = [line(step, **(nothing if step in bad else {"skipped": False})) for step in (1, 2, 3)]
    lines[0] = line(1, smooth_loss=None, **nothing) if 1 in bad else lines[0]
    trained(base_folder, "base", *lines)
    found, text = generated(drawn=True)
    section = found["sections"]["base_train"]
    assert section["skipped_updates"] == len(bad) and section["steps"] == 3
    assert len(section["loss"]) == 3 - (1 in bad) and section["last_loss"] == 3.85
    good = [4.0 - step / 10 for step in (1, 2, 3) if step not in bad]
    assert section["first_loss"] == (good[0] if good else None) and not re.search(r"\bnan\b", text)


@pytest.mark.parametrize("kept", ["base_train", "sft_eval", "tok_eval"])
def test_any_single_section_makes_a_report(base_folder: Path, kept: str) -> None:
    a_run(base_folder)
    for path in (report_dir() / "sections").iterdir():
        if path.stem != kept:
            path.unlink()
    stages_file().unlink()
    found, text = generated()
    assert list(found["sections"]) == [kept] and f"## {titles()[kept]}" in text
    assert ("tinyworld_en" in found["summary"]) == (kept == "sft_eval")
    report.show()


def test_a_folder_that_a_broken_installation_left_stops_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leftover-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert environment()["versions"]["torch"]


def test_a_processor_without_a_name_is_told_by_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"  # as on Kunpeng servers
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 200.00\nCPU implementer\t: 0x48\n")
    monkeypatch.setattr(summary, "CPUINFO", cpuinfo)
    monkeypatch.setattr(summary.platform, "processor", lambda: "")
    assert environment()["processor"] == summary.platform.machine()


def test_without_sections_or_report_the_next_step_is_named() -> None:
    for action in (report.generate, report.show):
        with pytest.raises(UserError) as refused:
            action()
        assert refused.value.exit_code == 2
    assert not report.is_finished("tinyworld")


def test_a_run_is_finished_under_its_own_key_only(base_folder: Path) -> None:
    a_run(base_folder)
    generated()
    assert not report.is_finished("") and not report.is_finished("smoke tinyworld")
    generated("smoke tinyworld")
    assert report.is_finished("smoke tinyworld") and not report.is_finished("auto auto")


def test_the_costs_of_another_run_are_forgotten(base_folder: Path) -> None:
    a_run(base_folder)
    report.begin("auto auto")
    assert not stages_file().exists()
    write_json(stages_file(), COSTS)
    report.begin("auto auto")  # the run resumes
    assert read_json(stages_file()) == COSTS
    report.begin("smoke auto")
    assert not stages_file().exists() and len(read_sections()) == 10


def a_pipeline(base: Path, tag: str, corpus: str, *stages: str) -> None:
    """Sections of a run on a corpus; the later stages take the corpus of their parent."""
    for name in ("tok_train", "tok_eval"):
        write_section(name, {"settings": {"data": corpus}, "vocab_size": 300})
    for number, stage in enumerate(stages):
        folder = base / f"{tag}-{corpus}-{stage}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(line(1))
        inherited = {"parent": f"{stages[number - 1]} {tag} step 1 0", "data": None} if number else {"data": corpus}
        training_section(stage, tag, folder, {"corpus": corpus, **inherited}, {"device": "a CPU"})
        write_section(f"{stage}_eval", {"tag": tag, "tasks": {"mental": score(0.5)}})


def test_what_another_tag_left_is_not_in_the_report(base_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_pipeline(base_folder, "d20", "fineweb", "base", "mid", "sft", "rl")
    assert len(generated()[0]["sections"]) == 10 and "left out" not in capsys.readouterr().out
    a_pipeline(base_folder, "speedrun", "tinyworld", "base", "mid")
    found, text = generated()
    assert list(found["sections"]) == ["tok_train", "tok_eval", "base_train", "base_eval", "mid_train", "mid_eval"]
    assert set(found["table"]["mental"]) == {"base", "mid"} and "SFT: fine-tuning" not in text
    assert "they belong to another run: sft_train, sft_eval, rl_train, rl_eval" in capsys.readouterr().out
    write_section("sft_eval", read_sections()["sft_eval"])  # the first run continues
    assert list(generated()[0]["sections"]) == ["sft_train", "sft_eval", "rl_train", "rl_eval"]


def test_what_another_corpus_left_under_the_same_tag_is_not_in_the_report(base_folder: Path) -> None:
    a_pipeline(base_folder, "d4", "fineweb", "base", "mid", "sft", "rl")
    a_pipeline(base_folder, "d4", "tinyworld", "base")
    assert list(generated()[0]["sections"]) == ["tok_train", "tok_eval", "base_train", "base_eval"]
    write_section("tok_eval", {"corpus": "fineweb"})
    assert list(generated()[0]["sections"]) == ["tok_train", "base_train", "base_eval"]


@pytest.mark.parametrize("tag", ["speedrun-mine", "my own"])
def test_your_own_conversations_and_the_model_they_started_from_are_one_run(base_folder: Path, tag: str) -> None:
    a_pipeline(base_folder, "speedrun", "tinyworld", "base", "mid", "sft", "rl")
    parents = {"mid": "base speedrun", "sft": f"mid {tag}"}
    for stage, parent in parents.items():
        section = {**read_sections()[f"{stage}_train"], "tag": tag}
        section["settings"] = {**section["settings"], "parent": f"{parent} step 1 0"}
        write_section(f"{stage}_train", section)
    kept = ["tok_train", "tok_eval", "base_train", "base_eval", "mid_train", "sft_train"]
    assert list(generated()[0]["sections"]) == kept  # evaluations and RL were of the other model
    write_section("mid_train", read_sections()["mid_train"])  # the parent is newer than its child
    assert list(generated()[0]["sections"]) == kept


def test_the_terminal_shows_the_table(base_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(base_folder)
    generated()
    report.show()
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "tinyworld_zh" in line]
    assert re.findall(r"0\.\d+", row) == ["0.2500", "0.7188", "0.6875"]


def test_the_terminal_shows_the_table_in_chinese(
    base_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(base_folder)
    generated()
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    capsys.readouterr()
    report.show()
    names = r"nanochat|CORE|tinyworld|calculator|mental|follow_ups|held_out|persona|storytelling"
    lines = [line for line in english_lines(capsys.readouterr().out) if re.search("[a-z]", line)]
    assert not [line for line in lines if not re.search(names, line)]


def test_the_report_is_in_chinese(base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(base_folder)
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    _, text = generated(key="smoke tinyworld")
    parts = [line for line in text.splitlines() if re.match(r"#|>|- (?!`)|\|.*\|$", line)]
    heads = [line for line, below in itertools.pairwise(parts) if "| --- |" in below]
    sentences = [line for line in parts if not line.startswith("|")]
    assert len(heads) > 5 and len(sentences) > 10
    names = ["| text | ratio |", "## Base：CORE"]  # keys of figures, and names
    assert [line for line in [*heads, *sentences] if not CHINESE.search(line)] == names
    assert '<html lang="zh">' in (report_dir() / "report.html").read_text(encoding="utf-8")


def test_fine_tuning_without_speedrun_has_figures_and_its_time(
    base_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"tag": "mine", "minutes": 7.0, "first_loss": 2.5, "last_loss": 1.25, "settings": {}, "loss": []}
    write_section("tune_train", figures)
    assert generated()[0]["table"] == {
        "training loss, first step": {"tune": 2.5},
        "training loss, last step": {"tune": 1.25},
    }
    report.show()
    out = capsys.readouterr().out
    assert "7 min" in out and "0.0 s" not in out and "1.2500" in out


def test_fine_tuning_after_a_speedrun_has_not_the_costs_of_the_speedrun(
    base_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(base_folder)  # its stages cost 7.5 minutes
    write_section("tune_train", {"tag": "mine", "minutes": 90.0, "settings": {}, "loss": []})
    assert generated()[0]["stages"] == {}
    report.show()
    out = capsys.readouterr().out
    assert "1 h 30 min" in out and "7 min 30 s" not in out


def test_stages_typed_after_a_speedrun_have_not_its_costs(base_folder: Path) -> None:
    a_run(base_folder)
    assert generated()[0]["stages"] == COSTS
    os.utime(stages_file(), (0, 0))
    write_section("base_train", {"tag": "mine", "minutes": 90.0, "settings": {}, "loss": []})
    content, _ = generated()
    assert content["stages"] == {} and content["summary"]["minutes"] == 90.0


@pytest.mark.slow
def test_the_command_line(base_folder: Path) -> None:
    a_run(base_folder)

    def code(*words: str) -> int:
        command = [sys.executable, "-m", "nanochat.report", *words]
        return subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True).returncode

    assert code("finished", "--key", "a b") == 3
    assert code("generate", "--key", "a b") == 0
    assert code("finished", "--key", "a b") == 0
    assert code("reset") == 0 and not report_dir().exists()
    assert code("generate") == 2
