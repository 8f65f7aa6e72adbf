"""Tasks on small files in the published schemas: their questions, their grades, and the files they refuse."""

import itertools
import json
import random
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.common import UserError
from nanochat.data import calculator
from nanochat.data.conversation import Conversation, Task
from tasks import gsm8k
from tasks.arc import ARC
from tasks.choices import render_choices
from tasks.common import Subset, TaskMixture, final_number
from tasks.gsm8k import GSM8K, read_solution
from tasks.mmlu import MMLU
from tasks.published import load_table
from tasks.smoltalk import SmolTalk
from tasks.spellingbee import SpellingBee

DATA = Path(__file__).parent.parent / "support" / "files" / "tasks"


@pytest.fixture(autouse=True)
def task_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_TASK_DIR", str(DATA))


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / path).read_text(encoding="utf-8").splitlines()]


def by_question(task: Task) -> dict[str, int]:
    """The number of each problem by the first line of its question."""
    return {task[i].messages[-2].text.split("\n")[0]: i for i in range(len(task))}


# --- where rows come from ------------------------------------------------------------------------


def test_parquet_and_jsonl_give_the_same_rows(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows("ai2_arc/ARC-Easy/test.jsonl")), tmp_path / "all.parquet")
    (tmp_path / "ARC-Easy").mkdir()
    whole = pq.read_table(tmp_path / "all.parquet")
    for n in range(2):  # in shards, as on the hub
        pq.write_table(whole.slice(n * 3, 3), tmp_path / "ARC-Easy" / f"test-0000{n}-of-00002.parquet")
    from_parquet, from_jsonl = ARC("ARC-Easy", "test", folder=tmp_path), ARC("ARC-Easy", "test")
    assert list(from_parquet) == list(from_jsonl)
    assert len(from_parquet) == 5


def test_the_order_is_shuffled_by_a_seed_and_complete() -> None:
    questions = [conversation.messages[0].text for conversation in MMLU("all", "test")]
    assert questions == [conversation.messages[0].text for conversation in MMLU("all", "test")]
    assert questions != [render_choices(row["question"], row["choices"]) for row in rows("mmlu/all/test.jsonl")]
    assert len(set(questions)) == 4


def test_without_files_and_network_both_ways_to_get_them_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANOCHAT_TASK_DIR")
    with pytest.raises(UserError, match=r"openai/gsm8k.*HF_ENDPOINT.*--local-dir gsm8k.*NANOCHAT_TASK_DIR") as refused:
        GSM8K("test")
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("endpoint", "token"),
    [("", None), ("https://huggingface.co", None), ("http://huggingface.co", False), ("https://hf-mirror.com", False)],
)
def test_only_the_hub_itself_gets_the_token(endpoint: str, token: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None lets the library send HF_TOKEN, False forbids it."""
    asked = {}

    def load(*names: str, **options: Any) -> Any:
        asked.update(options)
        raise ValueError("asked")

    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.delenv("NANOCHAT_TASK_DIR", raising=False)
    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(UserError, match="asked"):
        load_table(gsm8k.source("test"), ("question",))
    assert asked["token"] is token


def test_a_subset_is_not_taken_from_the_files_of_another(tmp_path: Path) -> None:
    (tmp_path / "ARC-Easy").mkdir()
    (tmp_path / "ARC-Easy" / "test.jsonl").write_bytes((DATA / "ai2_arc/ARC-Easy/test.jsonl").read_bytes())
    with pytest.raises(UserError, match="no rows of ai2_arc"):
        ARC("ARC-Challenge", "test", folder=tmp_path)


def test_a_split_is_not_taken_from_a_file_whose_name_only_begins_alike(tmp_path: Path) -> None:
    (tmp_path / "testing.jsonl").write_text('{"question": "", "answer": ""}\n')
    with pytest.raises(UserError, match="no rows of gsm8k"):
        GSM8K("test", folder=tmp_path)


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    for count in (1, 3):
        line = '{"question": "1+1", "answer": "#### 2"}\n'
        (tmp_path / "test.jsonl").write_text(line * count)
        assert len(load_table(gsm8k.source("test"), ("question",), tmp_path)) == count


@pytest.mark.parametrize(
    "make",
    [
        lambda: ARC("ARC-Medium", "test"),
        lambda: ARC("ARC-Easy", "dev"),
        lambda: MMLU("all", "train"),
        lambda: MMLU("auxiliary_train", "test"),
        lambda: GSM8K("validation"),
        lambda: SmolTalk("validation"),
        lambda: SpellingBee(split="validation"),
        lambda: SpellingBee(size=0),
    ],
)
def test_an_unknown_subset_or_split_is_refused(make: Any) -> None:
    with pytest.raises(UserError, match=r"must be one of .*, got|must be at least 1"):
        make()


# --- choices -------------------------------------------------------------------------------------


def test_letters_stand_alone_after_their_choices() -> None:
    text = render_choices("Which is a fruit?", ["a pear", "a shoe"])
    assert text == (
        "Which is a fruit?\n\nThe choices, each with its letter below it:\na pear\nA\na shoe\nB\n\n"
        "Answer with the letter."
    )


def test_arc_answers_with_letters_whatever_its_labels() -> None:
    task = ARC("ARC-Easy", "test")
    assert (task.name, task.kind, len(task)) == ("ARC-Easy", "choice", 5)
    numbers = by_question(task)
    expected = {"Which animal lays eggs?": ("B", 4), "Which sense uses the ears?": ("D", 5)}
    expected["What does ice become when it is warmed?"] = ("C", 3)
    for question, (letter, count) in expected.items():
        i = numbers[question]
        assert task[i].messages[1].text == letter
        assert task.letters(i) == tuple("ABCDE"[:count])
        assert [task.grade(i, one) for one in task.letters(i)] == [float(one == letter) for one in task.letters(i)]


def test_an_answer_that_is_no_choice_is_refused(tmp_path: Path) -> None:
    row = rows("ai2_arc/ARC-Easy/test.jsonl")[0] | {"answerKey": "E"}
    (tmp_path / "ARC-Easy").mkdir()
    (tmp_path / "ARC-Easy" / "test.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="must be one of its choices"):
        ARC("ARC-Easy", "test", folder=tmp_path)[0]


def test_mmlu_reads_wrapped_and_plain_rows_alike(tmp_path: Path) -> None:
    plain, wrapped = MMLU("all", "test"), MMLU("auxiliary_train", "train")
    assert list(plain) == list(wrapped)
    i = by_question(plain)["What is the plural of mouse?"]
    assert plain[i].messages[1].text == "C"
    assert len(MMLU("all", "dev")) == 2
    (tmp_path / "auxiliary_train").mkdir()
    table = pa.Table.from_pylist(rows("mmlu/auxiliary_train/train.jsonl"))
    pq.write_table(table, tmp_path / "auxiliary_train" / "train-00000-of-00001.parquet")
    assert list(MMLU("auxiliary_train", "train", folder=tmp_path)) == list(wrapped)


# --- GSM8K ---------------------------------------------------------------------------------------


def test_annotations_become_calls_and_outputs() -> None:
    parts = read_solution("She has 12/60 = $<<12/60=0.2>>0.2.\n#### 0.2")
    assert [(part.kind, part.text) for part in parts] == [
        ("text", "She has 12/60 = $"),
        ("python", "12/60"),
        ("python_output", "0.2"),
        ("text", "0.2.\n#### 0.2"),
    ]
    assert [part.kind for part in read_solution("<<>>a<<=2>>b<<3>>c<<x=4>>")] == ["text", "text", "text"]


def test_the_calculator_gives_the_outputs_of_the_annotations() -> None:
    published = {call for row in rows("gsm8k/main/test.jsonl") for call in re.findall("<<(.*?)>>", row["answer"])}
    read = set()
    for conversation in GSM8K("test"):
        for call, output in itertools.pairwise(conversation.messages[1].parts):
            if call.kind == "python":
                assert (output.kind, output.text) == ("python_output", calculator.calculate(call.text))
                read.add(f"{call.text}={output.text}")
    assert read == published
    assert [part.text for part in read_solution("<<10/3=3.33>>3.33")] == ["10/3", "3.333333333", "3.33"]


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("#### 1,800", True),
        ("That is 1800", True),
        ("1200 + 600 = 1800 pens.", True),
        ("It is $1,800.00", True),
        ("#### 1800\nI like 5 of them", True),
        ("1800 #### 1,801", False),
        ("１８００", True),
        ("####", False),
        ("No idea", False),
        ("", False),
        ("-1800", False),
        ("18 00", False),
        ("9" * 5000, False),
    ],
)
def test_gsm8k_grades_the_number_a_reply_ends_on(reply: str, right: bool) -> None:
    task = GSM8K("test")
    i = next(i for i in range(len(task)) if "1,200 pens" in task[i].messages[0].text)
    assert task.grade(i, reply) == float(right)


def test_the_final_number_may_have_a_sign_and_a_point() -> None:
    numbers = [final_number(text) for text in ("10-5", "it is -5.", "#### -2.50", ".5")]
    assert numbers == [5, -5, Fraction(-5, 2), Fraction(1, 2)]
    texts = ("it is -$5", "-¥ 1,200.50", r"$-\$5$", "\N{MINUS SIGN}5", "10-$5", "$5", "£-5")
    assert [final_number(text) for text in texts] == [-5, Fraction(-2401, 2), -5, -5, 5, 5, -5]


# --- conversations -------------------------------------------------------------------------------


def roles(conversation: Conversation) -> str:
    return " ".join(message.role for message in conversation.messages)


def test_smoltalk_keeps_the_system_turn_and_drops_an_unanswered_question() -> None:
    assert Counter(map(roles, SmolTalk("train"))) == {
        "user assistant": 2,
        "system user assistant user assistant": 1,
    }
    with pytest.raises(UserError, match="SmolTalk has no right answers"):
        SmolTalk("test").grade(0, "")


def test_smoltalk_names_a_broken_conversation(tmp_path: Path) -> None:
    row = {"messages": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="conversation 0: message 1 must have role 'user'"):
        SmolTalk("train", folder=tmp_path)[0]


# --- slices and mixtures -------------------------------------------------------------------------


def test_a_mixture_holds_every_problem_once_in_an_order_of_its_seed() -> None:
    tasks: list[Task] = [GSM8K("test"), SpellingBee(size=30), ARC("ARC-Easy", "test")]
    mixed = TaskMixture(tasks, seed=3)
    wanted = Counter(conversation for task in tasks for conversation in task)
    assert Counter(mixed) == wanted
    assert list(mixed) == list(TaskMixture(tasks, seed=3))
    assert list(mixed) != list(TaskMixture(tasks, seed=4))
    assert [conversation for task in tasks for conversation in task] != list(mixed)


def test_copies_in_a_mixture_share_the_place_of_the_first_one() -> None:
    task, other = ARC("ARC-Easy", "test"), GSM8K("test")
    mixed = TaskMixture([task, other, task])
    originals, first = mixed.originals().tolist(), {}
    for place in range(len(mixed)):
        assert originals[place] == first.setdefault(mixed.locate(place), place)
    assert len(set(originals)) == len(task) + len(other)
    assert Counter(mixed) == Counter({**dict.fromkeys(task, 2), **dict.fromkeys(other, 1)})
    assert TaskMixture([task, other]).originals().tolist() == list(range(len(task) + len(other)))


def test_a_mixture_asks_the_task_that_a_problem_comes_from() -> None:
    mixed = TaskMixture([ARC("ARC-Easy", "test"), GSM8K("test")])
    for i in range(len(mixed)):
        assert mixed.grade(i, mixed[i].messages[1].text) == 1.0
        assert bool(mixed.letters(i)) == (len(mixed[i].messages[1].parts) == 1)


def test_a_slice_is_that_of_a_list() -> None:
    task = SpellingBee(size=20)
    everything = list(task)
    random.seed(1)
    for _ in range(20):
        start, stop, step = random.randrange(20), random.randrange(30), random.randrange(1, 4)
        part = Subset(task, start, stop, step)
        assert list(part) == everything[start:stop:step]
        assert len(part) == len(everything[start:stop:step])
    part = Subset(task, stop=5)
    assert (part.name, part.kind) == (task.name, task.kind)
    assert part.grade(4, task[4].messages[1].text) == 1.0
