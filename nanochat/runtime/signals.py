"""Makes a run save and stop on SIGTERM, SIGINT or SIGUSR1, on all ranks at the same step."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist

from nanochat.common import Pulse, tr
from nanochat.device import Compute

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stopped(BaseException):
    """Raised if the run has been asked to stop, usually by a signal.

    Like KeyboardInterrupt, it is not caught by handlers of Exception around foreign code.
    """


@contextlib.contextmanager
def caught(pulse: Pulse) -> Iterator[None]:
    """Record signals in `pulse` inside this block, for check() and agreed() to read.

    In threads other than the main thread, this does nothing. Without a launcher, a signal before
    the block's first pulse.beat() raises Stopped at once, and a second Ctrl-C raises
    KeyboardInterrupt. A launcher forwards signals that the terminal has already sent to every
    process, so with a launcher a repeated signal means nothing; the launcher kills processes that
    take too long (TORCH_ELASTIC_SHUTDOWN_TIMEOUT).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    alone = not os.environ.get("RANK")

    def note(signal_number: int, _: FrameType | None) -> None:
        name = signal.Signals(signal_number).name
        is_ctrl_c = signal_number == signal.SIGINT
        if alone and is_ctrl_c and pulse.stop_reason == "SIGINT":
            raise KeyboardInterrupt
        nothing_trained = not pulse.moments
        stops_at_once = pulse.at_once or (alone and nothing_trained)
        if not pulse.stop_reason:
            _say_what_happens(name, stops_at_once, twice_stops=alone and is_ctrl_c)
        pulse.ask(name)
        if stops_at_once:
            raise Stopped

    earlier_handlers = {
        caught_signal: signal.signal(caught_signal, note) for caught_signal in CAUGHT
    }
    pulse.catching = True
    pulse.stop_reason = ""
    pulse.moments = 0
    pulse.step = 0
    try:
        yield
    finally:
        pulse.catching = False
        pulse.stop_reason = ""
        for caught_signal, handler in earlier_handlers.items():
            signal.signal(caught_signal, handler)


def _say_what_happens(name: str, at_once: bool, twice_stops: bool) -> None:
    """Tell the user on standard error how soon the process will stop after a signal.

    This uses os.write(), because print() is not safe in a signal handler.
    """
    if at_once:
        line = tr("{signal}: stopping", signal=name)
    elif twice_stops:
        line = tr("{signal}: saving at the end of this step; again to stop at once", signal=name)
    else:
        line = tr("{signal}: saving at the end of this step", signal=name)
    os.write(2, f"{line}\n".encode())


@contextlib.contextmanager
def at_once(pulse: Pulse) -> Iterator[None]:
    """Raise Stopped at once, on this rank only, if a signal arrives before this block ends.

    This is for long work that is not worth finishing, such as compiling, because a launcher gives
    its ranks only 30 seconds by default before it kills them.
    """
    pulse.at_once = True
    try:
        if pulse.stop_reason:
            raise Stopped
        yield
    finally:
        pulse.at_once = False


def agreed(compute: Compute) -> bool:
    """Return whether any rank has been asked to stop; every rank must call this.

    Outside of caught(), only requests to this rank count.
    """
    pulse = compute.pulse
    pulse.beat()
    asked_to_stop = bool(pulse.stop_reason)
    if compute.world_size == 1 or not pulse.catching:
        return asked_to_stop
    flag = torch.tensor([int(asked_to_stop)], dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    pulse.beat()
    if flag.item():
        pulse.ask(tr("a signal to another rank"))
    return bool(flag.item())


def check(compute: Compute) -> None:
    """Raise Stopped on every rank if any rank has been asked to stop; every rank must call this."""
    if agreed(compute):
        raise Stopped


def check_alone(compute: Compute) -> None:
    """Raise Stopped if this rank has been asked to stop, without waiting for other ranks.

    Use it while ranks work at their own pace. Every rank must call check() afterwards.
    """
    compute.pulse.beat()
    if compute.pulse.stop_reason:
        raise Stopped
