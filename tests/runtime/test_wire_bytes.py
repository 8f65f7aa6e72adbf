"""The bytes that a rank sends in a step, by the ring algorithms, are no more than the default mode must send."""

from dataclasses import replace

import pytest
import torch

from bench.batches import random_passes
from bench.training import D4, Trainer, random_model
from nanochat.device import Compute
from nanochat.gpt import GPT
from tests.support.ranks import run_ranks
from tests.support.wire import Wire

pytestmark = pytest.mark.ranks


def bytes_per_parameter(compute: Compute) -> float:
    """What a rank sends in a step of two passes, per parameter."""
    compute = replace(compute, dtype=torch.bfloat16)
    shape = replace(D4, sequence_len=64)
    trainer = Trainer(random_model(shape, compute), compute, mode="grad")
    for seed in range(2):  # the first step makes buffers
        passes = random_passes(shape.vocab_size, 2, 1, shape.sequence_len, seed)
        with Wire() as wire:
            trainer.step(passes)
    return sum(wire.bytes.values()) / trainer.parameters


def test_the_default_mode_sends_no_more_than_it_must() -> None:
    """Gather bf16 parameters once, reduce fp32 gradients once, exchange matrices both ways."""
    counts = GPT(replace(D4, sequence_len=64)).parameter_counts()
    matrix_share = counts["matrix"] / counts["total"]
    expected = 0.75 * (2 + 4) + 2 * 0.75 * 2 * matrix_share / 4
    sent = run_ranks(4, bytes_per_parameter)
    assert sum(sent) / 4 == pytest.approx(expected, rel=0.01) and max(sent) <= 5.3
