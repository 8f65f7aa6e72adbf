"""MMLU: questions from 57 subjects, with four choices (Hendrycks et al. 2020, arXiv:2009.03300)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.common import ChoiceProblem, ChoiceTask, Published, load_table, one_of

_SPLITS = {"all": ("test", "validation", "dev"), "auxiliary_train": ("train",)}


def source(subset: str, split: str) -> Published:
    """A split of MMLU on the hub."""
    return Published("cais/mmlu", subset, split, (subset,))


def _read(row: Mapping[str, Any]) -> ChoiceProblem:
    row = row.get("train") or row  # the rows of auxiliary_train are wrapped once more
    return ChoiceProblem(row["question"], tuple(row["choices"]), row["answer"])


class MMLU(ChoiceTask):
    """subset: `all` (split test, validation or dev) or `auxiliary_train` (split train: other exams, for training)."""

    def __init__(self, subset: str, split: str, folder: str | Path | None = None):
        one_of("the subset of MMLU", subset, tuple(_SPLITS))
        one_of(f"the split of MMLU {subset}", split, _SPLITS[subset])
        columns = () if subset == "auxiliary_train" else ("question", "choices", "answer")
        super().__init__("MMLU", load_table(source(subset, split), columns, folder), _read)
