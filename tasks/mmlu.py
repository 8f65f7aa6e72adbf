"""MMLU: four-choice questions from 57 subjects (Hendrycks et al. 2020, arXiv:2009.03300)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat.common import tr
from tasks.choices import ChoiceProblem, ChoiceTask, Plain
from tasks.common import one_of
from tasks.published import Published, load_table

_SPLITS = {"all": ("test", "validation", "dev"), "auxiliary_train": ("train",)}


def source(subset: str, split: str) -> Published:
    """Return the location of a split of MMLU on the Hugging Face hub."""
    return Published("cais/mmlu", subset, split, (subset,))


def _read(row: Mapping[str, Any]) -> ChoiceProblem:
    row = row.get("train") or row  # the rows of auxiliary_train are wrapped in another object
    subject = row.get("subject") or ""
    return ChoiceProblem(row["question"], tuple(row["choices"]), row["answer"], subject)


def intro(subject: str) -> str:
    """Return the line that introduces questions on a subject in a text for base models."""
    topic = subject.replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {topic}.\n\n"


class MMLU(ChoiceTask):
    """The problems of MMLU.

    The subset "all" has the splits test, validation and dev. The subset "auxiliary_train" has
    questions from other exams, for training, and only the split train. With `shots` above 0, that
    many questions of the same subject from the split dev precede each question. Published scores of
    base models use five.
    """

    def __init__(
        self,
        subset: str,
        split: str,
        folder: str | Path | None = None,
        shots: int = 0,
    ):
        one_of(tr("the subset of {task}", task="MMLU"), subset, tuple(_SPLITS))
        one_of(tr("the split of {task}", task=f"MMLU {subset}"), split, _SPLITS[subset])
        columns = () if subset == "auxiliary_train" else ("question", "choices", "answer")
        examples = load_table(source("all", "dev"), columns, folder) if shots else None
        table = load_table(source(subset, split), columns, folder)
        super().__init__("MMLU", table, _read, Plain(intro), examples, shots)
