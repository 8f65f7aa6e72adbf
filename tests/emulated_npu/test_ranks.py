"""Two processes with an emulated NPU each: the limits of HCCL, the hang watch, and saves beside training.

The checks of tools_npu compare its collectives, and tests/platforms/test_ascend_sharding.py the training over them.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nanochat.device import Compute
from nanochat.runtime import watch
from tests.checkpoint_manager.parts import test_background as background
from tests.emulated_npu import worker

pytestmark = [pytest.mark.npu, pytest.mark.ranks]


def counted(compute: Compute) -> list[int]:
    """How many collectives the hang watch counts for two on the device, and one on the host."""
    before = watch.calls()
    for _ in range(2):
        dist.all_reduce(torch.ones(2, device=compute.device))
    between = watch.calls()
    dist.all_reduce(torch.ones(2))
    return [between - before, watch.calls() - between]


def refusals(compute: Compute) -> list[str]:
    """The errors of the refused calls. In such a call, ranks do not communicate."""
    ones = torch.ones(2, device=compute.device)
    calls = [
        lambda: dist.all_reduce(ones, op=dist.ReduceOp.BXOR),
        lambda: dist.all_reduce(ones.double()),
        lambda: dist.all_reduce(torch.ones(2, device=compute.device, dtype=torch.bool)),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.bfloat16).to(compute.device)),
        lambda: dist.all_reduce(torch.ones(2, 4, device=compute.device).T),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("")
        except (RuntimeError, ValueError) as error:
            said.append(str(error).splitlines()[0])
    return said


def both(compute: Compute) -> tuple[list[int], list[str]]:
    return counted(compute), refusals(compute)


@pytest.fixture(scope="module")
def ran() -> list[tuple[list[int], list[str]]]:
    return worker.run_ranks(2, both, chip="910A")


def test_the_hang_watch_counts_the_collectives_of_both_backends(ran: list[tuple[list[int], list[str]]]) -> None:
    assert [counts for counts, _ in ran] == [[2, 1], [2, 1]]


def test_what_hccl_does_not_reduce_is_refused_on_every_rank(ran: list[tuple[list[int], list[str]]]) -> None:
    for _, said in ran:
        assert "Cannot use ReduceOp.BXOR with HCCL" in said[0]
        assert "Unsupported data type Double" in said[1]
        assert "Unsupported data type Bool" in said[2]
        assert "Unsupported data type BFloat16 on Ascend910A" in said[3]
        assert "contiguous" in said[4]


def test_saves_beside_training_copy_what_the_device_holds(tmp_path: Path) -> None:
    """The emulated device defers copies to pinned memory, so a writer that did not wait would write NaN."""
    folder = tmp_path / "run"
    background.check(worker.run_ranks(2, background.saves_beside_training, folder, "per_rank"), folder)
