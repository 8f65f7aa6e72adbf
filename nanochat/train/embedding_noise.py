"""Noise on the embeddings of a published model that is fine-tuned (NEFTune, arXiv:2310.05914).

A model that reads a few conversations many times knows their wordings by heart, and may not answer
when a question has another wording. Noise makes every reading of a wording a little different.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.device import Compute

NOISES = 4093  # vectors of noise among which the tokens of a step choose; a prime


class EmbeddingNoise:
    """Adds noise to embeddings: uniform, and at most `share` of the embedding's root mean square.

    The noise of a token follows from the step and from the tokens of its row up to it. So a step
    learns the same however its rows are divided among passes and ranks, and after a resume.
    """

    def __init__(self, share: float, channels: int, seed: int, compute: Compute):
        generator = torch.Generator().manual_seed(seed)
        noises = 2 * torch.rand(NOISES, channels, generator=generator) - 1
        self._noises = (share * noises).to(compute.device, compute.dtype)
        self._step = torch.zeros((), dtype=torch.long, device=compute.device)

    def renew(self, step: int) -> None:
        """Choose other noise for the passes of a step."""
        self._step.fill_(step)

    def __call__(
        self,
        x: Tensor,  # (B, T, C) the embeddings of `idx`
        idx: Tensor,  # (B, T)
    ) -> Tensor:  # (B, T, C)
        """Return the embeddings with the noise of this step."""
        noise = F.embedding((idx.cumsum(-1) + self._step) % NOISES, self._noises)
        size = x.detach().float().square().mean(-1, keepdim=True).sqrt()
        return x + size.to(x.dtype) * noise
