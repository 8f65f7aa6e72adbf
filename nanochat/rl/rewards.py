"""Rewards for replies: the right answer, and functions in a Python file of your own.

reward_calls.py calls the functions in the sandbox.
"""

import ast
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from nanochat.common import UserError, tr, warn
from nanochat.data.conversation import Conversation, Task
from nanochat.data.library_words import in_words
from nanochat.evals.chat import Reply, Score, grade_reply
from nanochat.rl.reward_calls import Arguments, Outcome, RewardFile

ANSWER = "answer"  # --reward=answer: 1 for a right answer, as without --reward
FEWEST_REPLIES = 8  # a function that fails for all of fewer replies may be right for others


@dataclass(frozen=True)
class Term:
    """A term of the reward: its weight, and the function that computes it.

    `file` is None for the right answer.
    """

    weight: float
    file: Path | None
    function: str

    @property
    def name(self) -> str:
        """The term as --reward names it, without its weight."""
        return ANSWER if self.file is None else f"{self.file.name}:{self.function}"


def read_term(text: str) -> Term:
    """Return the term of the reward that a value of --reward names.

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
        return Term(weight, None, ANSWER)
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            tr("there is no file {file}, which --reward names: check the path", file=file),
            exit_code=2,
        )
    return Term(weight, file, function)


@dataclass(frozen=True)
class Rewards:
    """What --reward names: the reward of a reply is the weighted sum of the terms.

    Without terms, it is 1 for a right answer and 0 for another one.
    """

    terms: tuple[Term, ...]
    unsafe_exec: bool = False

    @staticmethod
    def of(texts: Sequence[str], unsafe_exec: bool = False) -> "Rewards":
        """Return the rewards that the values of --reward name; see read_term()."""
        return Rewards(tuple(map(read_term, texts)), unsafe_exec)

    @property
    def need_answers(self) -> bool:
        """Whether every problem must have a right answer."""
        return not self.terms or any(term.file is None for term in self.terms)

    @property
    def functions(self) -> list[Term]:
        """The terms that are functions."""
        return [term for term in self.terms if term.file is not None]

    @cached_property
    def sources(self) -> dict[Path, str]:
        """The text of each file of functions.

        Raises UserError if a file is not Python.
        """
        texts = {}
        for term in self.functions:
            assert term.file is not None
            try:
                text = term.file.read_text(encoding="utf-8-sig")
                ast.parse(text)
            except (SyntaxError, UnicodeDecodeError, ValueError) as failure:
                raise UserError(
                    tr("{file} is not Python: {failure}", file=term.file, failure=in_words(failure))
                ) from failure
            texts[term.file] = text
        return texts

    @property
    def fingerprint(self) -> dict[str, str]:
        """The hash of all reward files, which must be the same when a run resumes; {} if none."""
        if not self.sources:
            return {}
        digest = sha256("".join(self.sources.values()).encode()).hexdigest()
        return {"reward functions": digest[:16]}

    def over(self, task: Task) -> Task:
        """Return a task with these rewards instead of its own grades."""
        return Rewarded(task, self) if self.terms else task

    def measured(self, task: Task) -> Task:
        """Return a task on which the model is measured: by right answers, if these count."""
        return task if self.need_answers else Rewarded(task, self)

    def try_out(self, task: Task) -> None:
        """Call every function for one reply, so that a broken one is noticed before training.

        The reply is the right answer of the first problem or, for lack of one, its question. Raises
        UserError if a file cannot be loaded, if it lacks a function, or if a function gives no
        number.
        """
        if not self.functions:
            return
        problem = _problem_arguments(task, 0)
        trial = problem | {"reply": problem["answer"] or problem["question"], "thought": ""}
        for term, (outcome,) in self._outcomes([trial]):
            if outcome.problem:
                raise UserError(
                    tr(
                        "{function} {problem}, for the reply {reply!r} to the first problem. A "
                        "reward is a finite number for any text; docs/rl.md shows one",
                        function=term.name,
                        problem=outcome.problem,
                        reply=trial["reply"][:60],
                    )
                )

    def grades(self, task: Task, problems: Sequence[int], replies: Sequence[Reply]) -> list[float]:
        """Return the reward of each reply to one of the problems.

        A function that fails for a reply adds nothing to its reward, and a warning counts such
        replies. Raises UserError if a function fails for all replies.
        """
        reply_keys = []
        calls: dict[str, Arguments] = {}  # equal replies to a problem are rewarded once
        for i, reply in zip(problems, replies, strict=True):
            reply_key = json.dumps([i, reply.thought, reply.text])
            reply_keys.append(reply_key)
            calls[reply_key] = {
                **_problem_arguments(task, i),
                "reply": reply.text,
                "thought": reply.thought,
            }
        totals = dict.fromkeys(calls, 0.0)
        for term, outcomes in self._outcomes(list(calls.values())):
            _report(term, outcomes)
            for reply_key, outcome in zip(calls, outcomes, strict=True):
                totals[reply_key] += term.weight * outcome.value
        rewards = [totals[reply_key] for reply_key in reply_keys]
        for term in self.terms:
            if term.file is None:
                for number, (i, reply) in enumerate(zip(problems, replies, strict=True)):
                    rewards[number] += term.weight * grade_reply(task, i, reply.answer)
        return rewards

    def _outcomes(self, calls: Sequence[Arguments]) -> list[tuple[Term, list[Outcome]]]:
        """Return each term that is a function with its outcomes, one for each call."""
        by_function: dict[tuple[Path | None, str], list[Outcome]] = {}
        for path, source in self.sources.items():
            names = [term.function for term in self.functions if term.file == path]
            rows = RewardFile(path, source, names).outcomes(calls, self.unsafe_exec)
            for column, name in enumerate(names):
                by_function[path, name] = [row[column] for row in rows]
        return [(term, by_function[term.file, term.function]) for term in self.functions]


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


def _problem_arguments(task: Task, i: int) -> dict[str, Any]:
    """Return the arguments of reward functions that describe problem `i`, not a reply to it."""
    conversation = task[i]
    prompt = conversation.prompt.messages
    last = conversation.messages[-1]
    return {
        "question": prompt[-1].text,
        "messages": [{"role": turn.role, "content": turn.text} for turn in prompt],
        "answer": last.text if last.role == "assistant" else "",
        "record": dict(record_of(task, i)),
    }


def _report(term: Term, outcomes: Sequence[Outcome]) -> None:
    """Warn about the replies for which a function failed; raise UserError if it failed for all."""
    failures = [outcome.problem for outcome in outcomes if outcome.problem]
    replies = len(outcomes)
    if not failures:
        return
    if len(failures) == replies >= FEWEST_REPLIES:
        raise UserError(
            tr(
                "{function} failed for all {replies} replies of a step; for the first it {problem}. "
                "Correct it, and begin again with --resume=none, since the reward is another then",
                function=term.name,
                replies=replies,
                problem=failures[0],
            )
        )
    warn(
        tr(
            "{function} failed for {count} of {replies} different replies, which get nothing from "
            "it; for the first it {problem}",
            function=term.name,
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
