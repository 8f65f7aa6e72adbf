"""Fabricated questions with choices, with lengths as the published ones have.

The words are names from Python's standard library, which the model's vocabulary was trained on.
"""

import builtins
import keyword
import random
from collections.abc import Sequence
from dataclasses import dataclass

from nanochat.data.conversation import Cloze

WORDS = sorted({*keyword.kwlist, *(name for name in dir(builtins) if name.islower())})
SHOTS = 5  # of multiple choice, as C-Eval, CMMLU and MMLU show
INTRO = "The following are multiple choice questions.\n\n"


def words(draw: random.Random, low: int, high: int) -> str:
    """Return some random words."""
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))


@dataclass(frozen=True)
class Choices:
    """Questions with four choices and five examples each, about 300 tokens: a ClozeTask."""

    questions: Sequence[Cloze]
    name: str = "multiple choice"
    shots: int = SHOTS

    def __len__(self) -> int:
        return len(self.questions)

    def cloze(self, i: int) -> Cloze:
        """Return question i."""
        return self.questions[i]


def choice_task(problems: int) -> Choices:
    """Return so many questions with choices."""
    draw = random.Random(2)
    examples = tuple(
        f"Question: {words(draw, 15, 30)}?\nAnswer: {words(draw, 2, 6)}\n\n" for _ in range(SHOTS)
    )
    questions = []
    for _ in range(problems):
        question = f"Question: {words(draw, 15, 30)}?\nAnswer:"
        answers = tuple(words(draw, 2, 6) for _ in range(4))
        questions.append(Cloze(INTRO, examples, question, answers, draw.randrange(4)))
    return Choices(questions)
