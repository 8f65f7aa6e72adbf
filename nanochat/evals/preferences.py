"""How much likelier a model finds preferred answers than a reference model does, and the loss that makes them so."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.common import UserError, atomic_path, warn
from nanochat.context import Packed
from nanochat.dataloader import PairRows
from nanochat.device import Compute, to_device
from nanochat.runtime import parallel, signals
from nanochat.runtime.progress import Progress


@dataclass(frozen=True)
class PreferenceLoss:
    """Direct preference optimisation (DPO, arXiv 2305.18290): -log sigmoid(margin), a mean over pairs.

    The margin of a pair is beta * (log p / p_ref of the preferred answer - log p / p_ref of the other one), where p_ref
    is what the model said before training. A row holds both answers of a pair, so one pass gives the losses of all
    their tokens, and the gradient of this loss is a weight for each of them: model(..., "none") applies the weights in
    chunks, and the logits never exist at once.
    """

    beta: float = (
        0.1  # how far the model is held to the reference: a smaller beta lets it move further
    )
    label_smoothing: float = 0.0  # the share of pairs that may be the wrong way round (cDPO)
    sft_weight: float = 0.0  # of the preferred answer's loss in nats per token, which is added (RPO, arXiv 2404.19733)
    figures: tuple[str, ...] = ("accuracy", "margin", "chosen_reward")

    def __post_init__(self) -> None:
        rules = (
            ("beta of DPO", self.beta, self.beta > 0, "above 0"),
            (
                "label smoothing of DPO",
                self.label_smoothing,
                0 <= self.label_smoothing < 0.5,
                "from 0 to below 0.5",
            ),
            (
                "weight of the preferred answers' own loss",
                self.sft_weight,
                self.sft_weight >= 0,
                "0 or above",
            ),
        )
        for name, value, fits, rule in rules:
            if not fits:
                raise UserError(f"the {name} must be {rule}, got {value}", 2)

    def __call__(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, **extras: Tensor
    ) -> Tensor:
        """The sums over the pairs of a batch of PairRows: of the loss, of the pairs with a margin above 0, of the
        margins, and of beta * log p / p_ref of preferred answers, (4,)."""
        references = extras["references"]
        scores, lengths = answer_scores(
            model, inputs, targets, extras["documents"], references.size(1)
        )
        rewards = self.beta * (scores - references)  # (B, P, 2)
        margin, there = rewards[..., 0] - rewards[..., 1], lengths[..., 0] > 0
        smooth = self.label_smoothing
        loss = -(1 - smooth) * F.logsigmoid(margin) - smooth * F.logsigmoid(-margin)
        if self.sft_weight:
            loss = loss - self.sft_weight * scores[..., 0] / lengths[..., 0].clamp_min(1)
        each = torch.stack((loss, (margin > 0).float(), margin, rewards[..., 0]))  # (4, B, P)
        return torch.where(there, each, 0.0).sum(dim=(1, 2))


def answer_scores(
    model: nn.Module,
    inputs: Tensor,  # (B, T), rows of whole pairs
    targets: Tensor,  # (B, T), -1 where no answer is
    documents: Tensor,  # (B, T), 2n and 2n + 1 for the answers of pair n of a row
    pairs: int,  # the largest number of pairs in a row
) -> tuple[Tensor, Tensor]:
    """The log-probability of every answer in nats, fp32 (B, P, 2), and its length in tokens; 0 where there is none."""
    losses = model(inputs, targets, "none", context=Packed(documents))
    numbers = torch.arange(2 * pairs, device=documents.device)[None, :, None]
    own = (documents[:, None] == numbers) & (targets >= 0)[:, None]  # (B, 2 P, T)
    # A sum over a mask and not scatter_add, whose order differs from run to run on some devices.
    scores = -torch.where(own, losses[:, None], 0.0).sum(dim=2)
    return scores.unflatten(1, (pairs, 2)), own.sum(dim=2).unflatten(1, (pairs, 2))


def add_references(
    rows: PairRows, model: nn.Module, identity: str, batch_rows: int, compute: Compute
) -> None:
    """Give the pairs of `rows` the log-probabilities of their answers under the model, which is not trained yet.

    They are computed once, in one pass over the rows, and kept beside the tokens: a run that resumes needs no reference
    model and learns from the same bits. `identity` names the model; a pass has at most `batch_rows` rows. Every rank
    must call this. signals.Stopped if the run is told to stop.
    """
    facts = f"{rows.key} {identity} {compute.dtype}"
    path = rows.folder / f"reference-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.npz"
    kept = _read(path, rows.references.shape) if compute.main else None
    if not parallel.agree(int(kept is not None), compute):
        kept = _score(rows, model, batch_rows, compute)
        if compute.main:
            with atomic_path(path) as temporary, open(temporary, "wb") as file:
                np.savez(file, references=kept)
    if kept is None or not compute.main:  # rank 0 tells the others, whose disk may be another one
        kept = np.zeros_like(rows.references)
    rows.references = _sum(kept, compute)


def _read(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The kept log-probabilities; None if there are none, or if they are damaged, which also prints a warning."""
    if not path.exists():
        return None
    try:
        with np.load(path) as content:  # which checks the CRC of what it reads
            found = content["references"]
        if found.shape == shape and found.dtype == np.float32:
            return found
        why = f"it holds {found.shape} values of {found.dtype}, expected {shape}"
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as failure:
        why = str(failure)
    warn(
        f"the reference's log-probabilities in {path} cannot be used and are computed again: {why}"
    )
    return None


@torch.no_grad()
def _score(rows: PairRows, model: nn.Module, batch_rows: int, compute: Compute) -> np.ndarray:
    """The log-probabilities of all answers, float32 (pairs, 2), on every rank; each computes those of its rows."""
    found, count = np.zeros_like(rows.references), rows.size
    model.eval()  # without dropout
    with Progress(f"reference {rows.folder.name}", count, "rows", shown=compute.main) as progress:
        for first in range(0, count, batch_rows * compute.world_size):
            signals.check(compute)
            begin = first + compute.rank * batch_rows
            own = np.arange(begin, min(begin + batch_rows, count))
            # A sharded model needs every rank in every pass, so a rank without a row of its own reads the first one.
            inputs, targets, documents, references = rows.batch(
                own if len(own) else np.zeros(1, np.int64)
            )
            inputs, targets, documents = (
                to_device(one, compute) for one in (inputs, targets, documents)
            )
            scores, _ = answer_scores(model, inputs, targets, documents, references.size(1))
            for row, of_row in zip(own, scores.cpu().numpy(), strict=len(own) > 0):
                start, end = rows.pair_starts[row : row + 2]
                found[start:end] = of_row[: end - start]
            compute.pulse.beat()
            progress.advance(min(batch_rows * compute.world_size, count - first))
    model.train()
    return _sum(found, compute)


def _sum(values: np.ndarray, compute: Compute) -> np.ndarray:
    """The sum over all ranks of values that one rank has and the others have as 0, so that no bit changes."""
    return np.array(parallel.total(values.ravel().tolist(), compute), np.float32).reshape(
        values.shape
    )
