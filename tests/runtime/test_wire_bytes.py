"""The bytes that a rank sends: those of the ring algorithms, and no more than the default mode must send."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.training import D4, Trainer, random_model, random_passes
from nanochat.device import Compute
from nanochat.gpt import GPT
from tests.support.ranks import run_ranks
from tests.support.wire import Wire

pytestmark = pytest.mark.ranks


def send_everything(compute: Compute) -> dict[str, Any]:
    """One collective of each kind, with 12 fp32 numbers per rank."""
    ranks, rank = compute.world_size, compute.rank
    x, gathered, share = torch.ones(12), torch.empty(12 * ranks), torch.empty(12 // ranks)
    alone = [dist.new_group([other]) for other in range(ranks)][rank]
    sizes = [6, 6, 0, 0]
    with Wire() as wire:
        dist.all_reduce(x)
        dist.all_gather([torch.empty(12) for _ in range(ranks)], x)
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(share, x)
        dist.all_to_all_single(torch.empty(4 * sizes[rank]), x, [sizes[rank]] * 4, sizes)
        dist.broadcast(x, src=0)
        dist.barrier()
        dist.all_reduce(x, group=alone)  # a group of one rank sends nothing
    return {"bytes": dict(wire.bytes), "calls": dict(wire.calls)}


def test_bytes_are_those_of_the_ring_algorithms() -> None:
    for rank, counted in enumerate(run_ranks(4, send_everything)):
        assert counted["bytes"] == {
            "allreduce_": 48 * 2 * 3 / 4,
            "allgather_": 48 * 3,
            "_allgather_base_": 48 * 3,
            "_reduce_scatter_base_": 12 * 3,
            "alltoall_base_": 24 if rank < 2 else 48,  # all but what the rank keeps
            "broadcast_": 48 * 3 / 4,
            "barrier": 0,
        }
        assert set(counted["calls"].values()) == {1}


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
