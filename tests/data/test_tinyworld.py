"""TinyWorld: the facts agree with each other, the wordings are clean, and grading is strict."""

import operator
import random
import re
import subprocess
import sys
from typing import Literal

import pytest

from nanochat.data.conversation import Part, chat
from nanochat.data.tinyworld import world as tinyworld
from nanochat.data.tinyworld.arithmetic import calculator_sum
from nanochat.data.tinyworld.documents import documents
from nanochat.data.tinyworld.facts import all_facts, facts_by_relation, sequences
from nanochat.data.tinyworld.stories import counting_story
from nanochat.data.tinyworld.talks.dialogues import dialogue_data
from nanochat.data.tinyworld.wording import wordings
from nanochat.data.tinyworld.words import LANGUAGES
from tests.support.tinyworld_rows import corpus, normalise, training


def values(relation: str) -> dict[str, str]:
    return {fact.subjects[0].key: fact.value.key for fact in facts_by_relation()[relation]}


# --- the facts -----------------------------------------------------------------------------------


def test_every_fact_stands_once_and_has_one_value():
    keys = [fact.key for fact in all_facts()]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "there, back",
    [
        ("capital", "capital_of"),
        ("body_use", "body_for"),
        ("job_task", "job_for"),
        ("tool_use", "tool_for"),
        ("to_chinese", "to_english"),
        ("number_word", "digits"),
        ("planet_at", "planet_number"),
        ("next_day", "previous_day"),
        ("next_month", "previous_month"),
        ("next_season", "previous_season"),
        ("next_letter", "previous_letter"),
        ("right_of", "left_of"),
    ],
)
def test_inverses_agree(there: str, back: str):
    forward, backward = values(there), values(back)
    assert len(set(forward.values())) == len(forward)
    assert {value: key for key, value in forward.items()} == backward


@pytest.mark.parametrize("relation, length", [("next_day", 7), ("next_month", 12), ("next_season", 4), ("right_of", 4)])
def test_the_calendar_and_the_compass_go_round(relation: str, length: int):
    step, seen = values(relation), []
    word = next(iter(step))
    while word not in seen:
        seen.append(word)
        word = step[word]
    assert len(seen) == length == len(step) and word == seen[0]


def test_comparisons_follow_one_order():
    for name, relation in (("size", "bigger"), ("speed", "faster")):
        order = [word.key for word in sequences()[name]]
        for fact in facts_by_relation()[relation]:
            assert fact.value.key == max((word.key for word in fact.subjects), key=order.index)
        assert len(facts_by_relation()[relation]) == len(order) * (len(order) - 1) // 2


def test_subjects_of_a_relation_read_differently():
    """Two subjects with the same words but different values would make a question with two true answers."""
    for relation, facts in facts_by_relation().items():
        for language in LANGUAGES:
            names = [tuple(word[language].usual for word in fact.subjects) for fact in facts]
            assert len(set(names)) == len(names), (relation, language)


def test_different_values_read_differently():
    for relation, facts in facts_by_relation().items():
        if relation != "family":  # 外公 and 爷爷 are both grandfathers in English
            for language in LANGUAGES:
                assert len({f.value.key for f in facts}) == len({f.value[language].name for f in facts}), relation


# --- the wordings --------------------------------------------------------------------------------


def test_every_relation_has_eight_questions_of_which_two_are_held_out():
    for (relation, language), wording in wordings().items():
        assert len(set(wording.questions)) == len(wording.questions) >= 8, (relation, language)
        assert len(set(wording.held_out)) == 2 and len(wording.trained) == len(wording.questions) - 2


def test_no_two_questions_are_the_same_without_their_slots():
    for language in LANGUAGES:
        seen: dict[str, str] = {}
        for (relation, of), wording in wordings().items():
            for pattern in wording.questions if of == language else ():
                signs = re.sub(r"[-+*/×÷]", lambda sign: f" sign{ord(sign[0])} ", pattern)
                bare = normalise(re.sub(r"\{[^}]*\}", " slot ", signs))
                assert seen.setdefault(bare, pattern) == pattern, (relation, pattern)


def test_nothing_is_rendered_with_a_slot_or_two_articles():
    texts = [*corpus(), *(message.text for conversation in training() for message in conversation.messages)]
    for text in texts:
        assert not re.search(
            r"[{}]|\b(?:[Aa]n?|[Tt]he) (?:an?|the)\b|\ba [aeio]|\ban (?!hour)[b-df-hj-np-tv-z]|  ", text
        ), text


# --- stories, sums, dialogues --------------------------------------------------------------------


def value(expression: str) -> float:
    """The result of an expression, computed without the calculator of the package."""
    a, sign, b = re.fullmatch(r"(\d+)([-+*/])(\d+)", expression).groups()
    return {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}[sign](int(a), int(b))


def test_counting_stories_add_up():
    rng = random.Random(0)
    for i in range(400):
        story, task = counting_story(LANGUAGES[i % 2], rng, largest=50)
        numbers = set(re.findall(r"\d+", story.text))
        assert set(re.findall(r"\d+", task.expression)) == numbers
        assert value(task.expression) == int(task.result)
        assert task.result in story.end and task.question.startswith(story.text)


def test_sums_are_right():
    rng = random.Random(0)
    for i in range(400):
        task = calculator_sum(LANGUAGES[i % 2], rng, evaluation=bool(i % 3))
        assert value(task.expression) == int(task.result)


# --- problems and grading ------------------------------------------------------------------------


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_evaluation_asks_every_relation_in_held_out_wordings(language: tinyworld.Language):
    found = tinyworld.evaluation(language)
    assert len(found) >= 600 and {problem.relation for problem in found} == set(facts_by_relation())
    assert len(tinyworld.held_out_combinations(language)) >= 100
    assert len(tinyworld.calculator_evaluation()) >= 300


@pytest.mark.parametrize("language", LANGUAGES)
def test_questions_about_nanochat_are_evaluated_in_wordings_that_are_never_trained(language: tinyworld.Language):
    found = tinyworld.persona_evaluation(language)
    starts = {"alone", "after a greeting", "after a question"}
    assert len(found) >= 40 and {problem.relation for problem in found} == starts
    asked = {normalise(problem.conversation.messages[-2].text) for problem in found}
    told = (*training(), *tinyworld.identity_conversations())
    assert not asked & {normalise(message.text) for one in told for message in one.messages[::2]}
    for problem in found:
        assert (len(problem.conversation.messages) == 2) == (problem.relation == "alone")
        for other in found:
            right = tinyworld.grade(problem, other.conversation.messages[-1].text)
            assert right == (other.answer == problem.answer), (problem, other)


def test_reference_answers_are_right():
    for language in LANGUAGES:
        for found in (
            tinyworld.evaluation(language, size=None),
            tinyworld.held_out_combinations(language),
            tinyworld.unknown_evaluation(language),
            tinyworld.story_evaluation(language),
        ):
            for problem in found:
                assert tinyworld.grade(problem, problem.conversation.messages[-1].text), problem
    for problem in (*tinyworld.calculator_evaluation(), *tinyworld.rl_problems(), *tinyworld.rl_evaluation()):
        assert tinyworld.grade(problem, problem.conversation.messages[-1].parts), problem


def problem(answer: str, *competing: str, tool: Literal["needed", "forbidden", "free"] = "free") -> tinyworld.Problem:
    return tinyworld.Problem(chat("?", answer), answer, competing, "test", "en", tool=tool)


CALL = (Part("python", "3*4"), Part("python_output", "12"), Part("text", "12."))


@pytest.mark.parametrize(
    "found, reply, right",
    [
        (problem("Paris", "London"), "It is ＰＡＲＩＳ, of course.", True),
        (problem("Paris", "London"), "Paris or London.", False),
        (problem("Paris", "London"), "Parisian", False),
        (problem("Paris", "London"), "", False),
        (problem("mammal", "bird"), "A mammal.", True),
        (problem("forest", "bamboo forest"), "The bamboo forest.", False),
        (problem("bamboo forest", "forest"), "the  bamboo\nforest", True),
        (problem("法语", "英语"), "法语。", True),
        (problem("法语", "英语"), "英语和法语。", False),
        (problem("1776"), "1,776", True),
        (problem("1776"), "17760", False),
        (problem("1776"), "1776 or 1777", False),
        (problem("4"), "4.5", False),
    ],
)
def test_grading(found: tinyworld.Problem, reply: str, right: bool):
    assert tinyworld.grade(found, reply) is right


@pytest.mark.parametrize(
    "tool, reply, right",
    [
        ("needed", CALL, True),
        ("needed", CALL[2:], False),
        ("needed", (*CALL[:2], Part("text", "13.")), False),
        ("forbidden", CALL[2:], True),
        ("forbidden", CALL, False),
    ],
)
def test_a_sum_takes_the_calculator_or_the_head_as_asked(tool, reply: tuple[Part, ...], right: bool):
    assert tinyworld.grade(problem("12", tool=tool), reply) is right


def test_what_is_beyond_nanochat_is_declined():
    asked = [m.text for c in tinyworld.sft_conversations(0, 2000) for m in c.messages]
    for language in LANGUAGES:
        item = dialogue_data()["request"][language]
        plain = [question for question in item["ask"] if "{t}" not in question]
        replies = {asked[i + 1] for i, text in enumerate(asked[:-1]) if text in plain}
        assert replies == {item["answer"]}


# --- determinism ---------------------------------------------------------------------------------


def test_equal_seeds_give_equal_texts_in_any_process():
    script = (
        "import hashlib; from nanochat.data.tinyworld import world as t; h = hashlib.sha256()\n"
        "rows = (*t.documents(5, copies=1), *t.mid_conversations(5, 300), *t.evaluation('zh', 5))\n"
        "for x in rows: h.update(repr(x).encode())\nprint(h.hexdigest())"
    )
    runs = {subprocess.check_output([sys.executable, "-c", script], env={"PYTHONHASHSEED": s}, text=True) for s in "12"}
    assert len(runs) == 1
    assert list(documents(1, copies=1)) != list(documents(2, copies=1))
