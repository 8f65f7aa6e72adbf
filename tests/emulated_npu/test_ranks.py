"""Two processes with an emulated NPU each: HCCL's collectives and limits, and FSDP2 with the losses of the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from nanochat.device import Compute
from nanochat.runtime import parallel, watch
from tests.checkpoint_manager.parts import test_background as background
from tests.emulated_npu import worker
from tests.support import ranks

pytestmark = [pytest.mark.npu, pytest.mark.ranks]


def collectives(compute: Compute) -> dict[str, Any]:
    """Every collective that the project or FSDP2 uses, with numbers that depend on the rank."""
    rank, device = compute.rank, compute.device
    mine = torch.arange(4.0, device=device) + 10 * rank
    results: dict[str, Any] = {"backend": dist.get_backend(dist.group.WORLD)}
    for name, op in (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG), ("max", dist.ReduceOp.MAX)):
        reduced = mine.clone()
        dist.all_reduce(reduced, op=op)
        results[name] = reduced.tolist()
    sent = mine.clone()
    dist.broadcast(sent, src=1)
    results["broadcast"] = sent.tolist()
    whole = torch.empty(8, device=device)
    dist.all_gather_into_tensor(whole, mine)
    results["all_gather_into_tensor"] = whole.tolist()
    parts = [torch.empty(4, device=device) for _ in range(2)]
    dist.all_gather(parts, mine)
    results["all_gather"] = torch.cat(parts).tolist()
    share = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(share, mine)
    results["reduce_scatter_tensor"] = share.tolist()
    dist.reduce_scatter_tensor(share, mine, op=dist.ReduceOp.AVG)
    results["reduce_scatter_avg"] = share.tolist()
    dist.reduce_scatter(share, list(mine.chunk(2)))
    results["reduce_scatter"] = share.tolist()
    uneven = torch.empty(2 + 4 * rank, device=device)
    dist.all_to_all_single(uneven, mine, [1, 1] if not rank else [3, 3], [1, 3])
    results["all_to_all_single"] = uneven.tolist()
    swapped = [torch.empty(2, device=device) for _ in range(2)]
    dist.all_to_all(swapped, list(mine.chunk(2)))
    results["all_to_all"] = torch.cat(swapped).tolist()
    received = torch.empty(4, device=device)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)])
    for work in works:
        work.wait()
    results["send_and_receive"] = received.tolist()
    late = mine.clone()
    work = dist.all_reduce(late, async_op=True)
    assert work is not None
    results["future"] = work.get_future().wait()[0].tolist()
    results["on_the_host"] = parallel.total([float(rank), 1.0], compute)
    dist.barrier()
    return results


def test_collectives_on_two_ranks() -> None:
    first, second = worker.run_ranks(2, collectives)
    both = [10, 12, 14, 16]
    for name, expected in {
        "backend": "cpu:gloo,npu:hccl", "sum": both, "avg": [5, 6, 7, 8], "max": [10, 11, 12, 13],
        "broadcast": [10, 11, 12, 13], "all_gather_into_tensor": [0, 1, 2, 3, 10, 11, 12, 13],
        "all_gather": [0, 1, 2, 3, 10, 11, 12, 13], "future": both, "on_the_host": [1, 2],
    }.items():  # fmt: skip
        assert first[name] == second[name] == expected, name
    assert (first["reduce_scatter_tensor"], second["reduce_scatter_tensor"]) == ([10, 12], [14, 16])
    assert (first["reduce_scatter_avg"], second["reduce_scatter_avg"]) == ([5, 6], [7, 8])
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([10, 12], [14, 16])
    assert (first["all_to_all_single"], second["all_to_all_single"]) == ([0, 10], [1, 2, 3, 11, 12, 13])
    assert (first["all_to_all"], second["all_to_all"]) == ([0, 1, 10, 11], [2, 3, 12, 13])
    assert (first["send_and_receive"], second["send_and_receive"]) == ([10, 11, 12, 13], [0, 1, 2, 3])


def counted(compute: Compute) -> list[int]:
    """How many collectives the hang watch counts for two on the device, and one on the host."""
    before = watch.calls()
    for _ in range(2):
        dist.all_reduce(torch.ones(2, device=compute.device))
    between = watch.calls()
    dist.all_reduce(torch.ones(2))
    return [between - before, watch.calls() - between]


def test_the_hang_watch_counts_the_collectives_of_both_backends() -> None:
    assert worker.run_ranks(2, counted) == [[2, 1], [2, 1]]


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


def test_what_hccl_does_not_reduce_is_refused_on_every_rank() -> None:
    for said in worker.run_ranks(2, refusals, chip="910A"):
        assert "Cannot use ReduceOp.BXOR with HCCL" in said[0]
        assert "Unsupported data type Double" in said[1]
        assert "Unsupported data type Bool" in said[2]
        assert "Unsupported data type BFloat16 on Ascend910A" in said[3]
        assert "contiguous" in said[4]


def sharded_losses(compute: Compute) -> list[float]:
    """The losses of a small sharded model whose batches are split by rank, and its whole parameters at the end."""
    torch.manual_seed(3)
    layers = [nn.Linear(16, 33), nn.Linear(33, 16)]
    model = nn.Sequential(layers[0], nn.GELU(), layers[1]).to(compute.device)
    parallel.shard(model, [*layers], compute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    losses = []
    for step in range(4):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        batch = batch[compute.rank :: compute.world_size].to(compute.device)
        for last in (False, True):  # two passes; gradients are reduced in the second
            parallel.sync_gradients(model, last)
            loss = (model(batch) - batch).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parallel.total([loss.item()], compute)[0])
    return losses + [float(value.cpu().double().sum()) for _, value in parallel.whole_parameters(model)]


def test_fsdp2_on_two_npus_gives_the_losses_of_two_cpu_ranks() -> None:
    assert worker.run_ranks(2, sharded_losses) == ranks.run_ranks(2, sharded_losses)


@pytest.mark.parametrize("files", background.FORMS)
def test_saves_beside_training_copy_what_the_device_holds(tmp_path: Path, files: background.Files) -> None:
    """The emulated device defers copies to pinned memory, so a writer that did not wait would write NaN."""
    background.check(worker.run_ranks(2, background.saves_beside_training, tmp_path / "run", files), tmp_path / "run")
