"""C-Eval, CMMLU, MMLU-Pro and Chinese MGSM: read in their published schemas, asked, refused if broken."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from nanochat.common import UserError
from nanochat.data.conversation import Task
from tasks.catalogue import chat_tasks, choice_tasks, use_task_data
from tasks.ceval import CEval
from tasks.cmmlu import CMMLU
from tasks.mgsm import MGSM
from tasks.mmlu import MMLU
from tasks.mmlu_pro import MMLUPro
from tests.support import published

DATA = Path(__file__).parent.parent / "support" / "files" / "tasks"


def numbers(task: Any) -> dict[str, int]:
    return {task.identify(i): i for i in range(len(task))}


@pytest.mark.parametrize("as_csv", [False, True])
def test_ceval_reads_the_hubs_files_and_the_authors_alike(tmp_path: Path, as_csv: bool) -> None:
    published.write_ceval(tmp_path, as_csv=as_csv)
    task = CEval(folder=tmp_path)
    assert (task.name, task.kind, len(task)) == ("C-Eval", "choice", 104)
    i = numbers(task)["logic/1"]
    asked = task.cloze(i)
    assert asked.intro == "以下是中国关于逻辑学的单项选择题，请选出其中的正确答案。\n\n"
    assert asked.question == "logic（val）：1加1等于____\nA. 1\nB. 2\nC. 3\nD. 4\n答案："
    assert (asked.choices, asked.answer, len(asked.examples)) == (("A", "B", "C", "D"), 1, 5)
    assert asked.examples[2] == "logic（dev）：2加1等于____\nA. 1\nB. 2\nC. 3\nD. 4\n答案： C\n\n"
    assert task.group(i) == "logic" and task.grade(i, "B") == 1.0
    assert [message.role for message in task[i].messages] == ["user", "assistant"] * 6
    assert [message.text for message in task[i].messages[1::2]] == ["A", "B", "C", "D", "A", "B"]


def test_cmmlu_keeps_every_cell_as_the_text_that_it_is(tmp_path: Path) -> None:
    published.write_cmmlu(tmp_path)
    task = CMMLU(folder=tmp_path)
    assert len(task) == 134
    problem = task.problem(numbers(task)["virology/1"])
    assert problem.choices == ("1.50", "None", "01", "N/A") and problem.answer == 1
    assert problem.question == "virology：下列哪个是“1”？\n请选择"
    assert task.cloze(0).intro.endswith("的单项选择题，请直接给出正确答案的选项。\n\n")


def test_mmlu_pro_has_up_to_ten_choices_and_examples_of_the_same_category(tmp_path: Path) -> None:
    published.write_mmlu_pro(tmp_path)
    task = MMLUPro(folder=tmp_path)
    i, j = numbers(task)["math/72"], numbers(task)["law/75"]
    assert task.letters(i) == tuple("ABCDEFGHIJ") and task.letters(j) == tuple("ABCD")
    assert task.cloze(j).examples[0].startswith("validation question 5?\nA. option 0")
    assert [len(task.cloze(n).examples) for n in (i, j)] == [5, 5]
    assert len(MMLUPro(folder=tmp_path, shots=0)[0].messages) == 2


@pytest.mark.parametrize("as_tsv", [False, True])
def test_mgsm_shows_eight_solutions_and_grades_the_last_number(tmp_path: Path, as_tsv: bool) -> None:
    published.write_mgsm(tmp_path, as_tsv)
    task = MGSM(folder=tmp_path)
    assert (len(task), len(task[0].messages)) == (6, 18)
    first = task[0].messages
    assert first[0].text == '小明有1个苹果，又买了"1"个，一共有几个？'
    assert first[1].text == "1加1是2。答案是 2。\n#### 2"
    i = numbers(task)["3"]
    assert task[i].messages[-2].text.startswith("小明有603个") and task[i].messages[-1].text in (
        "#### 1206",
        "#### 1,206",
    )
    assert [task.grade(i, reply) for reply in ("一共1206个。", "答案是 1,206。", "120", "")] == [1.0, 1.0, 0.0, 0.0]


def test_mmlu_poses_its_questions_as_the_paper_does() -> None:
    task = MMLU("all", "test", DATA / "mmlu", shots=5)
    asked = [task.cloze(i) for i in range(len(task))]
    assert all("multiple choice questions (with answers) about " in one.intro and "_" not in one.intro for one in asked)
    assert {len(one.examples) for one in asked} <= {0, 1, 2}  # the file has two questions in two subjects
    assert all(one.question.endswith("\nAnswer:") and "\nA. " in one.question for one in asked)


# --- what is refused -----------------------------------------------------------------------------


def one_line(make: Any) -> str:
    with pytest.raises(UserError) as refused:
        task: Task = make()
        for i in range(len(task)):
            task[i]
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_broken_copies_are_named_in_one_line(tmp_path: Path) -> None:
    published.write_ceval(tmp_path)
    law = tmp_path / "law" / "val-00000-of-00001.parquet"
    rows = pq.read_table(law)
    pq.write_table(rows.drop_columns("C"), law)
    assert "law/val-00000-of-00001.parquet lacks the columns ['C']" in one_line(lambda: CEval(folder=tmp_path))
    published.parquet(law, [{**rows.to_pylist()[0], "answer": "E"}], published.CEVAL)
    assert "must be one of its choices" in one_line(lambda: CEval(folder=tmp_path))
    law.write_bytes(law.read_bytes()[:-30])
    assert "law/val-00000-of-00001.parquet cannot be read" in one_line(lambda: CEval(folder=tmp_path))
    shutil.rmtree(tmp_path / "law")
    assert "looked for" in one_line(lambda: CEval(folder=tmp_path))


def test_a_csv_line_with_a_cell_too_few_is_named(tmp_path: Path) -> None:
    published.write_cmmlu(tmp_path)
    with open(tmp_path / "test" / "arts.csv", "a", encoding="utf-8") as f:
        f.write("2,问题,1,2\n")
    assert "arts.csv cannot be read: line 6 has not as many cells" in one_line(lambda: CMMLU(folder=tmp_path))


def test_an_answer_whose_letter_and_index_differ_is_refused(tmp_path: Path) -> None:
    published.write_mmlu_pro(tmp_path)
    path = tmp_path / "data" / "test-00000-of-00001.parquet"
    rows = pq.read_table(path).to_pylist()
    for broken in ({"answer": "J"}, {"answer_index": 12}, {"answer_index": None}):
        published.parquet(path, [{**rows[3], **broken}], published.MMLU_PRO)
        assert "must be one of its choices" in one_line(lambda: MMLUPro(folder=tmp_path))


def test_a_solution_without_a_number_is_refused(tmp_path: Path) -> None:
    published.write_mgsm(tmp_path, as_tsv=True)
    (tmp_path / "mgsm_zh.tsv").write_text("一共几个？\t很多\n", encoding="utf-8")
    assert "answer_number must be a number, got '很多'" in one_line(lambda: MGSM(folder=tmp_path))


def test_without_a_network_the_command_fetches_the_branch_that_has_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.delenv("NANOCHAT_TASK_DIR", raising=False)
    monkeypatch.setattr("datasets.load_dataset", no_network)
    branch = "--revision refs/convert/parquet "
    for task, repo, option in ((MGSM, "juletxara/mgsm", branch), (MMLUPro, "TIGER-Lab/MMLU-Pro", "")):
        command = f"`hf download {repo} --repo-type dataset {option}--local-dir {repo.partition('/')[2]}`"
        assert command in one_line(task)


# --- the catalogue -------------------------------------------------------------------------------


def test_task_data_names_the_folder_of_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_TASK_DIR", "nowhere")
    with pytest.raises(UserError, match="no folder"):
        use_task_data(str(tmp_path / "none"))
    published.write_mmlu_pro(tmp_path / "MMLU-Pro")
    use_task_data(None)
    use_task_data(str(tmp_path))
    assert len(chat_tasks(False, shots=2)["MMLU-Pro"]()[0].messages) == 6
    assert len(choice_tasks(3)["MMLU-Pro"]().cloze(0).examples) == 3


def test_chatcores_tasks_show_no_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_TASK_DIR", str(DATA))
    assert all(len(chat_tasks(False, 5)[name]()[0].messages) == 2 for name in ("MMLU", "ARC-Easy", "GSM8K"))
    assert json.dumps(list(choice_tasks())) == json.dumps(
        ["ARC-Easy", "ARC-Challenge", "MMLU", "MMLU-Pro", "C-Eval", "CMMLU"]
    )
