"""Runs tests in separate processes that have the emulated NPU; one process serves many tests.

Loading the device changes torch for the whole process, and tests of the CPU must not run there. So a test that needs
the device is sent to another process:

    @on_npu(chip="910A", devices=1)
    def test_something(): ...          # runs in the other process; an exception there fails the test
"""

import atexit
import functools
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import forks

from . import build, host

TESTS = Path(__file__).resolve().parent.parent
FROM_THE_TEST = ("NANOCHAT_BASE_DIR",)  # variables that differ between tests


def on_npu(chip: str = "910B3", devices: int = 2, **environment: str) -> Callable[[Callable[..., None]], Any]:
    """Run a test function on an emulated NPU. Without a compiler, the test is skipped."""

    def decorate(test: Callable[..., None]) -> Any:
        @pytest.mark.npu
        @functools.wraps(test)
        def sent(*args: Any, **kwargs: Any) -> None:
            skip_without_compiler()
            _worker(chip, devices, tuple(environment.items())).call(test.__module__, test.__name__, kwargs)

        return sent

    return decorate


def call_on(chip: str, function: Callable[..., None], **kwargs: Any) -> None:
    """Call a function of a test module on a chip that the test chooses; an exception there fails the test."""
    skip_without_compiler()
    _worker(chip, 1, ()).call(function.__module__, function.__name__, kwargs)


def skip_without_compiler() -> None:
    """Skip the test, with the reason, if the device cannot be compiled."""
    if why := build.missing():
        pytest.skip(f"the emulated NPU cannot be compiled: {why}")


def npu_environment(
    root: Path, chip: str = "910B3", devices: int = 2, memory_gib: float | None = None
) -> dict[str, str]:
    """The environment of a program on a fake host under `root`; the program can import the tests, too."""
    skip_without_compiler()
    env = host.environment(root, host.Settings(chip, devices, memory_gib))
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(TESTS.parent)])
    return env


class _Worker:
    """A process on an emulated NPU that calls functions by name."""

    def __init__(self, chip: str, devices: int, environment: dict[str, str]):
        self.folder = tempfile.TemporaryDirectory(prefix="emulated-npu-")
        self.here, there = Pipe()
        env = {**npu_environment(Path(self.folder.name), chip, devices), **environment}
        command = [sys.executable, "-m", "tests.emulated_npu.worker", str(there.fileno())]
        self.process = subprocess.Popen(command, env=env, pass_fds=[there.fileno()])
        there.close()

    def call(self, module: str, name: str, kwargs: dict[str, Any]) -> None:
        self.here.send((module, name, kwargs, {key: os.environ[key] for key in FROM_THE_TEST if key in os.environ}))
        try:
            error = self.here.recv()
        except EOFError:
            error = f"the process on the emulated NPU ended with exit code {self.process.wait()}"
            _worker.cache_clear()
        if error is not None:
            pytest.fail(f"on the emulated NPU:\n{error}", pytrace=False)

    def end(self) -> None:
        self.here.close()
        self.process.wait(timeout=60)
        self.folder.cleanup()


@functools.lru_cache(maxsize=8)
def _worker(chip: str, devices: int, environment: tuple[tuple[str, str], ...]) -> _Worker:
    worker = _Worker(chip, devices, dict(environment))
    atexit.register(worker.end)
    return worker


def _place_on_host(rank: int, per_host: int) -> dict[str, str]:
    """The local rank, and where several hosts are played on this one, the cards that the rank's host sees."""
    host, local_rank = divmod(rank, per_host)
    cards = range(host * per_host, (host + 1) * per_host)
    return {"LOCAL_RANK": str(local_rank), "ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, cards))}


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, chip: str = "910B3", **env: str) -> list[Any]:
    """Call `function(compute, *args)` on every rank, each with its own NPU, in fp32 unless NANOCHAT_DTYPE is given.

    `function` must be defined at the top level of a test module. Returns the results by rank; an exception on any rank
    fails the test.
    """
    import torch

    from tests.support.meeting import open_meeting

    with tempfile.TemporaryDirectory(prefix="emulated-npu-") as name:
        folder, meeting, torch_process = Path(name), open_meeting(), forks()
        torch.save((function.__module__, function.__name__, args), folder / "call.pt")
        base = {"NANOCHAT_DTYPE": "float32", **npu_environment(folder / "host", chip, world_size), **env}
        base["WORLD_SIZE"] = str(world_size)
        words = ["tests.emulated_npu.worker", "rank", str(folder), str(meeting.port)]
        running = {}
        for rank in range(world_size):
            outputs = folder / f"outputs-{rank}"
            outputs.mkdir()
            place = _place_on_host(rank, int(base.get("LOCAL_WORLD_SIZE", world_size)))
            running[rank] = torch_process.start(words, TESTS.parent, {**base, "RANK": str(rank), **place}, outputs)
        codes: dict[int, int] = {}
        end = time.monotonic() + 180
        while running:
            time.sleep(0.05)
            late = time.monotonic() > end
            for rank, child in list(running.items()):
                if late:
                    os.kill(child, signal.SIGKILL)
                if (code := torch_process.code(child, wait=late)) is not None:
                    codes[rank] = code
                    del running[rank]
            if any(codes.values()):  # the others would wait for the failed rank
                end = min(end, time.monotonic() + 5)
        said = [path.read_text() for path in sorted([*folder.glob("*.error"), *folder.glob("outputs-*/err")])]
        assert not any(codes.values()), "\n".join([f"exit codes {codes}", *said])
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(folder: Path, port: int) -> None:
    import torch

    from nanochat import device
    from tests.support.meeting import join

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        module, name, args = torch.load(folder / "call.pt", weights_only=False)
        torch.npu.set_device(int(os.environ["LOCAL_RANK"]))  # type: ignore[attr-defined]
        join(port, rank, world_size, "cpu:gloo,npu:hccl")
        result = getattr(importlib.import_module(module), name)(device.compute_init("npu"), *args)
        torch.save(result, folder / f"{rank}.pt")
        device.compute_cleanup()
    except BaseException:  # the edge of a process: the test gets the traceback
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{_words()}")
        os._exit(1)


def _words() -> str:
    """The current exception with the local variables of tests, since pytest cannot show those of another process."""
    _, error, frames = sys.exc_info()
    text = "".join(traceback.format_exception(error))
    for frame, _ in traceback.walk_tb(frames):
        if Path(frame.f_code.co_filename).name.startswith("test_"):
            text += "".join(f"    {name} = {repr(value)[:200]}\n" for name, value in frame.f_locals.items())
    return text


def _serve(connection: Connection) -> None:
    import torch_npu  # noqa: F401  # the stub: from now on this process has the device

    while True:
        try:
            module, name, kwargs, environment = connection.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            function = getattr(importlib.import_module(module), name)
            getattr(function, "__wrapped__", function)(**kwargs)  # a test's own body, without on_npu()
            connection.send(None)
        except BaseException:  # the edge of a process: the test gets the traceback
            connection.send(_words())


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        _rank(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        _serve(Connection(int(sys.argv[1])))
