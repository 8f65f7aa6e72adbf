"""Evaluates a model on the problems of a task: compares the logits of letters, or grades written replies."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from nanochat.common import UserError
from nanochat.data.conversation import Part, Task
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.generate.reply import reply_parts
from nanochat.generate.sampling import Sampling
from nanochat.nn.model import Model
from nanochat.runtime import parallel, signals
from nanochat.runtime.progress import Progress
from nanochat.tokenizer import Tokenizer

GREEDY = Sampling(temperature=0.0, max_tokens=512)
READ_AHEAD = 4096  # prompt tokens to prefill between two decoding passes: no reader waits for the next word here

Advance = Callable[[float], None]
Heard = Callable[[int, list[Part], float], None]  # called with problem, reply and grade


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
    grades: tuple[tuple[float, ...], ...]  # one tuple per problem, in the order of the task, one grade per sample

    @property
    def accuracy(self) -> float:
        """The share of problems that the model solved."""
        return self.right / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds of the accuracy with 95 % confidence."""
        return self.low, self.high

    @property
    def centred(self) -> float:
        """The accuracy, rescaled so that guessing is 0 and perfection is 1."""
        return (self.accuracy - self.baseline) / (1 - self.baseline)

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
) -> Score:
    """Evaluate the first `limit` problems of a task. Ranks share the problems; every rank returns the whole score.

    `batch_size` problems or replies are computed together. With several samples, a problem counts as right if one of
    them is right. If the task has `grade_parts(i, parts)`, that replaces `grade` and also sees calculator calls.
    `heard` is called with every written reply of this rank. UserError if there is no problem to evaluate.
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
    prompts = {i: tokenizer.render_prompt(task[i]) for i in mine}
    room = model.config.sequence_len - (
        0 if task.kind == "choice" else 1
    )  # a written reply needs at least one position
    fitting = {i: prompt for i, prompt in prompts.items() if len(prompt) <= room}
    grades: dict[int, list[float]] = {}
    with contextlib.suppress(signals.Stopped), _progress(task.name, len(fitting) * samples, compute) as advance:
        if task.kind == "choice":
            grades = _choose(task, fitting, model, tokenizer, batch_size, advance)
        else:
            grades = _write(task, fitting, model, tokenizer, sampling, samples, batch_size, advance, heard)
    signals.check(compute)  # ranks measure at their own pace, and stop together
    table = [0.0] * (total * samples)
    for i, values in grades.items():
        table[i * samples : (i + 1) * samples] = values
    guesses = sum(1 / len(task.letters(i)) for i in mine) if task.kind == "choice" else 0.0
    *table, guesses, too_long = parallel.total([*table, guesses, len(prompts) - len(fitting)], compute)
    rows = tuple(tuple(table[i * samples : (i + 1) * samples]) for i in range(total))
    right = sum(max(row) for row in rows)
    return Score(task.name, right, total, *wilson(right, total), guesses / total, int(too_long), rows)


@contextlib.contextmanager
def _progress(title: str, total: int, compute: Compute) -> Iterator[Advance]:
    """Give a function that advances the progress bar, which rank 0 shows. A signal to stop training ends the work."""
    with Progress(title, total, "replies") if compute.main else contextlib.nullcontext() as progress:

        def advance(by: float) -> None:
            signals.check_alone(compute)
            if progress is not None:
                progress.advance(by)

        yield advance


# --- letters -------------------------------------------------------------------------------------


@torch.inference_mode()
def _choose(
    task: Task,
    prompts: Mapping[int, Sequence[int]],
    model: Model,
    tokenizer: Tokenizer,
    batch_size: int,
    advance: Advance,
) -> dict[int, list[float]]:
    """Grade the letter of each problem that is likeliest as the first token of the reply."""
    grades: dict[int, list[float]] = {}
    by_length = sorted(prompts, key=lambda i: len(prompts[i]))  # so that batches need little padding
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        longest = max(len(prompts[i]) for i in batch)
        idx = torch.tensor([[*prompts[i], *[tokenizer.bos] * (longest - len(prompts[i]))] for i in batch])
        ends = torch.tensor([len(prompts[i]) - 1 for i in batch]).to(model.device)
        hidden = model.hidden(idx.to(model.device))  # (B, T, C); padding comes last, so no prompt attends to it
        logits = model.logits(hidden[torch.arange(len(batch), device=model.device), ends])  # (B, V)
        letters = [task.letters(i) for i in batch]
        most = max(map(len, letters))
        tokens = [[_letter(tokenizer, letter) for letter in of] for of in letters]
        padded = torch.tensor([[*of, *[of[0]] * (most - len(of))] for of in tokens]).to(model.device)
        chosen = (
            logits.gather(1, padded).argmax(dim=1).tolist()
        )  # argmax takes the first of equal logits, so never the padding
        for i, of, choice in zip(batch, letters, chosen, strict=True):
            grades[i] = [task.grade(i, of[choice])]
        advance(len(batch))
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
    advance: Advance,
    heard: Heard | None,
) -> dict[int, list[float]]:
    """Let the model write replies, and grade every sample of every problem."""
    if not prompts:
        return {}
    longest = max(map(len, prompts.values())) + sampling.max_tokens
    slots, length = min(batch_size, len(prompts) * samples), min(longest, model.config.sequence_len)
    engine = Engine(model, tokenizer, slots, length, prefill_tokens=READ_AHEAD)
    completions = engine.generate(list(prompts.values()), sampling, samples, done=lambda index: advance(1))
    grades: dict[int, list[float]] = {i: [] for i in prompts}
    numbers = [i for i in prompts for _ in range(samples)]
    for i, completion in zip(numbers, completions, strict=True):
        parts = reply_parts(completion.tokens, tokenizer)
        grade = _grade(task, i, parts)
        grades[i].append(grade)
        if heard:
            heard(i, parts, grade)
    return grades


def _grade(task: Task, i: int, parts: list[Part]) -> float:
    """The grade of a reply, from its text or, if the task has grade_parts, from all its parts."""
    if hasattr(task, "grade_parts"):
        return task.grade_parts(i, parts)  # pyright: ignore[reportAttributeAccessIssue]  # not in the protocol
    return task.grade(i, "".join(part.text for part in parts if part.kind == "text"))


def grader(task: Task, tokenizer: Tokenizer) -> Callable[[int, Sequence[int]], float]:
    """A function that takes a problem and the tokens of a reply, and grades the reply as evaluate() does."""
    return lambda i, tokens: _grade(task, i, reply_parts(tokens, tokenizer))


# --- figures -------------------------------------------------------------------------------------


def wilson(right: float, total: int, z: float = 1.96) -> tuple[float, float]:
    """The confidence interval of a share, by default of 95 % (Wilson 1927). It also holds near 0 and 1."""
    share = right / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
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
    return fmean(1 - math.comb(w, k) / math.comb(len(row), k) for w, row in zip(wrong, grades, strict=True))


def chat_core(scores: Sequence[Score]) -> float:
    """ChatCORE: the mean of the centred accuracies; 0 is guessing, 1 is perfection."""
    return fmean(score.centred for score in scores)
