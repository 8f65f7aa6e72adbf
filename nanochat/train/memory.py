"""Memory of an accelerator: what this process may still take, what a pass took, and what to try when it ran out."""

import contextlib
from collections.abc import Iterator

from nanochat import device
from nanochat.common import UserError
from nanochat.device import Compute

CPU_PASS_TOKENS = 4096  # tokens of a pass on a CPU: larger ones only fall out of its caches
SHARE = 0.9  # of what is free, so that the optimizer's step and fragments find room


def reachable(compute: Compute) -> int:
    """Bytes that this process holds or may still take: other processes on the same card make it less than its total.
    Of the host, where pages can be taken back from others, all of its memory."""
    module = device.ROWS[compute.device_type].module()
    if module is None:
        return device.memory_total(compute)
    free, _ = module.mem_get_info()
    return int(free + module.memory_reserved())


def budget(compute: Compute) -> int:
    """Bytes that passes may fill, everything that is held already included."""
    return int(SHARE * reachable(compute))


def start_watch(compute: Compute) -> None:
    """Give cached memory back; peak() then counts from here."""
    module = device.ROWS[compute.device_type].module()
    if module is not None:
        module.empty_cache()
        module.reset_peak_memory_stats()


def peak(compute: Compute) -> int:
    """Bytes that this process has taken from the device at most, since start_watch()."""
    module = device.ROWS[compute.device_type].module()
    assert module is not None, "the host's memory is not asked for"
    device.synchronize(compute)
    return int(module.max_memory_reserved())


@contextlib.contextmanager
def saving(tokens: int, compute: Compute) -> Iterator[None]:
    """Let a model that is compiled here, for passes of `tokens`, keep less for its backward pass.

    On a CPU, in passes too large for its caches, what costs no matmul (norms, rotations, squares) is made again then:
    half the memory of activations, and 5 % less time at 16,384 tokens; at 4,096 tokens it would take 5 % more.
    """
    if compute.device_type != "cpu" or tokens <= CPU_PASS_TOKENS:
        yield
        return
    from torch._functorch import config  # of the part of the compiler that decides what is kept

    reasons = ("materialized_backward", "used_far_apart", "long_fusible_chains", "reductions")  # to keep what is cheap
    with config.patch({f"ban_recompute_{reason}": False for reason in reasons}):
        yield


def ran_out(failure: BaseException) -> bool:
    """Whether a device, or the host, has no memory left; vendors raise RuntimeErrors with words of their own."""
    said = str(failure).lower()
    return isinstance(failure, RuntimeError) and ("out of memory" in said or "can't allocate memory" in said)


def advice(rows: int, rows_of_rank: int) -> UserError:
    """What to say when a pass of `rows` of a rank's rows of a step ran out of memory: the next value to try."""
    smaller = [size for size in range(1, rows) if rows_of_rank % size == 0]
    if smaller:
        return UserError(
            f"out of memory in a pass of {rows} row(s) on each device. Try --device_batch_size={smaller[-1]}: it "
            "changes the speed, not what is learned, and a run goes on from its last checkpoint."
        )
    return UserError(
        "out of memory in a pass of one row. Take --shard=full or more devices, or a model with a smaller --depth or "
        "--max_seq_len."
    )


@contextlib.contextmanager
def advising(rows: int, rows_of_rank: int) -> Iterator[None]:
    """Turn running out of memory into the next value to try."""
    try:
        yield
    except RuntimeError as failure:
        if not ran_out(failure):
            raise
        raise advice(rows, rows_of_rank) from failure
