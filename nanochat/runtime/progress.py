"""Shows the progress of long work, as a bar on a terminal or as lines in a log."""

import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from nanochat.common import tr

BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
# Pairs of units of time: (seconds of the larger, seconds of the smaller, their names in English).
TIME_UNITS = (
    (86_400, 3_600, ("d", "h")),
    (3_600, 60, ("h", "min")),
    (60, 1, ("min", "s")),
)


def amount(value: float, unit: str) -> str:
    """Format a quantity with its unit; bytes ("B") are shown in B, kB, MB or GB.

    Other quantities are rounded to whole numbers or, below 10, to two digits.
    """
    if unit != "B":
        number = f"{value:.2g}" if value < 10 else f"{value:,.0f}"
        return f"{number} {unit}"
    for factor, name in BYTE_UNITS:
        if value >= factor:
            return f"{value / factor:.1f} {name}"
    return f"{value:.0f} B"


def memory(value: float) -> str:
    """Format bytes of memory in GiB or MiB: a card that is sold as 64 GB has 64.0 GiB."""
    if value >= 2**30:
        return f"{value / 2**30:.1f} GiB"
    return f"{value / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Format seconds in the user's language, in at most two units.

    In English these are such as 8.3 s, 4 min 5 s, 3 h 20 min or 2 d 5 h.
    """
    return _duration(seconds, {"d": tr("d"), "h": tr("h"), "min": tr("min"), "s": tr("s")})


def plain_duration(seconds: float) -> str:
    """Format seconds as duration() does, but always in English.

    This is for the lines of training steps, which scripts parse.
    """
    return _duration(seconds, {})


def _duration(seconds: float, names: Mapping[str, str]) -> str:
    for large_seconds, small_seconds, (large, small) in TIME_UNITS:
        small_count = round(seconds / small_seconds)
        large_count, remainder = divmod(small_count, large_seconds // small_seconds)
        if large_count:
            text = f"{large_count:,} {names.get(large, large)}"
            return f"{text} {remainder} {names.get(small, small)}" if remainder else text
    return f"{seconds:.1f} {names.get('s', 's')}"


class Progress:
    """Shows the progress of some work on standard output, as a bar on a terminal, else as lines.

    Without a bar, `advance` prints a line at most every `every_seconds`, and `show` prints one each
    time. Both may be called from any thread. Used as a context manager, a Progress ends with a line
    that sums up the work, unless the block raises. With shown=False, as on all ranks but one,
    nothing is printed.
    """

    def __init__(
        self,
        title: str,
        total: float | None,
        unit: str,
        every_seconds: float = 10.0,
        completed: float = 0.0,
        shown: bool = True,
    ):
        """Start showing progress.

        `total` is the amount of work in units, or None if it is unknown. `unit` is "B" for bytes,
        or else a plural noun. `completed` is the amount that earlier runs have done.
        """
        self.title = title
        self.total = total
        self.unit = unit
        self.every_seconds = every_seconds
        self.completed = completed
        self._skipped = completed  # not done by this process, so not part of its speed
        self._shown = shown
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._printed_at = self._start
        self._bar: Bar | None = None
        # The console looks at standard output, TERM and TTY_INTERACTIVE.
        console = Console()
        if shown and sys.stdout.isatty() and console.is_interactive:
            self._bar = self._new_bar(console)
            self._task = self._bar.add_task(title, total=total, completed=int(completed), note="")
            self._bar.start()

    def _new_bar(self, console: Console) -> Bar:
        """Return a new bar of 20 columns between a title and a note."""
        return Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            refresh_per_second=4,
            transient=True,
            # Errors on the terminal are printed above the bar; redirected ones are left alone.
            redirect_stderr=sys.stderr.isatty(),
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.close()
        if kind is None:
            seconds = time.monotonic() - self._start
            line = tr(
                "{title}: {amount} in {time}{rate}",
                title=self.title,
                amount=self._amount(),
                time=duration(seconds),
                rate=self._rate(seconds),
            )
            self._print(line)

    def close(self) -> None:
        """Remove the bar from the terminal, if there is one."""
        if self._bar:
            self._bar.stop()

    def advance(self, by: float, skipped: bool = False) -> None:
        """Count `by` more units as completed.

        If they are `skipped`, an earlier run has done them, so they do not count towards the speed.
        """
        with self._lock:
            self.completed += by
            if skipped:
                self._skipped += by
            now = time.monotonic()
            if self._bar:
                self._bar.update(self._task, completed=self.completed, note=self._note(now))
            elif now - self._printed_at >= self.every_seconds:
                self._printed_at = now
                self._print(tr("{title}: {note}", title=self.title, note=self._note(now)))

    def show(self, completed: float, note: str, line: str) -> None:
        """Set the completed amount; show `note` next to the bar or, without one, print `line`."""
        with self._lock:
            self.completed = completed
            if self._bar:
                self._bar.update(self._task, completed=int(completed), note=note)
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
        seconds = now - self._start
        return f"{self._amount()}{self._rate(seconds)}{self._time_left(seconds)}"

    def _amount(self) -> str:
        if not self.total:
            return amount(self.completed, self.unit)
        completed = f"{self.completed:,.0f}"
        return tr(
            "{completed} of {total} ({share:.0%})",
            completed=amount(self.completed, "B") if self.unit == "B" else completed,
            total=amount(self.total, self.unit),
            share=self.completed / self.total,
        )

    def _own_work(self) -> float:
        """Return the amount of work that this process itself has completed, in units."""
        return self.completed - self._skipped

    def _rate(self, seconds: float) -> str:
        own_work = self._own_work()
        if own_work <= 0 or seconds <= 0:
            return ""
        return tr(", {amount}/s", amount=amount(own_work / seconds, self.unit))

    def _time_left(self, seconds: float) -> str:
        """Return the estimated time left as text, or "" if it cannot be estimated."""
        own_work = self._own_work()
        if not self.total or own_work <= 0 or self.completed > self.total:
            return ""
        seconds_left = seconds * (self.total - self.completed) / own_work
        return tr(", {time} left", time=duration(seconds_left))
