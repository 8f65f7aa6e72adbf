"""Conversations with follow-up questions, which make sense only after the turns before them.

A follow-up asks something else about the same thing ("And its language?"), or the same about
another thing ("And Italy?").
"""

import functools
import json
import random
from dataclasses import dataclass

from nanochat.data.conversation import Conversation, Message, assistant, user
from nanochat.data.tinyworld.facts import Fact
from nanochat.data.tinyworld.problems import Problem, fact_problem
from nanochat.data.tinyworld.splits import asked_facts, kept_for_evaluation
from nanochat.data.tinyworld.wording import (
    answer,
    as_typed,
    ask_trained,
    english_sentence,
    split_rng,
    wordings,
)
from nanochat.data.tinyworld.words import Language, data_text, full_stop

TURNS = (2, 4)
SAME_THING_SHARE = 0.65  # share of follow-ups about the same thing as before


@functools.cache
def follow_up_data() -> dict:
    """Return the content of followups.json."""
    return json.loads(data_text("followups.json"))


@functools.cache
def patterns(
    relation: str | None,
    language: Language,
    held_out: bool,
) -> tuple[str, ...]:
    """Return the follow-up patterns that training uses or, with `held_out`, the held-out one.

    They ask for `relation` of the same thing or, if `relation` is None, for the same relation of
    another thing. The first pattern in the data is the plainest, and is never held out.
    """
    data = follow_up_data()
    by_language = data["other"] if relation is None else data["relations"][relation]
    questions = by_language[language]
    held_out_question = split_rng("follow-up", str(relation), language).choice(questions[1:])
    if held_out:
        return (held_out_question,)
    return tuple(question for question in questions if question != held_out_question)


# --- which facts follow which --------------------------------------------------------------------


@functools.cache
def _facts_by_subject() -> dict[str, tuple[Fact, ...]]:
    """Return the facts that follow-up questions can ask about, by subject key."""
    groups: dict[str, list[Fact]] = {}
    for fact in _facts():
        groups.setdefault(fact.subjects[0].key, []).append(fact)
    return {subject: tuple(facts) for subject, facts in groups.items()}


@functools.cache
def _facts_by_relation() -> dict[str, tuple[Fact, ...]]:
    """Return the facts that follow-up questions can ask about, by relation."""
    groups: dict[str, list[Fact]] = {}
    for fact in _facts():
        groups.setdefault(fact.relation, []).append(fact)
    return {relation: tuple(facts) for relation, facts in groups.items()}


def _facts() -> list[Fact]:
    relations = follow_up_data()["relations"]
    return [fact for fact in asked_facts() if fact.relation in relations]


def is_held_out(before: Fact, after: Fact) -> bool:
    """Return whether training never asks about `after` in a follow-up to `before`.

    This holds for about a tenth of the pairs of facts.
    """
    return kept_for_evaluation("follow-up", *before.key, *after.key)


@functools.cache
def next_facts(
    fact: Fact,
    same_thing: bool,
    held_out: bool,
) -> tuple[Fact, ...]:
    """Return the facts that a follow-up question can ask about after `fact`.

    With `same_thing`, they are other facts about the same thing; otherwise, facts of the same
    relation about other things. With `held_out`, they are the facts that training never asks about
    in a follow-up to `fact`; otherwise, those that it may ask about.
    """
    about_same_thing = _facts_by_subject()[fact.subjects[0].key]
    of_same_relation = _facts_by_relation()[fact.relation]
    candidates = about_same_thing if same_thing else of_same_relation
    facts = []
    for candidate in candidates:
        if candidate.key != fact.key and is_held_out(fact, candidate) == held_out:
            facts.append(candidate)
    return tuple(facts)


# --- conversations -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A follow-up question: the fact it asks about, and whether the thing is the same as before."""

    fact: Fact
    same_thing: bool

    def question(
        self,
        language: Language,
        rng: random.Random,
        held_out: bool = False,
    ) -> str:
        """Return the text of the question, in a trained wording or in the held-out one."""
        relation = self.fact.relation if self.same_thing else None
        pattern = rng.choice(patterns(relation, language, held_out))
        text = pattern.format(e=self.fact.subjects[0][language])
        return english_sentence(text, language)


def full_answer(fact: Fact, language: Language) -> str:
    """Return the answer to a follow-up question as a full sentence, which names the thing."""
    wording = wordings()[fact.relation, language]
    pattern = wording.statements_by_value.get(fact.value.key, wording.statements)[0]
    statement = pattern.format(e=fact.subjects[0][language], v=fact.value[language])
    text = statement + full_stop(language)
    if fact.relation == "can_fly":
        yes, no = follow_up_data()["yes_no"][language]
        return (no if fact.value.key == "no" else yes) + text
    return english_sentence(text, language)


def follow_ups(language: Language, rng: random.Random) -> list[Message]:
    """Return a question and up to three follow-up questions, with their answers."""
    first = _first_fact(rng)
    messages = _first_messages(first, language, rng)
    count = rng.randint(TURNS[0] - 1, TURNS[1] - 1)
    for turn in _turns(first, count, rng):
        question = as_typed(turn.question(language, rng), language, rng)
        messages += [user(question), assistant(full_answer(turn.fact, language))]
    return messages


def _first_fact(rng: random.Random) -> Fact:
    """Draw a fact about a thing that has other facts to ask about."""
    facts_of_a_thing = rng.choice(_talked_about())
    return rng.choice(facts_of_a_thing)


@functools.cache
def _talked_about() -> tuple[tuple[Fact, ...], ...]:
    """Return, for each thing that has several facts to ask about, these facts."""
    return tuple(facts for facts in _facts_by_subject().values() if len(facts) > 1)


def _first_messages(
    first: Fact,
    language: Language,
    rng: random.Random,
) -> list[Message]:
    question = ask_trained(first, language, rng)
    return [user(as_typed(question, language, rng)), assistant(answer(first, language))]


def _turns(
    first: Fact,
    count: int,
    rng: random.Random,
) -> list[Turn]:
    """Draw up to `count` follow-up questions that training may ask; none repeats a fact."""
    turns: list[Turn] = []
    facts_so_far = [first]
    for _ in range(count):
        same_thing = rng.random() < SAME_THING_SHARE
        candidates = _not_in(facts_so_far, next_facts(facts_so_far[-1], same_thing, held_out=False))
        if candidates:
            fact = rng.choice(candidates)
            turns.append(Turn(fact, same_thing))
            facts_so_far.append(fact)
    return turns


def _not_in(facts_so_far: list[Fact], facts: tuple[Fact, ...]) -> list[Fact]:
    return [fact for fact in facts if fact not in facts_so_far]


# --- evaluation ----------------------------------------------------------------------------------


def follow_up_evaluation(
    language: Language,
    seed: int = 0,
    size: int = 120,
) -> list[Problem]:
    """Return problems whose last question is a follow-up that training never asks at that point.

    In every second problem, the follow-up is in a held-out wording. Two in three follow-ups ask
    about the same thing as before. A right reply names the thing and gives the value.
    """
    rng = random.Random(f"follow-ups/{seed}/{language}")
    problems: list[Problem] = []
    while len(problems) < size:
        same_thing = len(problems) % 3 < 2
        held_out_wording = len(problems) % 2 == 1
        problem = _draw_problem(language, same_thing, held_out_wording, rng)
        if problem is not None:
            problems.append(problem)
    return problems


def _draw_problem(
    language: Language,
    same_thing: bool,
    held_out_wording: bool,
    rng: random.Random,
) -> Problem | None:
    """Draw some turns and a held-out follow-up question, and return the problem.

    Returns None if no held-out fact can follow the turns that were drawn.
    """
    first = _first_fact(rng)
    turns = _turns(first, rng.randint(0, TURNS[1] - 2), rng)
    facts_so_far = [first, *(turn.fact for turn in turns)]
    candidates = _not_in(facts_so_far, next_facts(facts_so_far[-1], same_thing, held_out=True))
    if not candidates:
        return None
    last = Turn(rng.choice(candidates), same_thing)
    messages = _first_messages(first, language, rng)
    for turn in turns:
        messages.append(user(turn.question(language, rng)))
        messages.append(assistant(full_answer(turn.fact, language)))
    messages.append(user(last.question(language, rng, held_out_wording)))
    messages.append(assistant(full_answer(last.fact, language)))
    plainest = wordings()[last.fact.relation, language].trained[0]
    asked_alone = fact_problem(last.fact, language, plainest, rng)
    name = last.fact.subjects[0][language].name
    # 罗马 does not compete if the name is 罗马尼亚.
    competing = tuple(value for value in asked_alone.competing if value not in name)
    return Problem(
        conversation=Conversation(tuple(messages)),
        answer=asked_alone.answer,
        competing=competing,
        relation="same thing" if same_thing else "another thing",
        language=language,
        held_out_combination=True,
        names=name,
    )
