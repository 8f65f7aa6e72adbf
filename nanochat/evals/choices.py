"""Evaluates multiple choice by finding the most likely continuation, which needs no chat model.

Log-probabilities are compared in four ways: in total, per character, per byte and per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, Protocol

from nanochat.common import UserError, tr
from nanochat.data.conversation import Cloze
from nanochat.device import Compute
from nanochat.evals.chat import identify, progress, wilson
from nanochat.evals.likelihood import Likelihood, PromptRow, score_rows, shown_tokens
from nanochat.evals.records import Records, fingerprint
from nanochat.model import Model
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer

# The figures of a ChoiceScore that compare answers. Scores that were saved without one of them are
# not used.
MEASURES = ("acc", "acc_norm", "acc_norm_bytes", "acc_norm_tokens")


class ClozeTask(Protocol):
    """A task whose questions are texts to continue, each with several possible continuations."""

    @property
    def name(self) -> str:
        """The name of the task in reports."""
        ...

    def __len__(self) -> int: ...

    def cloze(self, i: int) -> Cloze:
        """Return question i.

        Raises UserError if the question is malformed.
        """
        ...


def choice_facts(task: Any, limit: int | None) -> dict[str, Any]:
    """Return what Records must know of the first `limit` questions of a task: shots and content."""
    return {"shots": task.shots, "data": fingerprint(task, limit), "measures": MEASURES}


@dataclass(frozen=True)
class ChoiceScore:
    """The accuracies on a task, over all ranks, for four ways to compare answers.

    `acc` compares the total log-probabilities of the answers, which favours short answers.
    `acc_norm` divides each log-probability by the number of characters in the answer,
    `acc_norm_bytes` by that of bytes, and `acc_norm_tokens` by that of tokens. `acc` and `acc_norm`
    are those of lm-evaluation-harness. `low` and `high` are the bounds of the 95 %
    confidence interval of `acc`, and `baseline` is the accuracy of guessing.
    """

    name: str
    acc: float
    acc_norm: float
    acc_norm_bytes: float
    acc_norm_tokens: float
    total: int
    low: float
    high: float
    baseline: float
    fewer_examples: int  # number of questions with examples left out to fit the context
    too_long: int  # number of questions that do not fit even without examples; count as wrong

    def __str__(self) -> str:
        notes = ""
        if self.fewer_examples:
            notes = tr("; {count:,} with fewer examples", count=self.fewer_examples)
        if self.too_long:
            notes += tr("; {count:,} too long for the context", count=self.too_long)
        return tr(
            "{name}: acc {acc:.2f} %, acc_norm {acc_norm:.2f} %, by bytes {by_bytes:.2f} %, "
            "by tokens {by_tokens:.2f} % (n = {total:,}, "
            "95 % interval of acc {low:.1f} to {high:.1f}, guessing {guessing:.1f} %{notes})",
            name=self.name,
            acc=100 * self.acc,
            acc_norm=100 * self.acc_norm,
            by_bytes=100 * self.acc_norm_bytes,
            by_tokens=100 * self.acc_norm_tokens,
            total=self.total,
            low=100 * self.low,
            high=100 * self.high,
            guessing=100 * self.baseline,
            notes=notes,
        )


def rows_of(
    question: int,
    context: str,
    choices: Sequence[str],
    tokenizer: Tokenizer,
) -> list[PromptRow]:
    """Return a row to score for each choice, tokenised as in lm-evaluation-harness.

    Context and choice are joined by a space and encoded as one text, after bos if the tokenizer
    adds it to texts, or if there is no context. Scoring skips as many tokens as the context has
    when encoded alone, without white space at its end, but never the last token of the row.
    """
    texts = [context.rstrip(), *(f"{context} {choice}" for choice in choices)]
    context_ids, *choice_ids = tokenizer.encode_batch(texts)
    start = [tokenizer.bos] if tokenizer.adds_bos or not context_ids else []
    shown = len(start) + len(context_ids)
    rows = []
    for ids in choice_ids:
        tokens = [*start, *ids]
        rows.append(PromptRow(question, tokens, min(shown, len(tokens) - 1)))
    return rows


@dataclass(frozen=True)
class Picks:
    """The indices of the likeliest choices: in total, per character, per byte and per token."""

    plain: int
    by_characters: int
    by_bytes: int
    by_tokens: int


def pick(scores: Sequence[Likelihood], choices: Sequence[str]) -> Picks:
    """Return the index of the most likely choice by each measure; the first one wins a tie."""
    plain = [score.logprob for score in scores]
    by_tokens = [score.logprob / score.tokens for score in scores]
    by_characters = []
    by_bytes = []
    for score, choice in zip(scores, choices, strict=True):
        by_characters.append(score.logprob / max(len(choice), 1))
        by_bytes.append(score.logprob / max(len(choice.encode()), 1))
    return Picks(_argmax(plain), _argmax(by_characters), _argmax(by_bytes), _argmax(by_tokens))


def _argmax(values: list[float]) -> int:
    return values.index(max(values))


def _fit(
    i: int,
    cloze: Cloze,
    tokenizer: Tokenizer,
    max_tokens: int,
) -> tuple[list[PromptRow], bool]:
    """Return a question's rows with as many examples as fit, and whether any are left out.

    The first examples are left out first. Even without any, a row may have more than `max_tokens`
    tokens for the model to read.
    """
    for first in range(len(cloze.examples) + 1):
        context = cloze.intro + "".join(cloze.examples[first:]) + cloze.question
        rows = rows_of(i, context, cloze.choices, tokenizer)
        if _longest_input(rows) <= max_tokens:
            break
    return rows, first > 0


def _longest_input(rows: Sequence[PromptRow]) -> int:
    """Return how many tokens of the longest row the model reads, which is all but the last one."""
    return max(len(row.tokens) for row in rows) - 1


def evaluate_choices(
    task: ClozeTask,
    model: Model,
    tokenizer: Tokenizer,
    compute: Compute,
    tokens_per_batch: int,
    limit: int | None = None,
    records: Records | None = None,
) -> ChoiceScore:
    """Return the score of a model on the first `limit` questions of a task.

    The ranks divide the questions, and every rank returns the score over all of them.

    `tokens_per_batch` limits the positions in a forward pass, padding included, unless one question
    needs more. Answers and score are saved in `records`, if given. Raises UserError on every rank
    if there is no question (exit code 2), if any rank finds a malformed one, or if the model has
    diverged.
    """
    total = len(task) if limit is None else min(limit, len(task))
    if total < 1:
        raise UserError(
            tr(
                "{name} has no question to evaluate, got a limit of {limit} on {count} questions",
                name=task.name,
                limit=limit,
                count=len(task),
            ),
            2,
        )
    context_length = model.config.sequence_len
    correct = [0, 0, 0, 0]  # by each measure of Picks
    fewer_examples = 0
    with parallel.together(task.name, compute):
        questions = {i: task.cloze(i) for i in range(compute.rank, total, compute.world_size)}
        rows: dict[int, list[PromptRow]] = {}
        for i, cloze in questions.items():
            fitted, shortened = _fit(i, cloze, tokenizer, context_length)
            if _longest_input(fitted) <= context_length:
                rows[i] = fitted
                fewer_examples += shortened
        scores = _score_questions(task.name, model, tokenizer, rows, tokens_per_batch, compute)
        for i, question_scores in scores.items():
            cloze = questions[i]
            picks = pick(question_scores, cloze.choices)
            for measure, choice in enumerate(astuple(picks)):
                correct[measure] += choice == cloze.answer
            if records:
                records.add(i, _record(identify(task, i), cloze, rows[i], question_scores, picks))
    guesses = sum(1 / len(cloze.choices) for cloze in questions.values())
    too_long = len(questions) - len(rows)
    sums = parallel.total([*map(float, correct), guesses, fewer_examples, too_long], compute)
    score = _choice_score(task.name, total, sums)
    if records:
        records.finish(asdict(score))
    return score


def _score_questions(
    title: str,
    model: Model,
    tokenizer: Tokenizer,
    rows: Mapping[int, Sequence[PromptRow]],
    tokens_per_batch: int,
    compute: Compute,
) -> dict[int, list[Likelihood]]:
    """Return the likelihoods of each question's rows, by question index."""
    flat = [row for question_rows in rows.values() for row in question_rows]
    with progress(title, len(flat), tr("choices"), compute) as advance:
        scored = score_rows(model, flat, tokenizer.bos, tokens_per_batch, on_batch=advance)
    likelihoods = iter(scored)
    return {i: [next(likelihoods) for _ in question_rows] for i, question_rows in rows.items()}


def _choice_score(name: str, total: int, sums: Sequence[float]) -> ChoiceScore:
    """Return the score, given the sums over all ranks in the order of evaluate_choices()."""
    plain, by_characters, by_bytes, by_tokens, guesses, fewer_examples, too_long = sums
    low, high = wilson(plain, total)
    return ChoiceScore(
        name=name,
        acc=plain / total,
        acc_norm=by_characters / total,
        acc_norm_bytes=by_bytes / total,
        acc_norm_tokens=by_tokens / total,
        total=total,
        low=low,
        high=high,
        baseline=guesses / total,
        fewer_examples=int(fewer_examples),
        too_long=int(too_long),
    )


def _record(
    name: str,
    cloze: Cloze,
    rows: Sequence[PromptRow],
    scores: Sequence[Likelihood],
    picks: Picks,
) -> dict[str, Any]:
    """Return the record of a question; its `prompt` holds the tokens before any scored token."""
    logprobs = [
        [choice, score.logprob, score.tokens]
        for choice, score in zip(cloze.choices, scores, strict=True)
    ]
    return {
        "id": name,
        "prompt": shown_tokens(rows),
        "expected": cloze.choices[cloze.answer],
        "answer": cloze.choices[picks.plain],
        "answer_by_characters": cloze.choices[picks.by_characters],
        "answer_by_bytes": cloze.choices[picks.by_bytes],
        "answer_by_tokens": cloze.choices[picks.by_tokens],
        "logprobs": logprobs,
    }
