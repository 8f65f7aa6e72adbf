#!/usr/bin/env python3
"""Checks an Ascend host from the driver to the collectives, and says what failed and what to do.

    python check_npu.py                  one line per check: PASS, WARN, FAIL or SKIP; the exit code is 1 if any fails
    python check_npu.py --json           the same as JSON, for programs
    python check_npu.py --bench          also measure how fast the cards are, for the planner and for bug reports
    python check_npu.py --share          print what --bench has measured, to post in an issue
    python check_npu.py --processes      list your training processes with user and folder; add --end ID... to end some
    python check_npu.py --lang zh        print Chinese (default: the language of the locale)

The script needs only the standard library of Python 3.8 or later. The checks that need torch run in
a separate process, with .venv/bin/python, or with this Python if that one has no torch.
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
from typing import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

# Thanks to the line above, the repository need not be installed.
from tools_npu import host, host_checks, lines, processes, setup  # noqa: E402
from tools_npu.flags import Flags  # noqa: E402
from tools_npu.lines import FAIL, SKIP, Line  # noqa: E402

CHINESE_HELP = """检查昇腾主机，从驱动一直到集合通信，说明哪一项没通过、该怎么办。

    python check_npu.py                  每项检查一行：PASS、WARN、FAIL 或 SKIP；有一项 FAIL 时退出码是 1
    python check_npu.py --json           同样的内容，以 JSON 输出，供程序读取
    python check_npu.py --bench          另外测量卡的速度，供规划器和问题反馈使用
    python check_npu.py --share          打印 --bench 测得的结果，可以贴到 issue 里
    python check_npu.py --processes      列出你的训练进程、用户和目录；加上 --end ID... 结束其中几个
    python check_npu.py --lang zh        打印中文（默认：由系统的语言环境决定）

这个脚本只需要 Python 3.8 或更高版本的标准库。需要 torch 的检查在单独的进程里进行，用的是 .venv/bin/python；
如果它没有 torch，就用运行本脚本的 Python。
"""

DEVICE_SECONDS = 900
HEADER = f"{'ID':>8}  {'running':>11}  {'cards':<12} {'memory':>9}  {'user':<10}  command"
# A Chinese character is two columns wide.
HEADER_ZH = "  进程号       已运行  占用的卡          显存  用户        命令"


def python_with_torch() -> str:
    """Return the path of .venv/bin/python if it has torch, or else of this Python.

    The path is "" if neither has torch. A torch of the system or of conda is not the one that jobs
    use once set-up has made .venv.
    """
    python = ROOT / ".venv" / "bin" / "python"
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if os.path.exists(python) and subprocess.run([str(python), "-c", probe]).returncode == 0:
        return str(python)
    if sys.version_info >= (3, 10) and importlib.util.find_spec("torch") is not None:
        return sys.executable
    return ""


def torch_npu_version(python: str) -> str:
    """Return the version of the installed torch_npu, or "" if there is none.

    It is read from the metadata of the package, because importing torch_npu may fail.
    """
    if not python:
        return ""
    code = "from importlib import metadata; print(metadata.version('torch_npu'))"
    process = subprocess.run(
        [python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return process.stdout.decode("utf-8", "replace").strip()


def with_pythonpath(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which another Python imports from this repository."""
    paths = [str(ROOT)]
    if env.get("PYTHONPATH"):
        paths.append(env["PYTHONPATH"])
    return dict(env, PYTHONPATH=os.pathsep.join(paths))


def device_lines(
    python: str,
    cann: str,
    env: Mapping[str, str],
    bench: bool,
    log: Path,
) -> Iterator[Line]:
    """Yield the results of the checks that need torch, which run in a process of their own.

    A crash or a hang of that process is a result too. `cann` is the version of CANN, or "".
    """
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
    command = [python, "-m", "tools_npu.device_checks", str(writer)]
    if bench:
        command.append("--bench")
    env = dict(with_pythonpath(env), NANOCHAT_CHECK_CANN=cann)
    with os.fdopen(own_file(log, os.O_TRUNC), "wb") as output:
        child = subprocess.Popen(command, env=env, pass_fds=[writer], stdout=output, stderr=output)
    os.close(writer)
    late = threading.Event()

    def give_up() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(DEVICE_SECONDS, give_up)
    timer.start()
    running = "torch"  # the check that is running
    ended = False
    usable = False  # whether card 0 can be used
    try:
        with os.fdopen(reader, encoding="utf-8") as pipe:
            for json_line in pipe:
                message = json.loads(json_line)
                running = message.get("begin", running)
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
    if not ended:
        yield unanswered(running, None if late.is_set() else child.returncode, log)
    elif not usable:
        yield Line(
            "numerics, speed, hccl",
            SKIP,
            "these need a card that torch_npu can use",
            "需要 torch_npu 能用的 NPU 卡",
        )


def unanswered(name: str, exit_code: int | None, log: Path) -> Line:
    """Return the result of the check during which the process ended.

    The exit code is None if the process hung.
    """
    if exit_code is None:
        english = f"gave no answer within {DEVICE_SECONDS} s"
        chinese = f" {DEVICE_SECONDS} 秒内没有响应"
    else:
        english = f"ended with code {exit_code}"
        chinese = f"异常结束，退出码 {exit_code}"
    output = log.read_text(encoding="utf-8", errors="replace").strip()
    tail = " | ".join(output.splitlines()[-2:])
    return Line(
        name,
        FAIL,
        f"the process that ran this check {english}. {tail}",
        f"运行这项检查的进程{chinese}。{tail}",
        (
            f"read its whole output in {log} and CANN's own logs in ~/ascend/log",
            f"查看完整输出 {log}，以及 CANN 自己的日志（plog）~/ascend/log",
        ),
    )


def check(bench: bool, log: Path) -> Iterator[Line]:
    """Yield the result of every check, in order."""
    env = dict(os.environ)
    inventory = setup.take_inventory(env)
    python = python_with_torch()
    version = torch_npu_version(python)
    yield from host_checks.all_of(inventory, env, version)
    cann = inventory.cann
    if cann:
        env = setup.job_environment(inventory, version or "2.13", env, fix=False)
    yield from device_lines(python, cann.version if cann else "", env, bench, log)


def show_processes(pids: Sequence[int], force: bool, language: str) -> int:
    """List the user's training processes, end those that are picked, and return the exit code."""
    env = dict(os.environ)
    output, _ = host.run_smi(["info"], env)
    own_processes = processes.list_own(env, host.parse_smi(output).holders)
    zh = language == "zh"
    if own_processes:
        print(HEADER_ZH if zh else HEADER)
    elif zh:
        print("没有属于你的训练进程")
    else:
        print("none of your processes is training or using a card")
    for process in own_processes:
        cards = ",".join(process.cards) or "-"
        usage = f"{cards:<12} {process.used_mb:>6} MB"
        time_and_usage = f"{process.minutes:7.1f} min  {usage}"
        print(f"{process.pid:>8}  {time_and_usage}  {process.user:<10}  {process.command[:100]}")
    if not pids and own_processes:
        show_endings(own_processes, zh)
        if sys.stdin.isatty():
            pids = ask_for_pids(zh)
    return 0 if processes.end(pids, own_processes, force, language) else 1


def ask_for_pids(zh: bool) -> list[int]:
    """Ask on the terminal which processes to end, and return their ids."""
    question = "IDs to end, separated by spaces (Enter: none): "
    if zh:
        question = "要结束哪些进程？输入进程号，用空格分隔，直接回车则不结束："
    print(question, end="", flush=True)
    words = sys.stdin.readline().split()  # none at Ctrl-D
    return [int(word) for word in words if word.isdigit()]


def show_endings(listed: Sequence[processes.Process], zh: bool) -> None:
    """Print, for each job, its user and folder, and the command that ends it."""
    for job in sorted({process.job for process in listed}):
        first = next(process for process in listed if process.pid == job)
        command = f"{first.user}, {first.folder}: {first.command[:60]}"
        ids = " ".join(str(process.pid) for process in listed if process.job == job)
        ending = f"python check_npu.py --processes --end {ids}"
        if zh:
            print(f"只结束这个任务（{command}）：{ending}")
        else:
            print(f"to end only the job of {command}: {ending}")


def share(python: str, language: str) -> int:
    """Print the measurements of --bench, and return the exit code.

    The measurements are in English; `language` is the language of errors.
    """
    if not python:
        english = (
            "error: neither this Python nor .venv/bin/python has torch; run bash setup_ascend.sh"
        )
        chinese = "错误：当前的 Python 和 .venv/bin/python 都没有 torch；运行 bash setup_ascend.sh"
        print(chinese if language == "zh" else english, file=sys.stderr)
        return 1
    env = dict(with_pythonpath(os.environ), NANOCHAT_LANG=language)
    return subprocess.run([python, "-m", "tools_npu.bench"], env=env).returncode


def log_file(base: Path) -> Path:
    """Return the file for the output of the checks that need torch, which exists.

    It is in the base folder. If that cannot be written or has a link of this name, it is a new file
    in the folder for temporary files.
    """
    log = base / "check_npu.log"
    try:
        base.mkdir(parents=True, exist_ok=True)
        os.close(own_file(log))
    except OSError:  # the check of the base folder reports this
        file, name = tempfile.mkstemp(prefix="check_npu-", suffix=".log")
        os.close(file)
        return Path(name)
    return log


def own_file(path: Path, flags: int = 0) -> int:
    """Open a file to write, or make it; raises OSError if it is a link. Returns the descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flags, 0o644)


def make_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Flags("check_npu.py", __doc__, CHINESE_HELP)
    flags.add(
        "--json",
        "print one JSON object instead of lines, for programs",
        "不逐行打印，而是输出一个 JSON 对象，供程序读取",
        action="store_true",
    )
    flags.add(
        "--bench",
        "also measure for a minute how fast the cards are; nanochat.planner reads the result",
        "另外用一分钟测量卡的速度；nanochat.planner 会读取结果",
        action="store_true",
    )
    flags.add(
        "--share",
        "print what --bench has measured, without names of hosts or folders",
        "打印 --bench 测得的结果，不含主机名和目录名",
        action="store_true",
    )
    flags.add(
        "--processes",
        "list your training processes instead of checking",
        "不做检查，而是列出你的训练进程",
        action="store_true",
    )
    flags.add(
        "--end",
        "end these processes of the list with SIGTERM",
        "用 SIGTERM 结束列表中的这些进程",
        nargs="+",
        type=int,
        default=[],
        metavar="ID",
    )
    flags.add(
        "--force",
        "with --end: kill processes that SIGTERM has not ended after 10 seconds",
        "与 --end 同用：10 秒后 SIGTERM 仍未结束的进程，强制结束",
        action="store_true",
    )
    flags.add(
        "--lang",
        "language of the output (default: that of the locale)",
        "输出的语言（默认：由系统的语言环境决定）",
        choices=["zh", "en"],
    )
    flags.add(
        "--root",
        "folder to put in front of every absolute path, for tests (default: none)",
        "加在每个绝对路径前面的目录，供测试用（默认：无）",
        default="",
    )
    return flags.parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code, which is 1 if a check failed."""
    lines.escape_unprintable()
    options = make_parser().parse_args(words)
    language = options.lang or lines.language_of(os.environ)
    if options.root:
        os.environ["ASCEND_ROOT_PREFIX"] = options.root
    if options.share:
        return share(python_with_torch(), language)
    if options.processes or options.end:
        return show_processes(options.end, options.force, language)
    log = log_file(host_checks.base_folder(os.environ))
    color = lines.on_terminal(sys.stdout)
    results = []
    for line in check(options.bench, log):
        results.append(line)
        if not options.json:
            print(lines.render(line, language, color), flush=True)
    if options.json:
        print(json.dumps(lines.as_json(results), ensure_ascii=False, indent=1))
    else:
        print(lines.summary(results, language))
    return 1 if any(line.status == FAIL for line in results) else 0


if __name__ == "__main__":
    # This lets `| head` end the script without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
