"""Multiple choice for models that continue a text: which answer the model finds likeliest, by three counts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from nanochat.common import UserError
from nanochat.data.conversation import Cloze
from nanochat.device import Compute
from nanochat.evals.chat import identify, progress, wilson
from nanochat.evals.likelihood import Likelihood, PromptRow, score_rows
from nanochat.evals.records import Records
from nanochat.model import Model
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer


class ClozeTask(Protocol):
    """Questions that a text poses."""

    @property
    def name(self) -> str:
        """The name of the task in reports."""
        ...

    def __len__(self) -> int: ...

    def cloze(self, i: int) -> Cloze:
        """Question i. UserError if it is broken."""
        ...


@dataclass(frozen=True)
class ChoiceScore:
    """Accuracies over all ranks. `acc` compares the log-probabilities of the answers as they are.

    Long answers have low probabilities, so `acc_norm_bytes` divides by the bytes of each answer and `acc_norm_tokens`
    by its tokens. `low` and `high` bound `acc` with 95 % confidence. `baseline` is the accuracy of guessing.
    """

    name: str
    acc: float
    acc_norm_bytes: float
    acc_norm_tokens: float
    total: int
    low: float
    high: float
    baseline: float
    fewer_examples: int  # questions with examples left out, since the context is too short for them
    too_long: int  # questions that do not fit without examples; they count as wrong

    def __str__(self) -> str:
        left = f"; {self.fewer_examples:,} with fewer examples" if self.fewer_examples else ""
        left += f"; {self.too_long:,} too long for the context" if self.too_long else ""
        return (
            f"{self.name}: acc {100 * self.acc:.2f} %, by bytes {100 * self.acc_norm_bytes:.2f} %, by tokens "
            f"{100 * self.acc_norm_tokens:.2f} % (n = {self.total:,}, 95 % interval of acc {100 * self.low:.1f} to "
            f"{100 * self.high:.1f}, guessing {100 * self.baseline:.1f} %{left})"
        )


def rows_of(
    question: int, context: str, choices: Sequence[str], tokenizer: Tokenizer
) -> list[PromptRow]:
    """A row for each choice after a context and a space, tokenised as lm-evaluation-harness does.

    Context and choice are encoded as one text; the tokens after those of the context alone are scored. Spaces at the
    end of the context count to the choice.
    """
    kept = context.rstrip()
    texts = [kept, *(f"{context} {choice}" for choice in choices)]
    alone, *whole = ([tokenizer.bos, *tokens] for tokens in tokenizer.encode_batch(texts))
    return [PromptRow(question, tokens, min(len(alone), len(tokens) - 1)) for tokens in whole]


def pick(scores: Sequence[Likelihood], choices: Sequence[str]) -> tuple[int, int, int]:
    """The likeliest choice by log-probability, by log-probability per byte, and per token; the first of equals."""
    plain = [one.logprob for one in scores]
    by_bytes = [
        one.logprob / max(len(choice.encode()), 1)
        for one, choice in zip(scores, choices, strict=True)
    ]
    by_tokens = [one.logprob / one.tokens for one in scores]
    return plain.index(max(plain)), by_bytes.index(max(by_bytes)), by_tokens.index(max(by_tokens))


def _fit(i: int, asked: Cloze, tokenizer: Tokenizer, room: int) -> tuple[list[PromptRow], bool]:
    """The rows of a question with as many examples as fit, and whether some were left out."""
    for first in range(len(asked.examples) + 1):
        context = asked.intro + "".join(asked.examples[first:]) + asked.question
        rows = rows_of(i, context, asked.choices, tokenizer)
        if max(len(row.tokens) for row in rows) - 1 <= room:
            break
    return rows, first > 0


def evaluate_choices(
    task: ClozeTask,
    model: Model,
    tokenizer: Tokenizer,
    compute: Compute,
    tokens_per_batch: int,
    limit: int | None = None,
    records: Records | None = None,
) -> ChoiceScore:
    """Evaluate the first `limit` questions. Ranks share the questions; every rank returns the whole score.

    `tokens_per_batch` limits the memory: it is the most positions, padding included, in one pass of the model.
    UserError on every rank if there is no question, or if one rank finds a broken one.
    """
    total = len(task) if limit is None else min(limit, len(task))
    if total < 1:
        raise UserError(
            f"{task.name} has no question to evaluate, got a limit of {limit} on {len(task)} questions",
            2,
        )
    mine, room = range(compute.rank, total, compute.world_size), model.config.sequence_len
    right, fewer, too_long = [0, 0, 0], 0, 0
    with parallel.together(task.name, compute):
        asked = {i: task.cloze(i) for i in mine}
        guesses = sum(1 / len(one.choices) for one in asked.values())
        rows: dict[int, list[PromptRow]] = {}
        for i, one in asked.items():
            fitted, cut = _fit(i, one, tokenizer, room)
            if max(len(row.tokens) for row in fitted) - 1 <= room:
                rows[i] = fitted
                fewer += cut
            else:
                too_long += 1
        flat = [row for some in rows.values() for row in some]
        with progress(task.name, len(flat), "choices", compute) as advance:
            found = iter(score_rows(model, flat, tokenizer.bos, tokens_per_batch, done=advance))
        for i, some in rows.items():
            scores = [next(found) for _ in some]
            picked = pick(scores, asked[i].choices)
            right = [
                count + (one == asked[i].answer) for count, one in zip(right, picked, strict=True)
            ]
            if records:
                records.add(i, _record(identify(task, i), asked[i], some, scores, picked))
    *shares, guesses, fewer, too_long = parallel.total(
        [*map(float, right), guesses, fewer, too_long], compute
    )
    acc, by_bytes, by_tokens = (share / total for share in shares)
    score = ChoiceScore(
        task.name,
        acc,
        by_bytes,
        by_tokens,
        total,
        *wilson(shares[0], total),
        guesses / total,
        int(fewer),
        int(too_long),
    )
    if records:
        records.finish(asdict(score))
    return score


def _record(
    name: str,
    asked: Cloze,
    rows: Sequence[PromptRow],
    scores: Sequence[Likelihood],
    picked: tuple[int, int, int],
) -> dict[str, Any]:
    """The record of a question; `prompt` is what all choices have before them."""
    return {
        "id": name,
        "prompt": rows[0].tokens[: min(row.start for row in rows)],
        "expected": asked.choices[asked.answer],
        "answer": asked.choices[picked[0]],
        "answer_by_bytes": asked.choices[picked[1]],
        "answer_by_tokens": asked.choices[picked[2]],
        "logprobs": [
            [choice, one.logprob, one.tokens]
            for choice, one in zip(asked.choices, scores, strict=True)
        ],
    }
