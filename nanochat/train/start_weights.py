"""The weights that fine-tuning starts from, to mix the finished model with them."""

import torch
import torch.nn as nn

from nanochat.common import UserError
from nanochat.device import local


class StartWeights:
    """A copy of the weights that a stage starts from: this rank's part, in memory.

    A model between start and end answers more questions in new wordings than either of them, and
    forgets less of what the start knew (WiSE-FT, Wortsman et al. 2022, arXiv:2109.01903;
    dev/LOG.md has the figures for TinyWorld).
    """

    def __init__(self, model: nn.Module, share: float):
        """`share` is the share of these weights in the finished model; 0 copies nothing.

        Raises UserError (code 2) unless the share is at least 0 and below 1.
        """
        if not 0 <= share < 1:
            raise UserError(f"--start_share must be at least 0 and below 1, got {share:g}", 2)
        self.model = model
        self.share = share
        self._weights: list[torch.Tensor] = []
        if share:
            self._weights = [local(weight).detach().clone() for weight in model.parameters()]

    @torch.no_grad()
    def mix(self) -> None:
        """Move the model's weights towards the weights of the start by the share."""
        if not self.share:
            return
        for parameter, weight in zip(self.model.parameters(), self._weights, strict=True):
            local(parameter).lerp_(weight, self.share)
