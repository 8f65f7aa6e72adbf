"""Fabricated evaluations with lengths as the published ones have: CORE's three kinds of tasks, and multiple choice.

The words are names from Python's standard library, which the model's vocabulary was trained on.
"""

import builtins
import json
import keyword
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanochat.data.conversation import Cloze
from nanochat.evals.core import IclTask

WORDS = sorted({*keyword.kwlist, *(name for name in dir(builtins) if name.islower())})
SHOTS = 5  # of multiple choice, as C-Eval, CMMLU and MMLU show


def _text(draw: random.Random, low: int, high: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(low, high)))


def core_bundle(folder: Path, problems: int) -> list[IclTask]:
    """Write CORE tasks of so many problems: four options with ten examples and with none, two contexts, and texts to
    finish with ten examples."""
    draw = random.Random(1)
    choices = [
        {
            "query": f"Question: {_text(draw, 15, 30)}?",
            "choices": [_text(draw, 2, 6) for _ in range(4)],
            "gold": draw.randrange(4),
        }
        for _ in range(problems)
    ]
    endings = [
        {
            "query": _text(draw, 25, 45),
            "choices": [_text(draw, 8, 20) for _ in range(4)],
            "gold": draw.randrange(4),
        }
        for _ in range(problems)
    ]
    contexts = [
        {
            "context_options": [_text(draw, 10, 20) for _ in range(2)],
            "continuation": _text(draw, 6, 12),
            "gold": draw.randrange(2),
        }
        for _ in range(problems)
    ]
    texts = [
        {"context": _text(draw, 25, 40), "continuation": _text(draw, 1, 4)} for _ in range(problems)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for label, kind, shots, delimiter, rows in (
        ("choices, 10 examples", "multiple_choice", 10, "\nAnswer: ", choices),
        ("endings", "multiple_choice", 0, " ", endings),
        ("two contexts", "schema", 0, " ", contexts),
        ("texts, 10 examples", "language_modeling", 10, " ", texts),
    ):
        path = folder / f"{len(found)}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found.append(IclTask(label, kind, path, min(shots, problems - 1), delimiter, 0.25))
    return found


@dataclass(frozen=True)
class Choices:
    """Questions with four choices and five examples each, about 300 tokens: a ClozeTask."""

    asked: Sequence[Cloze]
    name: str = "multiple choice"
    shots: int = SHOTS

    def __len__(self) -> int:
        return len(self.asked)

    def cloze(self, i: int) -> Cloze:
        """Question i."""
        return self.asked[i]


def choices(problems: int) -> Choices:
    """So many questions."""
    draw = random.Random(2)

    def solved() -> str:
        return f"Question: {_text(draw, 15, 30)}?\nAnswer: {_text(draw, 2, 6)}\n\n"

    examples = tuple(solved() for _ in range(SHOTS))
    intro = "The following are multiple choice questions.\n\n"
    return Choices(
        [
            Cloze(
                intro,
                examples,
                f"Question: {_text(draw, 15, 30)}?\nAnswer:",
                tuple(_text(draw, 2, 6) for _ in range(4)),
                draw.randrange(4),
            )
            for _ in range(problems)
        ]
    )
