"""SIGTERM, SIGINT and SIGUSR1 ask a training run to save and stop; all ranks do so at the same step."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist

from nanochat.common import Pulse
from nanochat.device import Compute

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stopped(BaseException):
    """A signal asked for the end; like KeyboardInterrupt it passes edges that catch what foreign code raises."""


@contextlib.contextmanager
def caught(pulse: Pulse) -> Iterator[None]:
    """Inside this block signals are only noted in `pulse`, for check() and agreed() to read; in the main thread only.

    Without a launcher the process stops at once while nothing has been trained yet, and at a second Ctrl-C. A launcher
    passes on a signal that the terminal has already sent to every process, and kills processes that take too long
    (TORCH_ELASTIC_SHUTDOWN_TIMEOUT).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    alone = not os.environ.get("RANK")

    def note(number: int, _: FrameType | None) -> None:
        if alone and pulse.stop_reason == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not pulse.stop_reason:
            again = "; again to stop at once" if alone and number == signal.SIGINT else ""
            words = "stopping" if pulse.at_once else f"saving at the end of this step{again}"
            os.write(2, f"{signal.Signals(number).name}: {words}\n".encode())
        pulse.ask(signal.Signals(number).name)
        if pulse.at_once or (alone and not pulse.moments):
            raise Stopped

    before = {number: signal.signal(number, note) for number in CAUGHT}
    pulse.catching, pulse.stop_reason, pulse.moments, pulse.step = True, "", 0, 0
    try:
        yield
    finally:
        pulse.catching, pulse.stop_reason = False, ""
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def at_once(pulse: Pulse) -> Iterator[None]:
    """Inside this block a signal raises Stopped at once, on every rank by itself: for long work that is not worth
    finishing, such as compiling. A launcher gives its ranks 30 seconds before it kills them."""
    pulse.at_once = True
    try:
        if pulse.stop_reason:
            raise Stopped
        yield
    finally:
        pulse.at_once = False


def agreed(compute: Compute) -> bool:
    """Whether any rank was asked to stop; every rank must call it."""
    pulse = compute.pulse
    pulse.beat()
    if compute.world_size == 1 or not pulse.catching:
        return bool(pulse.stop_reason)
    flag = torch.tensor([int(bool(pulse.stop_reason))], dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    pulse.beat()
    if flag.item():
        pulse.ask("a signal to another rank")
    return bool(flag.item())


def check(compute: Compute) -> None:
    """Raise Stopped on every rank if any rank was asked to stop; every rank must call it."""
    if agreed(compute):
        raise Stopped


def check_alone(compute: Compute) -> None:
    """Raise Stopped if this rank was asked to stop, where ranks work at their own pace; every rank must call check()
    afterwards."""
    compute.pulse.beat()
    if compute.pulse.stop_reason:
        raise Stopped
