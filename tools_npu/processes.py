"""Lists your own training processes, and ends those that you pick by id; nothing is ever ended by name."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Callable, Mapping, NamedTuple, Sequence

from tools_npu.host import Holder, prefix

TRAINING = re.compile(
    r"-m\x00(scripts|bench|torch\.distributed\.run)\b|torchrun\x00|/torchrun\b|speedrun(_npu)?\.sh"
)
PATIENCE_SECONDS = 10.0


class Process(NamedTuple):
    """A process of this user that trains or that holds the device file of a card open."""

    pid: int
    minutes: float  # since it started
    cards: tuple[str, ...]  # names of the card files that the process has open
    used_mb: int  # memory that the process holds on cards; 0 if npu-smi does not tell
    command: str
    job: int = 0  # the id of the first process of its job: a launcher and its ranks are one job


def read(path: Path) -> bytes:
    """The content of a file; empty if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError:  # the process has ended or belongs to another user
        return b""


def open_cards(folder: Path, device_folder: str) -> tuple[str, ...]:
    """The names of the davinci files that a process has open."""
    names = set()
    try:
        for link in (folder / "fd").iterdir():
            target = os.path.realpath(str(link)) if link.is_symlink() else ""
            if re.fullmatch(re.escape(device_folder) + r"/davinci\d+", target):
                names.add(os.path.basename(target))
    except OSError:
        return ()
    return tuple(sorted(names))


def started_minutes_ago(folder: Path) -> float:
    """Minutes since the process started; field 22 of /proc/PID/stat counts clock ticks from boot to that start."""
    fields = read(folder / "stat").decode("utf-8", "replace").rpartition(")")[2].split()
    uptime = read(folder.parent / "uptime").split()
    if len(fields) < 20 or not uptime:
        return 0.0
    return max(float(uptime[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK"), 0.0) / 60


def own(
    environment: Mapping[str, str], holders: Sequence[Holder] = (), proc: Path = Path("/proc")
) -> list[Process]:
    """This user's training processes, without this process and the processes that started it."""
    ancestors = set(line_of(os.getpid(), proc))
    held = {
        holder.pid: sum(other.used_mb for other in holders if other.pid == holder.pid)
        for holder in holders
    }
    devices = os.path.realpath(prefix(environment) + "/dev")
    found = []
    for folder in proc.iterdir():
        if not folder.name.isdigit() or int(folder.name) in ancestors:
            continue
        try:
            mine = folder.stat().st_uid == os.geteuid()
        except OSError:
            continue
        command = read(folder / "cmdline").decode("utf-8", "replace")
        cards = open_cards(folder, devices) if mine else ()
        number = int(folder.name)
        if mine and command and (cards or number in held or TRAINING.search(command)):
            words = " ".join(command.rstrip("\x00").split("\x00"))
            found.append(
                Process(number, started_minutes_ago(folder), cards, held.get(number, 0), words)
            )
    listed = {process.pid for process in found}
    jobs = {
        pid: [one for one in line_of(pid, proc) if one in listed][-1:] or [pid] for pid in listed
    }
    return sorted(process._replace(job=jobs[process.pid][0]) for process in found)


def line_of(pid: int, proc: Path) -> list[int]:
    """A process, the process that started it, and so on up to the first."""
    line: list[int] = []
    while pid > 1 and pid not in line:
        line.append(pid)
        fields = (
            read(proc / str(pid) / "stat").decode("utf-8", "replace").rpartition(")")[2].split()
        )
        pid = int(fields[1]) if len(fields) > 1 else 0
    return line


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    fields = read(Path(f"/proc/{pid}/stat")).decode("utf-8", "replace").rpartition(")")[2].split()
    return bool(fields) and fields[0] not in "ZX"


def end(
    pids: Sequence[int], listed: Sequence[Process], force: bool, say: Callable[[str], None] = print
) -> bool:
    """End listed processes by id: SIGTERM first, then SIGKILL if `force` is set.

    Returns True if every id was listed and every process has ended. Ids that are not listed are refused.
    """
    known = {process.pid for process in listed}
    strangers = [pid for pid in pids if pid not in known]
    for pid in strangers:
        say(f"{pid}: not among your training processes, left alone / 不是你的训练进程，没有处理")
    chosen = [pid for pid in pids if pid in known]
    for step in (signal.SIGTERM, signal.SIGKILL) if force else (signal.SIGTERM,):
        for pid in filter(is_alive, chosen):
            os.kill(pid, step)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(is_alive(pid) for pid in chosen) and time.monotonic() < deadline:
            time.sleep(0.1)
    left = [pid for pid in chosen if is_alive(pid)]
    for pid in chosen:
        say(
            f"{pid}: still running; add --force to kill it / 仍在运行；加 --force 强制结束"
            if pid in left
            else f"{pid}: ended / 已结束"
        )
    return not left and not strangers
