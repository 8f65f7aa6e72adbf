"""Progress of long work: a bar on a terminal, otherwise lines in a log."""

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
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
    """Seconds for people, in at most two units: 8.3 s, 4 min 5 s, 3 h 20 min, 2 d 5 h."""
    for size, part, names in (
        (86_400, 3_600, ("d", "h")),
        (3_600, 60, ("h", "min")),
        (60, 1, ("min", "s")),
    ):
        whole, rest = divmod(round(seconds / part), size // part)
        if whole:
            return f"{whole:,} {names[0]}" + (f" {rest} {names[1]}" if rest else "")
    return f"{seconds:.1f} s"


class Progress:
    """Shows on standard output how far a piece of work is: a bar if that is a terminal, otherwise lines.

    Work is counted by `advance`, which prints a line every few seconds, or told by `show`, which prints every line.
    Both may be called from any thread. As a context manager, a Progress ends with a line that sums up the work.
    Progress does not ask for the rank: of several processes one makes it with shown=True, and only that one prints.
    """

    def __init__(
        self,
        title: str,
        total: float | None,
        unit: str,
        every_seconds: float = 10.0,
        done: float = 0.0,
        shown: bool = True,
    ):
        """`total` counts units, None if unknown; `unit` is "B" for bytes, else a plural noun; `done` counts the units
        of earlier runs."""
        self.title, self.total, self.unit, self.every_seconds = title, total, unit, every_seconds
        self.done = done
        self._skipped = done  # not done by this process, so not part of its speed
        self._shown = shown
        self._lock = threading.Lock()
        self._start = self._last = time.monotonic()
        self._bar: Bar | None = None
        console = (
            Console()
        )  # asks standard output, like the next line, and the variables TERM and TTY_INTERACTIVE
        if shown and sys.stdout.isatty() and console.is_interactive:
            texts = [
                TextColumn(field, markup=False)
                for field in ("{task.description}", "{task.fields[note]}")
            ]
            self._bar = Bar(
                texts[0],
                BarColumn(bar_width=20),
                texts[1],  # on 80 columns about 50 are left for the note
                console=console,
                refresh_per_second=4,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),  # above the bar; errors that go to a file stay there
            )
            self._task = self._bar.add_task(title, total=total, completed=int(done), note="")
            self._bar.start()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.close()
        if kind is None:
            seconds = time.monotonic() - self._start
            self._print(
                f"{self.title}: {self._amount()} in {duration(seconds)}{self._rate(seconds)}"
            )

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar:
            self._bar.stop()

    def advance(self, by: float, skipped: bool = False) -> None:
        """Count work as done. `skipped` work was done by an earlier run, so it does not enter the speed."""
        with self._lock:
            self.done += by
            self._skipped += by if skipped else 0
            now = time.monotonic()
            if self._bar:
                self._bar.update(self._task, completed=self.done, note=self._note(now))
            elif now - self._last >= self.every_seconds:
                self._last = now
                self._print(f"{self.title}: {self._note(now)}")

    def show(self, done: float, note: str, line: str) -> None:
        """`done` units are done in all. A terminal shows `note` beside the bar, a log gets `line`."""
        with self._lock:
            self.done = done
            if self._bar:
                self._bar.update(self._task, completed=int(done), note=note)
            else:
                self._print(line)

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        with self._lock:
            self._print(line)

    def _print(self, line: str) -> None:
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self._shown:
            print(line, flush=True)

    def _note(self, now: float) -> str:
        return f"{self._amount()}{self._rate(now - self._start)}{self._left(now)}"

    def _amount(self) -> str:
        if not self.total:
            return amount(self.done, self.unit)
        return f"{amount(self.done, self.unit)} of {amount(self.total, self.unit)} ({self.done / self.total:.0%})"

    def _rate(self, seconds: float) -> str:
        fresh = self.done - self._skipped
        return f", {amount(fresh / seconds, self.unit)}/s" if fresh > 0 and seconds > 0 else ""

    def _left(self, now: float) -> str:
        fresh = self.done - self._skipped
        if not self.total or fresh <= 0 or self.done > self.total:  # more work than was foreseen
            return ""
        return f", {duration((now - self._start) * (self.total - self.done) / fresh)} left"
