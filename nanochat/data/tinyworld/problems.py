"""Questions whose answers can be graded.

Some evaluate what a model has learned, and others are the problems for RL.
"""

import functools
import random
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nanochat.data.conversation import Conversation, Message, Part, assistant, chat, user
from nanochat.data.tinyworld.arithmetic import Mental, MentalPart, Sum, calculator_sum, mental_sum
from nanochat.data.tinyworld.facts import Fact, facts_by_relation
from nanochat.data.tinyworld.splits import asked_facts, held_out_facts
from nanochat.data.tinyworld.stories import counting_story, logic_story
from nanochat.data.tinyworld.talks.dialogues import dialogue_data, dont_know, talk, unknown_question
from nanochat.data.tinyworld.talks.tale_grammar import held_out_heroes, heroes, trained_heroes
from nanochat.data.tinyworld.talks.tale_reading import fault
from nanochat.data.tinyworld.talks.tale_telling import request_for, requests, tale
from nanochat.data.tinyworld.wording import answer, ask, wordings
from nanochat.data.tinyworld.words import LANGUAGES, Language, full_stop, joined

STORY_SHARE = 0.2  # the share of stories in the evaluation of the calculator


@dataclass(frozen=True)
class Problem:
    """A question, its right answer as a bare value, and the competing values, which are wrong.

    `conversation` ends with a reference answer. `tool` tells whether a reply must, must not or may
    call the calculator. If `answer` is a number, every other number is wrong too. A reply must also
    contain `names`. If `tale` is not empty, it is the key of a hero, and the reply must be a story
    about that hero instead.
    """

    conversation: Conversation
    answer: str
    competing: tuple[str, ...]
    relation: str
    language: Language
    held_out_combination: bool = False
    tool: Literal["needed", "forbidden", "free"] = "free"
    names: str = ""
    tale: str = ""


# --- grading -------------------------------------------------------------------------------------


def grade(problem: Problem, reply: str | Sequence[Part]) -> bool:
    """Return whether a reply gives the right value and no wrong one, or tells the requested story.

    A reply must also call or not call the calculator, as `problem.tool` demands. A `reply` that is
    plain text, not a list of parts, contains no calculator call.
    """
    parts = [Part("text", reply)] if isinstance(reply, str) else reply
    words = "".join(part.text for part in parts if part.kind == "text")
    calls_tool = any(part.kind == "python" for part in parts)
    if problem.tool == "needed" and not calls_tool:
        return False
    if problem.tool == "forbidden" and calls_tool:
        return False
    if problem.tale:
        return not calls_tool and fault(words, problem.tale, problem.language) is None
    text = normalise(words)
    expected = normalise(problem.answer)
    if problem.names and not _names_thing(text, normalise(problem.names), expected):
        return False
    if expected.isdigit():
        return _numbers_in(text) == {expected}
    competing = [normalise(value) for value in problem.competing]
    return set(_finder((expected, *competing)).findall(text)) == {expected}


def normalise(text: str) -> str:
    """Return a text in the form for comparisons: NFKC, case-folded, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _numbers_in(text: str) -> set[str]:
    without_commas = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return set(re.findall(r"\d+(?:\.\d+)?", without_commas))


@functools.lru_cache(maxsize=4096)
def _finder(values: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds the values in a normalised text, preferring longer values.

    A value that begins or ends with a Latin letter or a digit is not found inside a longer word.
    """
    longest_first = sorted(set(values), key=lambda value: (-len(value), value))
    patterns = []
    for value in longest_first:
        before = r"(?<![a-z0-9])" if re.match(r"[a-z0-9]", value) else ""
        after = r"(?![a-z0-9])" if re.search(r"[a-z0-9]$", value) else ""
        patterns.append(before + re.escape(value) + after)
    return re.compile("|".join(patterns))


def _names_thing(
    text: str,
    name: str,
    expected: str,
) -> bool:
    """Return whether a text contains `name` in addition to the expected value.

    The value may itself contain the name, as Mexico City does.
    """
    if name not in text:
        return False
    without_first = "".join(text.split(name, 1))
    without_last = "".join(text.rsplit(name, 1))
    return expected in without_first or expected in without_last


# --- questions about facts -----------------------------------------------------------------------


@functools.cache
def values_of(relation: str, language: Language) -> tuple[str, ...]:
    """Return the distinct values of a relation in one language."""
    values = [fact.value[language].name for fact in facts_by_relation()[relation]]
    return tuple(dict.fromkeys(values))


def fact_problem(
    fact: Fact,
    language: Language,
    pattern: str,
    rng: random.Random,
    held_out: bool = False,
) -> Problem:
    """Return the problem that asks about a fact with the question pattern `pattern`."""
    value = fact.value[language].name
    if fact.relation in ("bigger", "faster"):
        candidates = tuple(word[language].name for word in fact.subjects if word != fact.value)
    else:
        candidates = values_of(fact.relation, language)
    competing = tuple(candidate for candidate in candidates if candidate != value)
    conversation = chat(ask(fact, language, pattern, rng), answer(fact, language))
    return Problem(conversation, value, competing, fact.relation, language, held_out)


def evaluation(
    language: Language,
    seed: int = 0,
    size: int | None = 700,
) -> list[Problem]:
    """Return problems that ask, in held-out wordings, about facts that training asks about.

    There are at most `size` problems, or one for each relation if that is more. If `size` is None,
    there is one for each fact that training asks about.
    """
    rng = random.Random(f"evaluation/{seed}/{language}")
    problems = []
    for fact in _spread(asked_facts(), size, rng):
        pattern = rng.choice(wordings()[fact.relation, language].held_out)
        problems.append(fact_problem(fact, language, pattern, rng))
    return problems


def _spread(
    facts: Sequence[Fact],
    size: int | None,
    rng: random.Random,
) -> list[Fact]:
    """Return up to `size` random facts, or more to include every relation; None means all."""
    order = list(facts)
    rng.shuffle(order)
    if size is None or size >= len(order):
        return order
    first_of_relation = {fact.relation: fact for fact in reversed(order)}
    firsts = list(first_of_relation.values())
    remaining = [fact for fact in order if first_of_relation[fact.relation] != fact]
    return (firsts + remaining)[: max(size, len(firsts))]


def held_out_combinations(language: Language, seed: int = 0) -> list[Problem]:
    """Return a problem in a trained wording for each fact that training never asks about."""
    rng = random.Random(f"combinations/{seed}/{language}")
    problems = []
    for fact in held_out_facts():
        pattern = rng.choice(wordings()[fact.relation, language].trained)
        problems.append(fact_problem(fact, language, pattern, rng, held_out=True))
    return problems


def unknown_evaluation(
    language: Language,
    seed: int = 0,
    size: int = 60,
) -> list[Problem]:
    """Return problems that ask about things that do not exist.

    The right reply admits that nanochat does not know the answer.
    """
    rng = random.Random(f"unknown/{seed}/{language}")
    reply = dont_know(language)
    value = reply.rstrip(".。")
    problems = []
    for _ in range(size):
        question = unknown_question(language, rng, evaluation=True)
        problems.append(Problem(chat(question, reply), value, (), "unknown", language))
    return problems


# --- questions about nanochat itself -------------------------------------------------------------


def persona_evaluation(language: Language, seed: int = 0) -> list[Problem]:
    """Return problems that ask about nanochat itself, in wordings that training never uses.

    Each question is asked three times: at the beginning of a chat, after a greeting, and after a
    question about the world.
    """
    rng = random.Random(f"persona/{seed}/{language}")
    topics = [topic[language] for topic in dialogue_data()["about_itself"]]
    answers = [topic["answer"].rstrip(".。") for topic in topics]
    problems = []
    for topic, value in zip(topics, answers, strict=True):
        competing = tuple(candidate for candidate in answers if candidate != value)
        for question in topic["kept"]:
            for start in ("alone", "after a greeting", "after a question"):
                before = _messages_before(start, language, rng)
                messages = (*before, user(question), assistant(topic["answer"]))
                conversation = Conversation(messages)
                problems.append(Problem(conversation, value, competing, start, language))
    return problems


def _messages_before(
    start: str,
    language: Language,
    rng: random.Random,
) -> list[Message]:
    if start == "after a greeting":
        return talk("open", language, rng)
    if start == "after a question":
        fact = rng.choice(asked_facts())
        pattern = wordings()[fact.relation, language].trained[0]
        return [user(ask(fact, language, pattern, rng)), assistant(answer(fact, language))]
    return []


# --- stories -------------------------------------------------------------------------------------


def story_evaluation(
    language: Language,
    seed: int = 0,
    size: int = 60,
) -> list[Problem]:
    """Return problems that tell a short story and ask who or where."""
    rng = random.Random(f"stories/{seed}/{language}")
    problems = []
    for _ in range(size):
        story = logic_story(language, rng)
        question = joined(language, [story.text, story.question])
        conversation = chat(question, story.answer)
        value = story.answer.rstrip(".。").removeprefix("In the ").removesuffix("里")
        problems.append(Problem(conversation, value, story.competing, story.kind, language))
    return problems


def tale_evaluation(
    language: Language,
    seed: int = 0,
    size: int = 120,
) -> list[Problem]:
    """Return problems that request a story, every second one in a held-out wording.

    Every third request is for a story about a hero that appears in no training story.
    """
    rng = random.Random(f"tales/{seed}/{language}")
    problems = []
    for i in range(size):
        held_out = i % 3 == 0
        key = rng.choice(held_out_heroes() if held_out else trained_heroes())
        hero = heroes()[key]
        pattern = rng.choice(requests(language, held_out=i % 2 == 1))
        request = request_for(hero, pattern, language)
        problem = Problem(
            conversation=chat(request, tale(hero, language, rng)),
            answer="",
            competing=(),
            relation="held-out hero" if held_out else "trained hero",
            language=language,
            held_out_combination=held_out,
            tool="forbidden",
            tale=key,
        )
        problems.append(problem)
    return problems


# --- sums ----------------------------------------------------------------------------------------


def calculator_evaluation(seed: int = 0, size: int = 400) -> list[Problem]:
    """Return problems for the calculator, sums and counting stories, in both languages.

    Training uses their pairs of operands in mental sums only, if at all.
    """
    rng = random.Random(f"calculator/{seed}")
    problems = []
    for i in range(size):
        language = LANGUAGES[i % 2]
        if rng.random() < STORY_SHARE:
            _, task = counting_story(language, rng, largest=99, evaluation=True)
        else:
            task = calculator_sum(language, rng, evaluation=True)
        problems.append(_number_problem(task, "calculator", language, tool="needed"))
    return problems


def rl_problems(
    seed: int = 0,
    size: int = 2000,
    mental: Mental | None = None,
) -> list[Problem]:
    """Return the problems for RL: practised mental sums, in wordings that training uses."""
    return _mental_problems(f"rl/{seed}", size, mental, "practised", held_out_wording=False)


def rl_evaluation(
    seed: int = 0,
    size: int = 1600,
    mental: Mental | None = None,
    unseen: bool = False,
) -> list[Problem]:
    """Return problems that ask for mental sums in held-out wordings, to measure the effect of RL.

    With `unseen`, these are the unseen sums of `mental`; otherwise, the practised ones.
    """
    name = f"rl evaluation/{seed}/{unseen}"
    split: MentalPart = "unseen" if unseen else "practised"
    return _mental_problems(name, size, mental, split, held_out_wording=True)


def _mental_problems(
    name: str,
    size: int,
    mental: Mental | None,
    split: MentalPart,
    held_out_wording: bool,
) -> list[Problem]:
    rng = random.Random(name)
    problems = []
    for i in range(size):
        language = LANGUAGES[i % 2]
        task = mental_sum(language, rng, mental or Mental(), split, held_out_wording)
        problems.append(_number_problem(task, "mental", language, tool="forbidden"))
    return problems


def _number_problem(
    task: Sum,
    relation: str,
    language: Language,
    tool: Literal["needed", "forbidden"],
) -> Problem:
    number = task.result + full_stop(language)
    reference = (*task.tool_answer, number) if tool == "needed" else (number,)
    return Problem(chat(task.question, *reference), task.result, (), relation, language, tool=tool)
