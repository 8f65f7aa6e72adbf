"""The processes that a benchmark measures: each side in its own, asked in turns, in JSON."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from nanochat import device
from nanochat.common import UserError
from nanochat.gpt import GPTConfig
from nanochat.platforms.base import dtype_name

ROOT = Path(__file__).resolve().parent.parent
LAST_LINES = 5  # of a failed process, which its error quotes
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "NANOCHAT_DEVICE": "cpu",
}

STEP_TITLES = ("CPU s/step", "tokens/CPU s", "peak GB", "parameters", "first loss", "last")
Key = TypeVar("Key")  # what a benchmark calls its sides


def environment(home: Path = ROOT, **variables: str) -> dict[str, str]:
    """Return an environment of one thread and one rank, with the `nanochat` of `home`."""
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    path = os.pathsep.join((str(home), str(ROOT)))  # upstream has no folder `bench`: ours is used
    return {**inherited, **ONE_THREAD, "PYTHONPATH": path, **variables}


def last_lines(text: str) -> str:
    """Return the last lines of a failed process's output, indented."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n  ".join(lines[-LAST_LINES:])


class Side:
    """A process that answers in lines of JSON. What it prints besides is shown only if it fails."""

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str], cwd: Path):
        self.name = name
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - see close()
        self._process = subprocess.Popen(
            command,
            env=variables,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def send(self, request: Any) -> None:
        """Send a request, whose answer is read later."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() says why the process has ended
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """Return the next answer; UserError with the last output if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        words = last_lines(self._errors.read())
        raise UserError(f"{self.name} ended with code {code}; its last lines:\n  {words}")

    def ask(self, request: Any) -> Any:
        """Send a request and return its answer."""
        self.send(request)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


@contextlib.contextmanager
def side(
    name: str,
    module: str,
    task: Mapping[str, Any],
    home: Path = ROOT,
    **variables: str,
) -> Iterator[Side]:
    """Run a module of `bench` with a task, and end it with the context.

    `home` is the checkout whose `nanochat` the module imports.
    """
    command = [sys.executable, "-m", module, json.dumps(task)]
    home = home.resolve()
    process = Side(name, command, environment(home, **variables), home)
    try:
        yield process
    finally:
        process.close()


def answer_of(
    name: str,
    module: str,
    task: Mapping[str, Any],
    home: Path = ROOT,
    **variables: str,
) -> Any:
    """Run a module of `bench` with a task and return its only answer."""
    with side(name, module, task, home, **variables) as process:
        return process.answer()


def take_turns(sides: Mapping[Key, Side], request: Any, rounds: int) -> dict[Key, list[Any]]:
    """Send all sides the same request, round after round; return the answers of each side.

    The sides take turns, so that a busy machine slows them equally.
    """
    answers: dict[Key, list[Any]] = {key: [] for key in sides}
    for _ in range(rounds):
        for key, process in sides.items():
            answers[key].append(process.ask(request))
    return answers


@dataclass
class Steps:
    """What a side that trains has measured, and the figures of its model."""

    parameters: int = 0
    seconds: list[float] = field(default_factory=list)  # CPU seconds of each step
    losses: list[float] = field(default_factory=list)  # in nats, with those of the warm-up
    peak_bytes: int = 0

    @property
    def step_seconds(self) -> float:
        """The CPU seconds of the median step."""
        return median(self.seconds)

    def speed(self, tokens: int) -> float:
        """Return the tokens per CPU second of the median step, which trains on so many tokens."""
        return tokens / self.step_seconds

    def cells(self, tokens: int) -> list[str]:
        """Return the figures for a table; a step trains on so many tokens."""
        return [
            f"{self.step_seconds:.3f}",
            f"{self.speed(tokens):,.0f}",
            f"{self.peak_bytes / 1e9:.2f}",
            f"{self.parameters:,}",
            f"{self.losses[0]:.3f}",
            f"{self.losses[-1]:.3f}",
        ]


def train_in_turns(sides: Mapping[Key, Side], request: Any, rounds: int) -> dict[Key, Steps]:
    """Let sides that train take turns.

    Each first answers with figures of its model, and then as child.time_steps does.
    """
    results = {key: Steps(**process.answer()) for key, process in sides.items()}
    for key, answers in take_turns(sides, request, rounds).items():
        result = results[key]
        for answer in answers:
            result.seconds += answer["seconds"]
            result.losses += answer["losses"]
            result.peak_bytes = answer["peak_bytes"]
    return results


def refuse(message: str) -> UserError:
    """Return the error of a mistake on the command line."""
    return UserError(message, exit_code=2)


def check_checkout(flag: str, folder: Path) -> None:
    """Raise UserError (code 2) where the folder of a flag is no checkout of 2026."""
    model = folder / "nanochat/gpt.py"
    if not model.is_file() or "def setup_optimizer(" not in model.read_text(encoding="utf-8"):
        raise refuse(
            f"{flag} must name a checkout of karpathy/nanochat of 2026, got {folder}, which has no "
            "nanochat/gpt.py with a setup_optimizer. Give the folder that holds its README."
        )


def check_installed(peer: str, *packages: str) -> None:
    """Raise UserError (code 2) where a package that a peer needs is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            command = f"{sys.executable} -m pip install {package}"
            raise refuse(f"{peer} needs {package}: run `{command}`")


def check_at_least(least: int, **flags: float) -> None:
    """Raise UserError (code 2) for the first flag whose value is below `least`."""
    for name, value in flags.items():
        if value < least:
            raise refuse(f"--{name} must be at least {least}, got {value}")


def check_peers(quick: bool, peers: Sequence[str] = (), upstream: Path | None = None) -> None:
    """Raise UserError (code 2) for --quick beside peers, and where --upstream is no checkout."""
    if quick and (peers or upstream):
        raise refuse("--quick measures ours alone: leave it out, or what to measure beside ours")
    if upstream is not None:
        check_checkout("--upstream", upstream)


def own_dtype() -> str:
    """Return the number format in which this CPU is fastest."""
    compute = device.compute_init("cpu")
    dtype, _ = compute.platform.best_dtype()
    return dtype_name(dtype)


def upstream_shape(shape: GPTConfig) -> dict[str, Any]:
    """Return the fields of a shape that upstream's GPTConfig has too."""
    fields = asdict(shape)
    for ours in ("bigram_rows", "offset_layers", "exclusive_layers"):
        del fields[ours]
    return fields
