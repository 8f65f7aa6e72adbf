"""GSM8K: grade school math word problems, solved with a calculator.

Cobbe et al. 2021, arXiv:2110.14168.
"""

import re
from pathlib import Path
from typing import Literal

from nanochat.common import UserError, tr
from nanochat.data.calculator import calculate
from nanochat.data.conversation import Conversation, Part, chat
from tasks.common import final_number, one_of
from tasks.published import Published, load_table

_CALL = re.compile(r"<<([^<>]*)>>")


def source(split: str, subset: str = "main") -> Published:
    """Return the location of a split of GSM8K on the Hugging Face hub."""
    return Published("openai/gsm8k", subset, split, (subset, "."))


def read_solution(solution: str) -> list[Part]:
    """Return a published solution as parts, with its calculations as calls of the calculator.

    Each `<<48/2=24>>` becomes a call and its output, which comes from our calculator, as in a chat.
    Expressions that our calculator refuses are dropped.
    """
    parts: list[Part] = []
    end = 0
    for call in _CALL.finditer(solution):
        parts.append(Part("text", solution[end : call.start()]))
        expression = call[1].rpartition("=")[0].strip()
        output = calculate(expression)
        if output is not None:
            parts.append(Part("python", expression))
            parts.append(Part("python_output", output))
        end = call.end()
    parts.append(Part("text", solution[end:]))
    return [part for part in parts if part.text]


class GSM8K:
    """The problems of GSM8K, from the train or test split.

    A reply is right if it ends with the right number, as final_number() reads it.
    """

    name = "GSM8K"
    kind: Literal["choice", "generative"] = "generative"

    def __init__(
        self,
        split: str,
        subset: str = "main",
        folder: str | Path | None = None,
    ):
        one_of(tr("the split of {task}", task="GSM8K"), split, ("train", "test"))
        one_of(tr("the subset of {task}", task="GSM8K"), subset, ("main",))
        self._table = load_table(source(split, subset), ("question", "answer"), folder)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, i: int) -> Conversation:
        row = self._table[i]
        return chat(row["question"], *read_solution(row["answer"]))

    def letters(self, i: int) -> tuple[str, ...]:
        return ()

    def grade(self, i: int, reply: str) -> float:
        solution = self._table[i]["answer"]
        answer = final_number(solution)
        if answer is None:
            raise UserError(
                tr(
                    "{source}: a row has no number after ####: {solution!r}. Fix or remove "
                    "the row.",
                    source=self._table.source,
                    solution=solution,
                )
            )
        return float(final_number(reply) == answer)
