"""The largest pass that memory holds: found with growing passes, the same on every rank, and never on a CPU."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.updates import update
from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.platforms.base import Platform
from nanochat.runtime.parallel import Sharding, whole_parameters
from nanochat.step import LossScale
from nanochat.train.fit import memory, probe
from nanochat.train.sizes import Batch
from tests.support.rank_training import CONFIG, CPU, batches, make
from tests.support.ranks import Pool, run_ranks
from tests.support.tiny_model import pretend

BATCH = Batch(tokens_per_step=512, rows_per_step=32, device_batch_size=4, passes=8)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, [1]), (2, [1, 2]), (32, [1, 2, 4, 8, 16, 32]), (12, [1, 2, 4, 12]), (7, [1, 7]), (9, [1, 3, 9])],
)  # fmt: skip
def test_sizes_divide_a_ranks_rows_and_at_least_double(rows: int, sizes: list[int]) -> None:
    assert probe.doublings(rows) == sizes


def card(capacity: int, fixed: int, each: int, tried: list[int]) -> Callable[[int], int]:
    """A device on which a pass of n rows takes `fixed` + n x `each` bytes, and fails beyond the capacity."""

    def attempt(rows: int) -> int:
        tried.append(rows)
        taken = fixed + rows * each
        if taken > capacity:
            raise torch.OutOfMemoryError(f"out of memory: {taken} of {capacity}")
        return taken

    return attempt


@pytest.mark.parametrize(
    ("sizes", "capacity", "fixed", "budget", "rows", "tried", "why"),
    [
        ([1, 2, 4, 8, 16], 1000, 100, 850, 4, [1, 2, 4], "8 would take"),
        ([1, 2, 4], 1000, 100, 900, 4, [1, 2, 4], "a rank's rows of a step"),
        ([1, 2], 150, 0, 150, 1, [1, 2], "2 ran out of memory"),
        ([1, 2, 8], 10_000, 0, 150, 1, [1, 2], "2 took"),
        ([1, 73], 1000, 100, 900, 1, [1, 2], "73 would take"),
        ([1, 7], 1000, 100, 900, 7, [1, 2, 7], "a rank's rows of a step"),
        ([1, 7], 250, 100, 240, 1, [1, 2], "2 ran out of memory"),
    ],
)
def test_the_largest_pass_within_the_budget_is_taken(
    sizes: list[int], capacity: int, fixed: int, budget: int, rows: int, tried: list[int], why: str
) -> None:
    attempts: list[int] = []
    largest, reason = probe.largest(sizes, card(capacity, fixed, 100, attempts), budget, CPU)
    assert (largest, attempts) == (rows, tried) and why in reason


@pytest.mark.parametrize(("capacity", "budget", "named"), [(50, 1000, "--shard=full"), (1000, 100, "another process")])
def test_a_device_that_cannot_hold_one_row_is_refused(capacity: int, budget: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        probe.largest([1, 2], card(capacity, 100, 100, []), budget, CPU)


def test_other_failures_come_through() -> None:
    def broken(rows: int) -> int:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        probe.largest([1], broken, 1, CPU)


def unequal(compute: Compute) -> tuple[int, list[int]]:
    """Rank 1's device is half as large, and its passes take more."""
    tried: list[int] = []
    attempt = card(10_000, 100, 100 + 50 * compute.rank, tried)
    rows, _ = probe.largest([1, 2, 4, 8, 16], attempt, 2000 // (1 + compute.rank), compute)
    return rows, tried


@pytest.mark.ranks
def test_ranks_take_the_smallest_of_what_fits(pool: Pool) -> None:
    assert pool.run(2, unequal) == [(4, [1, 2, 4])] * 2


class Accelerator(Platform):
    """A device that is not the host."""

    name = "card"


def probed(compute: Compute, mode: Sharding = "grad") -> dict[str, Any]:
    """Call fit() for the small model on a device that takes 10 bytes a row, then train two steps."""
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "start_watch", lambda compute: None)
        patch.setattr(memory, "budget", lambda compute: 45)
        model, optimizers = make(compute, mode)
        forward, seen = type(model).forward, []

        def watched(self: Any, idx: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen.append(len(idx))
            return forward(self, idx, *rest)

        patch.setattr(type(model), "forward", watched)
        patch.setattr(memory, "peak", lambda compute: 10 * seen[-1])
        device = replace(compute, device_type="card", platform=Accelerator())
        found = probe.fit(replace(BATCH, probe=True), model, optimizers, CONFIG.sequence_len, device)
        calls = list(seen)
    assert all(parameter.grad is None for parameter in model.parameters())
    for step in range(2):
        update(model, optimizers, batches(step, 1, compute), LossScale(), compute)
    return {"batch": found, "calls": calls, "after": {n: v.clone() for n, v in whole_parameters(model)}}


def untouched(compute: Compute) -> dict[str, torch.Tensor]:
    model, optimizers = make(compute)
    for step in range(2):
        update(model, optimizers, batches(step, 1, compute), LossScale(), compute)
    return {name: value.clone() for name, value in whole_parameters(model)}


def test_passes_are_tried_as_in_training_and_leave_the_run_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    found = probed(CPU)
    assert found["batch"] == Batch(512, 32, 4, 8)
    assert found["calls"] == [1, 1, 2, 2, 4, 4]  # two passes each: gradients add up
    assert "device_batch_size: 4 rows a pass, 8 pass(es) a step (8 would take" in capsys.readouterr().out
    for name, value in untouched(CPU).items():
        assert torch.equal(found["after"][name], value), name


def probed_in_every_mode(compute: Compute) -> list[dict[str, Any]]:
    modes: tuple[Sharding, ...] = ("none", "grad", "full")
    return [probed(compute, mode) for mode in modes]


@pytest.mark.ranks
def test_ranks_probe_together() -> None:
    reference = untouched(CPU)
    for found in itertools.chain(*run_ranks(2, probed_in_every_mode)):
        assert found["batch"] == Batch(512, 32, 4, 4)
        for name, value in reference.items():
            assert (found["after"][name] - value).norm() <= 1e-5 * value.norm(), name


def test_nothing_is_probed_where_the_size_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "largest", lambda *_: pytest.fail("probed"))
    model, optimizers = make(CPU)
    assert probe.fit(BATCH, model, optimizers, 16, pretend(Accelerator())) is BATCH
