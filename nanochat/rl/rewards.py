"""Rewards for replies: the right answer, and functions in a Python file of your own.

The functions run in the sandbox that runs HumanEval's programs, because a reward may depend on
running what the model wrote. All replies of a step are rewarded by one process.
"""

import ast
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from nanochat.common import UserError, tr, warn
from nanochat.data.conversation import Conversation, Task
from nanochat.evals import sandbox
from nanochat.evals.chat import Reply, Score, grade_reply

ANSWER = "answer"  # --reward=answer: 1 for a right answer, as without --reward
CALL_SECONDS = 2.0  # of the processor that a function may take for one reply
CALL_WAITING = 5 * CALL_SECONDS  # by the clock
START_SECONDS = 10.0  # for the interpreter, and for a busy machine
CALLS = 64  # calls of functions in one process, whose results fit the output of the sandbox
FEW = 8  # a function that fails for all of fewer replies may be right for others
MOST_RUINED = 5  # processes of a step that may end in the middle of a call
_CHILD = Path(__file__).with_name("reward_child.py")

Facts = Mapping[str, Any]  # what a function may ask for, by the name of its parameter


@dataclass(frozen=True)
class Part:
    """A part of the reward: its weight, and the function that computes it.

    `file` is None for the right answer.
    """

    weight: float
    file: Path | None
    function: str

    @property
    def name(self) -> str:
        """The part as --reward names it, without its weight."""
        return ANSWER if self.file is None else f"{self.file.name}:{self.function}"


def read_part(text: str) -> Part:
    """Return the part of the reward that a value of --reward names.

    It is `answer` or FILE.py:FUNCTION, and may end with *WEIGHT. Raises UserError (exit code 2) if
    the value has another form, or if there is no such file.
    """
    name, star, weight_text = text.rpartition("*")
    if not star:
        name, weight_text = text, "1"
    try:
        weight = float(weight_text)
    except ValueError:
        weight = math.nan
    path, _, function = name.rpartition(":")
    is_function = path.endswith(".py") and function.isidentifier()
    if not (is_function or name == ANSWER) or not math.isfinite(weight) or weight == 0:
        raise UserError(
            tr(
                "--reward must be FILE.py:FUNCTION or answer, with *WEIGHT after it for a weight "
                "other than 1, such as rewards.py:short*0.5, got {text}",
                text=text,
            ),
            exit_code=2,
        )
    if name == ANSWER:
        return Part(weight, None, ANSWER)
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            tr("there is no file {file}, which --reward names: check the path", file=file),
            exit_code=2,
        )
    return Part(weight, file, function)


@dataclass(frozen=True)
class Rewards:
    """What --reward names: the reward of a reply is the weighted sum of the parts.

    Without parts, it is 1 for a right answer and 0 for another one.
    """

    parts: tuple[Part, ...]
    unsafe_exec: bool = False

    @staticmethod
    def of(texts: Sequence[str], unsafe_exec: bool = False) -> "Rewards":
        """Return the rewards that the values of --reward name; see read_part()."""
        return Rewards(tuple(map(read_part, texts)), unsafe_exec)

    @property
    def need_answers(self) -> bool:
        """Whether every problem must have a right answer."""
        return not self.parts or any(part.file is None for part in self.parts)

    @cached_property
    def sources(self) -> dict[Path, str]:
        """The text of each file of functions.

        Raises UserError if a file is not Python.
        """
        texts = {}
        for part in self.parts:
            if part.file is None or part.file in texts:
                continue
            try:
                text = part.file.read_text(encoding="utf-8")
                ast.parse(text)
            except (SyntaxError, UnicodeDecodeError, ValueError) as failure:
                raise UserError(
                    tr("{file} is not Python: {failure}", file=part.file, failure=failure)
                ) from failure
            texts[part.file] = text
        return texts

    @property
    def facts(self) -> dict[str, str]:
        """What a run must have in common with the run that it resumes, beside its flags."""
        if not self.sources:
            return {}
        digest = sha256("".join(self.sources.values()).encode()).hexdigest()
        return {"reward functions": digest[:16]}

    def over(self, task: Task) -> Task:
        """Return a task with these rewards instead of its own grades."""
        return Rewarded(task, self) if self.parts else task

    def measured(self, task: Task) -> Task:
        """Return a task on which the model is measured: by right answers, if these count."""
        return task if self.need_answers else Rewarded(task, self)

    def try_out(self, task: Task) -> None:
        """Call every function for one reply, so that a broken one is noticed before training.

        The reply is the right answer of the first problem or, for lack of one, its question. Raises
        UserError if a file cannot be loaded, if it lacks a function, or if a function gives no
        number.
        """
        functions = [part for part in self.parts if part.file is not None]
        if not functions:
            return
        facts = _facts(task, 0)
        trial = facts | {"reply": facts["answer"] or facts["question"], "thought": ""}
        for part, (_, problem) in zip(functions, self._values([trial]), strict=True):
            if problem:
                raise UserError(
                    tr(
                        "{function} {problem}, for the reply {reply!r} to the first problem. A "
                        "reward is a finite number for any text; docs/rl.md shows one",
                        function=part.name,
                        problem=problem,
                        reply=trial["reply"][:60],
                    )
                )

    def grades(self, task: Task, problems: Sequence[int], replies: Sequence[Reply]) -> list[float]:
        """Return the reward of each reply to one of the problems.

        A function that fails for a reply adds nothing to its reward, and a warning counts such
        replies. Raises UserError if a function fails for all replies.
        """
        calls = [
            {**_facts(task, i), "reply": reply.text, "thought": reply.thought}
            for i, reply in zip(problems, replies, strict=True)
        ]
        keys = []
        for i, call in zip(problems, calls, strict=True):
            keys.append(json.dumps([i, call["thought"], call["reply"]]))
        distinct = dict(zip(keys, calls, strict=True))
        functions = [part for part in self.parts if part.file is not None]
        totals = dict.fromkeys(distinct, 0.0)
        values = self._values(list(distinct.values()))
        for place, part in enumerate(functions):
            failures = []
            for number, key in enumerate(distinct):
                value, problem = values[number * len(functions) + place]
                if problem:
                    failures.append(problem)
                else:
                    totals[key] += part.weight * value
            _report(part, failures, len(distinct))
        rewards = [totals[key] for key in keys]
        for part in self.parts:
            if part.file is None:
                for number, (i, reply) in enumerate(zip(problems, replies, strict=True)):
                    rewards[number] += part.weight * grade_reply(task, i, reply.answer)
        return rewards

    def _values(self, calls: Sequence[Facts]) -> list[tuple[float, str]]:
        """Return the value of every function for every call, or 0 and what went wrong.

        The results of a call stand together, in the order of the parts with functions.
        """
        functions = [part for part in self.parts if part.file is not None]
        results = [[(0.0, "")] * len(functions) for _ in calls]
        for file, source in self.sources.items():
            places = [place for place, part in enumerate(functions) if part.file == file]
            names = [functions[place].function for place in places]
            count = max(CALLS // len(names), 1)
            for first in range(0, len(calls), count):
                request = Request(file, source, names, calls[first : first + count])
                for number, place, value, problem in request.results(self.unsafe_exec):
                    results[first + number][places[place]] = (value, problem)
        return [result for call_results in results for result in call_results]


@dataclass(frozen=True)
class Request:
    """Calls of the functions of one file."""

    file: Path
    source: str
    functions: Sequence[str]
    calls: Sequence[Facts]

    def results(self, unsafe_exec: bool) -> Iterator[tuple[int, int, float, str]]:
        """Yield (call, function, value, what went wrong) for every function and call.

        Raises UserError if the file cannot be loaded, lacks a function, or ends the process too
        often.
        """
        first = 0
        for _ in range(MOST_RUINED):
            lines = self._run(first, unsafe_exec)
            for number, place, value, problem in lines:
                yield first + number, place, value or 0.0, problem
            done = len(lines) // len(self.functions)
            if first + done == len(self.calls):
                return
            for place in range(len(lines) % len(self.functions), len(self.functions)):
                yield first + done, place, 0.0, tr("ended its process")
            first += done + 1
            if first == len(self.calls):
                return
        raise UserError(
            tr(
                "the functions of {file} ended their process for {count} replies. Each has {memory} "
                "MiB of memory and {seconds:g} s for a reply, and may not call os._exit()",
                file=self.file,
                count=MOST_RUINED,
                memory=sandbox.MEMORY >> 20,
                seconds=CALL_SECONDS,
            )
        )

    def _run(self, first: int, unsafe_exec: bool) -> list[tuple[int, int, float | None, str]]:
        """Call the functions from the call `first` on, in one process, and return its results.

        They lack the last ones if the process ended too early.
        """
        calls = self.calls[first:]
        request = {
            "name": self.file.name,
            "source": self.source,
            "functions": self.functions,
            "facts": calls,
            "seconds": CALL_SECONDS,
        }
        text = json.dumps(json.dumps(request, default=str))
        program = f"{_CHILD.read_text(encoding='utf-8')}\n\nmain(json.loads({text}))\n"
        seconds = START_SECONDS + CALL_WAITING * len(calls) * len(self.functions)
        output = sandbox.run_program(program, seconds, unsafe_exec=unsafe_exec).output
        *lines, _ = output.split("\n")  # the process may have ended in the middle of a line
        try:
            (problem, existing), *results = map(json.loads, lines)
        except ValueError:
            problem, existing, results = output[-200:] or tr("it ended its process"), [], []
        if problem is not None:
            raise UserError(
                tr(
                    "{file} cannot be loaded: {problem}. Only Python's standard library is there",
                    file=self.file,
                    problem=problem,
                )
            )
        for function in self.functions:
            if function not in existing:
                raise UserError(
                    tr(
                        "{file} has no function {function}; it has {existing}",
                        file=self.file,
                        function=function,
                        existing=", ".join(existing) or tr("none"),
                    ),
                    exit_code=2,
                )
        return results


class Rewarded:
    """A task whose replies get rewards of functions; see Rewards.

    evaluate() and roll_out() grade all replies together.
    """

    kind: Literal["choice", "generative"] = "generative"

    def __init__(self, task: Task, rewards: Rewards):
        self.task = task
        self.name = task.name
        self.rewards = rewards

    def __len__(self) -> int:
        return len(self.task)

    def __getitem__(self, i: int) -> Conversation:
        return self.task[i]

    def letters(self, i: int) -> tuple[str, ...]:
        """Return (), since replies are written."""
        return ()

    def grade(self, i: int, reply: str) -> float:
        """Return the grade of the right answer alone."""
        return self.task.grade(i, reply)

    def grade_all(self, problems: Sequence[int], replies: Sequence[Reply]) -> list[float]:
        """Return the reward of each reply; see Rewards.grades()."""
        return self.rewards.grades(self.task, problems, replies)

    def record(self, i: int) -> Mapping[str, Any]:
        """Return the record of problem `i` in its file; see record_of()."""
        return record_of(self.task, i)


def record_of(task: Task, i: int) -> Mapping[str, Any]:
    """Return the record of a problem as its file has it, or {} if the task has no records."""
    return task.record(i) if hasattr(task, "record") else {}  # pyright: ignore[reportAttributeAccessIssue]


def _facts(task: Task, i: int) -> dict[str, Any]:
    """Return what functions may ask for about problem `i`; the reply and its thought are missing."""
    conversation = task[i]
    prompt = conversation.prompt.messages
    last = conversation.messages[-1]
    return {
        "question": prompt[-1].text,
        "messages": [{"role": turn.role, "content": turn.text} for turn in prompt],
        "answer": last.text if last.role == "assistant" else "",
        "record": dict(record_of(task, i)),
    }


def _report(part: Part, failures: Sequence[str], replies: int) -> None:
    """Warn about the replies for which a function failed; raise UserError if it failed for all."""
    if not failures:
        return
    if len(failures) == replies >= FEW:
        raise UserError(
            tr(
                "{function} failed for all {replies} replies of a step; for the first it {problem}. "
                "Correct it, and begin again with --resume=none, since the reward is another then",
                function=part.name,
                replies=replies,
                problem=failures[0],
            )
        )
    warn(
        tr(
            "{function} failed for {count} of {replies} different replies, which get nothing from "
            "it; for the first it {problem}",
            function=part.name,
            count=len(failures),
            replies=replies,
            problem=failures[0],
        )
    )


def mean_reward(score: Score) -> str:
    """Return a line that shows the mean reward of replies to held-out problems."""
    return tr(
        "{name}: mean reward {reward:.3f} on {total:,} held-out problems (95 % interval {low:.3f} to "
        "{high:.3f})",
        name=score.name,
        reward=score.accuracy,
        total=score.total,
        low=score.low,
        high=score.high,
    )
