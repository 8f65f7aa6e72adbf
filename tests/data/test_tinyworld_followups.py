"""Follow-up questions: they need the turns before, held-out pairs are never trained, and grading is strict."""

import random

import pytest

from nanochat.data.conversation import Conversation
from nanochat.data.tinyworld import world as tinyworld
from nanochat.data.tinyworld.facts import Fact
from nanochat.data.tinyworld.splits import asked_facts
from nanochat.data.tinyworld.talks.followups import (
    TURNS,
    follow_up_data,
    follow_up_evaluation,
    follow_ups,
    patterns,
)
from nanochat.data.tinyworld.words import LANGUAGES, Language
from tests.support.tinyworld_rows import normalise, training


def asked() -> list[Fact]:
    return [fact for fact in asked_facts() if fact.relation in follow_up_data()["relations"]]


@pytest.mark.parametrize("language", LANGUAGES)
def test_conversations_have_two_to_four_turns_and_repeat_no_answer(language: Language):
    rng = random.Random(0)
    lengths = set()
    for _ in range(300):
        messages = follow_ups(language, rng)
        lengths.add(len(messages) // 2)
        replies = [message.text for message in messages[1::2]]
        assert len(set(replies[1:])) == len(replies[1:])
    assert lengths <= {1, *range(TURNS[0], TURNS[1] + 1)} and {2, 3, 4} <= lengths


@pytest.mark.parametrize("language", LANGUAGES)
def test_short_questions_do_not_say_what_they_are_about(language: Language):
    """Without the turns before, the question about the same thing could be about anything."""
    names = {normalise(fact.subjects[0][language].name) for fact in asked()}
    for relation in follow_up_data()["relations"]:
        found = [*patterns(relation, language, False), *patterns(relation, language, True)]
        assert len(set(found)) == len(found) >= 5 and len(patterns(relation, language, True)) == 1
        for pattern in found:
            words = normalise(pattern).split() if language == "en" else [normalise(pattern)]
            assert not names & set(words) and "{" not in pattern


@pytest.mark.parametrize("language", LANGUAGES)
def test_held_out_pairs_and_wordings_are_never_trained(language: Language):
    def pairs(conversations: list[Conversation]) -> set[tuple[str, str]]:
        return {
            (before.text, after.text)
            for conversation in conversations
            for before, after in zip(conversation.messages[1::2], conversation.messages[3::2], strict=False)
        }

    found = [problem.conversation for problem in follow_up_evaluation(language)]
    evaluated = [one for one in found if len(one.messages) >= 6]  # the reply before the last names its thing
    assert len(evaluated) >= 40
    last = {tuple(message.text for message in found.messages[-3::2]) for found in evaluated}
    assert not last & pairs(list(training()))
    texts = {normalise(message.text) for conversation in training() for message in conversation.messages[::2]}
    for relation in follow_up_data()["relations"]:
        assert not {normalise(pattern) for pattern in patterns(relation, language, True)} & texts


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_evaluation_needs_the_turns_before(language: Language):
    found = follow_up_evaluation(language)
    assert len(found) >= 100 and {problem.relation for problem in found} == {"same thing", "another thing"}
    alone: dict[str, set[str]] = {}
    for problem in found:
        reference = problem.conversation.messages[-1].text
        assert 4 <= len(problem.conversation.messages) <= 2 * TURNS[1]
        assert tinyworld.grade(problem, reference), problem
        assert not tinyworld.grade(problem, problem.answer), "a bare value is no whole sentence"
        assert not tinyworld.grade(problem, ""), problem
        alone.setdefault(problem.conversation.messages[-2].text, set()).add(reference)
        others = [other for other in found if other.names != problem.names]
        assert not any(tinyworld.grade(problem, other.conversation.messages[-1].text) for other in others
                       if problem.names not in other.names and other.answer != problem.answer), problem  # fmt: skip
    assert sum(len(replies) > 1 for replies in alone.values()) >= 10
