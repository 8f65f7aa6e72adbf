"""Who is to blame when ranks wait: the one that has begun the fewest collectives, or that is silent."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.runtime import watch
from tests.support.ranks import Pool
from tests.support.tiny_model import on_cpu


def said(calls: int, step: int = 6, **more: Any) -> dict[str, Any]:
    return {"beats": 9, "calls": calls, "step": step, "place": "loop.py:1 update", **more}


def test_the_rank_with_the_fewest_collectives_hangs() -> None:
    assert watch.hanging({0: said(41), 1: said(40, 5), 2: said(41)}, 20.4) == (
        "rank 1 hangs in step 6, at loop.py:1 update: the others have waited for 20 s"
    )
    both = watch.hanging({0: said(40), 1: said(41), 2: said(40)}, 5)
    assert both.startswith("rank 0 hangs in step 7") and "rank 2 hangs in step 7" in both
    assert watch.hanging({0: said(41), 1: {"over": True}, 2: said(40)}, 5).startswith("rank 2 hangs")


def test_ranks_that_wait_in_one_place_are_not_told_apart() -> None:
    message = watch.hanging({0: {"over": True}, 1: said(40), 2: said(40)}, 5)
    assert message.startswith("all ranks hang in one place: no step for 5 s, rank 1 in step 7")


def test_one_rank_is_not_watched() -> None:
    with watch.over(on_cpu(), 600):
        pass


def count(compute: Compute) -> list[int]:
    """Collectives begun, before and after one that this rank alone begins."""
    before = watch.calls()
    dist.all_reduce(torch.ones(1))
    between = watch.calls()
    if compute.main:
        waiting = dist.all_reduce(torch.ones(1), async_op=True)
    begun = watch.calls()
    dist.all_reduce(torch.ones(1)) if not compute.main else waiting.wait()  # type: ignore[union-attr]
    return [between - before, begun - between]


@pytest.mark.ranks
def test_collectives_are_counted_as_they_begin(pool: Pool) -> None:
    assert pool.run(2, count) == [[1, 1], [1, 0]]


class Lost(watch.Watch):
    """A watch whose store has ended with its launcher."""

    def __init__(self, *_: object):
        self.store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def start(self) -> None: ...
    def close(self) -> None: ...
    def gone(self) -> str:
        raise dist.DistNetworkError("Broken pipe")


def test_the_end_of_the_first_host_is_told_in_words_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "Watch", Lost)
    said = "the launcher of the first host is gone. The same command.*failed with: connection reset"
    with pytest.raises(UserError, match=said), watch.over(replace(on_cpu(), rank=1, world_size=2), 600):
        raise RuntimeError("connection reset")


def failing_collective(compute: Compute) -> str:
    """An error of a collective while all ranks are there is what it is."""
    try:
        with watch.over(compute, 600):
            compute.pulse.beat(3)
            raise RuntimeError("the network")
    except RuntimeError as failure:
        return str(failure)


@pytest.mark.ranks
def test_an_error_while_all_are_there_stays_what_it_was(pool: Pool) -> None:
    assert pool.run(2, failing_collective) == ["the network"] * 2


def dies(compute: Compute) -> str:
    """Rank 1 is gone after step 3; what rank 0 then says."""
    try:
        with watch.over(compute, 600):
            compute.pulse.beat(3)
            dist.barrier()
            if compute.rank == 1:
                os._exit(9)
            dist.all_reduce(torch.ones(1))
    except UserError as named:
        return str(named)
    return "nothing"


@pytest.mark.ranks
def test_a_rank_that_died_is_named_with_its_step(pool: Pool) -> None:
    one, two = pool.outcomes(2, dies)
    assert not two.fine
    assert one.result.startswith("rank 1 is gone in step 4, last heard of at ")
