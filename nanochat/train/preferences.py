"""Computes the loss of direct preference optimisation (DPO), and its reference log-probabilities.

PairRows holds pairs of answers to one prompt, a preferred and a rejected one. For each pair, the
loss looks at how much more likely each answer is under the model than under the reference model,
and compares the preferred answer with the rejected one.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.common import UserError, tr
from nanochat.context import Packed
from nanochat.device import Compute
from nanochat.train.chat_rows import PairRows
from nanochat.train.references import row_scores, saved_or_scored


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of DPO (arXiv 2305.18290), which for each pair is -log sigmoid(margin) by default.

    The margin of a pair is beta * (log(p / p_ref) of the preferred answer - log(p / p_ref) of the
    rejected one), where p_ref is the probability under the model before training. Both answers
    of a pair are in one row, so one forward pass gives the losses of all their tokens. DPO's
    gradient needs only a weight for each of these losses, which model(..., "none") applies in
    chunks, so that the logits never exist all at once.
    """

    beta: float = 0.1  # a smaller beta lets the model move further away from the reference
    label_smoothing: float = 0.0  # the share of pairs that may be the wrong way round (cDPO)
    # The weight of the preferred answer's own loss, in nats per token, which is added to the loss
    # (RPO, arXiv 2404.19733).
    sft_weight: float = 0.0
    figures: tuple[str, ...] = ("accuracy", "margin", "chosen_reward")

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise UserError(tr("the beta of DPO must be above 0, got {beta}", beta=self.beta), 2)
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(
                tr(
                    "the label smoothing of DPO must be from 0 to below 0.5, got {share}",
                    share=self.label_smoothing,
                ),
                2,
            )
        if not self.sft_weight >= 0:
            raise UserError(
                tr(
                    "the weight of the preferred answers' own loss must be 0 or above, "
                    "got {weight}",
                    weight=self.sft_weight,
                ),
                2,
            )

    def __call__(
        self,
        model: nn.Module,
        inputs: Tensor,  # (B, T)
        targets: Tensor,  # (B, T)
        **extras: Tensor,  # documents (B, T) and references (B, P, 2) of PairRows
    ) -> Tensor:  # (4,)
        """Return four sums over all pairs in a batch of PairRows.

        They are the loss, the number of pairs with a margin above 0, the margin, and the reward of
        the preferred answer, which is beta * log(p / p_ref).
        """
        references = extras["references"]
        scores, lengths = answer_scores(
            model, inputs, targets, extras["documents"], references.size(1)
        )
        rewards = self.beta * (scores - references)  # (B, P, 2)
        margin = rewards[..., 0] - rewards[..., 1]
        smooth = self.label_smoothing
        loss = -(1 - smooth) * F.logsigmoid(margin) - smooth * F.logsigmoid(-margin)
        chosen_length = lengths[..., 0]
        if self.sft_weight:
            loss = loss - self.sft_weight * scores[..., 0] / chosen_length.clamp_min(1)
        chosen_reward = rewards[..., 0]
        is_right = (margin > 0).float()
        by_pair = torch.stack((loss, is_right, margin, chosen_reward))  # (4, B, P)
        has_pair = chosen_length > 0  # (B, P); rows hold different numbers of pairs
        return torch.where(has_pair, by_pair, 0.0).sum(dim=(1, 2))


def answer_scores(
    model: nn.Module,
    inputs: Tensor,  # (B, T), rows of whole pairs
    targets: Tensor,  # (B, T), -1 outside the answers
    documents: Tensor,  # (B, T), 2n and 2n + 1 for the answers of pair n of a row
    pairs: int,  # the largest number of pairs in a row
) -> tuple[Tensor, Tensor]:
    """Return the log-probability and the length of every answer, (B, P, 2) each.

    Log-probabilities are in nats (fp32), and lengths in tokens. Both are 0 for pairs that a row
    does not have.
    """
    losses = model(inputs, targets, "none", context=Packed(documents))
    numbers = torch.arange(2 * pairs, device=documents.device)[None, :, None]
    is_target = (targets >= 0)[:, None]
    in_answer = (documents[:, None] == numbers) & is_target  # (B, 2 P, T)
    # A masked sum instead of scatter_add, whose order differs from run to run on some devices.
    scores = -torch.where(in_answer, losses[:, None], 0.0).sum(dim=2)
    lengths = in_answer.sum(dim=2)
    shape = (pairs, 2)
    return scores.unflatten(1, shape), lengths.unflatten(1, shape)


# --- the reference model -------------------------------------------------------------------------


def add_references(
    rows: PairRows,
    model: nn.Module,
    identity: str,
    batch_rows: int,
    compute: Compute,
) -> None:
    """Set `rows.references` to the log-probabilities of all answers under `model`, the reference.

    They are computed before training and saved next to the tokens, so that a run that resumes uses
    exactly the same values. `identity` identifies the model, and a forward pass has at most
    `batch_rows` rows on each rank. Every rank must call this. Raises signals.Stopped if the run is
    asked to stop.
    """

    def score(
        inputs: Tensor, targets: Tensor, documents: Tensor, references: Tensor
    ) -> Tensor:  # (B, P, 2)
        return answer_scores(model, inputs, targets, documents, references.size(1))[0]

    def score_all() -> np.ndarray:
        log_probabilities = np.zeros_like(rows.references)
        for row, pair_scores in row_scores(rows, model, score, batch_rows, compute):
            start, end = rows.pair_starts[row : row + 2]
            log_probabilities[start:end] = pair_scores[: end - start]
        return log_probabilities

    facts = f"{rows.key} {identity} {compute.dtype}"
    shape = rows.references.shape
    rows.references = saved_or_scored(rows.folder, facts, shape, score_all, compute)
