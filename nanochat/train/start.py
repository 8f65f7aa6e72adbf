"""Mixes a fine-tuned model with the one that it started from.

A model between both answers more questions in new wordings than either of them, and forgets less of what the start knew
(WiSE-FT, Wortsman et al. 2022, arXiv:2109.01903; dev/LOG.md has the figures for TinyWorld).
"""

import torch
import torch.nn as nn

from nanochat.common import UserError
from nanochat.device import local


class Start:
    """The weights that a stage starts from: this rank's part, in memory beside those that are trained."""

    def __init__(self, model: nn.Module, share: float):
        """`share` of the finished model is the start's. UserError (code 2) unless it is at least 0 and below 1."""
        if not 0 <= share < 1:
            raise UserError(f"--start_share must be at least 0 and below 1, got {share:g}", 2)
        self.model, self.share = model, share
        self._weights = [local(parameter).detach().clone() for parameter in model.parameters()] if share else []

    @torch.no_grad()
    def mix(self) -> None:
        """Move the model's weights towards the start's by the share; nothing happens if that is 0."""
        if self.share:
            for parameter, weight in zip(self.model.parameters(), self._weights, strict=True):
                local(parameter).lerp_(weight, self.share)
