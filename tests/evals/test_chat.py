"""Batched evaluation against one problem at a time, and its figures against published tables and enumeration."""

import itertools
import random
import statistics
from typing import Literal

import pytest
import torch

from nanochat.common import UserError
from nanochat.data.conversation import Conversation, Part, chat
from nanochat.device import Compute, compute_init
from nanochat.engine import Engine
from nanochat.evals.chat import Reply, Score, by_group, chat_core, evaluate, pass_at, split_thought, wilson
from nanochat.generate.reply import reply_parts
from nanochat.generate.sampling import Sampling
from tests.emulated_npu.worker import on_npu
from tests.support.tiny_model import on_cpu, tiny_gpt, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MODEL = tiny_gpt(TOKENIZER.vocab_size)
SHORT = Sampling(0.0, max_tokens=6)


def question(i: int) -> str:
    rng = random.Random(i)
    return " ".join(rng.choices(["cat", "mat", "猫", "12", "the", "+"], k=rng.randint(1, 14)))


class Letters:
    """Problems with two to five choices; the number of the problem decides which letter is right."""

    name = "letters"
    kind: Literal["choice", "generative"] = "choice"

    def __init__(self, size: int = 23):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Conversation:
        return chat(question(i), self.letters(i)[0])

    def letters(self, i: int) -> tuple[str, ...]:
        return tuple("ABCDE"[: 2 + i % 4])

    def grade(self, i: int, reply: str) -> float:
        return float(reply == self.letters(i)[i % 3 % len(self.letters(i))])


class Words:
    """A reply is right if its text has an even number of characters."""

    name = "words"
    kind: Literal["choice", "generative"] = "generative"

    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int) -> Conversation:
        return chat(question(i), "cat")

    def letters(self, i: int) -> tuple[str, ...]:
        return ()

    def grade(self, i: int, reply: str) -> float:
        return float(len(reply) % 2 == 0)


class Called(Words):
    """A reply is right if it has no calculator call, which only its parts show."""

    def grade_parts(self, i: int, parts: list[Part]) -> float:
        return float(all(part.kind == "text" for part in parts))

    def grade(self, i: int, reply: str) -> float:
        raise AssertionError("grade_parts takes its place")


@torch.no_grad()
def likeliest_letter(task: Letters, i: int) -> str:
    """The reference: one prompt at a time, without padding, with the logits of every position."""
    logits = MODEL(torch.tensor([TOKENIZER.render_prompt(task[i])]))[0, -1]
    return max(task.letters(i), key=lambda letter: logits[TOKENIZER.encode(letter)[0]].item())


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_letters_in_batches_are_judged_as_one_by_one(batch_size):
    task = Letters()
    score = evaluate(task, MODEL, TOKENIZER, on_cpu(), batch_size=batch_size)
    expected = tuple((task.grade(i, likeliest_letter(task, i)),) for i in range(len(task)))
    assert score.grades == expected and 0 < score.right < score.total == 23
    assert score.accuracy == score.right / 23 and score.interval == wilson(score.right, 23)
    assert score.baseline == pytest.approx(sum(1 / len(task.letters(i)) for i in range(23)) / 23)


def test_replies_in_words_are_graded_greedily_through_the_engine():
    task, heard = Words(), {}
    score = evaluate(
        task, MODEL, TOKENIZER, on_cpu(), SHORT, batch_size=4, on_reply=lambda i, parts, grade: heard.update({i: grade})
    )
    for i in range(len(task)):
        (completion,) = Engine(MODEL, TOKENIZER).generate([TOKENIZER.render_prompt(task[i])], SHORT)
        text = "".join(part.text for part in reply_parts(completion.tokens, TOKENIZER) if part.kind == "text")
        assert score.grades[i] == (task.grade(i, text),) == (heard[i],)
    assert score.baseline == 0


def test_a_problem_with_several_samples_counts_its_best():
    score = evaluate(Words(), MODEL, TOKENIZER, on_cpu(), Sampling(1.0, 50, max_tokens=4), samples=3)
    assert all(len(row) == 3 for row in score.grades)
    assert len({grade for row in score.grades for grade in row}) == 2
    assert score.right == sum(max(row) for row in score.grades)
    assert score.accuracy == pytest.approx(pass_at(3, score.grades))


def test_a_task_may_grade_calculator_calls():
    score = evaluate(Called(), MODEL, TOKENIZER, on_cpu(), SHORT)
    assert score.total == 9


@pytest.mark.parametrize(
    ("text", "opened", "thought", "answer"),
    [
        ("<think>\nTwo and two.\n</think>\n\n4", False, "Two and two.", "4"),
        ("Two and two.</think>4", True, "Two and two.", "4"),  # the template opened the thought in the prompt
        ("<think>Two.</think>4", True, "Two.", "4"),  # a model that repeats the mark
        ("<think>Two and", False, "Two and", ""),  # cut off while it thinks
        ("Two and", True, "Two and", ""),
        ("4 </think> is text", False, "", "4 </think> is text"),
        ("4", False, "", "4"),
    ],
)
def test_the_thought_of_a_reply_is_split_from_the_answer(text: str, opened: bool, thought: str, answer: str) -> None:
    assert split_thought(text, ("<think>", "</think>"), opened) == (thought, answer)


def test_a_task_may_grade_all_replies_at_once_with_any_numbers() -> None:
    class Together(Words):
        def grade_all(self, problems: list[int], replies: list[Reply]) -> list[float]:
            assert len(problems) == len(replies) == 9
            return [float(i - 5) for i in problems]

    score = evaluate(Together(), MODEL, TOKENIZER, on_cpu(), SHORT)
    assert score.accuracy == pytest.approx(-1.0)
    assert score.low == pytest.approx(-1 - 1.96 * statistics.pstdev(range(9)) / 3)


def test_groups_are_counted_apart():
    class Grouped(Words):
        def group(self, i: int) -> str:
            return ("odd", "even")[i % 2]

    score = Score("x", 3, 5, 0, 1, 0, 0, ((1.0,), (0.0, 0.5), (0.0,), (1.0,), (1.0,)))
    assert by_group(Grouped(), score) == {"even": (1.5, 2), "odd": (2.0, 3)}
    assert by_group(Words(), score) == {}


def test_the_first_problems_are_asked_under_a_limit():
    whole, part = (evaluate(Letters(), MODEL, TOKENIZER, on_cpu(), limit=limit) for limit in (None, 7))
    assert part.total == 7 and part.grades == whole.grades[:7]
    assert evaluate(Letters(), MODEL, TOKENIZER, on_cpu(), limit=1000).total == 23


@pytest.mark.parametrize("task", [Letters(), Words()])
def test_problems_beyond_the_context_count_as_wrong_and_are_counted(task):
    lengths = sorted(len(TOKENIZER.render_prompt(task[i])) for i in range(len(task)))
    small = tiny_gpt(TOKENIZER.vocab_size, sequence_len=lengths[4])
    score = evaluate(task, small, TOKENIZER, on_cpu(), SHORT)
    fit = [i for i in range(len(task)) if len(TOKENIZER.render_prompt(task[i])) <= lengths[4] - (task.name == "words")]
    assert score.total == len(task) and score.too_long == len(task) - len(fit) > 0
    assert all(score.grades[i] == (0.0,) for i in range(len(task)) if i not in fit)
    assert f"{score.too_long} too long" in str(score)


def test_a_letter_that_the_vocabulary_splits_is_refused_in_words():
    class Long(Letters):
        def letters(self, i: int) -> tuple[str, ...]:
            return ("A", "strawberry cat")

    with pytest.raises(UserError, match="one token each"):
        evaluate(Long(), MODEL, TOKENIZER, on_cpu())


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"samples": 0}, {"batch_size": 0}])
def test_nothing_to_ask_is_refused_in_words(wrong):
    with pytest.raises(UserError, match="at least one"):
        evaluate(Words(), MODEL, TOKENIZER, on_cpu(), **wrong)


def scores(compute: Compute) -> list[Score]:
    return [
        evaluate(Letters(), MODEL, TOKENIZER, compute),
        evaluate(Letters(1), MODEL, TOKENIZER, compute),
        evaluate(Words(), MODEL, TOKENIZER, compute, Sampling(1.0, 20, max_tokens=5), samples=2),
    ]


@pytest.mark.ranks
def test_two_ranks_find_the_score_of_one(pool):
    first, second = pool.run(2, scores)
    assert first == second
    for score, expected in zip(first, scores(on_cpu()), strict=True):
        assert score.grades == expected.grades and score.baseline == pytest.approx(expected.baseline)


# --- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (50, 100, 0.4038, 0.5962),
        (1, 1, 0.2065, 1.0),
        (95, 100, 0.8882, 0.9785),
    ],
)
def test_wilson_intervals_equal_published_values(right, total, low, high):
    assert wilson(right, total) == pytest.approx((low, high), abs=1e-4)


def test_pass_at_k_equals_the_share_over_all_choices_of_samples():
    rng = random.Random(1)
    grades = [[float(rng.random() < 0.3) for _ in range(6)] for _ in range(10)]
    for k in range(1, 7):
        shares = [[max(some) for some in itertools.combinations(row, k)] for row in grades]
        assert pass_at(k, grades) == pytest.approx(sum(sum(row) / len(row) for row in shares) / len(shares))
    with pytest.raises(ValueError, match="k = 7"):
        pass_at(7, grades)


def test_chat_core_is_the_mean_of_centred_accuracies():
    # (.40 - .25) / .75 = .2, (.10 - .25) / .75 = -.2, .60 / 1 = .6; their mean is .2
    assert chat_core([(0.4, 0.25), (0.1, 0.25), (0.6, 0.0)]) == pytest.approx(0.2)


@on_npu(TASK_QUEUE_ENABLE="1", NANOCHAT_DTYPE="float32")
def test_replies_with_graphs_have_the_grades_of_those_without() -> None:
    compute = compute_init("npu")
    model = tiny_gpt(TOKENIZER.vocab_size, operations=compute.operations).to(compute.device)
    plain, graphed = (
        evaluate(Words(), model, TOKENIZER, compute, Sampling(1.0, 50, max_tokens=8), samples=2, graphs=graphs)
        for graphs in (False, True)
    )
    assert plain == graphed
