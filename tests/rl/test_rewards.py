"""Rewards of your own functions: what they see, how they add up, and what becomes of those that fail."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanochat.common import UserError
from nanochat.data.conversation import Part
from nanochat.evals.chat import Reply
from nanochat.rl import reward_calls
from nanochat.rl.rewards import Rewards
from tasks.problems import Problems

FUNCTIONS = """
import os, time

def length(reply): return len(reply)
def sees(reply, thought, question, messages, answer, record):
    return [reply, thought, question, messages[0]["role"], answer, record["level"]] == ["no", "hm", "2 + 2?", "user", "4", 3]
def everything(**facts): return len(facts)
def truth(reply): return reply == "yes"
def talks(reply): print("[1, 2, 3]"); return 1

def raises(reply): return {}[reply]
def sometimes(reply): return 1 / (len(reply) - 2)
def nan(reply): return float("nan")
def nothing(reply): pass
def asks(reply, weather): return 1
def hangs(reply):
    try:
        while True: pass
    except Exception:
        return 1
def leaves(reply): os._exit(0)
def eats(reply): return len(bytearray(1 << 40))
def reads(reply): return len(open("/etc/passwd").read())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards.py").write_text(FUNCTIONS, encoding="utf-8-sig")  # with a mark that editors on Windows write
    (folder / "broken.py").write_text("import no_such_module\n")
    (folder / "syntax.py").write_text("def f(:\n")
    problem = {"question": "2 + 2?", "answer": 4, "level": 3}
    (folder / "sums.jsonl").write_text("\n".join([json.dumps(problem)] * 2))
    (folder / "open.jsonl").write_text("\n".join([json.dumps({"prompt": "Say hello."})] * 2))
    return folder


def rewarded(folder: Path, parts: tuple[str, ...], texts: list[str]) -> list[float]:
    rewards = Rewards.of([part.replace("rewards.py", str(folder / "rewards.py")) for part in parts])
    replies = [Reply([], "hm", [Part("text", text)]) for text in texts]
    return rewards.grades(Problems(folder / "sums.jsonl"), [0] * len(replies), replies)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("rewards.py:length",), [2, 3]),
        (("rewards.py:sees",), [1, 0]),
        (("rewards.py:everything",), [6, 6]),
        (("rewards.py:talks",), [1, 1]),
        (("rewards.py:length*-0.5", "rewards.py:truth*4"), [-1, 2.5]),
        (("answer*2", "rewards.py:length"), [2, 3]),
    ],
)
def test_rewards_are_the_weighted_sum_of_functions(folder: Path, parts: tuple[str, ...], expected: list[float]) -> None:
    assert rewarded(folder, parts, ["no", "yes"]) == expected


def test_a_right_answer_is_a_part_like_others(folder: Path) -> None:
    assert rewarded(folder, ("answer*2", "rewards.py:length*0.5"), ["4", "5", "4"]) == [2.5, 0.5, 2.5]


BROKEN = {
    "raises": "KeyError: 'no', line 11",
    "nan": "returned nan",
    "nothing": "returned NoneType instead of a number",
    "asks": "parameter 'weather' is none of",
    "hangs": "took longer than 0.1 s",
    "leaves": "ended its process",
    "eats": "MemoryError",
    "reads": "FileNotFoundError|PermissionError",
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_calls, "CALL_SECONDS", 0.1)


@pytest.mark.parametrize("name", BROKEN)
def test_a_function_that_gives_no_number_is_noticed_before_training(folder: Path, name: str) -> None:
    rewards = Rewards.of([f"{folder}/rewards.py:{name}"])
    with pytest.raises(UserError, match=BROKEN[name].replace("no", "4") if name == "raises" else BROKEN[name]):
        rewards.try_out(Problems(folder / "sums.jsonl"))


def test_a_reply_for_which_a_function_fails_gets_nothing_from_it(folder: Path, capsys: Any) -> None:
    assert rewarded(folder, ("rewards.py:sometimes", "rewards.py:length"), ["abc", "no", "a", "no"]) == [4, 2, 0, 2]
    assert "1 of 3 different replies" in capsys.readouterr().err


def test_a_reply_that_ends_the_process_costs_no_other_reply_its_reward(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "exits.py"
    file.write_text("import os\ndef f(reply):\n    return len(reply) if reply != 'no' else os._exit(0)\n")
    assert rewarded(folder, (f"{file}:f", "rewards.py:length"), ["a", "no", "yes"]) == [2, 2, 6]


def test_a_function_that_fails_for_all_replies_ends_the_run(folder: Path) -> None:
    with pytest.raises(UserError, match="failed for all 8 replies"):
        rewarded(folder, ("rewards.py:nan",), [f"{i}" for i in range(8)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rewards.py", "must be FILE.py:FUNCTION or answer"),
        ("rewards.py:length*much", "must be FILE.py:FUNCTION or answer"),
        ("rewards.py:length*0", "must be FILE.py:FUNCTION or answer"),
        ("rewards.py:len gth", "must be FILE.py:FUNCTION or answer"),
        ("absent.py:length", "there is no file .*absent.py"),
        ("syntax.py:f", "is not Python"),
        ("broken.py:f", "ModuleNotFoundError: No module named 'no_such_module', line 1"),
        ("rewards.py:lenght", "has no function lenght; it has .*length"),
    ],
)
def test_a_value_that_names_no_function_is_refused(
    folder: Path, text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=words):
        Rewards.of([text]).try_out(Problems(folder / "sums.jsonl"))


def test_only_right_answers_need_answers(folder: Path) -> None:
    file = folder / "open.jsonl"
    with pytest.raises(UserError, match="a problem needs one of the keys answer"):
        Problems(file, Rewards.of(["answer", f"{folder}/rewards.py:length"]).need_answers)
    rewards = Rewards.of([f"{folder}/rewards.py:length"])
    task = Problems(file, rewards.need_answers)
    rewards.try_out(task)
    assert rewards.grades(task, [1], [Reply([], "", [Part("text", "hello")])]) == [5]
