"""Held-out parts of TinyWorld never reach training: checked on the rendered rows, independent of the generators."""

import itertools
import random
import re

import pytest

from nanochat.data.tinyworld import world as tinyworld
from nanochat.data.tinyworld.facts import Fact, all_facts, facts_by_relation
from nanochat.data.tinyworld.splits import asked_facts, held_out_facts, held_out_keys, kept_for_evaluation
from nanochat.data.tinyworld.talks.dialogues import invented_name
from nanochat.data.tinyworld.wording import ask, state, wordings
from nanochat.data.tinyworld.words import LANGUAGES
from tests.support.tinyworld_rows import corpus, normalise, training


def renderings(fact: Fact, language: tinyworld.Language, patterns: tuple[str, ...]) -> set[str]:
    """The questions about a fact in these patterns, in both orders if the fact compares two things."""
    return {normalise(ask(fact, language, pattern, random.Random(i))) for pattern in patterns for i in range(6)}


@pytest.mark.parametrize("language", LANGUAGES)
def test_held_out_questions_occur_nowhere_in_training(language: tinyworld.Language):
    held_out = set()
    for fact in all_facts():
        held_out |= renderings(fact, language, wordings()[fact.relation, language].held_out)
    turns = {normalise(message.text) for conversation in training() for message in conversation.messages}
    assert not held_out & turns
    sentences = {normalise(s) for text in corpus() for s in re.split(r"(?<=[.?!。？！])\s*|\n", text)}
    assert not held_out & sentences


@pytest.mark.parametrize("language", LANGUAGES)
def test_held_out_combinations_are_stated_but_never_asked(language: tinyworld.Language):
    asked = set()
    for fact in held_out_facts():
        asked |= renderings(fact, language, wordings()[fact.relation, language].questions)
    for conversation in training():
        for message in conversation.messages:
            assert normalise(message.text) not in asked
    text = "\n".join(corpus())
    for fact in held_out_facts():
        rng = random.Random(0)
        assert any(state(fact, language, rng, framed=0).rstrip(".。") in text for _ in range(200)), fact


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_training_answer_gives_a_held_out_value_for_its_entity(language: tinyworld.Language):
    """Needs no patterns, so it covers follow-up questions: the entity is in the question, the value is the answer."""
    other = {(f.subjects[0].key, f.value.key) for f in asked_facts()}
    held_out = {}
    for fact in held_out_facts():
        names = [normalise(word[language].name) for word in fact.subjects]
        if len(names) == 1 and len(names[0]) > 2 and (fact.subjects[0].key, fact.value.key) not in other:
            held_out[names[0], normalise(fact.value[language].name)] = fact
    assert len(held_out) >= 30
    by_value: dict[str, list[str]] = {}
    for name, value in held_out:
        by_value.setdefault(value, []).append(name)
    for conversation in training():
        for question, reply in zip(conversation.messages[::2], conversation.messages[1::2], strict=True):
            asked = f" {normalise(question.text)} "
            for name in by_value.get(normalise(reply.text), ()):
                assert not re.search(rf"\b{re.escape(name)}\b", asked), (question, reply)


def test_a_tenth_of_the_combinations_is_held_out():
    share = len(held_out_keys()) / len(all_facts())
    assert 0.08 <= share <= 0.12
    assert {fact.relation for fact in asked_facts()} == set(facts_by_relation())


def test_the_operands_of_the_evaluation_are_never_trained():
    def pairs(texts: list[str]) -> set[tuple[int, ...]]:
        found = itertools.chain(*(re.findall(r"(\d+) ?[-+*/×÷] ?(\d+)", text) for text in texts))
        return {tuple(sorted(map(int, pair))) for pair in found}

    calls = [part.text for c in training() for m in c.messages for part in m.parts if part.kind == "python"]
    turns = [message.text for c in training() for message in c.messages if "calculator" not in message.text]
    evaluated = [p.conversation.messages[-1].parts[0].text for p in tinyworld.calculator_evaluation(3)]
    sums = [line for text in corpus() for line in text.splitlines() if "=" in line and int(line.split()[0]) > 20]
    assert len(pairs(calls)) > 500 and pairs(evaluated) and pairs(sums)
    assert not pairs(evaluated) & pairs(calls)
    assert not pairs(evaluated) & pairs(sums)
    assert not any(kept_for_evaluation("operands", *pair) for pair in pairs(calls))
    assert turns


def test_a_tenth_of_the_sums_in_the_head_is_never_asked_in_training():
    mental = tinyworld.Mental()
    parts = [mental.part(a, b) for a in range(1, 21) for b in range(1, 21)]
    assert 0.05 < parts.count("unseen") / len(parts) < 0.15
    assert mental.part(3, 8) == mental.part(8, 3)
    questions = [m.text for c in training() for m in c.messages if re.search(r"head|at once|口算|心算", m.text)]
    asked = [tuple(map(int, re.findall(r"\d+", text))) for text in questions if re.search(r"\d", text)]
    assert len(asked) > 100 and {mental.part(*terms) for terms in asked} == {"practised"}


def test_the_unseen_sums_of_rl_are_never_trained():
    def terms(found: list[tinyworld.Problem]) -> set[tuple[int, ...]]:
        return {tuple(sorted(map(int, re.findall(r"\d+", p.conversation.messages[0].text)))) for p in found}

    trained = terms(tinyworld.rl_problems(0, 1000))
    assert not trained & terms(tinyworld.rl_evaluation(0, 300, unseen=True))
    assert terms(tinyworld.rl_evaluation(0, 300)) & trained


def test_invented_names_of_the_evaluation_are_never_trained():
    rng = random.Random(0)
    draw = [{invented_name(rng, "a", evaluation).key for _ in range(200)} for evaluation in (False, True)]
    assert not draw[0] & draw[1]
