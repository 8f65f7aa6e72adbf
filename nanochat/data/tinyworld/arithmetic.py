"""Sums for the calculator, and small mental sums."""

import random
from dataclasses import dataclass
from typing import Literal

from nanochat.data.calculator import calculate
from nanochat.data.conversation import Part
from nanochat.data.tinyworld.splits import kept_for_evaluation
from nanochat.data.tinyworld.wording import sentence, wordings
from nanochat.data.tinyworld.words import Language

MentalPart = Literal["practised", "unseen"]
OPERATIONS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}


@dataclass(frozen=True)
class Mental:
    """The difficulty of the mental sums, which a model answers without the calculator.

    A small model learns such sums by heart, one by one. Training before RL shows the practised sums
    so rarely that the model half knows them, since rewards teach nothing about a sum that the model
    always answers in the same way. The unseen sums, about a tenth of all sums, are never asked as
    mental sums in training, not even in RL.
    """

    terms: tuple[int, ...] = (2,)  # how many terms a sum may have
    largest: int = 20  # the largest term

    def part(self, *terms: int) -> MentalPart:
        """Return whether the sum of these terms, in any order, is practised or unseen."""
        return "unseen" if kept_for_evaluation("mental", *sorted(terms)) else "practised"


@dataclass(frozen=True)
class Sum:
    """A question whose answer is a number, the expression to calculate, and its result."""

    question: str
    expression: str
    result: str

    @property
    def tool_answer(self) -> tuple[Part, ...]:
        """The calculator call and its output, which come before the number in an answer."""
        return (Part("python", self.expression), Part("python_output", self.result))


def _number(rng: random.Random, digits: int) -> int:
    """Draw a number of at least 2 with at most `digits` digits; every length is equally likely."""
    length = rng.randint(1, digits)
    smallest = max(2, 10 ** (length - 1))
    return rng.randint(smallest, 10**length - 1)


def operands(
    operation: str,
    rng: random.Random,
    evaluation: bool,
) -> tuple[int, int]:
    """Draw two operands of `operation` whose result is a whole number, 0 or more.

    With `evaluation`, they are kept for evaluation; otherwise, training may use them.
    """
    while True:
        a, b = _draw_operands(operation, rng)
        if kept_for_evaluation("operands", *sorted((a, b))) == evaluation:
            return a, b


def _draw_operands(operation: str, rng: random.Random) -> tuple[int, int]:
    if operation == "divide":
        b = _number(rng, 2)
        quotient = _number(rng, 2)
        return b * quotient, b
    a = _number(rng, 3)
    if operation == "multiply":
        b = _number(rng, 2)
        swapped = rng.random() >= 0.5
    else:
        b = _number(rng, 3)
        swapped = operation == "subtract" and a < b
    return (b, a) if swapped else (a, b)


def value_of(expression: str) -> str:
    """Return the calculator's result for an expression, which must have one."""
    result = calculate(expression)
    assert result is not None, f"the calculator refuses {expression!r}"
    return result


def calculator_sum(
    language: Language,
    rng: random.Random,
    evaluation: bool = False,
) -> Sum:
    """Draw an arithmetic question for the calculator.

    With `evaluation`, the operands are ones that training never uses, and any wording may be
    drawn. Otherwise the operands and the wording are ones that training may use.
    """
    operation = rng.choice(list(OPERATIONS))
    a, b = operands(operation, rng, evaluation)
    wording = wordings()[operation, language]
    pattern = rng.choice(wording.questions if evaluation else wording.trained)
    expression = f"{a}{OPERATIONS[operation]}{b}"
    question = sentence(pattern.format(a=a, b=b))
    return Sum(question, expression, value_of(expression))


def mental_sum(
    language: Language,
    rng: random.Random,
    mental: Mental,
    split: MentalPart = "practised",
    held_out_wording: bool = False,
) -> Sum:
    """Draw a practised or an unseen sum that is answered at once, without the calculator."""
    terms = _draw_terms(mental, rng)
    while mental.part(*terms) != split:
        terms = _draw_terms(mental, rng)
    wording = wordings()["mental", language]
    pattern = rng.choice(wording.held_out if held_out_wording else wording.trained)
    expression = " + ".join(map(str, terms))
    question = sentence(pattern.format(sum=expression))
    return Sum(question, expression, str(sum(terms)))


def _draw_terms(mental: Mental, rng: random.Random) -> list[int]:
    count = rng.choice(mental.terms)
    return [rng.randint(1, mental.largest) for _ in range(count)]
