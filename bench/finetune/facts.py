"""Conversations about invented things, which a model can only answer after it has learned them.

Each kind of thing has two properties. A property is asked in two wordings of the training data, and
in a third wording that only the questions afterwards use.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SUBJECTS = 75  # two properties in two wordings each: 300 conversations
QUESTIONS = 96  # of the 150 facts, asked in other wordings afterwards
SUMS = 200
FIRST = "Ba De Fi Go Ha Ju Ka Lo Mi Na Or Pe Ri So Ta Vu".split()
SECOND = "lin mer ra dou vik sen tor bel nas qui".split()
THIRD = "da ko ris mund ta vo len par gu sha".split()


@dataclass(frozen=True)
class Property:
    """One property of a kind of thing, in three wordings; `{}` stands for the thing."""

    questions: tuple[str, str, str]  # the third is asked only after training
    answer: str  # with {} for the thing and {value}
    values: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of invented things."""

    name: str  # how its things are called, with {} for an invented word and {number}
    properties: tuple[Property, Property]


KINDS = {
    "people": Kind(
        "{}",
        (
            Property(
                (
                    "What does {} do for a living?",
                    "What is the job of {}?",
                    "Tell me the profession of {}.",
                ),
                "{} works as a {value}.",
                tuple(
                    "baker,pilot,carpenter,nurse,judge,farmer,tailor,plumber,violinist,chemist,librarian,barber,"
                    "sailor,architect,dentist,miner,poet,gardener,waiter,jeweller".split(",")
                ),
            ),
            Property(
                (
                    "Where does {} live?",
                    "Which town is the home of {}?",
                    "In what town can I visit {}?",
                ),
                "{} lives in {value}.",
                tuple(
                    "Oslo,Lima,Cairo,Dublin,Geneva,Havana,Kyoto,Lagos,Madrid,Nairobi,Perth,Quito,Riga,Seville,Tunis,"
                    "Utrecht,Vienna,Warsaw,York,Zagreb".split(",")
                ),
            ),
        ),
    ),
    "machines": Kind(
        "error {number} of the {} press",
        (
            Property(
                (
                    "What does {} mean?",
                    "My display shows {}. What is wrong?",
                    "Which part has failed at {}?",
                ),
                "At {} the {value} has failed.",
                tuple(
                    "fan,pump,belt,filter,fuse,valve,motor,sensor,clutch,heater,bearing,spring,hose,relay,piston,switch,"
                    "cable,gear,nozzle,battery".split(",")
                ),
            ),
            Property(
                (
                    "How do I fix {}?",
                    "What should I do about {}?",
                    "Please give me the remedy for {}.",
                ),
                "To fix {}, {value}.",
                tuple(
                    "restart it twice,open the lid,drain the oil,press the red button,wait ten minutes,lower the speed,"
                    "call the factory,tighten the screws,clean the glass,unplug the cord,fill the tank,turn the key,"
                    "replace the paper,warm the room,lift the arm,close the gate,reset the clock,check the log,"
                    "empty the tray,shake the bottle".split(",")
                ),
            ),
        ),
    ),
    "villages": Kind(
        "the village of {}",
        (
            Property(
                (
                    "What is {} famous for?",
                    "Why do people visit {}?",
                    "Name the thing that made {} well known.",
                ),
                "People know {} for its {value}.",
                tuple(
                    "cheese,bells,roses,marble,horses,honey,lace,mushrooms,fountain,bridge,wine,puppets,salt,"
                    "windmills,cherries,caves,pottery,market,lighthouse,carpets".split(",")
                ),
            ),
            Property(
                (
                    "Which animal is on the flag of {}?",
                    "What does the flag of {} show?",
                    "I see the banner of {}. What creature is on it?",
                ),
                "The flag of {} shows a {value}.",
                tuple(
                    "bear,swan,fox,eagle,lion,wolf,stag,crane,bull,owl,salmon,dragon,rooster,hare,badger,otter,"
                    "raven,goat,beetle,turtle".split(",")
                ),
            ),
        ),
    ),
}


@dataclass(frozen=True)
class Fact:
    """What a model can learn: questions, the reply to them, and the words that make a reply right."""

    questions: tuple[str, str, str]
    reply: str
    value: str
    wrong: str  # another value of the same property, which DPO is to avoid


def facts(kind: str, seed: int) -> list[Fact]:
    """Return two facts about each of SUBJECTS invented things, which `seed` draws."""
    draw = random.Random(f"{kind} {seed}")
    words = draw.sample([a + b + c for a in FIRST for b in SECOND for c in THIRD], SUBJECTS)
    drawn = []
    for word in words:
        thing = KINDS[kind].name.format(word, number=draw.randint(100, 999))
        for prop in KINDS[kind].properties:
            value, wrong = draw.sample(prop.values, 2)
            first, second, third = (question.format(thing) for question in prop.questions)
            reply = prop.answer.format(thing, value=value)
            drawn.append(Fact((first, second, third), reply[0].upper() + reply[1:], value, wrong))
    return drawn


def conversations(known: Sequence[Fact]) -> list[dict[str, Any]]:
    """Return two conversations about each fact, in the layout of scripts.finetune."""
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": fact.reply},
            ]
        }
        for fact in known
        for question in fact.questions[:2]
    ]


def preferences(known: Sequence[Fact]) -> list[dict[str, Any]]:
    """Return two pairs of answers about each fact: the right one is preferred to a wrong one."""
    return [
        {
            "prompt": question,
            "chosen": fact.reply,
            "rejected": fact.reply.replace(fact.value, fact.wrong),
        }
        for fact in known
        for question in fact.questions[:2]
    ]


def held_out(known: Sequence[Fact], seed: int) -> list[tuple[str, str]]:
    """Return questions in wordings that training does not show, with the words of right replies."""
    asked = random.Random(seed).sample(list(known), QUESTIONS)
    return [(fact.questions[2], fact.value) for fact in asked]


def sums() -> list[tuple[str, str]]:
    """Return sums that a chat model may solve, which show what it forgets; the same in each run."""
    draw = random.Random(0)
    terms = [(draw.randint(2, 49), draw.randint(2, 49)) for _ in range(SUMS)]
    return [(f"What is {first} + {second}?", str(first + second)) for first, second in terms]
