"""Counts what reaches the emulated device: kernels, copies, and how often the host waits for it."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Record:
    """The counts of a `with record()` block; empty until the block ends."""

    operators: Counter[str] = field(default_factory=Counter)
    by_phase: dict[str, Counter[str]] = field(default_factory=dict)
    bytes_by_phase: dict[str, Counter[str]] = field(default_factory=dict)  # read and written, each operand once
    captured: Counter[str] = field(default_factory=Counter)  # into a graph, and so not launched
    synchronisations: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    copied_bytes: Counter[str] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        """The number of kernels that reached the device."""
        return self.operators.total()


def _extension() -> Any:
    package = sys.modules.get("torch_npu")
    if not hasattr(package, "_emulator"):
        raise RuntimeError("this process has no emulated NPU: start it with `python -m tests.emulated_npu -- CMD...`")
    return package._emulator  # type: ignore[union-attr]


@contextmanager
def record() -> Iterator[Record]:
    """Count what reaches the device inside the `with` block, from all threads."""
    extension, result = _extension(), Record()
    before = extension.counts()
    yield result
    counts = extension.counts()
    counts.subtract(before)
    by_kind: dict[str, Counter[str]] = {}
    for (kind, name), count in counts.items():
        if count:
            by_kind.setdefault(kind, Counter())[name] = count
    result.by_phase = {phase: by_kind.get(phase, Counter()) for phase in ("forward", "backward")}
    result.operators = result.by_phase["forward"] + result.by_phase["backward"]
    result.bytes_by_phase = {phase: by_kind.get(f"{phase}_bytes", Counter()) for phase in ("forward", "backward")}
    for kind in ("captured", "synchronisations", "copies", "copied_bytes", "unsupported", "collectives"):
        setattr(result, kind, by_kind.get(kind, Counter()))
