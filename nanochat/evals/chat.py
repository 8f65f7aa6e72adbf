"""Evaluates a model on the problems of a task: compares the logits of letters, or grades written replies."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol, TypeVar

from nanochat.common import UserError
from nanochat.data.conversation import Conversation, Part, Task
from nanochat.device import Compute
from nanochat.engine import Completion, Engine
from nanochat.evals.likelihood import PromptRow, score_rows
from nanochat.generate.reply import reply_parts
from nanochat.generate.sampling import Sampling
from nanochat.model import Model
from nanochat.runtime import parallel, signals
from nanochat.runtime.progress import Progress
from nanochat.tokenizer import Tokenizer

GREEDY = Sampling(temperature=0.0, max_tokens=512)
READ_AHEAD = 4096  # prompt tokens to prefill between two decoding passes: no reader waits for the next word here

Judged = TypeVar("Judged")
Advance = Callable[[float], None]
Heard = Callable[[int, list[Part], float], None]  # called with problem, reply and grade
Keep = Callable[
    [int, Mapping[str, Any]], None
]  # called with problem and record, by the rank that asked the problem


@dataclass(frozen=True)
class Score:
    """The result of a task over all ranks. `low` and `high` bound the accuracy with 95 % confidence."""

    name: str
    right: float  # sum of grades; of several samples of a problem, the best one counts
    total: int
    low: float
    high: float
    baseline: float  # accuracy of guessing a letter; 0 for written replies
    too_long: int  # problems that do not fit into the context; they count as wrong
    grades: tuple[
        tuple[float, ...], ...
    ]  # one tuple per problem, in the order of the task, one grade per sample

    @property
    def accuracy(self) -> float:
        """The share of problems that the model solved."""
        return self.right / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds of the accuracy with 95 % confidence."""
        return self.low, self.high

    def __str__(self) -> str:
        counts = f"{self.right:,g} of {self.total:,}, 95 % interval {100 * self.low:.1f} to {100 * self.high:.1f}"
        skipped = f"; {self.too_long:,} too long for the context" if self.too_long else ""
        return f"{self.name}: {100 * self.accuracy:.2f} % right ({counts}{skipped})"


def evaluate(
    task: Task,
    model: Model,
    tokenizer: Tokenizer,
    compute: Compute,
    sampling: Sampling = GREEDY,
    samples: int = 1,
    limit: int | None = None,
    batch_size: int = 32,
    heard: Heard | None = None,
    keep: Keep | None = None,
    graphs: bool = False,
) -> Score:
    """Evaluate the first `limit` problems of a task. Ranks share the problems; every rank returns the whole score.

    `batch_size` problems or replies are computed together. With several samples, a problem counts as right if one of
    them is right. If the task has `grade_parts(i, parts)`, that replaces `grade` and also sees calculator calls.
    `heard` is called with every written reply of this rank, `keep` with a record of every answer. With `graphs`, the
    steps that write replies are captured and replayed. Examples of a task are left out, from the first on, where they
    do not fit into the context. UserError on every rank if there is no
    problem to evaluate, or if one rank finds a broken one.
    """
    total = len(task) if limit is None else min(limit, len(task))
    if min(total, samples, batch_size) < 1:
        raise UserError(
            f"an evaluation needs at least one problem, one sample and a batch size of at least 1, got {total} "
            f"problems of {task.name}, {samples} samples and batch size {batch_size}: raise what is 0",
            exit_code=2,
        )
    samples = 1 if task.kind == "choice" else samples
    mine = range(compute.rank, total, compute.world_size)
    room = model.config.sequence_len - (
        0 if task.kind == "choice" else 1
    )  # a written reply needs a position
    grades: dict[int, list[float]] = {}
    with parallel.together(task.name, compute):
        prompts = {i: _prompt(task, i, tokenizer, room) for i in mine}
        fitting = {i: prompt for i, prompt in prompts.items() if len(prompt) <= room}
        with contextlib.suppress(signals.Stopped):
            if task.kind == "choice":
                grades = _choose(task, fitting, model, tokenizer, batch_size, compute, keep)
            else:
                grades = _write(
                    task,
                    fitting,
                    model,
                    tokenizer,
                    sampling,
                    samples,
                    batch_size,
                    compute,
                    heard,
                    keep,
                    graphs,
                )
    signals.check(compute)  # ranks measure at their own pace, and stop together
    too_long = sum(len(prompt) > room for prompt in prompts.values())
    table = [0.0] * (total * samples)
    for i, values in grades.items():
        table[i * samples : (i + 1) * samples] = values
    guesses = sum(1 / len(task.letters(i)) for i in mine) if task.kind == "choice" else 0.0
    *table, guesses, too_long = parallel.total([*table, guesses, too_long], compute)
    rows = tuple(tuple(table[i * samples : (i + 1) * samples]) for i in range(total))
    right = sum(max(row) for row in rows)
    return Score(
        task.name, right, total, *wilson(right, total), guesses / total, int(too_long), rows
    )


def _prompt(task: Task, i: int, tokenizer: Tokenizer, room: int) -> list[int]:
    """The tokens of problem i, with as many of the task's examples as fit."""
    conversation = task[i]
    tokens = tokenizer.render_prompt(conversation)
    for _ in range(getattr(task, "shots", 0)):
        if len(tokens) <= room or len(conversation.messages) < 4:
            break
        conversation = Conversation(
            conversation.messages[2:]
        )  # an example is a question and an answer
        tokens = tokenizer.render_prompt(conversation)
    return tokens


@contextlib.contextmanager
def progress(title: str, total: int, unit: str, compute: Compute) -> Iterator[Advance]:
    """Give a function that advances the progress bar, which rank 0 shows. A signal to stop training ends the work."""
    with Progress(title, total, unit) if compute.main else contextlib.nullcontext() as bar:

        def advance(by: float) -> None:
            signals.check_alone(compute)
            if bar is not None:
                bar.advance(by)

        yield advance


def identify(task: Any, i: int) -> str:
    """The name of a problem in records: the task's own, else its number."""
    return task.identify(i) if hasattr(task, "identify") else str(i)


# --- letters -------------------------------------------------------------------------------------


def _choose(
    task: Task,
    prompts: Mapping[int, list[int]],
    model: Model,
    tokenizer: Tokenizer,
    batch_size: int,
    compute: Compute,
    keep: Keep | None,
) -> dict[int, list[float]]:
    """Grade the letter of each problem that is likeliest as the first token of the reply."""
    letters = {i: task.letters(i) for i in prompts}
    rows = [
        PromptRow(i, [*prompts[i], _letter(tokenizer, one)], len(prompts[i]))
        for i in prompts
        for one in letters[i]
    ]
    with progress(task.name, len(rows), "choices", compute) as advance:
        scored = score_rows(model, rows, tokenizer.bos, rows_per_batch=batch_size, done=advance)
    grades: dict[int, list[float]] = {}
    found = iter(scored)
    for i, of in letters.items():
        logprobs = [next(found).logprob for _ in of]
        answer = of[logprobs.index(max(logprobs))]
        grades[i] = [task.grade(i, answer)]
        if keep:
            expected = task[i].messages[-1].text
            about = {
                "id": identify(task, i),
                "prompt": prompts[i],
                "expected": expected,
                "answer": answer,
            }
            keep(
                i,
                {**about, "grade": grades[i][0], "logprobs": dict(zip(of, logprobs, strict=True))},
            )
    return grades


def _letter(tokenizer: Tokenizer, letter: str) -> int:
    """The token of a letter. UserError if the letter is more than one token."""
    ids = tokenizer.encode(letter)
    if len(ids) != 1:
        raise UserError(
            f"the letter of a choice must be one token each, but {letter!r} is {len(ids)} tokens in this vocabulary: "
            "train a larger tokenizer, or leave this task out"
        )
    return ids[0]


# --- words ---------------------------------------------------------------------------------------


def _write(
    task: Task,
    prompts: Mapping[int, Sequence[int]],
    model: Model,
    tokenizer: Tokenizer,
    sampling: Sampling,
    samples: int,
    batch_size: int,
    compute: Compute,
    heard: Heard | None,
    keep: Keep | None,
    graphs: bool,
) -> dict[int, list[float]]:
    """Let the model write replies, and grade every sample of every problem."""
    if not prompts:
        return {}
    longest = max(map(len, prompts.values())) + sampling.max_tokens
    slots, length = min(batch_size, len(prompts) * samples), min(longest, model.config.sequence_len)
    captures = compute.platform if graphs else None
    engine = Engine(model, tokenizer, slots, length, prefill_tokens=READ_AHEAD, graphs=captures)
    grades: dict[int, list[float]] = {i: [] for i in prompts}
    numbers = list(prompts)

    def judge(at: int, tokens: Sequence[int]) -> tuple[list[Part], float]:
        parts = reply_parts(tokens, tokenizer)
        return parts, _grade(task, numbers[at], parts)

    with progress(task.name, len(prompts) * samples, "replies", compute) as advance:
        asked = list(prompts.values())
        _, judged = generate_and_judge(engine, asked, sampling, samples, judge, lambda: advance(1))
    for at, (parts, grade) in enumerate(judged):
        i = numbers[at // samples]
        grades[i].append(grade)
        if heard:
            heard(i, parts, grade)
        if keep:
            about = {
                "id": identify(task, i),
                "prompt": list(prompts[i]),
                "expected": words(task[i].messages[-1].parts),
            }
            keep(i, {**about, "answer": words(parts), "grade": grade})
    return grades


class Generator(Protocol):
    """Completes every prompt `samples` times, as an Engine does; equal replies to a prompt may be one object."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        samples: int = 1,
        done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]: ...


def generate_and_judge(
    engine: Generator,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    samples: int,
    judge: Callable[[int, Sequence[int]], Judged],
    done: Callable[[], None],
) -> tuple[list[Completion], list[Judged]]:
    """Every prompt's `samples` replies, prompt by prompt, and what `judge` says of each.

    `judge` gets the number of the prompt and the tokens of the reply, once for each object. It runs in a thread of its
    own, while other replies are still written. `done` is called after every reply.
    """
    judged: dict[int, Future[Judged]] = {}
    alike: dict[
        int, Future[Judged]
    ] = {}  # by the identity of the reply, which `completions` keeps alive
    pool = ThreadPoolExecutor(1, thread_name_prefix="judge")

    def finished(at: int, reply: Completion) -> None:
        if id(reply) not in alike:
            alike[id(reply)] = pool.submit(judge, at // samples, reply.tokens)
        judged[at] = alike[id(reply)]
        done()

    try:
        completions = engine.generate(prompts, sampling, samples, finished)
        return completions, [judged[at].result() for at in range(len(completions))]
    finally:
        pool.shutdown(cancel_futures=True)


def _grade(task: Task, i: int, parts: list[Part]) -> float:
    """The grade of a reply, from its text or, if the task has grade_parts, from all its parts."""
    if hasattr(task, "grade_parts"):
        return task.grade_parts(i, parts)  # pyright: ignore[reportAttributeAccessIssue]  # not in the protocol
    return task.grade(i, "".join(part.text for part in parts if part.kind == "text"))


def words(parts: Sequence[Part]) -> str:
    """A reply as readable text, with calculator calls and answers in brackets."""
    shown = {"text": "{}", "python": "[{} = ", "python_output": "{}]"}
    return "".join(shown[part.kind].format(part.text) for part in parts)


def grader(task: Task, tokenizer: Tokenizer) -> Callable[[int, Sequence[int]], float]:
    """A function that takes a problem and the tokens of a reply, and grades the reply as evaluate() does."""
    return lambda i, tokens: _grade(task, i, reply_parts(tokens, tokenizer))


# --- figures -------------------------------------------------------------------------------------


def wilson(right: float, total: int, z: float = 1.96) -> tuple[float, float]:
    """The confidence interval of a share, by default of 95 % (Wilson 1927). It also holds near 0 and 1."""
    share = right / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = (
        z
        / (1 + z * z / total)
        * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    )
    return max(0.0, centre - half), min(1.0, centre + half)


def by_group(task: Task, score: Score) -> dict[str, tuple[float, int]]:
    """Right and total of every group, in alphabetical order; empty if the task has no `group(i)`."""
    found: dict[str, list[float]] = {}
    if hasattr(task, "group"):
        for i, row in enumerate(score.grades):
            found.setdefault(task.group(i), []).append(max(row))  # pyright: ignore[reportAttributeAccessIssue]
    return {name: (sum(grades), len(grades)) for name, grades in sorted(found.items())}


def pass_at(k: int, grades: Sequence[Sequence[float]]) -> float:
    """pass@k: the unbiased estimate of the chance that one of k samples is right (arXiv:2107.03374).

    `grades` has n >= k samples for each problem. A sample is right if its grade is 1.
    """
    if k < 1 or any(len(row) < k for row in grades):
        raise ValueError(
            f"pass@k needs 1 <= k <= samples, got k = {k} and {min(map(len, grades))} samples: ask for more samples"
        )
    wrong = [sum(grade < 1 for grade in row) for row in grades]
    return fmean(
        1 - math.comb(w, k) / math.comb(len(row), k) for w, row in zip(wrong, grades, strict=True)
    )


def chat_core(figures: Iterable[tuple[float, float]]) -> float:
    """ChatCORE from the accuracy and the baseline of each task: the mean of the accuracies, each rescaled so that
    guessing is 0 and perfection is 1."""
    return fmean((accuracy - baseline) / (1 - baseline) for accuracy, baseline in figures)
