"""Dialogues: greetings, and questions about nanochat itself, invented things or whole topics."""

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
    joined,
    lexicon,
)

# Relations that are also asked about invented things, and the article that the name of such a
# thing takes in English.
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
# Relations about a word, not about the thing that the word names: "And a car?" would not ask for
# the spelling of "car".
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
    """Return the content of dialogues.json."""
    return json.loads(data_text("dialogues.json"))


# --- nanochat itself -----------------------------------------------------------------------------


def identity_conversations() -> list[Conversation]:
    """Return a conversation for each training question about nanochat, in both languages."""
    conversations = []
    for item in dialogue_data()["about_itself"]:
        for language in LANGUAGES:
            for question in item[language]["ask"]:
                conversations.append(chat(question, item[language]["answer"]))
    return conversations


def talk(
    group: str,
    language: Language,
    rng: random.Random,
) -> list[Message]:
    """Return a random user turn of a group (`open`, `close` or `about_itself`) and its reply."""
    item = rng.choice(dialogue_data()[group])[language]
    return [user(rng.choice(item["ask"])), assistant(item["answer"])]


def request(language: Language, rng: random.Random) -> list[Message]:
    """Draw a request that the assistant cannot fulfil, and return it with the refusal."""
    item = dialogue_data()["request"][language]
    pattern = rng.choice(item["ask"])
    text = pattern.format(t=rng.choice(item["topics"]))
    return [user(text), assistant(item["answer"])]


# --- invented things -----------------------------------------------------------------------------


def invented_name(
    rng: random.Random,
    kind: str,
    evaluation: bool = False,
) -> Word:
    """Invent and return the name of a country or a thing that does not exist.

    `kind` is the English article: `none` for a country, `a` for a thing. Training and evaluation
    use different names.
    """
    syllables = dialogue_data()["invented"]
    real_names = {word.zh.name for word in lexicon().values()}
    while True:
        beginning = rng.choice(syllables["en"])
        middle = rng.choice(syllables["en_middle"])
        ending = rng.choice(syllables["en_end"])
        en = beginning + middle + ending
        zh = "".join(rng.sample(syllables["zh"], rng.randint(2, 3)))
        if kept_for_evaluation("name", en) != evaluation:
            continue
        if kept_for_evaluation("name", zh) != evaluation or zh in real_names:
            continue
        if kind == "none":  # the name of a country
            en = sentence(en)
        return Word(en, english(en, kind), chinese(zh))


def unknown_question(
    language: Language,
    rng: random.Random,
    evaluation: bool = False,
) -> str:
    """Return a question about something that does not exist."""
    relation = rng.choice(list(UNKNOWN_RELATIONS))
    subject = invented_name(rng, UNKNOWN_RELATIONS[relation], evaluation)
    wording = wordings()[relation, language]
    pattern = rng.choice(wording.held_out if evaluation else wording.trained)
    any_value = facts_by_relation()[relation][0].value  # a question does not show the value
    return ask(Fact(relation, (subject,), any_value), language, pattern, rng)


def dont_know(language: Language) -> str:
    """Return the sentence in which nanochat admits that it does not know."""
    return dialogue_data()["unknown"][language]


# --- several facts about one thing ---------------------------------------------------------------


@functools.cache
def asked_by_subject() -> dict[str, tuple[Fact, ...]]:
    """Return, by subject key, the facts that tell_me_about() may choose from.

    Training asks about all of them. Facts about words, numbers or two subjects are left out, as are
    subjects with fewer than three facts left.
    """
    groups: dict[str, list[Fact]] = {}
    for fact in asked_facts():
        subject = fact.subjects[0].key
        is_about_a_thing = fact.relation not in WORD_RELATIONS and not subject.isdigit()
        if is_about_a_thing and len(fact.subjects) == 1:
            groups.setdefault(subject, []).append(fact)
    return {subject: tuple(facts) for subject, facts in groups.items() if len(facts) >= 3}


def tell_me_about(language: Language, rng: random.Random) -> list[Message]:
    """Draw a request to tell about a thing, and return it with an answer of three facts.

    None of these facts is held out.
    """
    facts = rng.choice(list(asked_by_subject().values()))
    pattern = rng.choice(dialogue_data()["tell_me_about"][language])
    sentences = []
    for fact in rng.sample(facts, min(3, len(facts))):
        sentences.append(state(fact, language, rng, framed=0.0))
    request = pattern.format(e=facts[0].subjects[0][language])
    return [user(request), assistant(joined(language, sentences))]
