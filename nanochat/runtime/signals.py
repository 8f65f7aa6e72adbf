"""SIGTERM, SIGINT and SIGUSR1 ask a run to save and stop, on all ranks at the same step."""

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
    """A signal asked for the end.

    Like KeyboardInterrupt, it passes edges that catch what foreign code raises.
    """


@contextlib.contextmanager
def caught(pulse: Pulse) -> Iterator[None]:
    """Note signals in `pulse` inside this block, for check() and agreed() to read.

    This happens in the main thread only. Without a launcher, the process stops at once while
    nothing has been trained yet, and at a second Ctrl-C. A launcher passes on a signal that the
    terminal has already sent to every process, and kills processes that take too long
    (TORCH_ELASTIC_SHUTDOWN_TIMEOUT).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    alone = not os.environ.get("RANK")

    def note(number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        is_ctrl_c = number == signal.SIGINT
        if alone and is_ctrl_c and pulse.stop_reason == "SIGINT":
            raise KeyboardInterrupt
        if not pulse.stop_reason:
            _say_what_happens(name, pulse.at_once, twice_stops=alone and is_ctrl_c)
        pulse.ask(name)
        nothing_trained = not pulse.moments
        if pulse.at_once or (alone and nothing_trained):
            raise Stopped

    before = {number: signal.signal(number, note) for number in CAUGHT}
    pulse.catching = True
    pulse.stop_reason = ""
    pulse.moments = 0
    pulse.step = 0
    try:
        yield
    finally:
        pulse.catching = False
        pulse.stop_reason = ""
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_what_happens(name: str, at_once: bool, twice_stops: bool) -> None:
    """Print what the process does about a signal; print() is not safe in a signal handler."""
    again = "; again to stop at once" if twice_stops else ""
    words = "stopping" if at_once else f"saving at the end of this step{again}"
    os.write(2, f"{name}: {words}\n".encode())


@contextlib.contextmanager
def at_once(pulse: Pulse) -> Iterator[None]:
    """Raise Stopped at once for a signal inside this block, on every rank by itself.

    This is for long work that is not worth finishing, such as compiling. A launcher gives its ranks
    30 seconds before it kills them.
    """
    pulse.at_once = True
    try:
        if pulse.stop_reason:
            raise Stopped
        yield
    finally:
        pulse.at_once = False


def agreed(compute: Compute) -> bool:
    """Return whether any rank was asked to stop; every rank must call this."""
    pulse = compute.pulse
    pulse.beat()
    asked_to_stop = bool(pulse.stop_reason)
    if compute.world_size == 1 or not pulse.catching:
        return asked_to_stop
    flag = torch.tensor([int(asked_to_stop)], dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    pulse.beat()
    if flag.item():
        pulse.ask("a signal to another rank")
    return bool(flag.item())


def check(compute: Compute) -> None:
    """Raise Stopped on every rank if any rank was asked to stop; every rank must call this."""
    if agreed(compute):
        raise Stopped


def check_alone(compute: Compute) -> None:
    """Raise Stopped if this rank was asked to stop, where ranks work at their own pace.

    Every rank must call check() afterwards.
    """
    compute.pulse.beat()
    if compute.pulse.stop_reason:
        raise Stopped
