#!/usr/bin/env python3
"""Checks an Ascend host from the driver to collectives over all cards; says why a check failed and what to do.

    python check_npu.py                  one line per check: PASS, WARN, FAIL or SKIP; the exit code is 1 if any fails
    python check_npu.py --json           the same as JSON, for programs
    python check_npu.py --bench          also measure how fast the cards are, for the planner and for bug reports
    python check_npu.py --share          print what --bench has measured, to post in an issue
    python check_npu.py --processes      list your training processes; add --end ID... to end those that you pick
    python check_npu.py --lang zh        print Chinese (default: the language of the locale)

The script needs only the standard library of Python 3.8 or later. The checks that need torch run in a separate
process, with .venv/bin/python if this Python has no torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Iterator, Sequence

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from tools_npu import host, host_checks, lines, processes, setup  # noqa: E402 - the repository need not be installed
from tools_npu.lines import FAIL, SKIP, Line  # noqa: E402

DEVICE_SECONDS = 900
HEADER = f"{'ID':>8}  {'running':>11}  {'cards':<12} {'memory':>9}  command"
HEADER_ZH = (
    "  进程号       已运行  占用的卡          显存  命令"  # a Chinese character is two columns wide
)


def python_with_torch() -> str:
    """This Python if it has torch, otherwise .venv/bin/python; "" if neither has torch."""
    if sys.version_info >= (3, 10) and importlib.util.find_spec("torch") is not None:
        return sys.executable
    own = ROOT / ".venv" / "bin" / "python"
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if own.exists() and subprocess.run([str(own), "-c", probe]).returncode == 0:
        return str(own)
    return ""


def torch_npu_version(python: str) -> str:
    """The version of the installed torch_npu, read from its metadata, because importing it may fail."""
    if not python:
        return ""
    code = "from importlib import metadata; print(metadata.version('torch_npu'))"
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return done.stdout.decode("utf-8", "replace").strip()


def device_lines(
    python: str, found: setup.Found, env: dict[str, str], bench: bool, log: Path
) -> Iterator[Line]:
    """Yield the findings of the process with torch as they come; a crash or a hang of it is a finding too."""
    if not python:
        yield Line(
            "torch",
            FAIL,
            "neither this Python nor .venv/bin/python has torch",
            "当前的 Python 和 .venv/bin/python 都没有 torch",
            "bash setup_ascend.sh",
        )
        return
    reader, writer = os.pipe()
    command = [python, "-m", "tools_npu.device_checks", str(writer)] + (
        ["--bench"] if bench else []
    )
    env = dict(env, NANOCHAT_CHECK_CANN=found.cann.version if found.cann else "")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    at, ended, usable, late = "torch", False, False, threading.Event()
    with open(log, "wb") as output:
        child = subprocess.Popen(command, env=env, pass_fds=[writer], stdout=output, stderr=output)
    os.close(writer)

    def give_up() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(DEVICE_SECONDS, give_up)
    timer.start()
    try:
        with os.fdopen(reader, encoding="utf-8") as told:
            for text in told:
                message = json.loads(text)
                at = message.get("begin", at)
                ended = ended or "end" in message
                if "line" in message:
                    line = Line(*message["line"])
                    usable = usable or (line.name == "npu:0" and line.status != FAIL)
                    yield line
        child.wait()
    finally:
        timer.cancel()
        if child.poll() is None:
            child.kill()
            child.wait()
    if ended and not usable:
        yield Line(
            "numerics, speed, hccl",
            SKIP,
            "these need a card that torch_npu can use",
            "需要 torch_npu 能用的 NPU 卡",
        )
    if not ended:
        why = (
            f"gave no answer within {DEVICE_SECONDS} s"
            if late.is_set()
            else f"ended with code {child.returncode}"
        )
        why_zh = (
            f" {DEVICE_SECONDS} 秒内没有响应"
            if late.is_set()
            else f"异常结束，退出码 {child.returncode}"
        )
        tail = " | ".join(
            log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-2:]
        )
        yield Line(
            at,
            FAIL,
            f"the process that ran this check {why}. {tail}",
            f"运行这项检查的进程{why_zh}。{tail}",
            (
                f"read its whole output in {log} and CANN's own logs in ~/ascend/log",
                f"查看完整输出 {log}，以及 CANN 自己的日志（plog）~/ascend/log",
            ),
        )


def check(bench: bool, log: Path) -> Iterator[Line]:
    """Yield the line of every check, in order."""
    env = dict(os.environ)
    found = setup.look(env)
    python = python_with_torch()
    version = torch_npu_version(python)
    yield from host_checks.all_of(found, env, version)
    job = setup.job_environment(found, version or "2.13", env, fix=False) if found.cann else env
    yield from device_lines(python, found, job, bench, log)


def show_processes(pids: Sequence[int], force: bool, language: str) -> int:
    """List your own training processes, and end those that you pick; returns the exit code."""
    env = dict(os.environ)
    holders = host.parse_smi(host.run_smi(["info"], env)[0])[2]
    listed = processes.own(env, holders)
    zh = language == "zh"
    if not listed:
        print(
            "没有属于你的训练进程" if zh else "none of your processes is training or using a card"
        )
    else:
        print(HEADER_ZH if zh else HEADER)
    for process in listed:
        held = f"{','.join(process.cards) or '-':<12} {process.used_mb:>6} MB"
        print(f"{process.pid:>8}  {process.minutes:7.1f} min  {held}  {process.command[:100]}")
    if not pids and listed and sys.stdin.isatty():
        asked = (
            "要结束哪些进程？输入进程号，用空格分隔，直接回车则不结束："
            if zh
            else "IDs to end, separated by spaces (Enter: none): "
        )
        pids = [int(word) for word in input(asked).split() if word.isdigit()]
    elif not pids and listed:
        for job in sorted({process.job for process in listed}):
            command = next(process.command for process in listed if process.pid == job)[:60]
            ids = " ".join(str(process.pid) for process in listed if process.job == job)
            ending = f"python check_npu.py --processes --end {ids}"
            print(
                f"要结束这一个任务（{command}）：{ending}"
                if zh
                else f"to end this job alone ({command}): {ending}"
            )
    return 0 if processes.end(pids, listed, force) else 1


def share(python: str, language: str) -> int:
    """Print what --bench has measured; returns the exit code. Only errors are in `language`."""
    if not python:
        english = (
            "error: neither this Python nor .venv/bin/python has torch; run bash setup_ascend.sh"
        )
        chinese = "错误：当前的 Python 和 .venv/bin/python 都没有 torch；运行 bash setup_ascend.sh"
        print(chinese if language == "zh" else english, file=sys.stderr)
        return 1
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = dict(os.environ, PYTHONPATH=path, NANOCHAT_LANG=language)
    return subprocess.run([python, "-m", "tools_npu.bench"], env=env).returncode


def log_file(base: Path) -> Path:
    """Where the checks that need torch leave their output: in the base folder, or else in the one for scratch files."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        log = base / "check_npu.log"
        with open(log, "ab"):
            return log
    except OSError:  # the check of the base folder says so
        return Path(tempfile.gettempdir()) / f"check_npu-{os.getuid()}.log"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    plain = argparse.RawDescriptionHelpFormatter
    words = argparse.ArgumentParser(
        "check_npu.py", description=__doc__, formatter_class=plain, allow_abbrev=False
    )
    words.add_argument(
        "--json", action="store_true", help="print one JSON object instead of lines, for programs"
    )
    words.add_argument(
        "--bench",
        action="store_true",
        help="also measure for a minute how fast the cards are; nanochat.planner reads the result",
    )
    words.add_argument(
        "--share",
        action="store_true",
        help="print what --bench has measured, without names of hosts or folders",
    )
    words.add_argument(
        "--processes", action="store_true", help="list your training processes instead of checking"
    )
    words.add_argument(
        "--end",
        nargs="+",
        type=int,
        default=[],
        metavar="ID",
        help="end these processes of the list with SIGTERM",
    )
    words.add_argument(
        "--force",
        action="store_true",
        help="with --end: kill processes that SIGTERM has not ended after 10 seconds",
    )
    words.add_argument(
        "--lang", choices=["zh", "en"], help="language of the output (default: that of the locale)"
    )
    words.add_argument(
        "--root",
        default="",
        help="folder to put in front of every absolute path, for tests (default: none)",
    )
    return words


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if no check failed."""
    lines.show_what_cannot_be_shown()
    options = parser().parse_args(words)
    language = options.lang or lines.language_of(os.environ)
    if options.root:
        os.environ["ASCEND_ROOT_PREFIX"] = options.root
    if options.share:
        return share(python_with_torch(), language)
    if options.processes or options.end:
        return show_processes(options.end, options.force, language)
    log = log_file(host_checks.base_folder(os.environ))
    found = []
    for line in check(options.bench, log):
        found.append(line)
        if not options.json:
            print(lines.shown(line, language, lines.on_terminal(sys.stdout)), flush=True)
    if options.json:
        print(json.dumps(lines.as_json(found), ensure_ascii=False, indent=1))
    else:
        print(lines.summary(found, language))
    return 1 if any(line.status == FAIL for line in found) else 0


if __name__ == "__main__":
    signal.signal(
        signal.SIGPIPE, signal.SIG_DFL
    )  # so that `| head` ends the script without a traceback
    sys.exit(main())
