"""Evaluates a chat model on the problems of a task.

In multiple choice, the logits of the choices' letters are compared. In other tasks, the model
writes replies, which are graded.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, Protocol, TypeVar

from nanochat.common import UserError, tr
from nanochat.data.conversation import Conversation, Part, Task, words
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
# Prompt tokens to prefill between two decoding steps. They can be many, since no user is waiting.
PREFILL_TOKENS = 4096
PROMPT_END = 32  # tokens at the end of a prompt, among which is the mark that opens a thought

Judgement = TypeVar("Judgement")
Advance = Callable[[float], None]
OnReply = Callable[[int, list[Part], float], None]  # called with index, reply and grade
# Called with a problem's index and its record, on the rank that evaluated the problem.
OnRecord = Callable[[int, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Score:
    """The score of a model on a task, over all ranks.

    `low` and `high` are the bounds of the accuracy's 95 % confidence interval.
    """

    name: str
    right: float  # sum of grades; if a problem has several samples, the best one counts
    total: int
    low: float
    high: float
    baseline: float  # accuracy of guessing a letter; 0 for written replies
    too_long: int  # number of problems that do not fit into the context; they count as wrong
    # One tuple per problem, in the order of the task, with one grade per sample.
    grades: tuple[tuple[float, ...], ...]
    cut_off: int = 0  # number of replies that ended for lack of room, and were graded as they are

    @property
    def accuracy(self) -> float:
        """The mean grade of all problems, counting the best sample of each."""
        return self.right / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the accuracy."""
        return self.low, self.high

    def __str__(self) -> str:
        skipped = ""
        if self.too_long:
            skipped = tr("; {count:,} too long for the context", count=self.too_long)
        if self.cut_off:
            skipped += tr("; {count:,} replies cut off", count=self.cut_off)
        return tr(
            "{name}: {percent:.2f} % right ({right:,g} of {total:,}, "
            "95 % interval {low:.1f} to {high:.1f}{skipped})",
            name=self.name,
            percent=100 * self.accuracy,
            right=self.right,
            total=self.total,
            low=100 * self.low,
            high=100 * self.high,
            skipped=skipped,
        )


def evaluate(
    task: Task,
    model: Model,
    tokenizer: Tokenizer,
    compute: Compute,
    sampling: Sampling = GREEDY,
    samples: int = 1,
    limit: int | None = None,
    batch_size: int = 32,
    on_reply: OnReply | None = None,
    on_record: OnRecord | None = None,
    graphs: bool = False,
    shown: bool = True,
) -> Score:
    """Return the score of a model on the first `limit` problems of a task.

    The ranks divide the problems, and every rank returns the score over all of them.

    At most `batch_size` problems or replies are computed together. If replies are written, there
    are `samples` for each problem, and the best grade counts. If the task has `grade_parts(i,
    parts)`, it is used instead of `grade`, and also sees calculator calls. Examples that do not fit
    into the context are left out, starting with the first.

    `on_reply` is called with every written reply of this rank, and `on_record` with a record of
    each of its answers. With `graphs`, decoding steps are replayed as captured graphs. With
    `shown`, rank 0 shows a progress bar. Raises UserError on every rank if there is no problem or
    if `samples` or `batch_size` is less than 1 (exit code 2), or if any rank finds a malformed
    problem or a letter that is not one token. Raises signals.Stopped if any rank is asked to stop.
    """
    total = len(task) if limit is None else min(limit, len(task))
    if min(total, samples, batch_size) < 1:
        raise UserError(
            tr(
                "an evaluation needs at least one problem, one sample and a batch size of "
                "at least 1, got {total} problems of {name}, {samples} samples and batch "
                "size {batch_size}: raise what is 0",
                total=total,
                name=task.name,
                samples=samples,
                batch_size=batch_size,
            ),
            exit_code=2,
        )
    by_letter = task.kind == "choice"
    if by_letter:
        samples = 1
    reply_room = 0 if by_letter else 1  # a letter is read from the logits of the prompt
    max_prompt = model.config.sequence_len - reply_room
    numbers = range(compute.rank, total, compute.world_size)  # indices of this rank's problems
    grades: dict[int, list[float]] = {}
    cut_off = 0
    with parallel.together(task.name, compute):
        prompts = {i: _prompt(task, i, tokenizer, max_prompt) for i in numbers}
        fitting = {i: prompt for i, prompt in prompts.items() if len(prompt) <= max_prompt}
        with contextlib.suppress(signals.Stopped):  # raised below, on all ranks at once
            if by_letter:
                grades = _grade_letters(
                    task, fitting, model, tokenizer, batch_size, compute, on_record, shown
                )
            else:
                grades, cut_off = _grade_replies(
                    task,
                    fitting,
                    model,
                    tokenizer,
                    sampling,
                    samples,
                    batch_size,
                    compute,
                    on_reply,
                    on_record,
                    graphs,
                    shown,
                )
    signals.check(compute)  # ranks evaluate at their own pace, but stop together
    too_long = len(prompts) - len(fitting)
    guesses = sum(1 / len(task.letters(i)) for i in numbers) if by_letter else 0.0
    counts = (guesses, too_long, cut_off)
    return _total_score(task.name, grades, total, samples, counts, compute)


def _total_score(
    name: str,
    grades: Mapping[int, list[float]],
    total: int,
    samples: int,
    counts: tuple[float, int, int],
    compute: Compute,
) -> Score:
    """Return the score over all ranks.

    `grades` and `counts` cover this rank only. The counts are the sum of the chances of guessing
    right, the problems that are too long, and the replies that were cut off.
    """
    table = [0.0] * (total * samples)  # sample by sample; 0 for the problems of other ranks
    for i, problem_grades in grades.items():
        table[i * samples : (i + 1) * samples] = problem_grades
    *table, guesses, too_long, cut_off = parallel.total([*table, *counts], compute)
    rows = tuple(tuple(table[i * samples : (i + 1) * samples]) for i in range(total))
    right = sum(max(row) for row in rows)
    low, high = _interval([max(row) for row in rows])
    baseline = guesses / total
    return Score(name, right, total, low, high, baseline, int(too_long), rows, int(cut_off))


def _prompt(task: Task, i: int, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    """Return the tokens of problem i's prompt, with as many of the task's examples as fit.

    Even without examples, the prompt may exceed `max_tokens`.
    """
    conversation = task[i]
    tokens = tokenizer.render_prompt(conversation)
    for _ in range(getattr(task, "shots", 0)):
        if len(tokens) <= max_tokens or len(conversation.messages) < 4:
            break
        # An example is a question and an answer.
        conversation = Conversation(conversation.messages[2:])
        tokens = tokenizer.render_prompt(conversation)
    return tokens


@contextlib.contextmanager
def progress(
    title: str,
    total: int,
    unit: str,
    compute: Compute,
    shown: bool = True,
) -> Iterator[Advance]:
    """Yield a function that advances the progress bar, which only rank 0 shows, if it is `shown`.

    The function raises signals.Stopped if a signal has asked the run to stop.
    """
    is_shown = shown and compute.main
    with Progress(title, total, unit) if is_shown else contextlib.nullcontext() as bar:

        def advance(by: float) -> None:
            signals.check_alone(compute)
            if bar is not None:
                bar.advance(by)

        yield advance


def identify(task: Any, i: int) -> str:
    """Return the ID that identifies problem i in evaluation records, as a string.

    It is what `task.identify(i)` returns, if the task has that method, or else the index i.
    """
    return task.identify(i) if hasattr(task, "identify") else str(i)


# --- letters -------------------------------------------------------------------------------------


def _grade_letters(
    task: Task,
    prompts: Mapping[int, list[int]],
    model: Model,
    tokenizer: Tokenizer,
    batch_size: int,
    compute: Compute,
    on_record: OnRecord | None,
    shown: bool,
) -> dict[int, list[float]]:
    """Return a dict from problem index to a list with one grade, that of the most likely letter.

    The letters of the choices are compared as the first token of the reply.
    """
    letters = {i: task.letters(i) for i in prompts}
    rows = []
    for i, prompt in prompts.items():
        for letter in letters[i]:
            tokens = [*prompt, _letter_id(tokenizer, letter)]
            rows.append(PromptRow(i, tokens, len(prompt)))
    with progress(task.name, len(rows), tr("choices"), compute, shown) as advance:
        scored = score_rows(model, rows, tokenizer.bos, rows_per_batch=batch_size, on_batch=advance)
    grades: dict[int, list[float]] = {}
    likelihoods = iter(scored)
    for i, options in letters.items():
        logprobs = [next(likelihoods).logprob for _ in options]
        answer = options[logprobs.index(max(logprobs))]
        grade = task.grade(i, answer)
        grades[i] = [grade]
        if on_record:
            record = {
                "id": identify(task, i),
                "prompt": prompts[i],
                "expected": task[i].messages[-1].text,
                "answer": answer,
                "grade": grade,
                "logprobs": dict(zip(options, logprobs, strict=True)),
            }
            on_record(i, record)
    return grades


def _letter_id(tokenizer: Tokenizer, letter: str) -> int:
    """Return the token ID of a letter.

    Raises UserError if the letter is not a single token.
    """
    ids = tokenizer.encode_reply(letter)
    if len(ids) != 1:
        raise UserError(
            tr(
                "the letter of a choice must be one token each, but {letter!r} is "
                "{count} tokens in this vocabulary: train a larger tokenizer, or leave "
                "this task out",
                letter=letter,
                count=len(ids),
            )
        )
    return ids[0]


# --- written replies -----------------------------------------------------------------------------


def _grade_replies(
    task: Task,
    prompts: Mapping[int, Sequence[int]],
    model: Model,
    tokenizer: Tokenizer,
    sampling: Sampling,
    samples: int,
    batch_size: int,
    compute: Compute,
    on_reply: OnReply | None,
    on_record: OnRecord | None,
    graphs: bool,
    shown: bool,
) -> tuple[dict[int, list[float]], int]:
    """Let the model write replies, and return the grades of all samples by problem index.

    The second value is how many replies were cut off.
    """
    if not prompts:
        return {}, 0
    numbers = list(prompts)
    replies = len(prompts) * samples
    longest = max(map(len, prompts.values())) + sampling.max_tokens
    engine = Engine(
        model,
        tokenizer,
        min(batch_size, replies),
        min(longest, model.config.sequence_len),
        prefill_tokens=PREFILL_TOKENS,
        graphs=compute.platform if graphs else None,
    )

    with progress(task.name, replies, tr("replies"), compute, shown) as advance:
        completions, written, reply_grades = generate_and_grade(
            task,
            numbers,
            engine,
            list(prompts.values()),
            sampling,
            samples,
            tokenizer,
            lambda: advance(1),
        )
    grades: dict[int, list[float]] = {i: [] for i in prompts}
    for reply_number, (reply, grade) in enumerate(zip(written, reply_grades, strict=True)):
        i = numbers[reply_number // samples]
        parts = reply.parts
        grades[i].append(grade)
        if on_reply:
            on_reply(i, parts, grade)
        if on_record:
            record = {
                "id": identify(task, i),
                "prompt": list(prompts[i]),
                "expected": words(task[i].messages[-1].parts),
                "answer": words(parts),
                "grade": grade,
            }
            on_record(i, record)
    return grades, sum(completion.finish == "length" for completion in completions)


class Generator(Protocol):
    """The interface, shared by Engine and Groups, for completing every prompt `samples` times.

    Equal replies to a prompt may be the same object.
    """

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        samples: int = 1,
        on_reply: Callable[[int, Completion], None] | None = None,
        /,
    ) -> list[Completion]: ...


def generate_and_judge(
    engine: Generator,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    samples: int,
    judge: Callable[[int, Sequence[int]], Judgement],
    on_reply: Callable[[], None],
) -> tuple[list[Completion], list[Judgement]]:
    """Return `samples` replies to each prompt, in the order of the prompts, and their judgements.

    `judge` is called once for each distinct reply object, with the index of the prompt and the
    reply's tokens, in a separate thread while other replies are still being written. `on_reply`
    is called after every reply.
    """
    by_reply: dict[int, Future[Judgement]] = {}
    by_object: dict[int, Future[Judgement]] = {}  # by id(), valid while `completions` holds them
    pool = ThreadPoolExecutor(1, thread_name_prefix="judge")

    def start_judging(reply_number: int, reply: Completion) -> None:
        if id(reply) not in by_object:
            prompt_number = reply_number // samples
            by_object[id(reply)] = pool.submit(judge, prompt_number, reply.tokens)
        by_reply[reply_number] = by_object[id(reply)]
        on_reply()

    try:
        completions = engine.generate(prompts, sampling, samples, start_judging)
        judgements = [by_reply[number].result() for number in range(len(completions))]
        return completions, judgements
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Reply:
    """A written reply, and apart from each other its thought and the answer after it."""

    parts: list[Part]  # all that was written
    thought: str  # empty for a model that does not think
    answer: list[Part]

    @property
    def text(self) -> str:
        """The answer's text, without calculator calls and their outputs."""
        return "".join(part.text for part in self.answer if part.kind == "text")


def read_reply(tokens: Sequence[int], prompt: Sequence[int], tokenizer: Tokenizer) -> Reply:
    """Return the reply to a prompt, given the tokens of both."""
    parts = reply_parts(tokens, tokenizer)
    marks = tokenizer.thought_marks
    if marks is None:
        return Reply(parts, "", parts)
    text = "".join(part.text for part in parts if part.kind == "text")
    opened = tokenizer.decode(prompt[-PROMPT_END:]).rstrip().endswith(marks[0])
    thought, answer = split_thought(text, marks, opened)
    return Reply(parts, thought, [Part("text", answer)])


def split_thought(text: str, marks: tuple[str, str], opened: bool) -> tuple[str, str]:
    """Return the thought at the beginning of a reply and the answer after it.

    `marks` begin and end a thought. `opened` says whether the prompt ends with the opening mark, as
    some templates write it. A reply that was cut off in its thought has no answer.
    """
    opening, closing = marks
    beginning = text.lstrip()
    if not opened and not beginning.startswith(opening):
        return "", text
    thought, _, answer = beginning.removeprefix(opening).partition(closing)
    return thought.strip(), answer.lstrip()


def generate_and_grade(
    task: Task,
    numbers: Sequence[int],
    engine: Generator,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    samples: int,
    tokenizer: Tokenizer,
    on_reply: Callable[[], None],
) -> tuple[list[Completion], list[Reply], list[float]]:
    """Return `samples` completions of each prompt, what each of them says, and its grade.

    `numbers` are the indices of the problems that the prompts ask. If the task has
    `grade_all(problems, replies)`, which takes the index of a problem for each Reply, it grades all
    replies at the end. Otherwise each is graded while others are still being written.
    """
    grade_all = getattr(task, "grade_all", None)

    def judge(prompt_number: int, tokens: Sequence[int]) -> tuple[Reply, float]:
        reply = read_reply(tokens, prompts[prompt_number], tokenizer)
        if grade_all is not None:
            return reply, 0.0
        return reply, grade_reply(task, numbers[prompt_number], reply.answer)

    completions, judgements = generate_and_judge(
        engine, prompts, sampling, samples, judge, on_reply
    )
    replies = [reply for reply, _ in judgements]
    grades = [grade for _, grade in judgements]
    if grade_all is not None:
        problems = [numbers[number // samples] for number in range(len(replies))]
        grades = grade_all(problems, replies)
    return completions, replies, grades


def grade_reply(task: Task, i: int, answer: list[Part]) -> float:
    """Return the grade of an answer, by its parts if the task can grade them, else by its text."""
    if hasattr(task, "grade_parts"):
        return task.grade_parts(i, answer)  # pyright: ignore[reportAttributeAccessIssue]
    text = "".join(part.text for part in answer if part.kind == "text")
    return task.grade(i, text)


# --- figures -------------------------------------------------------------------------------------


def wilson(right: float, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's confidence interval (1927) of the share right / total, by default at 95 %.

    The interval is also valid for shares near 0 and 1. `z` is the normal quantile of its level.
    """
    share = right / total
    widening = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / widening
    deviation = math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    half = z / widening * deviation
    return max(0.0, centre - half), min(1.0, centre + half)


def _interval(grades: Sequence[float], z: float = 1.96) -> tuple[float, float]:
    """Return the confidence interval of the mean of grades.

    It is Wilson's for grades from 0 to 1, and the normal approximation for rewards beyond them.
    """
    if all(0 <= grade <= 1 for grade in grades):
        return wilson(sum(grades), len(grades), z)
    mean = fmean(grades)
    half = z * pstdev(grades, mean) / math.sqrt(len(grades))
    return mean - half, mean + half


def by_group(task: Task, score: Score) -> dict[str, tuple[float, int]]:
    """Return a dict from group to (sum of grades, number of problems), sorted by group name.

    The best sample of each problem counts. If the task has no method `group(i)`, the dict is empty.
    """
    if not hasattr(task, "group"):
        return {}
    grades: dict[str, list[float]] = {}
    for i, samples in enumerate(score.grades):
        group = task.group(i)  # pyright: ignore[reportAttributeAccessIssue]
        grades.setdefault(group, []).append(max(samples))
    return {name: (sum(best), len(best)) for name, best in sorted(grades.items())}


def pass_at(k: int, grades: Sequence[Sequence[float]]) -> float:
    """Return pass@k, an unbiased estimate of the chance that at least one of k samples is right.

    The estimate (arXiv:2107.03374) is averaged over the problems. `grades` holds the grades of
    n >= k samples for each problem, and a sample is right if its grade is 1. Raises ValueError if k
    is less than 1 or a problem has fewer than k samples.
    """
    if k < 1 or any(len(samples) < k for samples in grades):
        raise ValueError(
            f"pass@k needs 1 <= k <= samples, got k = {k} and {min(map(len, grades))} samples: ask "
            "for more samples"
        )
    chances = []
    for samples in grades:
        wrong = sum(grade < 1 for grade in samples)
        chances.append(1 - math.comb(wrong, k) / math.comb(len(samples), k))
    return fmean(chances)


def chat_core(figures: Iterable[tuple[float, float]]) -> float:
    """Return ChatCORE, given the (accuracy, baseline) of each task.

    ChatCORE is the mean of the accuracies, each rescaled so that guessing is 0 and perfection is 1.
    """
    return fmean((accuracy - baseline) / (1 - baseline) for accuracy, baseline in figures)
