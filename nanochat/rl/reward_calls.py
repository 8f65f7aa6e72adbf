"""Calls reward functions for replies, in the sandbox that runs HumanEval's programs.

A reward may depend on running what the model wrote, so a function is trusted no more than a reply.
reward_child.py is the program that runs in the sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.common import UserError, tr
from nanochat.evals import sandbox

CALL_SECONDS = 2.0  # CPU seconds that a function may take for one reply
CALL_WAITING = 5 * CALL_SECONDS  # seconds by the clock that it may take
START_SECONDS = 10.0  # seconds for the interpreter to start on a busy machine
CALLS = 64  # calls of functions in one process, whose results fit the output of the sandbox
MOST_RUINED = 5  # processes of a step that may end in the middle of a call
CHILD = Path(__file__).with_name("reward_child.py")

Arguments = Mapping[str, Any]  # the value of each parameter that a function may have, by name


@dataclass(frozen=True)
class Outcome:
    """A function's reward for a reply: its value, or 0 and the reason why it gave no value."""

    value: float
    problem: str = ""


@dataclass(frozen=True)
class RewardFile:
    """A Python file, and the names of its functions that are called."""

    path: Path
    source: str
    functions: Sequence[str]

    def outcomes(self, calls: Sequence[Arguments], unsafe_exec: bool) -> list[list[Outcome]]:
        """Call every function with the arguments of each call, and return a row of outcomes per call.

        If a function ends its process, the outcomes of that call are problems, and the later calls
        get another process. Raises UserError if the file cannot be loaded, lacks a function, or
        ends MOST_RUINED processes.
        """
        width = len(self.functions)
        batch_size = max(CALLS // width, 1)
        rows: list[list[Outcome]] = []
        ruined = 0
        while len(rows) < len(calls):
            batch = calls[len(rows) : len(rows) + batch_size]
            outcomes = self._run(batch, unsafe_exec)
            if len(outcomes) < width * len(batch):
                ruined += 1
                if ruined == MOST_RUINED:
                    raise self._ends_processes()
                missing = width - len(outcomes) % width  # outcomes of the call that was interrupted
                outcomes += [Outcome(0.0, tr("ended its process"))] * missing
            rows += [outcomes[i : i + width] for i in range(0, len(outcomes), width)]
        return rows

    def _run(self, calls: Sequence[Arguments], unsafe_exec: bool) -> list[Outcome]:
        """Call the functions in one process, and return the outcomes, those of a call together.

        The last ones are missing if the process ended too early.
        """
        request = {
            "name": self.path.name,
            "source": self.source,
            "functions": self.functions,
            "calls": calls,
            "seconds": CALL_SECONDS,
        }
        text = json.dumps(json.dumps(request, default=str))
        program = f"{CHILD.read_text(encoding='utf-8')}\n\nmain(json.loads({text}))\n"
        seconds = START_SECONDS + CALL_WAITING * len(calls) * len(self.functions)
        output = sandbox.run_program(program, seconds, unsafe_exec=unsafe_exec).output
        *lines, _ = output.split("\n")  # the process may have ended in the middle of a line
        try:
            (problem, existing), *results = map(json.loads, lines)
        except ValueError:
            problem, existing, results = output[-200:] or tr("it ended its process"), [], []
        self._check_loaded(problem, existing)
        return [Outcome(value or 0.0, problem) for _, _, value, problem in results]

    def _check_loaded(self, problem: str | None, existing: Sequence[str]) -> None:
        """Raise UserError if the file was not loaded, or has only functions of other names."""
        if problem is not None:
            raise UserError(
                tr(
                    "{file} cannot be loaded: {problem}. Only Python's standard library is there",
                    file=self.path,
                    problem=problem,
                )
            )
        for function in self.functions:
            if function not in existing:
                raise UserError(
                    tr(
                        "{file} has no function {function}; it has {existing}",
                        file=self.path,
                        function=function,
                        existing=", ".join(existing) or tr("none"),
                    ),
                    exit_code=2,
                )

    def _ends_processes(self) -> UserError:
        """Return the error that says that functions ended too many processes."""
        return UserError(
            tr(
                "the functions of {file} ended their process for {count} replies. Each has {memory} "
                "MiB of memory and {seconds:g} s for a reply, and may not call os._exit()",
                file=self.path,
                count=MOST_RUINED,
                memory=sandbox.MEMORY >> 20,
                seconds=CALL_SECONDS,
            )
        )
