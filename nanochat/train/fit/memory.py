"""Measures the memory of a device, and turns running out of memory into advice for the user."""

import contextlib
from collections.abc import Iterator

from nanochat.common import UserError, tr
from nanochat.device import Compute

SHARE = 0.9  # share of the reachable memory; the rest is for the optimizer's step and for fragments


def reachable(compute: Compute) -> int:
    """Return the bytes of device memory that this process holds or may still take.

    On an accelerator, this is the memory that other processes have not taken. On a CPU, it is all
    physical memory.
    """
    return compute.platform.memory_reachable()


def budget(compute: Compute) -> int:
    """Return the bytes that this process may hold during passes, including those it holds now."""
    return int(SHARE * reachable(compute))


def start_watch(compute: Compute) -> None:
    """Give cached memory back to the device, and restart peak(); on a CPU, do nothing."""
    compute.platform.start_memory_watch()


def peak(compute: Compute) -> int:
    """Return the most bytes that this process has taken from its device since start_watch().

    Raises NotImplementedError on a CPU.
    """
    return compute.platform.memory_taken()


def ran_out(failure: BaseException) -> bool:
    """Return whether an exception means that the device or the host has run out of memory."""
    message = str(failure).lower()
    return isinstance(failure, RuntimeError) and (
        "out of memory" in message or "can't allocate memory" in message
    )


def advice(rows: int, rows_of_rank: int) -> UserError:
    """Return the error for a pass of `rows` rows that ran out of memory, with advice.

    `rows_of_rank` is the number of rows that each rank has in a step.
    """
    smaller = [size for size in range(1, rows) if rows_of_rank % size == 0]
    if smaller:
        return UserError(
            tr(
                "out of memory in a pass of {rows} row(s) on each device. Try "
                "--device_batch_size={smaller}: it changes "
                "the speed, not what is learned, and the run resumes from its last checkpoint.",
                rows=rows,
                smaller=smaller[-1],
            )
        )
    return UserError(
        tr(
            "out of memory in a pass of one row. Take --shard=full or more devices, a smaller "
            "model, or shorter rows: --max_seq_len in pretraining, --max_length in fine-tuning."
        )
    )


@contextlib.contextmanager
def advising(rows: int, rows_of_rank: int) -> Iterator[None]:
    """Raise the UserError from advice() if this block runs out of memory."""
    try:
        yield
    except RuntimeError as failure:
        if not ran_out(failure):
            raise
        raise advice(rows, rows_of_rank) from failure
