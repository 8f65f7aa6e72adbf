"""Conversations for midtraining and SFT: questions about the world, sums, stories, small talk."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from nanochat.data.conversation import Conversation, Message, assistant, user
from nanochat.data.tinyworld.arithmetic import Mental, calculator_sum, mental_sum
from nanochat.data.tinyworld.facts import Fact
from nanochat.data.tinyworld.splits import asked_facts
from nanochat.data.tinyworld.stories import counting_story, logic_story
from nanochat.data.tinyworld.talks.dialogues import (
    WORD_RELATIONS,
    dialogue_data,
    dont_know,
    request,
    talk,
    tell_me_about,
    unknown_question,
)
from nanochat.data.tinyworld.talks.followups import follow_up_data, follow_ups, full_answer
from nanochat.data.tinyworld.talks.tale_telling import ask_for_beginning, ask_for_tale
from nanochat.data.tinyworld.wording import answer, as_typed, ask_trained, sentence
from nanochat.data.tinyworld.words import LANGUAGES, Language, full_stop, joined

# The factor by which questions about facts of these relations are more frequent. The relations have
# two directions over few entities, and a model easily confuses left and right, or a number with its
# words.
CONFUSABLE: dict[str, int] = {
    "left_of": 6,
    "right_of": 6,
    "next_day": 3,
    "previous_day": 3,
    "next_month": 3,
    "previous_month": 3,
    "next_season": 3,
    "previous_season": 3,
    "next_number": 3,
    "previous_number": 3,
    "number_word": 3,
    "digits": 3,
    "parity": 3,
    "double": 3,
}

# With equal shares, a model answers fewer Chinese than English questions in new wordings.
LANGUAGE_SHARES: dict[Language, float] = {"en": 0.42, "zh": 0.58}

MID_SHARES = {
    "question": 0.235,
    "questions": 0.2,
    "follow_up": 0.03,
    "follow_ups": 0.1,
    "calculator": 0.2,
    "logic": 0.1,
    "mental": 0.015,
    "unknown": 0.03,
    "about_itself": 0.02,
    "tell_me_about": 0.02,
    "request": 0.01,
    "tale": 0.08,
    "beginning": 0.09,
    "dialogue": 0.05,
}
SFT_SHARES = {
    "question": 0.36,
    "questions": 0.09,
    "follow_up": 0.01,
    "follow_ups": 0.1,
    "calculator": 0.24,
    "logic": 0.1,
    "mental": 0.06,
    "unknown": 0.05,
    "about_itself": 0.04,
    "request": 0.02,
    "tale": 0.08,
    "beginning": 0.03,
    "dialogue": 0.04,
}


def mid_conversations(
    seed: int = 0,
    size: int = 60_000,
    mental: Mental | None = None,
) -> list[Conversation]:
    """Return conversations for midtraining: all kinds, often with several questions."""
    return _mix(f"mid/{seed}", size, MID_SHARES, mental or Mental())


def sft_conversations(
    seed: int = 0,
    size: int = 20_000,
    mental: Mental | None = None,
) -> list[Conversation]:
    """Return conversations for SFT: like users' chats, mostly one question and a short answer."""
    return _mix(f"sft/{seed}", size, SFT_SHARES, mental or Mental())


Item = TypeVar("Item")
Maker = Callable[[Language, random.Random], list[Message]]


def _mix(
    seed: str,
    size: int,
    shares: dict[str, float],
    mental: Mental,
) -> list[Conversation]:
    """Return `size` conversations of several kinds, in random order.

    `shares` gives the weight of each kind, and LANGUAGE_SHARES that of each language.
    """
    rng = random.Random(seed)
    makers = _makers(Questions(rng), mental)
    kinds = _draw(shares, size, rng)
    languages = _draw(LANGUAGE_SHARES, size, rng)
    mixed = []
    for kind, language in zip(kinds, languages, strict=True):
        messages = makers[kind](language, rng)
        mixed.append(Conversation(tuple(messages)))
    # Shuffle, so that taking every n-th conversation for validation gives both languages.
    rng.shuffle(mixed)
    return mixed


def _draw(shares: Mapping[Item, float], size: int, rng: random.Random) -> list[Item]:
    """Draw `size` keys of `shares` with replacement, weighted by their values."""
    return rng.choices(list(shares), weights=list(shares.values()), k=size)


def _makers(questions: "Questions", mental: Mental) -> dict[str, Maker]:
    """Return a dict from each kind of conversation to the function that makes its messages."""
    return {
        "question": lambda language, rng: questions.several(language, 1),
        "questions": lambda language, rng: questions.several(language, rng.randint(2, 5)),
        "follow_up": lambda language, rng: questions.follow_up(language),
        "follow_ups": follow_ups,
        "calculator": _calculator,
        "logic": _logic,
        "mental": lambda language, rng: _mental(language, rng, mental),
        "unknown": _unknown,
        "about_itself": _about_itself,
        "tell_me_about": tell_me_about,
        "request": request,
        "tale": ask_for_tale,
        "beginning": ask_for_beginning,
        "dialogue": lambda language, rng: _dialogue(language, rng, questions),
    }


# --- questions about facts -----------------------------------------------------------------------


def endless(items: Sequence[Item], rng: random.Random) -> Iterator[Item]:
    """Yield the items again and again, reshuffled in each round, so that none is rare."""
    order = list(items)
    while True:
        rng.shuffle(order)
        yield from order


def _question(
    fact: Fact,
    language: Language,
    rng: random.Random,
) -> list[Message]:
    question = as_typed(ask_trained(fact, language, rng), language, rng)
    return [user(question), assistant(answer(fact, language))]


class Questions:
    """Draws questions about the facts that training asks about, with their answers.

    In each language, the facts are drawn from a shuffled deck, in which easily confused ones
    (CONFUSABLE) come up several times.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng
        deck = []
        self.by_relation: dict[str, list[Fact]] = {}
        for fact in asked_facts():
            deck += [fact] * CONFUSABLE.get(fact.relation, 1)
            self.by_relation.setdefault(fact.relation, []).append(fact)
        self.decks = {language: endless(deck, rng) for language in LANGUAGES}

    def several(self, language: Language, count: int) -> list[Message]:
        """Return `count` unrelated questions and their answers."""
        messages = []
        for _ in range(count):
            messages += _question(next(self.decks[language]), language, self.rng)
        return messages

    def follow_up(self, language: Language) -> list[Message]:
        """Return a question and the same question about up to two other things, with answers."""
        first = next(self.decks[language])
        while not _takes_follow_up(first):
            first = next(self.decks[language])
        candidates = [fact for fact in self.by_relation[first.relation] if fact != first]
        messages = _question(first, language, self.rng)
        count = min(len(candidates), self.rng.randint(1, 2))
        for fact in self.rng.sample(candidates, count):
            pattern = self.rng.choice(dialogue_data()["follow_up"][language])
            question = sentence(pattern.format(e=fact.subjects[0][language]))
            messages += [user(question), assistant(full_answer(fact, language))]
        return messages


def _takes_follow_up(fact: Fact) -> bool:
    """Return whether a conversation of Questions.follow_up() may begin with this fact.

    Facts with two subjects, facts about words, and relations that follow_ups() covers are excluded.
    """
    if len(fact.subjects) != 1 or fact.relation in WORD_RELATIONS:
        return False
    return fact.relation not in follow_up_data()["relations"]


# --- other kinds ---------------------------------------------------------------------------------


def _calculator(language: Language, rng: random.Random) -> list[Message]:
    if rng.random() < 0.75:
        task = calculator_sum(language, rng)
    else:
        _, task = counting_story(language, rng, largest=99)
    number = task.result + full_stop(language)
    return [user(task.question), assistant(*task.tool_answer, number)]


def _logic(language: Language, rng: random.Random) -> list[Message]:
    story = logic_story(language, rng)
    question = joined(language, [story.text, story.question])
    return [user(question), assistant(story.answer)]


def _mental(
    language: Language,
    rng: random.Random,
    mental: Mental,
) -> list[Message]:
    task = mental_sum(language, rng, mental)
    return [user(task.question), assistant(task.result + full_stop(language))]


def _unknown(language: Language, rng: random.Random) -> list[Message]:
    return [user(unknown_question(language, rng)), assistant(dont_know(language))]


def _about_itself(language: Language, rng: random.Random) -> list[Message]:
    return talk("about_itself", language, rng)


def _dialogue(
    language: Language,
    rng: random.Random,
    questions: Questions,
) -> list[Message]:
    """Return one or two questions about facts, sums or nanochat itself, with answers.

    A greeting often comes first, and a farewell last.
    """
    messages = []
    if rng.random() < 0.7:
        messages += talk("open", language, rng)
    for _ in range(rng.randint(1, 2)):
        draw = rng.random()
        if draw < 0.6:
            messages += questions.several(language, 1)
        elif draw < 0.8:
            messages += _calculator(language, rng)
        else:
            messages += _about_itself(language, rng)
    if rng.random() < 0.6:
        messages += talk("close", language, rng)
    return messages
