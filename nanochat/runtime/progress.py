"""Progress of long work: one bar on a terminal, a plain line every few seconds in a log."""

import sys
import threading
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


def amount(value: float, unit: str) -> str:
    """A quantity for people: bytes as kB, MB or GB, anything else as a count with its unit."""
    if unit != "B":
        return f"{value:,.0f} {unit}"
    for factor, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{value / factor:.1f} {name}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """Seconds for people: 8.3 s, 4:05, 1:04:05."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """How far a piece of work is; `advance` may be called from any thread.

    It prints whatever its rank: only the one process that does the work makes one.
    """

    def __init__(self, title: str, total: float | None, unit: str, every_seconds: float = 10.0):
        """`total` in units, None if unknown; `unit` is "B" for bytes, else a plural noun."""
        self.title, self.total, self.unit, self.every_seconds = title, total, unit, every_seconds
        self.done = 0.0
        self._skipped = 0.0
        self._lock = threading.Lock()
        self._start = self._last = time.monotonic()
        self._bar: Bar | None = None
        if sys.stdout.isatty():
            columns = (
                TextColumn(title),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
                TimeRemainingColumn(compact=True),
            )
            self._bar = Bar(*columns, console=Console(), transient=True)
            self._task = self._bar.add_task(title, total=total, amount="")

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()
        if kind is None:
            seconds = time.monotonic() - self._start
            self._print(f"{self.title}: {self._amount()} in {duration(seconds)}{self._rate(seconds)}")

    def advance(self, by: float, skipped: bool = False) -> None:
        """Count work as done; `skipped` work was done before and says nothing about speed."""
        with self._lock:
            self.done += by
            self._skipped += by if skipped else 0
            now = time.monotonic()
            if self._bar:
                text = f"{self._amount()}{self._rate(now - self._start)}"
                self._bar.update(self._task, completed=self.done, total=self.total, amount=text)
            elif now - self._last >= self.every_seconds:
                self._last = now
                self._print(f"{self.title}: {self._amount()}{self._rate(now - self._start)}{self._left(now)}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        with self._lock:
            self._print(line)

    def _print(self, line: str) -> None:
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def _amount(self) -> str:
        if not self.total:
            return amount(self.done, self.unit)
        return f"{amount(self.done, self.unit)} of {amount(self.total, self.unit)} ({self.done / self.total:.0%})"

    def _rate(self, seconds: float) -> str:
        fresh = self.done - self._skipped
        return f", {amount(fresh / seconds, self.unit)}/s" if fresh > 0 and seconds > 0 else ""

    def _left(self, now: float) -> str:
        fresh = self.done - self._skipped
        if not self.total or fresh <= 0:
            return ""
        return f", {duration((now - self._start) * (self.total - self.done) / fresh)} left"


class StepProgress:
    """A bar on a terminal, one line a step in a log; on rank 0 only."""

    def __init__(self, title: str, steps: int, done: int, main: bool):
        self.steps, self.main, self.bar = steps, main, None
        if main and sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
            self.bar = Progress(*columns, refresh_per_second=4, transient=True)
            self.task = self.bar.add_task(title, total=steps, completed=done, note="")
            self.bar.start()

    def show(self, line: dict[str, Any], eta: float) -> None:
        """Show a step."""
        if self.bar is not None:
            note = (
                f"{line['step']}/{self.steps} loss {line['smooth_loss']:.3f} "
                f"{line['tokens_per_second']:,.0f} tok/s, {eta / 60:.1f} min left"
            )
            self.bar.update(self.task, completed=line["step"], note=note)
        elif self.main:
            print(self.line(line, eta), flush=True)

    def line(self, line: dict[str, Any], eta: float) -> str:
        """A step in the published format, with the time left."""
        step, steps = line["step"], self.steps
        return (
            f"step {step:05d}/{steps:05d} ({100 * step / steps:.2f}%) | loss: {line['smooth_loss']:.3f} | "
            f"lrm: {line['lrm']:.2f} | dt: {1000 * line['seconds']:.1f}ms | "
            f"tok/sec: {line['tokens_per_second']:,.0f} | mfu: {line['mfu']:.2f} | "
            f"total time: {line['total_seconds'] / 60:.1f}m | eta: {eta / 60:.1f}m"
        )

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()
