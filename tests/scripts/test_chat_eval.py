"""chat_eval with a tiny checkpoint and small files of the published tasks."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanochat.common import UserError, read_json, write_json
from nanochat.data.conversation import Part, Task, words
from nanochat.data.traits import traits
from nanochat.device import Compute
from nanochat.evals.records import read_records
from nanochat.runtime.samples import read_samples
from scripts import chat_eval
from scripts.chat_eval import Config
from tasks import tinyworld
from tests.support import published
from tests.support.ranks import run_ranks
from tests.support.tiny_model import on_cpu, tiny_checkpoint

DATA = Path(__file__).parent.parent / "support" / "files" / "tasks"


@pytest.fixture(autouse=True)
def task_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_TASK_DIR", str(DATA))
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")


def section(base_folder: Path, stage: str = "sft") -> dict[str, Any]:
    return read_json(base_folder / "report" / "sections" / f"{stage}_eval.json")


def test_the_published_tasks_give_scores_chatcore_and_a_section_of_the_report(base_folder, capsys):
    tiny_checkpoint(corpus="fineweb-edu", sequence_len=1024)
    scores = chat_eval.chat_eval(Config(max_new_tokens=4, max_problems=3, unsafe_exec=True), on_cpu())
    assert list(scores) == ["ARC-Easy", "ARC-Challenge", "MMLU", "GSM8K", "HumanEval", "SpellingBee"]
    saved = section(base_folder)
    for name, score in scores.items():
        assert saved["tasks"][name]["accuracy"] == score.accuracy and saved["tasks"][name]["total"] <= 3
    assert [scores[name].baseline > 0 for name in scores] == [True] * 3 + [False] * 3
    said = capsys.readouterr().out
    assert f"ChatCORE: {saved['chat_core']:.4f}" in said
    assert said.count("answers: ") == 1  # for all tasks together
    (folder,) = base_folder.glob("*_checkpoints/*")
    samples = [(one.asked, one.said, one.grade) for one in read_samples(folder) if one.source == "GSM8K"]
    assert samples
    assert samples == [(row["question"], row["reply"], row["grade"]) for row in saved["tasks"]["GSM8K"]["samples"]]


def test_named_tasks_are_added_to_the_section_of_the_same_checkpoint(base_folder):
    tiny_checkpoint()
    ask = Config(task_name="ARC-Easy", max_new_tokens=4, max_problems=2)
    chat_eval.chat_eval(ask, on_cpu())
    chat_eval.chat_eval(Config(task_name=" calculator | MMLU ", max_new_tokens=4, max_problems=2), on_cpu())
    assert list(section(base_folder)["tasks"]) == ["ARC-Easy", "calculator", "MMLU"]
    tiny_checkpoint(step=4)
    chat_eval.chat_eval(ask, on_cpu())
    assert list(section(base_folder)["tasks"]) == ["ARC-Easy"] and section(base_folder)["step"] == 4
    assert section(base_folder)["chat_core"] is None


@pytest.mark.slow
def test_a_tinyworld_model_is_asked_tinyworlds_measures_by_relation(base_folder):
    tiny_checkpoint("mid")
    scores = chat_eval.chat_eval(Config(max_new_tokens=3, max_problems=12), on_cpu())
    assert {"tinyworld_en", "tinyworld_zh", "calculator", "mental"} <= set(scores)
    groups = section(base_folder, "mid")["tasks"]["tinyworld_zh"]["groups"]
    assert sum(group["total"] for group in groups.values()) == 12 and len(groups) > 1


def test_a_sample_of_a_conversation_shows_the_turns_before_the_question(base_folder):
    tiny_checkpoint(sequence_len=256)
    chat_eval.chat_eval(Config(task_name="follow_ups_en|storytelling_zh", max_new_tokens=3, max_problems=2), on_cpu())
    tasks = section(base_folder)["tasks"]
    asked = [message.text for message in tinyworld.measures()["follow_ups_en"]()[0].prompt.messages]
    assert tasks["follow_ups_en"]["samples"][0]["question"] == "\n".join(asked) and len(asked) >= 3
    assert "故事" in tasks["storytelling_zh"]["samples"][0]["question"]


def test_default_tasks_without_rows_are_left_out_with_a_warning(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NANOCHAT_TASK_DIR", str(tmp_path))  # tests have no access to the hub either
    tasks, broken = chat_eval.choose_tasks(None, "fineweb-edu", unsafe_exec=True, compute=on_cpu())
    assert not broken
    assert [task.name for task in tasks] == ["SpellingBee"]
    assert capsys.readouterr().err.count("is left out: ") == 5
    with pytest.raises(UserError, match="cannot be read"):
        chat_eval.choose_tasks("GSM8K", "fineweb-edu", unsafe_exec=True, compute=on_cpu())


@pytest.mark.parametrize("asked", ["ARC-easy", " | "])
def test_an_unknown_task_is_answered_with_the_names(asked):
    with pytest.raises(UserError, match=r"ARC-Easy, .*SpellingBee") as refused:
        chat_eval.choose_tasks(asked, "tinyworld", unsafe_exec=False, compute=on_cpu())
    assert refused.value.exit_code == 2


def test_every_name_of_a_default_task_can_be_asked_for():
    names = list(tinyworld.measures())
    asked, _ = chat_eval.choose_tasks("|".join(["GSM8K", *names]), "fineweb-edu", unsafe_exec=False, compute=on_cpu())
    assert [task.name for task in asked] == ["GSM8K", *names]


def test_settings_of_sampling_that_cannot_be_are_refused_before_the_model_is_loaded():
    for flags, rule in (({"min_p": 2.0}, "min_p must be from 0 to 1"), ({"num_samples": 4}, "--temperature above 0")):
        with pytest.raises(UserError, match=rule):
            chat_eval.chat_eval(Config(**flags), on_cpu())  # there is no model


def test_min_p_leaves_out_unlikely_tokens_and_is_among_the_settings_of_an_answer(base_folder):
    tiny_checkpoint()

    def replies(**flags: float) -> list[Any]:
        ask = Config(task_name="calculator", max_new_tokens=6, max_problems=4, again=True, **flags)  # type: ignore[arg-type]
        chat_eval.chat_eval(ask, on_cpu())
        (path,) = (base_folder / "records" / "sft-d2-000003").iterdir()
        head, lines = read_records(path)
        path.unlink()
        assert head["about"]["settings"]["min_p"] == flags.get("min_p", 0)
        return [line["answer"] for line in lines]

    likeliest = replies()
    assert replies(temperature=1.0, min_p=1.0) == likeliest != replies(temperature=1.0)


def test_stories_are_drawn_as_a_chat_draws_them_unless_a_flag_says_otherwise():
    made = tinyworld.measures()
    story, question = made["storytelling_en"](), made["tinyworld_en"]()

    def drawn(task: Task, corpus: str | None = "tinyworld", **flags: float) -> tuple[float, float]:
        found = chat_eval.sampling_for(task, Config(**flags), corpus)  # type: ignore[arg-type]
        return found.temperature, found.min_p

    chats = traits("tinyworld").chats
    assert drawn(story) == (chats.temperature, chats.min_p) == (1.0, 0.5)
    assert drawn(question) == (0.0, 0.0)
    assert drawn(story, corpus="fineweb") == (0.6, 0.0)
    assert drawn(story, temperature=0.0, min_p=0.1) == (0.0, 0.1) == drawn(question, min_p=0.1)


def test_the_command_line_takes_upstreams_letters(monkeypatch, base_folder):
    tiny_checkpoint()
    flags = "-i sft -a ARC-Easy|SpellingBee -t 0 -m 3 -n 1 -k 50 -b 2 -g d2 -s 3 -x 2"
    monkeypatch.setattr(sys, "argv", ["chat_eval", "--", *flags.split()])
    chat_eval.run(chat_eval.with_compute(chat_eval.chat_eval), Config)
    assert list(section(base_folder)["tasks"]) == ["ARC-Easy", "SpellingBee"]


def test_replies_are_written_for_people():
    parts = [Part("text", "It is "), Part("python", "1+1"), Part("python_output", "2"), Part("text", ".")]
    assert words(parts) == "It is [1+1 = 2]."


@pytest.mark.slow
def test_once_asks_only_what_the_report_lacks(base_folder):
    tiny_checkpoint()
    plain = Config(task_name="calculator", max_new_tokens=3, max_problems=2, once=True)

    def evaluated(**flags: Any) -> list[str]:
        return list(chat_eval.chat_eval(replace(plain, **flags), on_cpu()))

    assert evaluated() == ["calculator"]
    path = base_folder / "report" / "sections" / "sft_eval.json"
    before = path.stat().st_mtime_ns
    assert evaluated() == evaluated(dtype="float32") == []  # which is what auto chooses here
    assert path.stat().st_mtime_ns == before
    assert evaluated(task_name="calculator|mental") == ["mental"]
    assert list(section(base_folder)["tasks"]) == ["calculator", "mental"]
    assert evaluated(max_new_tokens=4) == ["calculator"]
    assert evaluated(dtype="bfloat16") == ["calculator"] and evaluated(dtype="bfloat16") == []
    assert evaluated(dtype="bfloat16", shots=5) == ["calculator"]
    tiny_checkpoint(step=4)
    assert evaluated() == ["calculator"]


def test_once_completes_chatcore_after_a_task_that_failed_the_first_time(base_folder, monkeypatch):
    tiny_checkpoint(corpus="fineweb-edu", sequence_len=1024)
    real = chat_eval.evaluate

    def evaluate(task: Task, *args: Any) -> Any:
        if task.name == "GSM8K":
            raise UserError("the hub did not answer")
        return real(task, *args)

    ask = Config(max_new_tokens=4, max_problems=3, unsafe_exec=True, once=True)
    with monkeypatch.context() as patch:
        patch.setattr(chat_eval, "evaluate", evaluate)
        with pytest.raises(UserError, match="1 of the tasks could not be evaluated: GSM8K"):
            chat_eval.chat_eval(ask, on_cpu())
    assert section(base_folder)["chat_core"] is None
    assert list(chat_eval.chat_eval(ask, on_cpu())) == ["GSM8K"]
    completed = section(base_folder)
    scores = chat_eval.chat_eval(replace(ask, once=False, again=True), on_cpu())
    assert section(base_folder)["chat_core"] == completed["chat_core"] is not None
    assert {name: row["accuracy"] for name, row in completed["tasks"].items()} == {
        name: score.accuracy for name, score in scores.items()
    }
    write_json(base_folder / "report" / "sections" / "sft_eval.json", {**completed, "chat_core": None})
    assert chat_eval.chat_eval(ask, on_cpu()) == {}  # a report of which an earlier version lost ChatCORE
    assert section(base_folder)["chat_core"] == completed["chat_core"]


def test_replies_that_were_cut_off_are_counted_and_warned_of(base_folder, capsys):
    tiny_checkpoint()
    score = chat_eval.chat_eval(Config(task_name="calculator", max_new_tokens=3, max_problems=2), on_cpu())
    assert "2 replies cut off" in str(score["calculator"])
    assert "2 of 2 replies were cut off at --max_new_tokens=3" in capsys.readouterr().err
    chat_eval.chat_eval(Config(task_name="calculator|mental", max_new_tokens=3, max_problems=2), on_cpu())
    said = capsys.readouterr()
    assert said.out.count("2 replies cut off") == 2 and said.err.count("were cut off at") == 1


def test_once_asks_again_what_an_earlier_version_has_graded(base_folder, monkeypatch):
    tiny_checkpoint()
    ask = Config(task_name="calculator", max_new_tokens=3, max_problems=2, once=True)
    assert list(chat_eval.chat_eval(ask, on_cpu())) == ["calculator"]
    assert chat_eval.chat_eval(ask, on_cpu()) == {}
    monkeypatch.setattr("nanochat.evals.records.RENDERING", "of a later version")
    assert list(chat_eval.chat_eval(ask, on_cpu())) == ["calculator"]


def test_every_answer_is_kept_and_a_second_call_skips_what_is_done(base_folder):
    tiny_checkpoint()
    ask = Config(task_name="ARC-Easy|calculator", max_new_tokens=3, max_problems=3)
    first = chat_eval.chat_eval(ask, on_cpu())
    folder = base_folder / "records" / "sft-d2-000003"
    arc, calculator = sorted(folder.iterdir())
    head, lines = read_records(arc)
    assert head["score"]["total"] == 3 and head["about"]["settings"]["shots"] == 0
    assert len(lines) == 3 and all(set("AB") <= set(line["logprobs"]) and line["prompt"] for line in lines)
    assert sum(line["answer"] == line["expected"] for line in lines) == first["ARC-Easy"].right
    assert len(read_records(calculator)[1]) == 3
    before = {path: path.stat().st_mtime_ns for path in (arc, calculator)}
    assert chat_eval.chat_eval(ask, on_cpu()) == first
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    chat_eval.chat_eval(Config(task_name="ARC-Easy", max_new_tokens=3, max_problems=3, again=True), on_cpu())
    chat_eval.chat_eval(Config(task_name="calculator", max_new_tokens=4, max_problems=3), on_cpu())
    assert arc.stat().st_mtime_ns > before[arc] and calculator.stat().st_mtime_ns == before[calculator]
    assert len(list(folder.iterdir())) == 3


def test_a_broken_task_is_named_and_the_others_go_on(base_folder, tmp_path, capsys):
    tiny_checkpoint(sequence_len=1024)
    published.write_mmlu_pro(tmp_path / "copies" / "MMLU-Pro")
    published.write_mgsm(tmp_path / "copies" / "mgsm", as_tsv=True)
    (tmp_path / "copies" / "mgsm" / "mgsm_zh.tsv").write_text("几个？\t很多\n", encoding="utf-8")
    ask = Config(task_name="MGSM-zh|C-Eval|MMLU-Pro", max_new_tokens=3, task_data=str(tmp_path / "copies"))
    with pytest.raises(UserError, match="2 of the tasks could not be evaluated: C-Eval, MGSM-zh"):
        chat_eval.chat_eval(ask, on_cpu())
    said = capsys.readouterr().err
    assert "C-Eval is left out" in said and "MGSM-zh is left out" in said and "got '很多'" in said
    assert section(base_folder)["tasks"]["MMLU-Pro"]["total"] == 10


def a_rank_of_two_disks(compute: Compute, cfg: Config, without: str) -> str:
    """The refusal of one rank; rank 1 has the other folder."""
    with pytest.raises(UserError) as refused:
        chat_eval.chat_eval(cfg if compute.rank == 0 else replace(cfg, task_data=without), compute)
    return str(refused.value)


@pytest.mark.ranks
def test_ranks_leave_out_together_what_one_of_them_cannot_read_or_evaluate(base_folder, tmp_path):
    """Rank 1 does not evaluate the broken row of MGSM, which is rank 0's, and has no MMLU-Pro."""
    tiny_checkpoint(sequence_len=1024)
    for name in ("with", "without"):
        published.write_mgsm(tmp_path / name / "mgsm", as_tsv=True)
        (tmp_path / name / "mgsm" / "mgsm_zh.tsv").write_text("几个？\t很多\n几个？\t3\n", encoding="utf-8")
    published.write_mmlu_pro(tmp_path / "with" / "MMLU-Pro")
    ask = Config(task_name="MGSM-zh|MMLU-Pro|calculator", max_new_tokens=3, max_problems=5, shots=0)
    ask = replace(ask, task_data=str(tmp_path / "with"))
    for refusal in run_ranks(2, a_rank_of_two_disks, ask, str(tmp_path / "without")):
        assert "2 of the tasks could not be evaluated" in refusal and "MGSM-zh" in refusal and "MMLU-Pro" in refusal
    two = section(base_folder)["tasks"]
    one = chat_eval.chat_eval(replace(ask, task_name="calculator", again=True), on_cpu())
    assert {name: (row["right"], row["total"]) for name, row in two.items()} == {
        name: (score.right, score.total) for name, score in one.items()
    }
