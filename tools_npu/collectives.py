"""One rank of the check of the collectives; it prints its results as JSON.

python -m tools_npu.collectives RANK RANKS PORT MEGABYTES
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def wrong(name: str, good: bool) -> list[str]:
    """The name of a collective in a list if its result was wrong, otherwise an empty list."""
    return [] if good else [name]


def results(rank: int, ranks: int, megabytes: int) -> dict[str, float | list[str]]:
    """Run every collective that training uses on inputs with known answers.

    Returns the names of the collectives that were wrong, and the bandwidth of all_reduce in GB/s.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("npu", rank)
    total = ranks * (ranks + 1) / 2
    found: list[str] = []

    x = torch.full((8,), rank + 1.0, device=device)
    dist.all_reduce(x)
    found += wrong("all_reduce", bool((x.cpu() == total).all()))

    x = torch.full((8,), rank + 1.0, device=device, dtype=torch.float16)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)  # HCCL has no AVG: torch_npu sums, then divides
    found += wrong("all_reduce average", bool((x.cpu() == total / ranks).all()))

    parts = torch.arange(4.0 * ranks, device=device) + rank
    share = torch.empty(4, device=device)
    dist.reduce_scatter_tensor(share, parts)
    expected = ranks * (torch.arange(4.0) + 4 * rank) + ranks * (ranks - 1) / 2
    found += wrong("reduce_scatter", bool((share.cpu() == expected).all()))

    gathered = torch.empty(4 * ranks, device=device)
    dist.all_gather_into_tensor(gathered, torch.full((4,), float(rank), device=device))
    found += wrong(
        "all_gather", bool((gathered.cpu() == torch.arange(ranks).repeat_interleave(4)).all())
    )

    sent = torch.arange(ranks, device=device, dtype=torch.int64) + 10 * rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    found += wrong("all_to_all", bool((received.cpu() == torch.arange(ranks) * 10 + rank).all()))

    x = torch.full((4,), float(rank), device=device)
    dist.broadcast(x, src=ranks - 1)
    found += wrong("broadcast", bool((x.cpu() == ranks - 1).all()))

    dist.barrier()
    block = torch.ones(megabytes << 18, device=device)  # fp32
    dist.all_reduce(block)  # the first one connects the ranks
    torch.npu.synchronize()
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(block)
    torch.npu.synchronize()
    # Every rank runs the same number of collectives in a row, for about two seconds with large blocks.
    enough = torch.tensor([2.0 if megabytes >= 256 else 0.1], device=device) / (
        time.perf_counter() - start
    )
    dist.all_reduce(enough, op=dist.ReduceOp.MIN)
    count = max(1, min(int(enough.item()), 1000))
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(block)
    torch.npu.synchronize()
    seconds = (time.perf_counter() - start) / count
    moved = 2 * (ranks - 1) / ranks * block.numel() * 4  # bytes that a ring moves over each link
    return {"wrong": found, "gb_per_s": moved / seconds / 1e9}


def main() -> None:
    """Join the process group as one rank, run the collectives, and print the results."""
    rank, ranks, port, megabytes = (int(word) for word in sys.argv[1:5])
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401 - the import defines torch.npu

    torch.npu.set_device(rank)
    dist.init_process_group(
        "hccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    try:
        print(json.dumps(results(rank, ranks, megabytes)), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
