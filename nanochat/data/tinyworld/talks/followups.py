"""Conversations whose later questions need the turns before them: another question about the same thing ("And its
language?"), or the same question about another thing ("And Italy?")."""

import functools
import json
import random
from dataclasses import dataclass

from nanochat.data.conversation import Conversation, Message, assistant, user
from nanochat.data.tinyworld.facts import Fact
from nanochat.data.tinyworld.problems import Problem, fact_problem
from nanochat.data.tinyworld.splits import asked_facts, kept_for_evaluation
from nanochat.data.tinyworld.wording import answer, as_typed, ask, sentence, split_rng, wordings
from nanochat.data.tinyworld.words import Language, data_text

TURNS = (2, 4)


@functools.cache
def follow_up_data() -> dict:
    """The short questions, by relation."""
    return json.loads(data_text("followups.json"))


@functools.cache
def patterns(relation: str | None, language: Language, held_out: bool) -> tuple[str, ...]:
    """The short questions about the same thing or, for None, about another thing: those of training, or the held-out
    one. The first of each list is the plainest and is trained."""
    data = follow_up_data()
    found = data["other"][language] if relation is None else data["relations"][relation][language]
    kept = split_rng("follow-up", str(relation), language).choice(found[1:])
    return tuple(pattern for pattern in found if (pattern == kept) == held_out)


@functools.cache
def _facts() -> tuple[dict[str, tuple[Fact, ...]], dict[str, tuple[Fact, ...]]]:
    """The facts that follow-up questions can ask, by subject and by relation."""
    by_subject: dict[str, list[Fact]] = {}
    by_relation: dict[str, list[Fact]] = {}
    for fact in asked_facts():
        if fact.relation in follow_up_data()["relations"]:
            by_subject.setdefault(fact.subjects[0].key, []).append(fact)
            by_relation.setdefault(fact.relation, []).append(fact)
    return (
        {key: tuple(facts) for key, facts in by_subject.items()},
        {key: tuple(facts) for key, facts in by_relation.items()},
    )


def kept(before: Fact, after: Fact) -> bool:
    """Whether training never asks `after` as the follow-up of `before`, as it is for a tenth of the pairs."""
    return kept_for_evaluation("follow-up", *before.key, *after.key)


def whole(fact: Fact, language: Language) -> str:
    """The answer to a follow-up question: a whole sentence that names the thing, which the question did not."""
    wording = wordings()[fact.relation, language]
    stated = wording.statements_by_value.get(fact.value.key, wording.statements)[0]
    text = stated.format(e=fact.subjects[0][language], v=fact.value[language]) + (
        "。" if language == "zh" else "."
    )
    if fact.relation == "can_fly":
        return follow_up_data()["yes_no"][language][fact.value.key == "no"] + text
    return sentence(text) if language == "en" else text


def nexts(fact: Fact, same_thing: bool, held_out: bool) -> tuple[Fact, ...]:
    """The facts that can be asked after a fact: about the same thing, or of the same relation about another thing."""
    return _nexts(fact, same_thing)[held_out]


@functools.cache
def _nexts(fact: Fact, same_thing: bool) -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """The facts that training may ask after a fact, and those that it never does."""
    by_subject, by_relation = _facts()
    found = by_subject[fact.subjects[0].key] if same_thing else by_relation[fact.relation]
    others = [other for other in found if other.key != fact.key]
    held = tuple(other for other in others if kept(fact, other))
    return tuple(other for other in others if other not in held), held


@dataclass(frozen=True)
class Turn:
    """A follow-up: the fact that it asks, and whether about the same thing as before."""

    fact: Fact
    same_thing: bool

    def question(self, language: Language, rng: random.Random, held_out: bool = False) -> str:
        """The short question, in a wording of training or in the held-out one."""
        pattern = rng.choice(
            patterns(self.fact.relation if self.same_thing else None, language, held_out)
        )
        text = pattern.format(e=self.fact.subjects[0][language])
        return sentence(text) if language == "en" else text


def _turns(first: Fact, count: int, rng: random.Random) -> list[Turn]:
    """Up to `count` follow-ups that training may ask, none of which asks a fact again."""
    found: list[Turn] = []
    asked = [first]
    for _ in range(count):
        same = rng.random() < 0.65
        free = [fact for fact in nexts(asked[-1], same, held_out=False) if fact not in asked]
        if free:
            found.append(Turn(rng.choice(free), same))
            asked.append(found[-1].fact)
    return found


def _first(rng: random.Random) -> Fact:
    """A fact about a thing of which other facts can be asked."""
    return rng.choice(rng.choice(_talked_about()))


@functools.cache
def _talked_about() -> tuple[tuple[Fact, ...], ...]:
    """The facts of every thing of which several can be asked."""
    return tuple(facts for facts in _facts()[0].values() if len(facts) > 1)


def _begin(first: Fact, language: Language, rng: random.Random) -> list[Message]:
    question = ask(first, language, rng.choice(wordings()[first.relation, language].trained), rng)
    return [user(as_typed(question, language, rng)), assistant(answer(first, language))]


def follow_ups(language: Language, rng: random.Random) -> list[Message]:
    """A question, and one to three that follow it, answered in whole sentences."""
    first = _first(rng)
    messages = _begin(first, language, rng)
    for turn in _turns(first, rng.randint(TURNS[0] - 1, TURNS[1] - 1), rng):
        question = as_typed(turn.question(language, rng), language, rng)
        messages += [user(question), assistant(whole(turn.fact, language))]
    return messages


def follow_up_evaluation(language: Language, seed: int = 0, size: int = 120) -> list[Problem]:
    """Follow-ups that training never asks after the turn before them, every second one in a held-out wording.

    Of three, two ask about the same thing and one about another thing. A right reply names the thing and gives the
    value.
    """
    rng = random.Random(f"follow-ups/{seed}/{language}")
    problems: list[Problem] = []
    while len(problems) < size:
        same = len(problems) % 3 < 2
        first = _first(rng)
        turns = _turns(first, rng.randint(0, TURNS[1] - 2), rng)
        last = turns[-1].fact if turns else first
        asked = {first, *(turn.fact for turn in turns)}
        free = [fact for fact in nexts(last, same, held_out=True) if fact not in asked]
        if not free:
            continue
        turn = Turn(rng.choice(free), same)
        messages = _begin(first, language, rng)
        for one in turns:
            messages += [user(one.question(language, rng)), assistant(whole(one.fact, language))]
        messages += [user(turn.question(language, rng, held_out=len(problems) % 2 == 1))]
        messages += [assistant(whole(turn.fact, language))]
        asked_alone = fact_problem(
            turn.fact, language, wordings()[turn.fact.relation, language].trained[0], rng
        )
        name = turn.fact.subjects[0][language].name
        # 罗马 is no value that competes where the name is 罗马尼亚.
        competing = tuple(other for other in asked_alone.competing if other not in name)
        group = "same thing" if same else "another thing"
        conversation = Conversation(tuple(messages))
        problems.append(
            Problem(conversation, asked_alone.answer, competing, group, language, True, names=name)
        )
    return problems
