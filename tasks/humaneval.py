"""HumanEval: Python functions to write, graded by running their tests.

Chen et al. 2021, arXiv:2107.03374.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import Literal

from nanochat.data.conversation import Conversation, chat
from tasks.published import Published, load_table

_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def _defines(code: str, function: str) -> bool:
    return re.search(rf"^def\s+{re.escape(function)}\b", code, re.MULTILINE) is not None


def extract_code(reply: str, function: str) -> str:
    """Return the code in a reply.

    That is the first fenced block that defines the function, or else the first block, or else the
    whole reply.
    """
    blocks = _BLOCK.findall(reply) or [reply]
    for block in (*blocks, *map(textwrap.dedent, blocks)):  # a block in a list is indented
        if _defines(block, function):
            return block
    return blocks[0]


def build_program(
    prompt: str,
    reply: str,
    test: str,
    function: str,
) -> str:
    """Return the program that grades a reply: its code, the tests, and a call of the tests.

    A reply may continue the prompt, which then precedes it. If it repeats the head of the function
    instead, the program keeps the prompt's imports and, if the prompt parses, its helper functions.
    """
    code = extract_code(reply, function)
    if not _defines(code, function):
        code = prompt + code
    elif _is_complete(prompt):
        code = f"{prompt}\n{code}"
    else:
        lines = prompt.splitlines()
        imports = [line for line in lines if line.startswith(("import ", "from "))]
        code = "\n".join([*imports, code])
    return f"{code}\n\n{test}\n\ncheck({function})\n"


def _is_complete(prompt: str) -> bool:
    """Return whether a prompt parses as a program, as a function head with a docstring does."""
    try:
        ast.parse(prompt)
    except SyntaxError:
        return False
    return True


def source() -> Published:
    """Return the location of HumanEval on the Hugging Face hub."""
    return Published(
        "openai/openai_humaneval",
        "openai_humaneval",
        "test",
        ("openai_humaneval", "."),
    )


class HumanEval:
    """The problems of HumanEval, whose only split is test.

    Because grading runs the replies as programs, the constructor raises UserError if this machine
    cannot isolate them and `unsafe_exec` is not set (nanochat/evals/sandbox.py).
    """

    name = "HumanEval"
    kind: Literal["choice", "generative"] = "generative"

    def __init__(
        self,
        folder: str | Path | None = None,
        unsafe_exec: bool = False,
        seconds: float = 5.0,
    ):
        self._unsafe_exec = unsafe_exec
        self._seconds = seconds
        from nanochat.evals import sandbox

        sandbox.tier(unsafe_exec)
        columns = ("prompt", "canonical_solution", "test", "entry_point")
        self._table = load_table(source(), columns, folder)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, i: int) -> Conversation:
        row = self._table[i]
        return chat(row["prompt"], f"```python\n{row['prompt']}{row['canonical_solution']}```")

    def letters(self, i: int) -> tuple[str, ...]:
        return ()

    def grade(self, i: int, reply: str) -> float:
        from nanochat.evals import sandbox

        row = self._table[i]
        program = build_program(row["prompt"], reply, row["test"], row["entry_point"])
        result = sandbox.run_program(program, self._seconds, unsafe_exec=self._unsafe_exec)
        return float(result.passed)
