"""Rotary frequencies for contexts that are longer than in pretraining.

A frequency makes a number of turns within the original context. Every rule divides frequencies, and
most divide only the low ones, which make few turns. Shapes: R rotated channels of a head.
"""

import math

import torch
from torch import Tensor

from nanochat.models.qwen.config import QwenConfig


def rotary_base(config: QwenConfig) -> float:
    """Return the base of the rotary frequencies, which the rule "dynamic" raises.

    The base follows from the longest context of the model, not from the length of each text, so
    that the keys in a cache stay valid. Up to `rope_original` tokens it is `rope_theta`. Source:
    NTK-aware scaling, as in transformers, which divides by zero if R is 2. There is only the
    frequency base ** 0 then, for which the base does not matter.
    """
    c = config
    if c.rope != "dynamic" or c.rotated == 2:
        return c.rope_theta
    longer = max(c.sequence_len / c.rope_original, 1.0)
    growth = c.rope_factor * longer - (c.rope_factor - 1)
    return c.rope_theta * growth ** (c.rotated / (c.rotated - 2))


def rotary_divisors(config: QwenConfig, device: torch.device) -> Tensor | None:  # (R / 2,) fp32
    """Return the numbers that divide the rotary frequencies, or None to leave them alone."""
    c = config
    if c.rope in ("default", "dynamic") or c.rope_factor == 1:
        return None
    if c.rope == "linear":
        return torch.full((c.rotated // 2,), c.rope_factor, device=device)
    unchanged_by_rule = _unchanged_llama3 if c.rope == "llama3" else _unchanged_yarn
    unchanged = unchanged_by_rule(c, device)
    return 1 / (unchanged + (1 - unchanged) / c.rope_factor)


def _unchanged_llama3(config: QwenConfig, device: torch.device) -> Tensor:  # (R / 2,)
    """Return how far each frequency stays as it is, from 0 to 1, in even steps of its turns.

    Source: The Llama 3 Herd of Models, arXiv 2407.21783, and Meta's code.
    """
    c = config
    channels = torch.arange(0, c.rotated, 2, dtype=torch.float32, device=device)
    frequencies = c.rope_theta ** (-channels / c.rotated)
    turns = c.rope_original * frequencies / (2 * math.pi)
    unchanged = (turns - c.rope_low) / (c.rope_high - c.rope_low)
    return unchanged.clamp(0, 1)


def _unchanged_yarn(config: QwenConfig, device: torch.device) -> Tensor:  # (R / 2,)
    """Return how far each frequency stays as it is, from 0 to 1, in even steps of its channel.

    Source: YaRN, arXiv 2309.00071. Like its code, this rounds the first and the last channel of the
    steps outwards.
    """
    c = config

    def channel_at(turns: float) -> float:
        """Return the index of the frequency that makes `turns` turns in the original context."""
        frequency = 2 * math.pi * turns / c.rope_original
        return -c.rotated / 2 * math.log(frequency, c.rope_theta)

    first = max(math.floor(channel_at(c.rope_high)), 0)
    last = min(math.ceil(channel_at(c.rope_low)), c.rotated - 1)
    index = torch.arange(c.rotated // 2, dtype=torch.float32, device=device)
    divided = (index - first) / max(last - first, 0.001)
    return 1 - divided.clamp(0, 1)


def yarn_scale(factor: float, multiple: float = 1.0, multiple_of_all: float = 0.0) -> float:
    """Return what YaRN multiplies cosines and sines with, for a context `factor` times as long.

    The multiples are `mscale` and `mscale_all_dim` in config.json; without both, 0.1 ln(factor) + 1.
    """

    def scale(multiple: float) -> float:
        if factor <= 1:
            return 1.0
        return 0.1 * multiple * math.log(factor) + 1.0

    if not (multiple and multiple_of_all):
        return scale(1.0)
    return scale(multiple) / scale(multiple_of_all)
