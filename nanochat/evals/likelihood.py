"""Measures how likely a model finds given continuations of prompts, in batches sorted by length.

CORE, multiple choice by letter and by text, and the loss by domain all use it to score their rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from nanochat.common import UserError, tr
from nanochat.evals.branches import Branches
from nanochat.model import Model

HEAD_ROWS = 1024  # the number of positions whose logits are in memory at the same time
LEAST_SHARED = 64  # least tokens that sharing a prefix must save, since it costs a second pass

Tokens = TypeVar("Tokens", list[int], tuple[int, ...])


@dataclass(frozen=True)
class PromptRow:
    """The tokens of a prompt and its continuation; those from index `start` on are scored.

    `start` is at least 1 and less than the number of tokens.
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
    """The total log-probability of a row's scored tokens in nats, and their number.

    With `greedy`, score_rows() replaces the log-probability by minus the number of misses.
    """

    logprob: float
    tokens: int

    @property
    def mean_loss(self) -> float:
        """The mean loss per scored token in nats, which CORE compares."""
        return -self.logprob / self.tokens


@dataclass(frozen=True)
class _Input:
    """The tokens that the model reads to score one or more rows, and the indices of these rows.

    Rows that differ only in their last token share an input.
    """

    tokens: tuple[int, ...]
    row_numbers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Family:
    """Inputs of one question that share a prefix, or a single input with a prefix of length 0."""

    prefix_length: int
    inputs: list[_Input]

    @property
    def longest(self) -> int:
        """The number of tokens in the longest input."""
        return max(len(model_input.tokens) for model_input in self.inputs)


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

    With `greedy`, a scored token counts as 0.0 if it is the most likely one, and otherwise as -1.0,
    instead of its log-probability. `on_batch` is called after every batch with the number of rows
    that were scored.

    Rows that differ only in their last token are read as one, and a long prefix that the rows of a
    question share is read only once. Padding comes last, so no row attends to it. Raises UserError
    if a loss is not finite, because the model has diverged.
    """
    likelihoods: dict[int, Likelihood] = {}
    branches = Branches(model, pad)
    families = _families(_inputs(rows), rows)
    for prefix_lengths, inputs in _batches(families, tokens_per_batch, rows_per_batch):
        losses = _losses(model, branches, prefix_lengths, inputs, rows, greedy)
        row_numbers = [i for model_input in inputs for i in model_input.row_numbers]
        losses_by_row = losses.split([rows[i].scored for i in row_numbers])
        for i, row_losses in zip(row_numbers, losses_by_row, strict=True):
            logprob = -float(row_losses.sum())
            likelihoods[i] = Likelihood(logprob, len(row_losses))
        on_batch(len(row_numbers))
    return [likelihoods[i] for i in range(len(rows))]


def tokens_read(rows: Sequence[PromptRow]) -> int:
    """Return how many tokens the model reads in score_rows(), without padding."""
    tokens = 0
    for family in _families(_inputs(rows), rows):
        own_tokens = [len(member.tokens) - family.prefix_length for member in family.inputs]
        tokens += family.prefix_length + sum(own_tokens)
    return tokens


def shown_tokens(rows: Sequence[PromptRow]) -> list[int]:
    """Return the tokens of the first row that come before the first scored token of any row."""
    end = min(row.start for row in rows)
    return rows[0].tokens[:end]


# --- batches -------------------------------------------------------------------------------------


def common_prefix(rows: Sequence[Tokens]) -> int:
    """Return the length of the longest common prefix of all rows, in tokens."""
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
    """Yield the indices of rows in batches of similar lengths, longest first.

    Memory therefore runs out early, if at all. A padded batch has at most `tokens_per_batch`
    positions and `rows_per_batch` rows, where None means no limit, but it always has at least one
    row.
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
    """Return the inputs in families: one for each question whose shared prefix is long enough.

    Every input of the other questions is a family of its own.
    """
    questions: dict[int, list[_Input]] = {}
    for model_input in inputs:
        question = rows[model_input.row_numbers[0]].question
        questions.setdefault(question, []).append(model_input)
    families: list[_Family] = []
    for members in questions.values():
        prefix_length = _shareable_prefix(members, rows)
        saved_tokens = prefix_length * (len(members) - 1)
        if saved_tokens >= LEAST_SHARED:
            families.append(_Family(prefix_length, members))
        else:
            families += [_Family(0, [model_input]) for model_input in members]
    return families


def _shareable_prefix(inputs: Sequence[_Input], rows: Sequence[PromptRow]) -> int:
    """Return the length in tokens of the prefix that can be read once for all of these inputs."""
    # The first scored token is predicted from the hidden state of the token before it, so each
    # input must read that token itself.
    first_scored = min(rows[i].start for model_input in inputs for i in model_input.row_numbers)
    shortest = min(len(model_input.tokens) for model_input in inputs)
    limit = min(first_scored, shortest) - 1
    prefix_length = common_prefix([model_input.tokens for model_input in inputs])
    return max(0, min(limit, prefix_length))


def _batches(
    families: Sequence[_Family],
    tokens_per_batch: int | None,
    rows_per_batch: int | None,
) -> Iterator[tuple[list[int], list[_Input]]]:
    """Yield (prefix lengths, inputs) of every batch, under the limits of batches().

    Families whose inputs share a prefix come first, followed by single inputs, each longest first.
    A family is never split, so one that exceeds the limits is a batch of its own.
    """
    sharing = [family for family in families if family.prefix_length]
    sharing.sort(key=lambda family: -family.longest)
    while sharing:
        count = _count_that_fit(sharing, tokens_per_batch, rows_per_batch)
        batch = sharing[:count]
        sharing = sharing[count:]
        prefix_lengths = [family.prefix_length for family in batch for _ in family.inputs]
        inputs = [model_input for family in batch for model_input in family.inputs]
        yield prefix_lengths, inputs
    single = [family.inputs[0] for family in families if not family.prefix_length]
    lengths = [len(model_input.tokens) for model_input in single]
    for numbers in batches(lengths, tokens_per_batch, rows_per_batch):
        prefix_lengths = [0] * len(numbers)
        yield prefix_lengths, [single[i] for i in numbers]


def _count_that_fit(
    families: Sequence[_Family],
    tokens_per_batch: int | None,
    rows_per_batch: int | None,
) -> int:
    """Return how many of the first families fit into one batch, or 1 if none does.

    The first family must be the longest.
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
    """Return all scored tokens' losses, in the order of `inputs` and their rows.

    They are float64 on the host, in nats or, with `greedy`, as _misses() counts them. Raises
    UserError if a loss is not finite.
    """
    states = branches.hidden(
        [model_input.tokens for model_input in inputs], prefix_lengths
    )  # (B, T, C)
    positions: list[Tensor] = []  # in the flattened batch, of the states that predict scored tokens
    target_ids: list[int] = []
    for b, (model_input, prefix_length) in enumerate(zip(inputs, prefix_lengths, strict=True)):
        offset = b * states.size(1) - prefix_length
        for i in model_input.row_numbers:
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
            tr(
                "the model's loss is not finite, so its training has diverged: evaluate an "
                "earlier step"
            )
        )
    return losses


def _misses(
    model: Model,
    hidden: Tensor,
    targets: Tensor,
) -> Tensor:  # (N, C), (N,) -> (N,)
    """Return 0 for each position whose most likely token is the target, and 1 for every other.

    If a position's largest logit is not finite, that logit is returned instead, so that _losses()
    notices a diverged model.
    """
    misses = []
    hidden_chunks = hidden.split(HEAD_ROWS)
    target_chunks = targets.split(HEAD_ROWS)
    for hidden_chunk, target_chunk in zip(hidden_chunks, target_chunks, strict=True):
        top_logits, top_ids = model.logits(hidden_chunk).max(dim=-1)
        missed = (top_ids != target_chunk).to(top_logits.dtype)
        misses.append(torch.where(top_logits.isfinite(), missed, top_logits))
    return torch.cat(misses)
