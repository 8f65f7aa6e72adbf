"""How well a model answers the problems of a task: letters compared by their logits, words written and graded."""

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
READ_AHEAD = 4096  # prompt tokens read between two decoding passes: nobody waits for the next word here

Advance = Callable[[float], None]
Heard = Callable[[int, list[Part], float], None]  # problem, reply, grade


@dataclass(frozen=True)
class Score:
    """The result of a task over all ranks. `low` and `high` bound the accuracy with 95 % confidence."""

    name: str
    right: float  # sum of grades; a problem with several samples counts its best
    total: int
    low: float
    high: float
    baseline: float  # accuracy of guessing among the letters; 0 where words are asked for
    too_long: int  # problems that do not fit the context, which count as wrong
    grades: tuple[tuple[float, ...], ...]  # of every sample of every problem, in the order of the task

    @property
    def accuracy(self) -> float:
        return self.right / self.total

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high

    @property
    def centred(self) -> float:
        """The accuracy on a scale where guessing is 0 and all right is 1."""
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
    """Ask the first `limit` problems of a task, rank r of W every W-th; every rank returns the whole score.

    `batch_size` problems, or replies, are computed together. With several samples a problem is right if any of them
    is. A task may have `grade_parts(i, parts)`, which then takes the place of `grade` and sees calculator calls too.
    `heard` is told each reply in words of this rank. UserError if there is nothing to ask.
    """
    total = len(task) if limit is None else min(limit, len(task))
    if min(total, samples, batch_size) < 1:
        raise UserError(
            f"an evaluation needs at least one problem, sample and row in a batch, got {total} problems of "
            f"{task.name}, {samples} samples and batch_size {batch_size}",
            exit_code=2,
        )
    samples = 1 if task.kind == "choice" else samples
    mine = range(compute.rank, total, compute.world_size)
    prompts = {i: tokenizer.render_prompt(task[i]) for i in mine}
    room = model.config.sequence_len - (0 if task.kind == "choice" else 1)  # a written reply needs a place
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
    """How far this rank is, shown on rank 0 only; a signal to a training run ends the work."""
    with Progress(title, total, "replies") if compute.main else contextlib.nullcontext() as progress:

        def advance(by: float) -> None:
            signals.check_alone()
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
    """Grade the likeliest of each problem's letters as the first word of the reply."""
    grades: dict[int, list[float]] = {}
    by_length = sorted(prompts, key=lambda i: len(prompts[i]))  # so that little is padding
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        longest = max(len(prompts[i]) for i in batch)
        idx = torch.tensor([[*prompts[i], *[tokenizer.bos] * (longest - len(prompts[i]))] for i in batch])
        ends = torch.tensor([len(prompts[i]) - 1 for i in batch]).to(model.device)
        hidden = model.hidden(idx.to(model.device))  # (B, T, C); padding comes after, causality hides it
        logits = model.logits(hidden[torch.arange(len(batch), device=model.device), ends])  # (B, V)
        letters = [task.letters(i) for i in batch]
        most = max(map(len, letters))
        tokens = [[_letter(tokenizer, letter) for letter in of] for of in letters]
        padded = torch.tensor([[*of, *[of[0]] * (most - len(of))] for of in tokens]).to(model.device)
        chosen = logits.gather(1, padded).argmax(dim=1).tolist()  # of equal logits the first, so never the padding
        for i, of, choice in zip(batch, letters, chosen, strict=True):
            grades[i] = [task.grade(i, of[choice])]
        advance(len(batch))
    return grades


def _letter(tokenizer: Tokenizer, letter: str) -> int:
    """The one token of a letter. UserError if the vocabulary splits it."""
    ids = tokenizer.encode(letter)
    if len(ids) != 1:
        raise UserError(f"letters of choices must be one token each, but {letter!r} is {len(ids)} in this vocabulary")
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
    """Grade what the model writes, each sample of each problem."""
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
    """The grade of a reply, by its words or, where the task looks at them, by all its parts."""
    if hasattr(task, "grade_parts"):
        return task.grade_parts(i, parts)  # pyright: ignore[reportAttributeAccessIssue]  # not in the protocol
    return task.grade(i, "".join(part.text for part in parts if part.kind == "text"))


def grader(task: Task, tokenizer: Tokenizer) -> Callable[[int, Sequence[int]], float]:
    """A function from a problem and the tokens of a reply to the grade that evaluate() would give it."""
    return lambda i, tokens: _grade(task, i, reply_parts(tokens, tokenizer))


# --- figures -------------------------------------------------------------------------------------


def wilson(right: float, total: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of a share, by default with 95 % confidence (Wilson 1927): right near 0 and 1 too."""
    share = right / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def by_group(task: Task, score: Score) -> dict[str, tuple[float, int]]:
    """Right and total of each of the groups that `task.group(i)` names, in alphabetical order; none without it."""
    found: dict[str, list[float]] = {}
    if hasattr(task, "group"):
        for i, row in enumerate(score.grades):
            found.setdefault(task.group(i), []).append(max(row))  # pyright: ignore[reportAttributeAccessIssue]
    return {name: (sum(grades), len(grades)) for name, grades in sorted(found.items())}


def pass_at(k: int, grades: Sequence[Sequence[float]]) -> float:
    """The chance that one of k samples is right, without bias, from n >= k samples a problem (arXiv:2107.03374).

    A sample is right if its grade is 1.
    """
    if k < 1 or any(len(row) < k for row in grades):
        raise ValueError(f"pass@k needs 1 <= k <= samples, got k = {k} and {min(map(len, grades))} samples")
    wrong = [sum(grade < 1 for grade in row) for row in grades]
    return fmean(1 - math.comb(w, k) / math.comb(len(row), k) for w, row in zip(wrong, grades, strict=True))


def chat_core(scores: Sequence[Score]) -> float:
    """ChatCORE: the mean of the centred accuracies; 0 is guessing, 1 all right."""
    return fmean(score.centred for score in scores)
