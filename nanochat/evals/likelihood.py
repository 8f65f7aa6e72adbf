"""How likely a model finds continuations: one batched path, sorted by length, for CORE and every choice of answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat.common import UserError
from nanochat.nn.model import Model

HEAD_ROWS = 1024  # positions whose logits are in memory at the same time


@dataclass(frozen=True)
class PromptRow:
    """The tokens of a prompt with a continuation. The tokens from `start` on, at least one, are scored."""

    question: int
    tokens: list[int]
    start: int


@dataclass(frozen=True)
class Likelihood:
    """The summed log-probability, in nats, of the scored tokens of a row, and how many tokens those are."""

    logprob: float
    tokens: int

    @property
    def mean_loss(self) -> float:
        """The mean loss in nats over the scored tokens, which CORE compares."""
        return -self.logprob / self.tokens


def batches(lengths: Sequence[int], tokens_per_batch: int | None, rows_per_batch: int | None) -> Iterator[list[int]]:
    """Indices of rows of similar length, batch by batch, the longest first, so that memory runs out at once or never.

    A padded batch has at most `tokens_per_batch` positions and `rows_per_batch` rows; None means no limit.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = rows_per_batch or len(order)
        if tokens_per_batch is not None:
            size = max(1, min(size, tokens_per_batch // max(lengths[order[0]], 1)))
        yield order[:size]
        order = order[size:]


class _Pass:
    """One row to run through the model. Rows that differ only in their last token share it."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens = tokens
        self.rows: list[int] = []


def _passes(rows: Sequence[PromptRow]) -> list[_Pass]:
    found: dict[tuple[int, ...], _Pass] = {}
    for i, row in enumerate(rows):
        read = tuple(row.tokens[:-1])  # nothing is predicted from the last token
        found.setdefault(read, _Pass(read)).rows.append(i)
    return list(found.values())


@torch.inference_mode()
def score_rows(
    model: Model,
    rows: Sequence[PromptRow],
    pad: int,
    tokens_per_batch: int | None = None,
    rows_per_batch: int | None = None,
    greedy: bool = False,
    done: Callable[[int], None] = lambda rows: None,
) -> list[Likelihood]:
    """The likelihood of each row's continuation, in the order of the rows; `done` hears how many rows a batch scored.

    With `greedy`, the log-probability is 0.0 if the likeliest token is right at every place, else -1.0 for each place
    where it is wrong. Options of one token each, such as letters, cost one pass together. Padding comes last, so no
    row attends to it. UserError if the model has diverged.
    """
    found: list[Likelihood | None] = [None] * len(rows)
    passes = _passes(rows)
    for batch in batches([len(one.tokens) for one in passes], tokens_per_batch, rows_per_batch):
        some = [passes[i] for i in batch]
        numbers = [i for one in some for i in one.rows]
        values = _losses(model, some, rows, pad, greedy)
        counts = [len(rows[i].tokens) - rows[i].start for i in numbers]
        for i, part in zip(numbers, values.split(counts), strict=True):
            found[i] = Likelihood(-float(part.sum()), len(part))
        done(len(numbers))
    return [one for one in found if one is not None]


def _losses(model: Model, passes: Sequence[_Pass], rows: Sequence[PromptRow], pad: int, greedy: bool) -> Tensor:
    """The loss in nats of every scored token of a batch, row after row: float64 on the host."""
    longest = max(len(one.tokens) for one in passes)
    idx = torch.full((len(passes), longest), pad)
    places: list[Tensor] = []  # in the flattened batch: positions whose hidden states predict the scored tokens
    targets: list[int] = []
    for b, one in enumerate(passes):
        idx[b, : len(one.tokens)] = torch.tensor(one.tokens)
        for i in one.rows:
            places.append(torch.arange(rows[i].start - 1, len(rows[i].tokens) - 1) + b * longest)
            targets += rows[i].tokens[rows[i].start :]
    wanted = torch.tensor(targets).to(model.device)
    hidden = model.hidden(idx.to(model.device)).flatten(0, 1)[torch.cat(places).to(model.device)]  # (N, C)
    if greedy:
        parts = []
        for i in range(0, len(wanted), HEAD_ROWS):
            most, places_of = model.logits(hidden[i : i + HEAD_ROWS]).max(dim=-1)
            parts.append(torch.where(most.isfinite(), (places_of != wanted[i : i + HEAD_ROWS]).to(most.dtype), most))
        values = torch.cat(parts).double().cpu()
    else:
        values = model.token_losses(hidden, wanted).double().cpu()
    if not values.isfinite().all():
        raise UserError("the model's loss is not finite, so its training has diverged: evaluate an earlier step")
    return values
