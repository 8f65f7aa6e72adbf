"""MMLU-Pro: harder questions in 14 subjects, with up to ten choices.

Wang et al. 2024, arXiv:2406.01574. The authors let models reason before they answer. Here the most
likely letter is the answer, as in MMLU, because small models can do that. Scores of the two kinds
cannot be compared.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat.common import tr
from tasks.choices import LETTERS, ChoiceProblem, ChoiceTask, Plain
from tasks.common import one_of
from tasks.mmlu import intro
from tasks.published import Published, load_table

COLUMNS = ("question_id", "question", "options", "answer", "answer_index", "category")


def source(split: str) -> Published:
    """Return the location of a split of MMLU-Pro on the Hugging Face hub."""
    return Published("TIGER-Lab/MMLU-Pro", None, split, ("data", "."))


def _read(row: Mapping[str, Any]) -> ChoiceProblem:
    """Return the problem in a row.

    Its answer is -1, which is refused, if the letter and the index of the answer disagree.
    """
    index = row["answer_index"]
    is_letter = isinstance(index, int) and 0 <= index < len(LETTERS)
    if not is_letter or LETTERS[index] != row["answer"]:
        index = -1
    return ChoiceProblem(
        question=row["question"],
        choices=tuple(row["options"]),
        answer=index,
        subject=row["category"],
        id=str(row["question_id"]),
    )


class MMLUPro(ChoiceTask):
    """The problems of MMLU-Pro, from the test or validation split.

    The examples are questions of the validation split, without their reasoning.
    """

    def __init__(
        self,
        split: str = "test",
        folder: str | Path | None = None,
        shots: int = 5,
    ):
        one_of(tr("the split of {task}", task="MMLU-Pro"), split, ("test", "validation"))
        examples = load_table(source("validation"), COLUMNS, folder) if shots else None
        table = load_table(source(split), COLUMNS, folder)
        super().__init__("MMLU-Pro", table, _read, Plain(intro), examples, shots)
