"""Runs one rank of the check of the collectives, and prints its results as JSON.

python -m tools_npu.collectives RANK RANKS PORT MEGABYTES DTYPE
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def wrong_collectives(rank: int, ranks: int, dtype: torch.dtype) -> list[str]:
    """Run every collective of training on known inputs, and return the names of the wrong ones.

    `dtype` is the number format of training, in which gradients may be averaged.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("npu", rank)
    sum_of_ranks = ranks * (ranks + 1) / 2  # of rank + 1
    wrong: list[str] = []

    def compare(
        name: str,
        result: torch.Tensor,
        expected: torch.Tensor | float,
    ) -> None:
        if not bool((result.cpu() == expected).all()):
            wrong.append(name)

    x = torch.full((8,), rank + 1.0, device=device)
    dist.all_reduce(x)
    compare("all_reduce", x, sum_of_ranks)

    x = torch.full((8,), rank + 1.0, device=device, dtype=dtype)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)  # HCCL has no AVG: torch_npu sums, then divides
    compare("all_reduce average", x, sum_of_ranks / ranks)

    x = torch.arange(4.0 * ranks, device=device) + rank
    share = torch.empty(4, device=device)
    dist.reduce_scatter_tensor(share, x)
    expected = ranks * (torch.arange(4.0) + 4 * rank) + ranks * (ranks - 1) / 2
    compare("reduce_scatter", share, expected)

    x = torch.full((4,), float(rank), device=device)
    gathered = torch.empty(4 * ranks, device=device)
    dist.all_gather_into_tensor(gathered, x)
    compare("all_gather", gathered, torch.arange(ranks).repeat_interleave(4))

    x = torch.arange(ranks, device=device, dtype=torch.int64) + 10 * rank
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    compare("all_to_all", received, torch.arange(ranks) * 10 + rank)

    x = torch.full((4,), float(rank), device=device)
    dist.broadcast(x, src=ranks - 1)
    compare("broadcast", x, ranks - 1)
    return wrong


def bandwidth(rank: int, ranks: int, megabytes: int) -> float:
    """Return the GB/s that an all_reduce of `megabytes` moves over each link."""
    import torch
    import torch.distributed as dist

    device = torch.device("npu", rank)
    block = torch.ones(megabytes << 18, device=device)  # fp32

    def seconds_of(count: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(block)
        torch.npu.synchronize()
        return time.perf_counter() - start

    seconds_of(1)  # the first all_reduce connects the ranks
    # Every rank runs equally many collectives, which take about two seconds with large blocks.
    duration = 2.0 if megabytes >= 256 else 0.1
    count = torch.tensor([duration / seconds_of(1)], device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    repeats = max(1, min(int(count.item()), 1000))
    seconds = seconds_of(repeats) / repeats
    ring_bytes = 2 * (ranks - 1) / ranks * block.numel() * 4  # over each link
    return ring_bytes / seconds / 1e9


def main() -> None:
    """Join the process group as one rank, run the collectives, and print the results."""
    rank, ranks, port, megabytes = map(int, sys.argv[1:5])
    dtype_name = sys.argv[5]
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401 - the import defines torch.npu

    from nanochat.platforms.ascend import environment as ascend_environment

    torch.npu.set_device(rank)
    ascend_environment.use_ready_kernels(torch.npu)
    dist.init_process_group(
        "hccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    try:
        wrong = wrong_collectives(rank, ranks, getattr(torch, dtype_name))
        speed = bandwidth(rank, ranks, megabytes)
        print(json.dumps({"wrong": wrong, "gb_per_s": speed}), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
