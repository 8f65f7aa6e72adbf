"""Where ranks of a test meet: a store in the process of the test, whose port the kernel chooses."""

from datetime import timedelta

import torch.distributed as dist

HOST = "127.0.0.1"


def open_meeting() -> dist.TCPStore:
    """A store that listens until it is dropped. It holds its port from the start, so no other test can take it."""
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def join(port: int, rank: int, world_size: int, backend: str = "gloo", seconds: float = 60) -> None:
    """Form the process group with the other ranks; joining and each collective take at most `seconds`."""
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
