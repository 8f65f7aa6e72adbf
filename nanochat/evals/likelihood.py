"""Measures how likely a model finds given continuations of prompts, in batches sorted by length.

CORE, multiple choice by letter and by text, and the split by domain all score their rows here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from nanochat.common import UserError
from nanochat.evals.branches import Branches
from nanochat.model import Model

HEAD_ROWS = 1024  # positions whose logits are in memory at the same time
LEAST_SHARED = 64  # tokens that reading a prefix once must save, since it costs a second pass

Tokens = TypeVar("Tokens", list[int], tuple[int, ...])


@dataclass(frozen=True)
class PromptRow:
    """The tokens of a prompt with a continuation.

    The tokens from `start` on, at least one, are scored.
    """

    question: int  # rows of the same question may share a prefix
    tokens: list[int]
    start: int

    @property
    def scored(self) -> int:
        """The number of scored tokens."""
        return len(self.tokens) - self.start


@dataclass(frozen=True)
class Likelihood:
    """The summed log-probability, in nats, of the scored tokens of a row, and their number."""

    logprob: float
    tokens: int

    @property
    def mean_loss(self) -> float:
        """The mean loss in nats over the scored tokens, which CORE compares."""
        return -self.logprob / self.tokens


@dataclass(frozen=True)
class _Input:
    """Tokens that the model reads, and the numbers of the rows that are scored by them.

    Rows that differ only in their last token share an input.
    """

    tokens: tuple[int, ...]
    row_numbers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Family:
    """Inputs of one question whose first `prefix_length` tokens are equal and read only once."""

    prefix_length: int
    inputs: list[_Input]

    @property
    def longest(self) -> int:
        """The length of the longest input in tokens."""
        return max(len(entry.tokens) for entry in self.inputs)


@torch.inference_mode()
def score_rows(
    model: Model,
    rows: Sequence[PromptRow],
    pad: int,
    tokens_per_batch: int | None = None,
    rows_per_batch: int | None = None,
    greedy: bool = False,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> list[Likelihood]:
    """Return the likelihood of each row's continuation, in the order of the rows.

    `on_batch` is called after every batch with the number of rows that the batch scored. With
    `greedy`, every scored token counts 0.0 if it is the likeliest one, else -1.0, instead of its
    log-probability. Options of one token each, such as letters, cost one pass together, and the
    prefix that the rows of a question share is read once. Padding comes last, so no row attends to
    it. Raises UserError if the model has diverged.
    """
    likelihoods: dict[int, Likelihood] = {}
    branches = Branches(model, pad)
    families = _families(_inputs(rows), rows)
    for prefix_lengths, inputs in _batches(families, tokens_per_batch, rows_per_batch):
        losses = _losses(model, branches, prefix_lengths, inputs, rows, greedy)
        row_numbers = [i for entry in inputs for i in entry.row_numbers]
        losses_by_row = losses.split([rows[i].scored for i in row_numbers])
        for i, row_losses in zip(row_numbers, losses_by_row, strict=True):
            logprob = -float(row_losses.sum())
            likelihoods[i] = Likelihood(logprob, len(row_losses))
        on_batch(len(row_numbers))
    return [likelihoods[i] for i in range(len(rows))]


def shown_tokens(rows: Sequence[PromptRow]) -> list[int]:
    """Return the tokens that the rows of a question show before any of them scores a token."""
    end = min(row.start for row in rows)
    return rows[0].tokens[:end]


# --- batches -------------------------------------------------------------------------------------


def common_prefix(rows: Sequence[Tokens]) -> int:
    """Return the number of tokens that all rows have in common at the start."""
    # In lexicographic order, every other row lies between these two.
    first = min(rows)
    last = max(rows)
    for i, (a, b) in enumerate(zip(first, last, strict=False)):
        if a != b:
            return i
    return min(len(first), len(last))


def batches(
    lengths: Sequence[int],
    tokens_per_batch: int | None,
    rows_per_batch: int | None,
) -> Iterator[list[int]]:
    """Yield the indices of rows of similar length, batch by batch.

    The longest rows come first, so that memory runs out at once or never. A padded batch has at
    most `tokens_per_batch` positions and `rows_per_batch` rows; None means no limit.
    """
    order = list(range(len(lengths)))
    order.sort(key=lambda i: -lengths[i])
    while order:
        size = rows_per_batch or len(order)
        if tokens_per_batch is not None:
            longest = max(lengths[order[0]], 1)
            size = max(1, min(size, tokens_per_batch // longest))
        yield order[:size]
        order = order[size:]


def _inputs(rows: Sequence[PromptRow]) -> list[_Input]:
    inputs: dict[tuple[int, ...], _Input] = {}
    for i, row in enumerate(rows):
        tokens = tuple(row.tokens[:-1])  # nothing is predicted from the last token
        inputs.setdefault(tokens, _Input(tokens)).row_numbers.append(i)
    return list(inputs.values())


def _families(inputs: Sequence[_Input], rows: Sequence[PromptRow]) -> list[_Family]:
    """Group the inputs of each question; an input that shares too little stays alone."""
    questions: dict[int, list[_Input]] = {}
    for entry in inputs:
        question = rows[entry.row_numbers[0]].question
        questions.setdefault(question, []).append(entry)
    families: list[_Family] = []
    for members in questions.values():
        prefix_length = _shareable_prefix(members, rows)
        saved_tokens = prefix_length * (len(members) - 1)
        if saved_tokens >= LEAST_SHARED:
            families.append(_Family(prefix_length, members))
        else:
            families += [_Family(0, [entry]) for entry in members]
    return families


def _shareable_prefix(inputs: Sequence[_Input], rows: Sequence[PromptRow]) -> int:
    """Return how many tokens at the start of all inputs can be read once."""
    # The first scored token is predicted from the token before it, whose hidden state each input
    # needs.
    first_scored = min(rows[i].start for entry in inputs for i in entry.row_numbers)
    shortest = min(len(entry.tokens) for entry in inputs)
    limit = min(first_scored, shortest) - 1
    prefix_length = common_prefix([entry.tokens for entry in inputs])
    return max(0, min(limit, prefix_length))


def _batches(
    families: Sequence[_Family],
    tokens_per_batch: int | None,
    rows_per_batch: int | None,
) -> Iterator[tuple[list[int], list[_Input]]]:
    """Yield the prefix lengths and the inputs of every batch, within the limits that batches() has.

    Families that share a prefix come first, then single inputs; among both, the longest come first.
    """
    sharing = [family for family in families if family.prefix_length]
    sharing.sort(key=lambda family: -family.longest)
    while sharing:
        count = _count_that_fit(sharing, tokens_per_batch, rows_per_batch)
        batch = sharing[:count]
        sharing = sharing[count:]
        prefix_lengths = [family.prefix_length for family in batch for _ in family.inputs]
        inputs = [entry for family in batch for entry in family.inputs]
        yield prefix_lengths, inputs
    single = [family.inputs[0] for family in families if not family.prefix_length]
    lengths = [len(entry.tokens) for entry in single]
    for numbers in batches(lengths, tokens_per_batch, rows_per_batch):
        prefix_lengths = [0] * len(numbers)
        yield prefix_lengths, [single[i] for i in numbers]


def _count_that_fit(
    families: Sequence[_Family],
    tokens_per_batch: int | None,
    rows_per_batch: int | None,
) -> int:
    """Return how many of the first families fit into one batch, at least 1.

    The first family is the longest.
    """
    longest = families[0].longest
    slots = 0
    for count, family in enumerate(families):
        slots += len(family.inputs)
        too_many_tokens = tokens_per_batch is not None and slots * longest > tokens_per_batch
        too_many_rows = rows_per_batch is not None and slots > rows_per_batch
        if count > 0 and (too_many_tokens or too_many_rows):
            return count
    return len(families)


# --- losses --------------------------------------------------------------------------------------


def _losses(
    model: Model,
    branches: Branches,
    prefix_lengths: Sequence[int],
    inputs: Sequence[_Input],
    rows: Sequence[PromptRow],
    greedy: bool,
) -> Tensor:
    """Return the loss in nats of every scored token, row after row, float64 on the host."""
    states = branches.hidden([entry.tokens for entry in inputs], prefix_lengths)  # (B, T, C)
    positions: list[Tensor] = []  # in the flattened batch, of the states that predict scored tokens
    target_ids: list[int] = []
    for b, (entry, prefix_length) in enumerate(zip(inputs, prefix_lengths, strict=True)):
        offset = b * states.size(1) - prefix_length
        for i in entry.row_numbers:
            row = rows[i]
            predicting = torch.arange(row.start - 1, len(row.tokens) - 1)
            positions.append(predicting + offset)
            target_ids += row.tokens[row.start :]
    targets = torch.tensor(target_ids).to(model.device)  # (N,)
    index = torch.cat(positions).to(model.device)
    hidden = states.flatten(0, 1)[index]  # (N, C)
    losses = _misses(model, hidden, targets) if greedy else model.token_losses(hidden, targets)
    losses = losses.cpu().double()
    if not losses.isfinite().all():
        raise UserError(
            "the model's loss is not finite, so its training has diverged: evaluate an earlier step"
        )
    return losses


def _misses(
    model: Model,
    hidden: Tensor,
    targets: Tensor,
) -> Tensor:  # (N, C), (N,) -> (N,)
    """Return 0 where the likeliest token is the target, else 1; keep logits that are not finite."""
    misses = []
    hidden_chunks = hidden.split(HEAD_ROWS)
    target_chunks = targets.split(HEAD_ROWS)
    for hidden_chunk, target_chunk in zip(hidden_chunks, target_chunks, strict=True):
        top_logits, top_ids = model.logits(hidden_chunk).max(dim=-1)
        missed = (top_ids != target_chunk).to(top_logits.dtype)
        misses.append(torch.where(top_logits.isfinite(), missed, top_logits))
    return torch.cat(misses)
