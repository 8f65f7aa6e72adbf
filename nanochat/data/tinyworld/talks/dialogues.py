"""Dialogues that ask nothing about the world: greetings, what nanochat is, and what nanochat cannot know."""

import functools
import json
import random

from nanochat.data.conversation import Conversation, Message, assistant, chat, user
from nanochat.data.tinyworld.facts import Fact, facts_by_relation
from nanochat.data.tinyworld.splits import asked_facts, kept_for_evaluation
from nanochat.data.tinyworld.wording import ask, sentence, state, wordings
from nanochat.data.tinyworld.words import (
    LANGUAGES,
    Language,
    Word,
    chinese,
    data_text,
    english,
    lexicon,
)

# Relations that are also asked about invented things, and the article that the name of such a thing has in English.
UNKNOWN_RELATIONS = {
    "capital": "none",
    "continent": "none",
    "language": "none",
    "currency": "none",
    "animal_class": "a",
    "legs": "a",
    "food": "a",
    "home": "a",
    "colour": "a",
    "made_of": "a",
    "tool_use": "a",
    "job_task": "a",
}
# Relations about a word, not about the thing that the word names: "And a car?" would not ask for the spelling of "car".
WORD_RELATIONS = (
    "spelling",
    "letter_count",
    "to_chinese",
    "to_english",
    "opposite",
    "left_of",
    "right_of",
)


@functools.cache
def dialogue_data() -> dict:
    """The patterns of the dialogues."""
    return json.loads(data_text("dialogues.json"))


def identity_conversations() -> list[Conversation]:
    """Every question about nanochat itself and its answer, in both languages."""
    return [
        chat(question, item[language]["answer"])
        for item in dialogue_data()["about_itself"]
        for language in LANGUAGES
        for question in item[language]["ask"]
    ]


def talk(group: str, language: Language, rng: random.Random) -> list[Message]:
    """One exchange of a group: `open`, `close` or `about_itself`."""
    item = rng.choice(dialogue_data()[group])[language]
    return [user(rng.choice(item["ask"])), assistant(item["answer"])]


def request(language: Language, rng: random.Random) -> list[Message]:
    """A request that this assistant cannot fulfil, and its refusal."""
    item = dialogue_data()["request"][language]
    return [
        user(rng.choice(item["ask"]).format(t=rng.choice(item["topics"]))),
        assistant(item["answer"]),
    ]


def invented_name(rng: random.Random, kind: str, evaluation: bool = False) -> Word:
    """The name of a country or a thing that does not exist. Training and evaluation use different names."""
    parts = dialogue_data()["invented"]
    known = {word.zh.name for word in lexicon().values()}
    while True:
        en = rng.choice(parts["en"]) + rng.choice(parts["en_middle"]) + rng.choice(parts["en_end"])
        zh = "".join(rng.sample(parts["zh"], rng.randint(2, 3)))
        if (
            kept_for_evaluation("name", en) == evaluation == kept_for_evaluation("name", zh)
            and zh not in known
        ):
            en = sentence(en) if kind == "none" else en
            return Word(en, english(en, kind), chinese(zh))


def unknown_question(language: Language, rng: random.Random, evaluation: bool = False) -> str:
    """A question about something that does not exist."""
    relation = rng.choice(list(UNKNOWN_RELATIONS))
    subject = invented_name(rng, UNKNOWN_RELATIONS[relation], evaluation)
    wording = wordings()[relation, language]
    pattern = rng.choice(wording.held_out if evaluation else wording.trained)
    return ask(
        Fact(relation, (subject,), facts_by_relation()[relation][0].value), language, pattern, rng
    )


def dont_know(language: Language) -> str:
    """The sentence with which nanochat says that it does not know."""
    return dialogue_data()["unknown"][language]


@functools.cache
def asked_by_subject() -> dict[str, tuple[Fact, ...]]:
    """The facts about things that training asks about, by subject, for subjects with three or more."""
    groups: dict[str, list[Fact]] = {}
    for fact in asked_facts():
        if (
            len(fact.subjects) == 1
            and fact.relation not in WORD_RELATIONS
            and not fact.subjects[0].key.isdigit()
        ):
            groups.setdefault(fact.subjects[0].key, []).append(fact)
    return {key: tuple(facts) for key, facts in groups.items() if len(facts) >= 3}


def tell_me_about(language: Language, rng: random.Random) -> list[Message]:
    """A request to tell about an entity, answered with three facts that are not held out."""
    facts = rng.choice(list(asked_by_subject().values()))
    request = rng.choice(dialogue_data()["tell_me_about"][language])
    told = [
        state(fact, language, rng, framed=0.0) for fact in rng.sample(facts, min(3, len(facts)))
    ]
    joined = ("" if language == "zh" else " ").join(told)
    return [user(request.format(e=facts[0].subjects[0][language])), assistant(joined)]
