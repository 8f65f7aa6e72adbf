"""Mixes a fine-tuned model with the weights that fine-tuning started from."""

import torch
import torch.nn as nn

from nanochat.common import UserError, tr
from nanochat.device import local


class StartWeights:
    """An in-memory copy of the weights that a stage starts from, or this rank's shard of them.

    A model between the start and the end of fine-tuning often answers more questions in new
    wordings than either, and forgets less of what the start model knew (WiSE-FT, Wortsman et al.
    2022, arXiv:2109.01903; dev/LOG.md has the figures for TinyWorld).
    """

    def __init__(self, model: nn.Module, share: float):
        """Copy the model's weights, which will make up `share` of the mix, unless `share` is 0.

        Raises UserError (exit code 2) unless the share is at least 0 and below 1.
        """
        if not 0 <= share < 1:
            raise UserError(
                tr("--start_share must be at least 0 and below 1, got {share:g}", share=share), 2
            )
        self.model = model
        self.share = share
        self._weights: list[torch.Tensor] = []
        if share:
            self._weights = [local(weight).detach().clone() for weight in model.parameters()]

    @torch.no_grad()
    def mix(self) -> None:
        """Replace the model's weights with `share` * start + (1 - `share`) * current."""
        if not self.share:
            return
        for parameter, weight in zip(self.model.parameters(), self._weights, strict=True):
            local(parameter).lerp_(weight, self.share)
