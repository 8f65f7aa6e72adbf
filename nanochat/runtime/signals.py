"""SIGTERM, SIGINT and SIGUSR1 ask a training run to save and stop; all ranks do so at the same step."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from nanochat.device import Compute

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stopped(BaseException):
    """A signal asked for the end; like KeyboardInterrupt it passes edges that catch what foreign code raises."""


@dataclass
class _State:
    """What has happened in this process."""

    catching: bool = False
    asked: str = ""  # the name of the first signal
    alive: int = 0  # how often this process has said that it goes on
    step: int = 0  # which it is at


_state = _State()


@contextlib.contextmanager
def caught() -> Iterator[None]:
    """From here on the signals are only noted, and looked at by check() and agreed(); in the main thread only.

    Without a launcher the process stops at once while nothing is trained yet, and at a second Ctrl-C. A launcher hands
    on what the terminal has already sent to all, and kills those that take too long (TORCH_ELASTIC_SHUTDOWN_TIMEOUT).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    alone = "RANK" not in os.environ

    def note(number: int, _: FrameType | None) -> None:
        if alone and _state.asked == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not _state.asked:
            again = "; again to stop at once" if alone and number == signal.SIGINT else ""
            os.write(2, f"{signal.Signals(number).name}: saving at the end of this step{again}\n".encode())
        _state.asked = _state.asked or signal.Signals(number).name
        if alone and not _state.alive:
            raise Stopped

    before = {number: signal.signal(number, note) for number in CAUGHT}
    _state.catching, _state.asked, _state.alive, _state.step = True, "", 0, 0
    try:
        yield
    finally:
        _state.catching, _state.asked = False, ""
        for number, handler in before.items():
            signal.signal(number, handler)


def asked() -> str:
    """The name of the signal that this process has had, or ""; other ranks may not have had it."""
    return _state.asked


def ask(why: str) -> None:
    """Save and stop at the next step, as after a signal."""
    _state.asked = _state.asked or why


def alive(step: int | None = None) -> None:
    """Say that this process goes on, and at which step, to whoever watches it."""
    _state.alive += 1
    _state.step = _state.step if step is None else step


def step() -> int:
    """The step that this process last said it was at."""
    return _state.step


def moments() -> int:
    """How often this process has said that it goes on."""
    return _state.alive


def agreed(compute: Compute) -> bool:
    """Whether any rank was asked to stop; every rank must call it."""
    alive()
    if compute.world_size == 1 or not _state.catching:
        return bool(_state.asked)
    flag = torch.tensor([int(bool(_state.asked))], dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    alive()
    if flag.item():
        ask("a signal to another rank")
    return bool(flag.item())


def check(compute: Compute) -> None:
    """Raise Stopped on every rank if any was asked to stop; every rank must call it."""
    if agreed(compute):
        raise Stopped


def check_alone() -> None:
    """Raise Stopped if this rank was asked to stop, where ranks go at their own pace; a check() of all must follow."""
    alive()
    if _state.asked:
        raise Stopped
