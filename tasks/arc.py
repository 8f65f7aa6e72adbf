"""ARC: multiple-choice science questions from American schools.

Clark et al. 2018, arXiv:1803.05457.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat.common import tr
from tasks.choices import ChoiceProblem, ChoiceTask, Plain
from tasks.common import one_of
from tasks.published import Published, load_table


def source(subset: str, split: str) -> Published:
    """Return the location of a split of ARC on the Hugging Face hub."""
    return Published("allenai/ai2_arc", subset, split, (subset,))


def _read(row: Mapping[str, Any]) -> ChoiceProblem:
    """Return the problem in a row.

    The answer is found by its label, because some rows label their choices A to D, and others 1 to
    4.
    """
    labels = row["choices"]["label"]
    texts = tuple(row["choices"]["text"])
    answer = labels.index(row["answerKey"]) if row["answerKey"] in labels else -1
    return ChoiceProblem(row["question"], texts, answer, id=row.get("id") or "")


class ARC(ChoiceTask):
    """The problems of ARC-Easy or ARC-Challenge, from the train, validation or test split."""

    def __init__(
        self,
        subset: str,
        split: str,
        folder: str | Path | None = None,
    ):
        one_of(tr("the subset of {task}", task="ARC"), subset, ("ARC-Easy", "ARC-Challenge"))
        one_of(tr("the split of {task}", task="ARC"), split, ("train", "validation", "test"))
        columns = ("question", "choices", "answerKey")
        plain = Plain(opening="Question: ", lettered=False)
        table = load_table(source(subset, split), columns, folder)
        super().__init__(subset, table, _read, plain)
