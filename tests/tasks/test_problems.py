"""Your own problems: every known layout is read, replies are compared as people mean it, mistakes are named."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from nanochat.common import UserError
from nanochat.data.conversation import chat, system, user
from tasks.mixtures import rl_tasks
from tasks.problems import Problems, final_answer, is_right, read_problem


def written(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "value",
    [
        {"question": "2+3?", "answer": "5"},
        {"problem": "2+3?", "solution": "5"},
        {"prompt": "2+3?", "ground_truth": 5},
        {"instruction": "2+3?", "target": ["5", "five"]},
        {"prompt": [{"role": "user", "content": "2+3?"}], "reward_model": {"style": "rule", "ground_truth": "5"}},
        {"messages": [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "?"}], "answer": "5"},
    ],
)
def test_layouts_that_people_have(value: Any) -> None:
    problem = read_problem(value)
    assert problem.conversation == chat("2+3?", "5") and problem.answers[0] == "5"


def test_a_table_holds_messages_and_answers_as_json(tmp_path: Path) -> None:
    asked = json.dumps([{"role": "user", "content": "2+3?"}])
    answers = {
        "answers": ('["5", "five"]', "[0, 1)", "[7]"),
        "reward_model": ('{"ground_truth": "5"}', '{"ground_truth": "[0, 1)"}', '{"answers": "[7]"}'),
        "answer": ("5", "[0, 1)", "[7]"),
    }
    rights = {
        "answers": ("five", "[0, 1)", "7"),
        "reward_model": ("5", "[0, 1)", "7"),
        "answer": ("5", "[0, 1)", "[7]"),
    }
    for key, cells in answers.items():
        with open(tmp_path / "mine.csv", "w", newline="") as file:
            csv.writer(file).writerows([("prompt", key), *((asked, cell) for cell in cells)])
        task = Problems(tmp_path / "mine.csv")
        assert [task[i].messages[0] for i in range(3)] == [user("2+3?")] * 3
        assert [task.grade(i, right) for i, right in enumerate(rights[key])] == [1.0] * 3


def test_turns_before_the_question_are_kept() -> None:
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+3?"}]
    wanted = (system("Be short."), user("2+3?"))
    assert read_problem({"prompt": asked, "answer": 5}).conversation.prompt.messages == wanted
    for question in ("2+3?", asked[1:], asked):
        record = {"system": "Be short.", "prompt": question, "answer": 5}
        assert read_problem(record).conversation.prompt.messages == wanted


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("5", "5"),
        ("We add.\n#### 1,200", "1,200"),
        (r"So $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}"),
        (r"{\boxed{\left\{x^{2^{n}}\right.}", r"\left\{x^{2^{n}}\right."),
        (r"\boxed{1}, then \boxed{\frac{1}{2", "1"),  # cut off
        (r"a} brace, \boxed{}", ""),
        (r"It is \boxed{\text{Paris}}.", "Paris"),  # as DeepSeek's distillations write words
        ("The answer is 12.\nI am sure.", "12."),
        ("先算。\n答案是42", "42"),
        ("答案:北京", "北京"),
        ("Thinking aloud\n\nParis\n", "Paris"),
        ("", ""),
        # marks on lines of their own, and between the words
        ("**Answer:**\n\n42", "42"),
        ("**Answer**: Paris", "Paris"),
        ("The final answer is:\n$$\n42\n$$", "42"),
        ("So\n\\[\nx = 42\n\\]", "x = 42"),
        # 答案 in other sentences
        ("答案是42。\n希望这个答案对你有帮助。", "42。"),
        ("42就是答案。", "42就是答案。"),
        ("**答案**：北京", "北京"),
        ("答案应该是北京", "北京"),
        ("答案选B", "B"),
        ("答案42\n三步", "42"),
    ],
)
def test_the_final_answer_of_a_text(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        ("There are 42 of them.", "42", True),
        ("42 and then 43", "42", False),
        ("It costs $1,200.00", "1200", True),
        ("答案是42。", "42", True),
        ("#### 42", "6*7 is <<6*7=42>>42\n#### 42", True),
        ("The answer is Paris.", "paris", True),
        ("Paris or Rome", "paris", False),
        ("「北京」", "北京", True),
        ("-7", "7", False),
        ("$5", "-$5", False),
        ("#### -5", "-$5", True),
        ("-5", "\N{MINUS SIGN}5", True),
        ("x = \N{MINUS SIGN}y", "x = -y", True),
        ("So 12.\n#### 12 cm^2", "12", True),
        ("#### 2 of 12", "12", False),
        ("#### 12 cm^2\nThe answer is 4 + 8 = 12", "12", True),
        ("", "7", False),
        ("no number", "7", False),
        ("no number", "1" * 70, False),  # more digits than are read as a number: compared as words
        (f"The answer is {'1' * 70}.", "1" * 70, True),
        # a number without a digit before its point
        ("0.5", ".5", True),
        ("5", ".5", False),
        # parts of a formula
        ("The answer is 1/3", "3", False),
        ("So ½.", "2", False),
        (r"\boxed{\frac{1}{3}}", "3", False),
        (r"\boxed{\sqrt{3}}", "3", False),
        ("#### 5/6", "5", False),
        ("2^5", "2", False),
        ("x_2", "2", False),
        ("2:3", "3", False),
        ("√3", "3", False),
        (r"\boxed{\sqrt3}", "3", False),
        ("1e5", "5", False),
        ("2 + 3", "3", False),
        (r"7 \times 3", "3", False),
        ("12 - 5", "5", False),
        (r"2\pi", "2", False),
        ("1.2.3", ".3", False),
        ("Problem 2: 3", "3", True),
        ("The total (in euros) - 3", "3", True),
        ("*(a)* **3**", "3", True),
        ("24/2 = 12", "12", True),
        (r"It is \textbf{12} _12_", "12", True),
        ("The area is 12 cm^2.", "12", True),
        ("The area is 12 m².", "12", True),
        # other ways to write the same
        (r"The answer is \(\frac{1}{2}\).", r"\frac{1}{2}", True),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", True),
        (r"\boxed{45^{\circ}}", "45", True),
        (r"\boxed{10\,000}", "10000", True),
        ("The answer is -5.", "- 5", True),
        ("5", "- 5", False),
        ("x = 42", "$42$", True),
        # lists
        (r"\boxed{1, 2}", "1,2", True),
        (r"\boxed{12}", "1,2", False),
        ("1,2", "12", False),
        (r"\boxed{10,\!000}", "10000", True),
        ("1{,}000", "1,000", True),
        # intervals and points
        ("(0, 1]", "[0, 1)", False),
        (r"\boxed{[0, 1)}", "[0,1)", True),
        ("0, 1", "(0, 1)", True),
        ("Both are right: (A)", "Both are right: A", False),
        ("(A)", "A", True),
    ],
)
def test_a_reply_is_right_if_it_ends_with_the_answer(reply: str, answer: str, right: bool) -> None:
    assert is_right(reply, answer) is right


def test_a_number_of_json_is_right_without_its_exponent() -> None:
    assert read_problem({"question": "1/100,000?", "answer": 1e-05}).answers == ("0.00001",)


def test_any_of_several_answers_is_right(tmp_path: Path) -> None:
    task = Problems(written(tmp_path / "mine.jsonl", {"question": "2+3?", "answers": ["5", "five"]}))
    assert (task.name, task.kind, len(task), task.letters(0)) == ("mine", "generative", 1, ())
    assert [task.grade(0, reply) for reply in ("It is 5", "Five", "6")] == [1.0, 1.0, 0.0]


def test_every_tenth_problem_is_held_out(tmp_path: Path) -> None:
    values = [{"question": f"{i}+0?", "answer": i} for i in range(21)]
    train, held_out = rl_tasks("tinyworld", str(written(tmp_path / "sums.jsonl", *values)))
    questions = [[task[i].messages[0].text for i in range(len(task))] for task in (train, held_out)]
    assert questions[1] == ["0+0?", "10+0?", "20+0?"] and len(questions[0]) == 18
    assert not set(questions[0]) & set(questions[1])
    assert train.grade(0, "1") == 1.0 and held_out.grade(1, "10") == 1.0


def test_no_copy_of_a_held_out_problem_is_trained(tmp_path: Path) -> None:
    """In a file that repeats its problems, every tenth line of the second round was trained in the first."""
    values = [{"question": f"{i}+0?", "answer": i} for i in range(11)] * 2
    train, held_out = rl_tasks("tinyworld", str(written(tmp_path / "sums.jsonl", *values)))
    questions = [[task[i].messages[0].text for i in range(len(task))] for task in (train, held_out)]
    assert questions == [[f"{i}+0?" for i in range(1, 10)] * 2, ["0+0?", "10+0?"]]


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (5, "a problem is an object, got int"),
        ({"text": "a"}, "needs one of the keys question, problem"),
        ({"question": "a"}, "needs one of the keys answer, answers"),
        ({"question": "a", "answer": " "}, "an answer must be a text or a number that is not empty"),
        ({"question": "a", "answer": []}, "an answer must be a text or a number that is not empty"),
        ({"question": '[{"role": "user"', "answer": 5}, "a list of messages is expected, got a text that is not JSON"),
        ({"question": "a", "reward_model": "{ground_truth: 5}"}, 'an object under "reward_model" is expected'),
        ({"question": 5, "answer": 5}, "a question is a text or a list of messages, got int"),
        ({"prompt": [{"role": "assistant", "content": "a"}], "answer": 5}, "message 1 must have role 'user'"),
    ],
)
def test_a_mistake_is_named_with_file_line_and_rule(tmp_path: Path, value: Any, rule: str) -> None:
    path = written(tmp_path / "mine.jsonl", {"question": "2+3?", "answer": 5}, value)
    with pytest.raises(UserError) as refused:
        Problems(path)
    assert f"{path}, line 2: " in str(refused.value) and rule in str(refused.value)


def test_one_problem_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 2 different problems, since one is held out, got 1"):
        rl_tasks("tinyworld", str(written(tmp_path / "mine.jsonl", {"question": "2+3?", "answer": 5})))
