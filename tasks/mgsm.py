"""MGSM in Chinese: 250 problems of GSM8K's test split, translated by people.

Shi et al. 2022, arXiv:2210.03057.
"""

import re
from pathlib import Path
from typing import Literal

from nanochat.common import UserError, tr
from nanochat.data.conversation import Conversation, Message, assistant, chat, user
from tasks.common import final_number, one_of
from tasks.published import Published, Table, load_table

COLUMNS = {"train": ("question", "answer", "answer_number"), "test": ("question", "answer_number")}
_LABEL = re.compile(r"^\s*(?:问题|逐步解答)\s*[:：]\s*")  # the words that begin the examples


def source(split: str) -> Published:
    """Return the location of a split on the hub's branch of parquet files.

    For the split test, the authors' file mgsm_zh.tsv is also accepted.
    """
    patterns = [f"zh/{split}/*.parquet", f"zh/mgsm-{split}.parquet"]
    if split == "test":
        patterns.append("mgsm_zh.tsv")
    return Published(
        repo="juletxara/mgsm",
        subset="zh",
        split=split,
        inside=("zh",),
        patterns=tuple(patterns),
        header=("question", "answer_number"),
        parquet_branch=True,
    )


def _number(row: dict[str, str | int], source: str) -> str:
    number = str(row["answer_number"])
    if final_number(number) is None:
        raise UserError(
            tr(
                "{source}: answer_number must be a number, got {number!r}. Fix or remove the row.",
                source=source,
                number=number,
            )
        )
    return number


class MGSM:
    """The problems of MGSM in Chinese, from the test or train split.

    A reply is right if it ends with the right number, as final_number() reads it. The examples are
    problems of the train split with their solutions, of which the paper shows eight.
    """

    name = "MGSM-zh"
    kind: Literal["choice", "generative"] = "generative"

    def __init__(
        self,
        split: str = "test",
        folder: str | Path | None = None,
        shots: int = 8,
    ):
        one_of(tr("the split of {task}", task="MGSM"), split, ("test", "train"))
        self.shots = shots
        self._table = load_table(source(split), COLUMNS[split], folder)
        self._examples: list[Message] = []  # turns: a question, then its solution
        if shots:
            table = load_table(source("train"), COLUMNS["train"], folder)
            self._examples = _examples(table)[: 2 * shots]

    def __len__(self) -> int:
        return len(self._table)

    def identify(self, i: int) -> str:
        """Return the name of problem i in records, which is its position in the published file."""
        return str(self._table.number(i))

    def __getitem__(self, i: int) -> Conversation:
        row = self._table[i]
        answer = f"#### {_number(row, self._table.source)}"
        problem = chat(_LABEL.sub("", row["question"]), answer)
        return Conversation((*self._examples, *problem.messages))

    def letters(self, i: int) -> tuple[str, ...]:
        return ()

    def grade(self, i: int, reply: str) -> float:
        answer = _number(self._table[i], self._table.source)
        return float(final_number(reply) == final_number(answer))


def _examples(table: Table) -> list[Message]:
    """Return the published examples as turns, with the final number after each solution."""
    turns: list[Message] = []
    for i in table.in_published_order():
        row = table[i]
        question = _LABEL.sub("", row["question"])
        solution = _LABEL.sub("", row["answer"])
        number = _number(row, table.source)
        turns += [user(question), assistant(f"{solution}\n#### {number}")]
    return turns
