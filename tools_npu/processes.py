"""Lists your own training processes, and ends those that you pick by id, never by name."""

from __future__ import annotations

import os
import pwd
import re
import signal
import time
from pathlib import Path
from typing import Callable, Mapping, NamedTuple, Sequence

from tools_npu.host import Holder, prefix

# A script is part of its job: runs/supervise.sh would start a job again that was ended without it.
TRAINING = re.compile(
    r"-m\x00(scripts|bench|runs|torch\.distributed\.run)\b|torchrun\x00|/torchrun\b|"
    r"sh\x00[^\x00]*\b(speedrun(_npu)?|runs/\w+)\.sh\x00"
)
PATIENCE_SECONDS = 10.0


class Process(NamedTuple):
    """A process of this user that trains, or that holds the device file of a card open."""

    pid: int
    minutes: float  # since it started
    cards: tuple[str, ...]  # names of the card files that the process has open
    used_mb: int  # memory that the process holds on cards; 0 if npu-smi does not report it
    command: str
    user: str = ""  # who logged in to start the process, or else its owner
    folder: str = ""  # the folder in which the process works
    job: int = 0  # the id of the first process of its job: a launcher and its ranks are one job


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, or b"" if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError:  # the process has ended or belongs to another user
        return b""


def stat_fields(folder: Path) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which begin with state and parent id."""
    text = read_bytes(folder / "stat").decode("utf-8", "replace")
    return text.rpartition(")")[2].split()


def open_cards(folder: Path, device_folder: str) -> tuple[str, ...]:
    """Return the names of the davinci files that a process has open."""
    pattern = re.escape(device_folder) + r"/davinci\d+"
    names = set()
    try:
        for link in (folder / "fd").iterdir():
            target = os.path.realpath(str(link)) if link.is_symlink() else ""
            if re.fullmatch(pattern, target):
                names.add(os.path.basename(target))
    except OSError:
        return ()
    return tuple(sorted(names))


def started_minutes_ago(folder: Path) -> float:
    """Return the minutes since a process started, or 0 if they are not known.

    Field 22 of /proc/PID/stat counts the clock ticks from boot to the start of the process.
    """
    fields = stat_fields(folder)
    uptime = read_bytes(folder.parent / "uptime").split()
    if len(fields) < 20 or not uptime:
        return 0.0
    start = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(float(uptime[0]) - start, 0.0) / 60


def list_own(
    environment: Mapping[str, str],
    holders: Sequence[Holder] = (),
    proc: Path = Path("/proc"),
) -> list[Process]:
    """Return this user's training processes, except this process and its ancestors."""
    ancestors = set(ancestry(os.getpid(), proc))
    used_mb: dict[int, int] = {}  # memory on cards by process
    for holder in holders:
        used_mb[holder.pid] = used_mb.get(holder.pid, 0) + holder.used_mb
    devices = os.path.realpath(prefix(environment) + "/dev")
    processes = []
    for folder in proc.iterdir():
        if not folder.name.isdigit() or int(folder.name) in ancestors:
            continue
        pid = int(folder.name)
        command = read_bytes(folder / "cmdline").decode("utf-8", "replace")
        if not belongs_to_user(folder) or not command:
            continue
        cards = open_cards(folder, devices)
        if cards or pid in used_mb or TRAINING.search(command):
            command_line = " ".join(command.rstrip("\x00").split("\x00"))
            minutes = started_minutes_ago(folder)
            processes.append(
                Process(
                    pid,
                    minutes,
                    cards,
                    used_mb.get(pid, 0),
                    command_line,
                    user_of(folder),
                    working_folder(folder),
                )
            )
    pids = {process.pid for process in processes}
    with_jobs = []
    for process in processes:
        listed_ancestry = [pid for pid in ancestry(process.pid, proc) if pid in pids]
        job = listed_ancestry[-1] if listed_ancestry else process.pid
        with_jobs.append(process._replace(job=job))
    return sorted(with_jobs)


def user_of(folder: Path) -> str:
    """Return the name of the user who logged in to start a process, or else of its owner.

    Where everybody works as root, the name of the login tells whose process it is.
    """
    login = read_bytes(folder / "loginuid").decode("utf-8", "replace").strip()
    try:
        # The kernel writes 2**32 - 1 for a process that no login started.
        user_id = int(login) if login.isdigit() and int(login) < 2**32 - 1 else folder.stat().st_uid
    except OSError:  # the process has ended
        return "?"
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def working_folder(folder: Path) -> str:
    """Return the folder in which a process works, or "?" if it cannot be read."""
    try:
        return os.readlink(str(folder / "cwd"))
    except OSError:
        return "?"


def belongs_to_user(folder: Path) -> bool:
    """Return whether a process belongs to this user, which is False if it has ended."""
    try:
        return folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def ancestry(pid: int, proc: Path) -> list[int]:
    """Return the ids of a process and its ancestors, from the process itself to the first."""
    pids: list[int] = []
    while pid > 1 and pid not in pids:
        pids.append(pid)
        fields = stat_fields(proc / str(pid))
        pid = int(fields[1]) if len(fields) > 1 else 0
    return pids


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    fields = stat_fields(Path(f"/proc/{pid}"))
    return bool(fields) and fields[0] not in "ZX"


def end(
    pids: Sequence[int],
    listed: Sequence[Process],
    force: bool,
    language: str = "en",
    say: Callable[[str], None] = print,
) -> bool:
    """End listed processes by id, with SIGTERM and then, if `force` is set, with SIGKILL.

    Ids that are not listed are refused. Returns True if every id was listed and every process has
    ended.
    """
    is_chinese = language == "zh"
    listed_pids = {process.pid for process in listed}
    strangers = [pid for pid in pids if pid not in listed_pids]
    for pid in strangers:
        text = (
            "不是你的训练进程，没有处理"
            if is_chinese
            else "not among your training processes, left alone"
        )
        say(f"{pid}: {text}")
    chosen = [pid for pid in pids if pid in listed_pids]
    signals = (signal.SIGTERM, signal.SIGKILL) if force else (signal.SIGTERM,)
    for signal_number in signals:
        for pid in filter(is_alive, chosen):
            os.kill(pid, signal_number)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(is_alive(pid) for pid in chosen) and time.monotonic() < deadline:
            time.sleep(0.1)
    alive = [pid for pid in chosen if is_alive(pid)]
    for pid in chosen:
        if pid in alive:
            text = (
                "仍在运行；加 --force 强制结束"
                if is_chinese
                else "still running; add --force to kill it"
            )
        else:
            text = "已结束" if is_chinese else "ended"
        say(f"{pid}: {text}")
    return not alive and not strangers
