"""The Llama models: Llama 2 and 3, SmolLM2, Mistral, and others with their layers.

They are Qwen models without biases and without norms of queries and keys. Llama 3.1 and later
divide the low frequencies of the rotary embedding, for contexts longer than in pretraining.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat.common import UserError, tr
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen


@dataclass(frozen=True)
class LlamaConfig(QwenConfig):
    """The shape of a Llama model."""

    qk_norm: int = 0
    rope_factor: float = 1.0  # divides the low rotary frequencies; 1 = all stay as they are
    rope_low: float = 1.0  # turns within rope_original up to which a frequency is low
    rope_high: float = 4.0  # turns from which a frequency stays as it is
    rope_original: int = 8192  # tokens of context in pretraining

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_low >= self.rope_high:
            raise UserError(
                tr(
                    "rope_low must be below rope_high, got {rope_low} and {rope_high}",
                    rope_low=self.rope_low,
                    rope_high=self.rope_high,
                )
            )


class Llama(Qwen):
    """A Llama model, with the members that model.py requires of every family."""

    config: LlamaConfig

    def rotary_divisors(self) -> Tensor | None:
        """Return the numbers that divide the rotary frequencies, or None to leave them alone."""
        return rotary_divisors(self.config, self.device)


def rotary_divisors(
    config: LlamaConfig, device: torch.device
) -> Tensor | None:  # (rotated / 2,) fp32
    """Return the numbers that divide the rotary frequencies, or None to leave them alone.

    Low frequencies are divided by `rope_factor`, high ones stay as they are, and the change between
    them is gradual. Source: The Llama 3 Herd of Models, arXiv 2407.21783, and Meta's code.
    """
    c = config
    if c.rope_factor == 1:
        return None
    channels = torch.arange(0, c.rotated, 2, dtype=torch.float32, device=device)
    frequencies = c.rope_theta ** (-channels / c.rotated)
    turns = c.rope_original * frequencies / (2 * math.pi)
    unchanged = ((turns - c.rope_low) / (c.rope_high - c.rope_low)).clamp(0, 1)
    return 1 / (unchanged + (1 - unchanged) / c.rope_factor)
