"""The benchmark of several ranks: bytes against costs computed by hand, and a quick run."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode

from bench.ranks import __main__ as ranks
from bench.ranks import group
from bench.ranks.group import D4, Ranks, Task, Timed
from bench.ranks.wire import Wire
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.models.qwen.config import QwenConfig
from tests.support.ranks import run_ranks
from tests.support.tiny_model import on_cpu

SMALL = GPTConfig(sequence_len=32, vocab_size=320, n_layer=2, n_head=2, n_kv_head=2, n_embd=64, window_pattern="L")


def talk(compute: Compute) -> dict[str, Any]:
    """One collective of each kind, with 12 fp32 numbers per rank."""
    x, whole, mine = torch.ones(12), torch.empty(12 * compute.world_size), torch.empty(12 // compute.world_size)
    alone = [dist.new_group([rank]) for rank in range(compute.world_size)][compute.rank]
    with Wire() as wire:
        dist.all_reduce(x)
        dist.all_gather([torch.empty(12) for _ in range(compute.world_size)], x)
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(mine, x)
        sizes = [6, 6, 0, 0]
        dist.all_to_all_single(torch.empty(4 * sizes[compute.rank]), x, [sizes[compute.rank]] * 4, sizes)
        dist.broadcast(x, src=0)
        dist.barrier()
        dist.all_reduce(x, group=alone)  # a group of one rank sends nothing
    return {"bytes": dict(wire.bytes), "calls": dict(wire.calls)}


@pytest.mark.ranks
def test_bytes_are_those_of_the_ring_algorithms() -> None:
    for rank, found in enumerate(run_ranks(4, talk)):
        assert found["bytes"] == {
            "allreduce_": 48 * 2 * 3 / 4, "allgather_": 48 * 3, "_allgather_base_": 48 * 3,
            "_reduce_scatter_base_": 12 * 3, "alltoall_base_": 24 if rank < 2 else 48,  # all but what the rank keeps
            "broadcast_": 48 * 3 / 4, "barrier": 0,
        }  # fmt: skip
        assert set(found["calls"].values()) == {1}


@pytest.mark.ranks
def test_the_default_mode_sends_no_more_than_it_must() -> None:
    """Four ranks, two passes: gather bf16 parameters once, reduce fp32 gradients once, exchange matrices both ways."""
    shape = replace(D4, sequence_len=64)
    model = GPT(shape)
    counts = model.parameter_counts()
    matrices, total = counts["matrix"], counts["total"]
    expected = 0.75 * (2 + 4) + 2 * 0.75 * 2 * matrices / 4 / total
    four = Ranks(Task(4, shape=shape, tokens=4 * 2 * 64))
    try:
        assert [timed.wire_bytes for timed in four.step()] == [None] * 4
        sent = [timed.wire_bytes or 0.0 for timed in four.step(count=True)]
    finally:
        four.close()
    assert sum(sent) / 4 == pytest.approx(expected, rel=0.01)
    assert max(sent) <= 5.3


@pytest.mark.ranks
def test_it_prints_a_table_and_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        ranks, "task", lambda cfg, *given: Task(given[0], given[1], compiled=given[2], shape=SMALL, tokens=512)
    )
    ranks.main(ranks.Config(quick=True))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "tokens/s" in line] == ["one", "two,", "two,"]
    found = json.loads(lines[-1])
    assert found["benchmark"] == "ranks" and not found["compiled"]
    assert found["two_ranks_of_ideal"]["grad"] > 0 and found["two_ranks_of_ideal_cpu"]["grad"] > 0
    assert 4 < found["wire_bytes_per_parameter"]["grad"] < 6


@pytest.mark.ranks
def test_ranks_fine_tune_a_qwen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = QwenConfig(sequence_len=32, vocab_size=64, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, n_hidden=64)
    monkeypatch.setattr(
        ranks,
        "task",
        lambda cfg, *given: Task(
            given[0], given[1], compiled=given[2], shape=small, lora_rank=cfg.lora_rank, tokens=128
        ),
    )
    ranks.main(ranks.Config(model="qwen3", compile=False, rounds=1, shard=("none", "full")))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["lora_rank"] == 8 and set(found["two_ranks_of_ideal"]) == {"apart", "none", "full"}


@pytest.mark.ranks
def test_ranks_apart_send_nothing() -> None:
    pair = Ranks(Task(2, None, shape=SMALL, tokens=512))
    try:
        assert [timed.wire_bytes for timed in pair.step(count=True)] == [0, 0]
    finally:
        pair.close()


def test_the_share_of_the_ideal_is_by_the_slowest_rank() -> None:
    one = [[Timed(4.0, 3.0)], [Timed(9.0, 9.0)], [Timed(4.0, 3.0)]]
    two = [[Timed(2.5, 1.5), Timed(2.0, 2.5)]] * 3
    assert ranks.share_of_ideal(one, two, "seconds") == pytest.approx(4 / 5)
    assert ranks.share_of_ideal(one, two, "cpu_seconds") == pytest.approx(3 / 4)


def test_only_a_counted_step_runs_below_a_dispatch_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below one, torch would leave compiled code aside, and the timed steps would not be those of a training run."""
    modes: list[Any] = []
    update = group.update

    def watched(*given: Any) -> Any:
        modes.append(_get_current_dispatch_mode())
        return update(*given)

    monkeypatch.setattr(group, "update", watched)
    step = group.training_step(Task(1, "none", "float32", shape=SMALL, tokens=128), on_cpu())
    assert step(0) is None and step(1, True) == 0
    assert modes[0] is None and isinstance(modes[1], Wire)
