"""Sets up an Ascend host: picks torch and torch_npu for its CANN, makes .venv, exports variables.

    bash setup_ascend.sh             make the environment
    source setup_ascend.sh           make the environment and set its variables in this shell
    bash setup_ascend.sh --dry-run   print what would be done and change nothing
    bash setup_ascend.sh --fix       also repair the group of the user and the packages of .venv
    source setup_ascend.sh --fix     repair harmful variables of this shell as well

Exit codes: 0 ready, 1 refused or failed, 2 unknown flag, 3 this host has no NPU.
"""

from __future__ import annotations

import argparse
import getpass
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Mapping, NamedTuple, Sequence, TextIO

from tools_npu import environment, host, lines, versions
from tools_npu.flags import Flags

CHINESE_HELP = """准备昇腾主机：选择与 CANN 配套的 torch 和 torch_npu，创建 .venv，导出环境变量。

    bash setup_ascend.sh             创建环境
    source setup_ascend.sh           创建环境，并在当前 shell 里设置变量
    bash setup_ascend.sh --dry-run   只打印会做什么，不做任何更改
    bash setup_ascend.sh --fix       还会修复用户所属的组和 .venv 里的软件包
    source setup_ascend.sh --fix     还会修复当前 shell 里有害的环境变量

退出码：0 就绪，1 被拒绝或失败，2 选项不认识，3 本机没有 NPU。
"""
ROOT = Path(__file__).resolve().parent.parent
NO_NPU = 3
CHINESE_MARKS = {"warning": "警告", "error": "错误"}
# --fix does not touch variables whose names begin so, because only the user knows the right value.
PLACES = ("ASCEND_HOME", "ASCEND_OPP", "CUDA_")
PROBE_SECONDS = 180
NO_ANSWER = f"no answer within {PROBE_SECONDS} s"
# The name of a missing library of CANN or the driver, which reinstalling the pair cannot provide.
LIBRARY = r"lib\w+\.so[\w.]*"
PROBE = (
    "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
    "import torch; print('torch', torch.__version__)\n"
    "import torch_npu; print('torch_npu', torch_npu.__version__, flush=True)\n"
)
# An error here is the fault of the card, of whoever uses it or of numpy, but not of the pair.
OPEN = (
    "try: torch.npu.set_device(0)\nexcept Exception as failure: print('closed', ' "
    "'.join(str(failure).split()) or repr(failure))\n"
)

# What to do about a CANN that this user may not read, in English and Chinese.
CLOSED_REMEDY = (
    "whoever installed that CANN can install it again with --install-for-all; or install CANN "
    f"{versions.CANN_FLOOR} or later for yourself, in ~/Ascend",
    f"请安装它的用户加上 --install-for-all 重新安装；或自己在 ~/Ascend 里安装 CANN {versions.CANN_FLOOR} 或更高版本",
)


class Refusal(Exception):
    """Stops the set-up, with a reason in both languages and an exit code."""

    def __init__(self, english: str, chinese: str, code: int = 1):
        super().__init__(english)
        self.english = english
        self.chinese = chinese
        self.code = code


def say(
    english: str,
    chinese: str,
    mark: str = "ascend",
    stream: TextIO | None = None,
) -> None:
    """Print a line in the user's language, or in both where nothing says which one that is.

    `stream` is standard output by default.
    """
    languages = lines.languages_of(os.environ)
    if "en" in languages:
        print(f"{mark}: {english}", file=stream, flush=True)
    if "zh" in languages:
        print(f"{CHINESE_MARKS.get(mark, mark)}：{chinese}", file=stream, flush=True)


def glibc() -> tuple[int, ...]:
    """Return the version of glibc, or () if the C library is not glibc."""
    name, version = platform.libc_ver()
    return versions.release(version) if name == "glibc" else ()


# --- the host ------------------------------------------------------------------------------------


class Inventory(NamedTuple):
    """The parts of an Ascend host: CANN, the driver, and the device files of cards and managers."""

    cann: host.Cann | None
    driver: host.Driver | None
    cards: list[host.Device]
    managers: list[host.Device]


def take_inventory(env: Mapping[str, str]) -> Inventory:
    """Return the CANN, the driver and the device files that this host has."""
    canns = host.find_canns(env)
    cards, managers = host.find_devices(env)
    return Inventory(canns[0] if canns else None, host.find_driver(env), cards, managers)


def describe(inventory: Inventory) -> None:
    """Print a line each about CANN, the driver and the cards."""
    cann = inventory.cann
    driver = inventory.driver
    unknown = "(unknown version)"
    unknown_zh = "（版本未知）"
    if cann:
        say(
            f"CANN {cann.version or unknown} in {cann.home} ({cann.layout})",
            f"CANN {cann.version or unknown_zh}，位于 {cann.home}（{cann.layout}）",
        )
    else:
        say("CANN not found", "没有找到 CANN")
    if driver:
        say(
            f"driver {driver.version or unknown} in {driver.path}",
            f"驱动 {driver.version or unknown_zh}，位于 {driver.path}",
        )
    else:
        say("driver not found", "没有找到驱动")
    names = "".join(f" {Path(card.path).name}" for card in inventory.cards)
    say(f"{len(inventory.cards)} card(s){names}", f"{len(inventory.cards)} 张卡{names}")


def choose_pair(
    inventory: Inventory,
    torch_npu: str,
    env: Mapping[str, str],
) -> versions.Pick:
    """Return the pair of torch and torch_npu to install.

    `torch_npu` is the version that the user names, or "". Raises Refusal if the host is too old or
    lacks something.
    """
    libc = glibc()
    if libc and libc < versions.GLIBC_FLOOR:
        version = ".".join(map(str, libc))
        raise Refusal(
            f"glibc {version} is too old: 2.28 or later is needed (Ubuntu 20.04, openEuler 20.03, "
            "Debian 10 or later; not Ubuntu 18.04). Upgrade the system, or use a container image",
            f"glibc {version} 版本过低：需要 2.28 或更高（Ubuntu 20.04、openEuler 20.03、Debian 10 "
            "及以上都可以，Ubuntu 18.04 不行）。请升级系统，或改用容器镜像",
        )
    cann = inventory.cann
    if cann is None:
        if not inventory.cards and inventory.driver is None:
            raise Refusal(
                "this host has no Ascend NPU: no driver, no /dev/davinci*, no CANN. On a GPU or a "
                "CPU, run `bash speedrun.sh`",
                "本机没有昇腾 NPU：没有驱动，没有 /dev/davinci*，也没有 CANN。改用 GPU 或 CPU：bash speedrun.sh",
                NO_NPU,
            )
        closed = host.closed_cann(env)
        if closed:
            raise Refusal(
                f"this user may not read {closed}: {CLOSED_REMEDY[0]}",
                f"当前用户没有权限读取 {closed}：{CLOSED_REMEDY[1]}",
            )
        raise Refusal(
            "no CANN was found (looked for set_env.sh in "
            "/usr/local/Ascend/{cann,ascend-toolkit,nnae,latest}, in ~/Ascend, and at "
            f"ASCEND_HOME_PATH). Install the CANN toolkit {versions.CANN_FLOOR} or later and its "
            "ops (kernels) package for this chip. If CANN is in another folder, export "
            "ASCEND_HOME_PATH",
            "没有找到 CANN（查找过 /usr/local/Ascend/{cann,ascend-toolkit,nnae,latest}、~/Ascend 和 "
            f"ASCEND_HOME_PATH）。请安装 CANN toolkit {versions.CANN_FLOOR} 或更高版本，以及对应芯片的算子包。"
            "如果装在别处，请设置 ASCEND_HOME_PATH",
        )
    if torch_npu:
        pick = versions.pick_named(torch_npu)
    elif not cann.version:
        raise Refusal(
            f"the version of the CANN in {cann.home} cannot be read, because it has no "
            "ascend_*_install.info. Name the torch_npu for it: bash setup_ascend.sh --torch-npu "
            "VERSION",
            f"读不出 {cann.home} 里 CANN 的版本（没有 ascend_*_install.info）。请指定 torch_npu："
            "bash setup_ascend.sh --torch-npu 版本号",
        )
    else:
        pick = versions.resolve(cann.version)
    if pick.refusal[0]:
        raise Refusal(*pick.refusal)
    return pick


# --- variables -----------------------------------------------------------------------------------


def source_variables(script: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment after CANN's set_env.sh has been sourced.

    Bash sources the script, because it may use features of bash.
    """
    code = f". {shlex.quote(script)} >/dev/null 2>&1; exec env -0"
    process = subprocess.run(
        ["bash", "-c", code], env=dict(env), stdout=subprocess.PIPE, timeout=PROBE_SECONDS
    )
    variables = {}
    # In a locale such as zh_CN.GBK, values have bytes that are no UTF-8.
    for assignment in os.fsdecode(process.stdout).split("\0"):
        name, equals, value = assignment.partition("=")
        if equals:
            variables[name] = value
    return variables


def is_sourced(cann: host.Cann, env: Mapping[str, str]) -> bool:
    """Return whether the variables of this CANN are already set.

    Sourcing set_env.sh a second time would add its paths twice.
    """
    home = os.path.realpath(env.get("ASCEND_HOME_PATH") or "/")
    return home == os.path.realpath(cann.home) and bool(env.get("ASCEND_OPP_PATH"))


def job_environment(
    inventory: Inventory,
    torch_npu: str,
    env: Mapping[str, str],
    fix: bool,
) -> dict[str, str]:
    """Return the complete environment for a job on this host.

    `torch_npu` is the version that the job uses. If `fix` is set, harmful variables are repaired.
    """
    new = dict(env)
    cann = inventory.cann
    if cann and cann.set_env and not is_sourced(cann, env):
        new = source_variables(cann.set_env, env)
    if cann:
        new.setdefault("ASCEND_HOME_PATH", cann.home)
    host.add_driver(new, inventory.driver)
    allocator = environment.allocator_variable(torch_npu)
    for name in environment.ALLOCATOR_VARIABLES:
        if name != allocator and name in new:
            # Keep the user's value under the name that this torch_npu reads.
            new.setdefault(allocator, new.pop(name))
    set_defaults(new, torch_npu)
    if fix:
        for finding in environment.lint(new, torch_npu):
            if not finding.name.startswith(PLACES):
                new.pop(finding.name, None)
        set_defaults(new, torch_npu)
    activate_venv(new)
    return new


def set_defaults(job: dict[str, str], torch_npu: str) -> None:
    """Set the variables that the set-up exports, unless the user has set them."""
    for variable in environment.exported_variables(torch_npu):
        job.setdefault(variable.name, variable.value)


def activate_venv(job: dict[str, str]) -> None:
    """Put .venv first on PATH, as its activate script does."""
    venv = str(ROOT / ".venv")
    programs = venv + "/bin"
    if os.path.isdir(programs):
        job["VIRTUAL_ENV"] = venv
        paths = [path for path in job.get("PATH", "").split(":") if path != programs]
        job["PATH"] = ":".join([programs, *paths])
        job.pop("PYTHONHOME", None)


# --- the environment -----------------------------------------------------------------------------


class Pair(NamedTuple):
    """The torch and torch_npu in .venv, and the result of loading them."""

    torch: str  # version; "" if it does not load
    torch_npu: str
    failure: str  # the last line of the error if a package does not load, or ""
    closed: str = ""  # why card 0 does not open, or "" if it opens or was not tried

    @property
    def loads(self) -> bool:
        """Whether both packages load."""
        return not self.failure


def probe(python: str, env: Mapping[str, str], cards: bool) -> Pair:
    """Return what happens when a job imports torch and torch_npu.

    If there are cards, the job also opens card 0.
    """
    code = PROBE + (OPEN if cards else "")
    failure = ""
    try:
        process = subprocess.run(
            [python, "-c", code], env=dict(env), capture_output=True, timeout=PROBE_SECONDS, cwd="/"
        )
        output = process.stdout
        if process.returncode:
            errors = process.stderr.decode("utf-8", "replace").strip()
            failure = (errors or f"exit code {process.returncode}").splitlines()[-1]
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        failure = NO_ANSWER
    values = {}
    for line in output.decode("utf-8", "replace").splitlines():
        name_and_value = line.split(None, 1)
        if len(name_and_value) == 2:
            values[name_and_value[0]] = name_and_value[1]
    torch = values.get("torch", "")
    torch_npu = values.get("torch_npu", "")
    if cards and torch_npu and failure:  # both packages have loaded, so the card failed
        return Pair(torch, torch_npu, "", failure)
    return Pair(torch, torch_npu, failure, values.get("closed", ""))


def venv_python() -> str:
    """Return the Python of .venv, or "" if there is none."""
    path = ROOT / ".venv" / "bin" / "python"
    return str(path) if os.path.exists(path) else ""


def can_stay(pair: Pair, cann: str, torch_npu: str) -> bool:
    """Return whether the installed pair can stay.

    It can if it loads, if torch and torch_npu fit each other and CANN, and if the user does not
    name another version. `torch_npu` is the version that the user names, or "".
    """
    if not pair.loads or (torch_npu and torch_npu != pair.torch_npu):
        return False
    fits_torch = versions.pair_fits(pair.torch, pair.torch_npu).status
    fits_cann = versions.cann_fits(pair.torch_npu, cann).status
    return "FAIL" not in (fits_torch, fits_cann)


def run(command: Sequence[str], env: Mapping[str, str], dry: bool) -> int:
    """Run a command and return its exit code, or only print the command in a dry run."""
    if dry:
        quoted_command = " ".join(shlex.quote(word) for word in command)
        say(f"would run: {quoted_command}", f"将会运行：{quoted_command}")
        return 0
    return subprocess.run(list(command), env=dict(env)).returncode


def make_environment(
    pick: versions.Pick | None,
    numpy: int,
    env: Mapping[str, str],
    dry: bool,
) -> None:
    """Make .venv with setup_env.sh and with the given major version of numpy.

    If `pick` is None, the installed pair stays. Raises Refusal if setup_env.sh fails.
    """
    command = ["setup_env"]
    if pick is not None:
        command += ["--npu", pick.torch_npu, "--python-max", str(pick.python[1])]
    command += ["--numpy", str(numpy)]
    quoted_command = " ".join(map(shlex.quote, command))
    script = shlex.quote(str(ROOT / "setup_env.sh"))
    code = run(["bash", "-c", f"source {script} && {quoted_command}"], env, dry)
    if code != 0:
        raise Refusal(
            "the environment could not be made. The lines above say why and what to do; then type "
            "the same command again",
            "无法创建环境。原因和处理办法见上文；处理之后再次输入同一条命令",
            1,
        )


# --- permissions ---------------------------------------------------------------------------------


def check_permissions(
    inventory: Inventory,
    env: Mapping[str, str],
    fix: bool,
    dry: bool,
) -> None:
    """Warn if this user may not use the cards.

    With --fix, try to add the user to the group first.
    """
    devices = [*inventory.cards, *inventory.managers]
    unusable = [device.path for device in devices if not device.usable]
    is_member = host.may_use_devices(env, os.geteuid(), os.getgroups())
    if is_member and not unusable:
        return
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        user = str(os.geteuid())
    remedy = f"sudo usermod -aG {host.GROUP} {user}"
    english = f"{user} is not in the group {host.GROUP}"
    chinese = f"用户 {user} 不在 {host.GROUP} 组里"
    if unusable:
        english = f"{user} may not read and write {unusable[0]}"
        chinese = f"用户 {user} 不能读写 {unusable[0]}"
    if fix and not is_member:
        sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
        if run([*sudo, "usermod", "-aG", host.GROUP, user], env, dry) == 0:
            say(
                f"added {user} to the group {host.GROUP}; log in again for this to take effect",
                f"已把 {user} 加入 {host.GROUP} 组，重新登录后生效",
            )
            return
    say(
        f"{english}. Run {remedy}, then log in again",
        f"{chinese}。请执行 {remedy}，然后重新登录",
        "warning",
    )


# --- set-up --------------------------------------------------------------------------------------


def set_up(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Set up the host, and return the exit code.

    Raises Refusal if that is not possible.
    """
    inventory = take_inventory(env)
    describe(inventory)
    pick = choose_pair(inventory, options.torch_npu, env)
    if pick.warning[0]:
        say(*pick.warning, mark="warning")
    if not inventory.cards:
        say(
            "no card is visible (/dev/davinci*); making the environment anyway",
            "看不到 NPU 卡（/dev/davinci*），但仍会创建环境",
            "warning",
        )
    check_permissions(inventory, env, options.fix, options.dry_run)
    torch_npu = install_pair(inventory, pick, options, env)
    lines = environment.changes(env, job_environment(inventory, torch_npu, env, options.fix))
    if options.env_file:
        Path(options.env_file).write_bytes(os.fsencode("\n".join(lines) + "\n"))
    if options.fix and (options.env_file or options.dry_run):
        report_repairs(
            job_environment(inventory, torch_npu, env, fix=False),
            job_environment(inventory, torch_npu, env, fix=True),
        )
    if options.dry_run:
        print("\n".join(lines))
    if not (options.fix and options.env_file):
        unfixed = job_environment(inventory, torch_npu, env, fix=False)
        for finding in environment.lint(unfixed, torch_npu):
            say(*environment.advice(finding, options.fix), mark="warning")
    return finish(options)


def report_repairs(unfixed: Mapping[str, str], fixed: Mapping[str, str]) -> None:
    """Print each variable that --fix changes or removes, with its old and new value."""
    for name in sorted(set(unfixed) | set(fixed)):
        old = unfixed.get(name)
        new = fixed.get(name)
        if old == new:
            continue
        if new is None:
            say(f"--fix removes {name}={old}", f"--fix 删除 {name}={old}")
        else:
            say(
                f"--fix sets {name}={new} (was {old or 'not set'})",
                f"--fix 设置 {name}={new}（原为 {old or '未设置'}）",
            )


def install_pair(
    inventory: Inventory,
    pick: versions.Pick,
    options: argparse.Namespace,
    env: Mapping[str, str],
) -> str:
    """Install the pair, or keep the installed one if it fits, and return the version of torch_npu.

    Raises Refusal if the pair cannot be installed, or if it does not load on a host with cards.
    """
    cann = inventory.cann.version if inventory.cann else ""
    cards = bool(inventory.cards)
    numpy = versions.numpy_for(cann)
    python = venv_python()
    pair = Pair("", "", "no .venv")
    if python:
        planned = job_environment(inventory, pick.torch_npu, env, options.fix)
        pair = probe(python, planned, cards)
    if can_stay(pair, cann, options.torch_npu):
        say(
            f"torch {pair.torch} and torch_npu {pair.torch_npu} load and fit CANN {cann}: kept",
            f"torch {pair.torch} 和 torch_npu {pair.torch_npu} 能加载，与 CANN {cann} 配套：保留不动",
        )
        torch_npu = pair.torch_npu
        stamp = ROOT / ".venv" / "setup.stamp"
        if options.fix and not options.dry_run and stamp.is_file():
            # This line makes setup_env.sh install every package that was removed or replaced.
            with stamp.open("a", encoding="utf-8") as file:
                file.write("stale\n")
        make_environment(None, numpy, env, options.dry_run)
    else:
        torch_npu = pick.torch_npu
        say(*versions.explain(cann, pick, bool(options.torch_npu)))
        is_broken = python and not re.search(LIBRARY, pair.failure)
        if options.fix and is_broken and not options.dry_run:
            failure = pair.failure[:200]
            say(
                "--fix makes .venv again, because torch_npu does not "
                + (f"load: {failure}" if failure else "fit"),
                "--fix 重建 .venv，因为 torch_npu "
                + (f"无法加载：{failure}" if failure else "不配套"),
            )
            # This mark makes setup_env.sh start from scratch.
            (ROOT / ".venv" / "setup.busy").touch()
        make_environment(pick, numpy, env, options.dry_run)
        pair = Pair("", "", "not yet loaded")

    # A pair that stays was already loaded above. With another numpy, a card may open that did not
    # open there, but not one that gave no answer.
    if pair.closed == NO_ANSWER:
        report_closed(pair)
    elif not options.dry_run and (not pair.loads or pair.closed):
        new = job_environment(inventory, torch_npu, env, options.fix)
        check_pair(new, cards, options.fix)
    return torch_npu


def check_pair(env: Mapping[str, str], cards: bool, fix: bool) -> None:
    """Load the pair, open card 0 if there are cards, and report what fails.

    Raises Refusal if the pair does not load on a host with cards.
    """
    python = venv_python() or shutil.which("python", path=env.get("PATH")) or sys.executable
    pair = probe(python, env, cards)
    if not pair.loads:
        report_load_failure(pair, cards, fix)
    if pair.closed:
        report_closed(pair)


def report_closed(pair: Pair) -> None:
    """Warn that card 0 does not open, and say what to do."""
    say(
        f"card 0 does not open: {pair.closed[:200]}. `python check_npu.py` names the cause; to work "
        "without this card, leave it out of ASCEND_RT_VISIBLE_DEVICES",
        f"NPU 0 打不开：{pair.closed[:200]}。运行 python check_npu.py 查明原因；要避开这张卡，"
        "ASCEND_RT_VISIBLE_DEVICES 里就不要写它",
        "warning",
    )


def report_load_failure(pair: Pair, cards: bool, fix: bool) -> None:
    """Raise Refusal, or only warn if there are no cards, because the pair does not load.

    Without cards, for example while an image is built, the pair cannot load yet.
    """
    missing = re.search(LIBRARY, pair.failure)
    library = f" ({missing[0]})" if missing else ""
    english = (
        f"torch_npu does not load{library}: {pair.failure}. `python check_npu.py` names the cause"
    )
    chinese = f"torch_npu 无法加载{library}：{pair.failure}。运行 python check_npu.py 查明原因"
    if not fix:
        english += "; bash setup_ascend.sh --fix repairs a broken installation"
        chinese += "；如果是安装损坏，bash setup_ascend.sh --fix 会重装"
    if cards:
        raise Refusal(english, chinese)
    say(english, chinese, "warning")


def finish(options: argparse.Namespace) -> int:
    """Print what to type next, and return the exit code."""
    if options.dry_run:
        say("dry run: nothing was changed", "试运行：没有做任何更改")
    elif options.env_file:
        say(
            "ready, and this shell has the variables. Next: python check_npu.py, then bash "
            "speedrun_npu.sh",
            "就绪，变量已写入当前 shell。下一步：运行 python check_npu.py，再运行 bash speedrun_npu.sh",
        )
    else:
        again = "source setup_ascend.sh" + (" --fix" if options.fix else "")
        say(
            f"ready. Next: {again} (only `source` can change the variables of your shell), python "
            "check_npu.py, then bash speedrun_npu.sh",
            f"就绪。下一步：先 {again}（只有 source 才能改动当前 shell 的变量），再依次运行 python check_npu.py 和 "
            "bash speedrun_npu.sh",
        )
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Flags("setup_ascend.sh", __doc__, CHINESE_HELP)
    flags.add(
        "--dry-run",
        "print what would be done and change nothing",
        "只打印会做什么，不做任何更改",
        action="store_true",
    )
    flags.add(
        "--fix",
        "also repair harmful variables (only when sourced), the group of the user, and the "
        "packages of .venv",
        "还会修复有害的环境变量（仅限 source 时）、用户所属的组，以及 .venv 里的软件包",
        action="store_true",
    )
    flags.add(
        "--torch-npu",
        "version of torch_npu to install (default: NANOCHAT_TORCH_NPU, otherwise the version that "
        "the table pairs with the installed CANN)",
        "要安装的 torch_npu 版本（默认：NANOCHAT_TORCH_NPU，否则是表中与已装 CANN 配套的版本）",
        default=os.environ.get("NANOCHAT_TORCH_NPU", ""),
        metavar="VERSION",
    )
    flags.add(
        "--root",
        "folder to put in front of every absolute path, for tests (default: none)",
        "加在每个绝对路径前面的目录，供测试用（默认：无）",
        default="",
    )
    # The shell that sources the script reads this file.
    flags.parser.add_argument("--env-file", default="", help=argparse.SUPPRESS)
    return flags.parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code of setup_ascend.sh."""
    lines.escape_unprintable()
    parser = make_parser()
    options, unknown = parser.parse_known_args(words)
    flags = " ".join(unknown)
    if unknown and not options.env_file:
        parser.error(f"unrecognized arguments: {flags}")
    if unknown:  # they belong to the script that sources this one
        say(
            f"ignored, because they are not flags of setup_ascend.sh: {flags}",
            f"已忽略（不是 setup_ascend.sh 的参数）：{flags}",
        )
    env = dict(os.environ)
    if options.root:
        env["ASCEND_ROOT_PREFIX"] = options.root
    try:
        return set_up(options, env)
    except Refusal as refusal:
        # The script that sources this one may continue without an NPU.
        if refusal.code == NO_NPU and options.env_file:
            say(refusal.english, refusal.chinese)
            return NO_NPU
        say(f"{refusal.english}.", f"{refusal.chinese}。", "error", sys.stderr)
        return refusal.code


if __name__ == "__main__":
    sys.exit(main())
