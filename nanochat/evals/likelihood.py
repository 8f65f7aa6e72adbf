"""How likely a model finds continuations: one batched path, sorted by length, for CORE and every choice of answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat.common import UserError
from nanochat.evals.branches import Branches
from nanochat.model import Model

HEAD_ROWS = 1024  # positions whose logits are in memory at the same time
LEAST_SHARED = 64  # tokens that a question must spare, or its rows are read whole: a second pass has a price too


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


def batches(
    lengths: Sequence[int], tokens_per_batch: int | None, rows_per_batch: int | None
) -> Iterator[list[int]]:
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

    def __init__(self, tokens: tuple[int, ...]):
        self.tokens = tokens
        self.rows: list[int] = []


def _passes(rows: Sequence[PromptRow]) -> list[_Pass]:
    found: dict[tuple[int, ...], _Pass] = {}
    for i, row in enumerate(rows):
        read = tuple(row.tokens[:-1])  # nothing is predicted from the last token
        found.setdefault(read, _Pass(read)).rows.append(i)
    return list(found.values())


def _families(passes: Sequence[_Pass], rows: Sequence[PromptRow]) -> list[tuple[int, list[_Pass]]]:
    """The passes of each question together, with how many tokens they have in common at the start, which are read once.
    A pass that shares too little is alone, with 0."""
    questions: dict[int, list[_Pass]] = {}
    for one in passes:
        questions.setdefault(rows[one.rows[0]].question, []).append(one)
    families: list[tuple[int, list[_Pass]]] = []
    for some in questions.values():
        scored = min(
            rows[i].start for one in some for i in one.rows
        )  # its prediction must come after the common part
        most = min(scored - 1, *(len(one.tokens) - 1 for one in some))
        low, high = (
            min(one.tokens for one in some),
            max(one.tokens for one in some),
        )  # any other lies between these
        alike = next((i for i in range(most) if low[i] != high[i]), max(most, 0))
        if alike * (len(some) - 1) >= LEAST_SHARED:
            families.append((alike, some))
        else:
            families += [(0, [one]) for one in some]
    return families


def _batches(
    families: Sequence[tuple[int, list[_Pass]]],
    tokens_per_batch: int | None,
    rows_per_batch: int | None,
) -> Iterator[tuple[list[int], list[_Pass]]]:
    """How many tokens were read before of each pass, and the passes, batch by batch: first those that share their
    beginnings, then the others. The longest come first, and a batch is limited as in batches()."""
    sharing = sorted(
        (one for one in families if one[0]), key=lambda one: -max(len(p.tokens) for p in one[1])
    )
    while sharing:
        longest, taken, slots = max(len(one.tokens) for one in sharing[0][1]), 0, 0
        while taken < len(sharing):
            slots += len(sharing[taken][1])
            full = (tokens_per_batch is not None and slots * longest > tokens_per_batch) or (
                rows_per_batch is not None and slots > rows_per_batch
            )
            if full and taken:
                break
            taken += 1
        some, sharing = sharing[:taken], sharing[taken:]
        yield (
            [alike for alike, passes in some for _ in passes],
            [one for _, passes in some for one in passes],
        )
    alone = [passes[0] for alike, passes in families if not alike]
    for batch in batches([len(one.tokens) for one in alone], tokens_per_batch, rows_per_batch):
        yield [0] * len(batch), [alone[i] for i in batch]


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
    where it is wrong. Options of one token each, such as letters, cost one pass together, and the beginning that the
    rows of a question have in common is read once. Padding comes last, so no row attends to it. UserError if the model
    has diverged.
    """
    found: list[Likelihood | None] = [None] * len(rows)
    branches = Branches(model, pad)
    for before, some in _batches(_families(_passes(rows), rows), tokens_per_batch, rows_per_batch):
        numbers = [i for one in some for i in one.rows]
        values = _losses(model, branches, before, some, rows, greedy)
        counts = [len(rows[i].tokens) - rows[i].start for i in numbers]
        for i, part in zip(numbers, values.split(counts), strict=True):
            found[i] = Likelihood(-float(part.sum()), len(part))
        done(len(numbers))
    return [one for one in found if one is not None]


def _losses(
    model: Model,
    branches: Branches,
    before: Sequence[int],
    passes: Sequence[_Pass],
    rows: Sequence[PromptRow],
    greedy: bool,
) -> Tensor:
    """The loss in nats of every scored token of a batch, row after row: float64 on the host."""
    states = branches.hidden([one.tokens for one in passes], before)  # (B, T, C)
    longest = states.size(1)
    places: list[
        Tensor
    ] = []  # in the flattened batch: positions whose hidden states predict the scored tokens
    targets: list[int] = []
    for b, (one, read) in enumerate(zip(passes, before, strict=True)):
        for i in one.rows:
            places.append(
                torch.arange(rows[i].start - 1, len(rows[i].tokens) - 1) - read + b * longest
            )
            targets += rows[i].tokens[rows[i].start :]
    wanted = torch.tensor(targets).to(model.device)
    hidden = states.flatten(0, 1)[torch.cat(places).to(model.device)]  # (N, C)
    if greedy:
        parts = []
        for i in range(0, len(wanted), HEAD_ROWS):
            most, places_of = model.logits(hidden[i : i + HEAD_ROWS]).max(dim=-1)
            parts.append(
                torch.where(
                    most.isfinite(), (places_of != wanted[i : i + HEAD_ROWS]).to(most.dtype), most
                )
            )
        values = torch.cat(parts).cpu().double()
    else:
        values = model.token_losses(hidden, wanted).cpu().double()
    if not values.isfinite().all():
        raise UserError(
            "the model's loss is not finite, so its training has diverged: evaluate an earlier step"
        )
    return values
