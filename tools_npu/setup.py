"""The work of setup_ascend.sh: look at the host, pick the pair, make .venv, and say what to export.

    bash setup_ascend.sh             make the environment
    source setup_ascend.sh           the same, and put its variables into this shell
    bash setup_ascend.sh --dry-run   print what would be done; change nothing
    bash setup_ascend.sh --fix       also repair: harmful variables, the group, a pair that does not load

Exit codes: 0 ready, 1 refused or failed, 2 a wrong flag, 3 this host has no NPU.
"""

from __future__ import annotations

import argparse
import getpass
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Mapping, NamedTuple, Sequence

from tools_npu import environment, host, versions

ROOT = Path(__file__).resolve().parent.parent
NO_NPU = 3
PLACES = ("ASCEND_HOME", "ASCEND_OPP", "CUDA_")  # what --fix does not take away, since it cannot know better
NAME = re.compile(r"[A-Za-z_]\w*")
PROBE_SECONDS = 180
LIBRARY = r"lib\w+\.so[\w.]*"  # one of CANN or of the driver that is missing: no fault of the pair
PROBE = (
    "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
    "import torch; print('torch', torch.__version__)\n"
    "import torch_npu; print('torch_npu', torch_npu.__version__)\n"
)


class Refusal(Exception):
    """Why the set-up cannot go on, in both languages, and with which code it ends."""

    def __init__(self, english: str, chinese: str, code: int = 1):
        super().__init__(english)
        self.english, self.chinese, self.code = english, chinese, code


def say(english: str, chinese: str = "", mark: str = "ascend") -> None:
    print(f"{mark}: {english}", flush=True)
    if chinese:
        print(f"{mark}: {chinese}", flush=True)


def glibc() -> tuple[int, ...]:
    """The version of the C library, () where it is not glibc."""
    name, version = platform.libc_ver()
    return versions.release(version) if name == "glibc" else ()


# --- what is there ---------------------------------------------------------------------------------


class Found(NamedTuple):
    """The host: CANN or None, the driver or None, and the cards' files."""

    cann: host.Cann | None
    driver: host.Driver | None
    cards: list[host.Device]
    managers: list[host.Device]


def look(env: Mapping[str, str]) -> Found:
    """What the host has."""
    canns = host.find_canns(env)
    return Found(canns[0] if canns else None, host.find_driver(env), *host.find_devices(env))


def describe(found: Found) -> None:
    """One line for each thing that was found or not."""
    cann, driver = found.cann, found.driver
    say(f"CANN {cann.version or 'of an unknown version'} in {cann.home} ({cann.layout})" if cann else "no CANN")
    say(f"driver {driver.version} in {driver.path}" if driver else "no driver")
    say(f"{len(found.cards)} card(s)" + "".join(f" {Path(card.path).name}" for card in found.cards))


def check_floors(found: Found, asked: str) -> versions.Pick:
    """The pair for this host; Refusal below a floor."""
    libc = glibc()
    if libc and libc < versions.GLIBC_FLOOR:
        raise Refusal(
            f"glibc {'.'.join(map(str, libc))} is too old: 2.28 or later is needed (Ubuntu 20.04, openEuler 20.03, "
            "Debian 10 or later; not Ubuntu 18.04). Upgrade the system, or use a container image",
            f"glibc {'.'.join(map(str, libc))} 版本过低：需要 2.28 或更高（Ubuntu 20.04、openEuler 20.03、Debian 10 "
            "以上；不支持 Ubuntu 18.04）。请升级系统，或使用容器镜像",
        )
    if found.cann is None:
        if not found.cards and found.driver is None:
            raise Refusal(
                "this host has no Ascend NPU: no driver, no /dev/davinci*, no CANN. `bash speedrun.sh` runs on GPUs "
                "and CPUs",
                "本机没有昇腾 NPU：没有驱动、没有 /dev/davinci*、没有 CANN。GPU 或 CPU 请使用 bash speedrun.sh",
                NO_NPU,
            )
        raise Refusal(
            "no CANN was found (looked for set_env.sh in /usr/local/Ascend/{cann,ascend-toolkit,nnae,latest} and "
            f"~/Ascend, and at ASCEND_HOME_PATH). Install the CANN toolkit {versions.CANN_FLOOR} or later and its ops "
            "(kernels) package for this chip; if it lies elsewhere, export ASCEND_HOME_PATH",
            "没有找到 CANN（已查找 /usr/local/Ascend/{cann,ascend-toolkit,nnae,latest}、~/Ascend 与 "
            f"ASCEND_HOME_PATH）。请安装 CANN toolkit {versions.CANN_FLOOR} 或更高版本以及对应芯片的算子包；"
            "若装在别处，请设置 ASCEND_HOME_PATH",
        )
    if asked:
        pick = versions.asked(asked)
    elif not found.cann.version:
        raise Refusal(
            f"the version of the CANN in {found.cann.home} cannot be read (no ascend_*_install.info). Name the "
            "torch_npu for it: bash setup_ascend.sh --torch-npu VERSION",
            f"无法读取 {found.cann.home} 中 CANN 的版本（没有 ascend_*_install.info）。请指定 torch_npu："
            "bash setup_ascend.sh --torch-npu 版本号",
        )
    else:
        pick = versions.resolve(found.cann.version)
    if pick.refusal[0]:
        raise Refusal(*pick.refusal)
    return pick


# --- variables -------------------------------------------------------------------------------------


def sourced(script: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment after CANN's set_env.sh, which only bash can be relied on to read."""
    code = f". {shlex.quote(script)} >/dev/null 2>&1; exec env -0"
    done = subprocess.run(["bash", "-c", code], env=dict(env), stdout=subprocess.PIPE, timeout=PROBE_SECONDS)
    pairs = (item.split("=", 1) for item in done.stdout.decode("utf-8", "replace").split("\0") if "=" in item)
    return dict(pairs)


def is_sourced(cann: host.Cann, env: Mapping[str, str]) -> bool:
    """Whether this CANN's variables are set already: sourced twice, its paths would be there twice."""
    same = os.path.realpath(env.get("ASCEND_HOME_PATH") or "/") == os.path.realpath(cann.home)
    return same and bool(env.get("ASCEND_OPP_PATH"))


def job_environment(found: Found, torch_npu: str, env: Mapping[str, str], fix: bool) -> dict[str, str]:
    """The whole environment that a job should see."""
    new = dict(env)
    if found.cann and found.cann.set_env and not is_sourced(found.cann, env):
        new = sourced(found.cann.set_env, env)
    if found.cann:
        new.setdefault("ASCEND_HOME_PATH", found.cann.home)
    paths = [path for path in new.get("LD_LIBRARY_PATH", "").split(":") if path]
    missing = [path for path in (found.driver.libraries if found.driver else ()) if path not in paths]
    new["LD_LIBRARY_PATH"] = ":".join([*missing, *paths])
    allocator = environment.allocator_variable(torch_npu)
    others = {"PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"} - {allocator}
    for other in others & set(new):
        new.setdefault(allocator, new[other])  # what the user chose, under the name that is read
        del new[other]
    for variable in environment.wanted(torch_npu):
        new.setdefault(variable.name, variable.value)
    if fix:
        for finding in environment.lint(new, torch_npu):
            if not finding.name.startswith(PLACES):
                new.pop(finding.name, None)
        for variable in environment.wanted(torch_npu):
            new.setdefault(variable.name, variable.value)
    venv = str(ROOT / ".venv")
    if os.path.isdir(venv + "/bin"):
        new["VIRTUAL_ENV"] = venv
        rest = [path for path in new.get("PATH", "").split(":") if path != venv + "/bin"]
        new["PATH"] = ":".join([venv + "/bin", *rest])
        new.pop("PYTHONHOME", None)
    return new


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Lines that any shell reads, from one environment to the other."""
    own = {"_", "PWD", "OLDPWD", "SHLVL"}  # of every shell
    names = sorted(name for name in {*old, *new} - own if NAME.fullmatch(name))
    lines = [f"export {name}={shlex.quote(new[name])}" for name in names if name in new and old.get(name) != new[name]]
    lines += [f"unset {name}" for name in names if name not in new]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < environment.FILES_WANTED and (hard == resource.RLIM_INFINITY or hard > soft):
        most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        lines.append(f"ulimit -S -n {most}")
    return lines


# --- the environment -------------------------------------------------------------------------------


class Pair(NamedTuple):
    """What .venv has: versions as far as they load, and the last line of the failure if one does not."""

    torch: str
    torch_npu: str
    failure: str

    @property
    def loads(self) -> bool:
        return not self.failure


def probe(python: str, env: Mapping[str, str]) -> Pair:
    """Try to import both, in the environment of a job."""
    try:
        done = subprocess.run([python, "-c", PROBE], env=dict(env), capture_output=True, timeout=PROBE_SECONDS, cwd="/")
    except subprocess.TimeoutExpired:
        return Pair("", "", f"no answer within {PROBE_SECONDS} s")
    words = [line.split(None, 1) for line in done.stdout.decode("utf-8", "replace").splitlines()]
    told = {line[0]: line[1] for line in words if len(line) == 2}
    failure = ""
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        failure = lines[-1] if lines else f"exit code {done.returncode}"
    return Pair(told.get("torch", ""), told.get("torch_npu", ""), failure)


def own_python() -> str:
    """The Python of .venv, "" if there is none."""
    path = ROOT / ".venv" / "bin" / "python"
    return str(path) if path.exists() else ""


def keeps(pair: Pair, cann: str, asked: str) -> bool:
    """Whether the pair that is there can stay: it loads, its halves match, and CANN is new enough for it."""
    if not pair.loads or (asked and asked != pair.torch_npu):
        return False
    return "FAIL" not in (versions.pair_fits(pair.torch, pair.torch_npu).status,
                          versions.cann_fits(pair.torch_npu, cann).status)  # fmt: skip


def run(command: Sequence[str], env: Mapping[str, str], dry: bool) -> int:
    """Run a command, or in a dry run print it."""
    if dry:
        say("would run: " + " ".join(shlex.quote(word) for word in command))
        return 0
    return subprocess.run(list(command), env=dict(env)).returncode


def make_environment(pick: versions.Pick | None, env: Mapping[str, str], dry: bool) -> None:
    """.venv by setup_env.sh, with the pair; None keeps what is there."""
    flags = [] if pick is None else ["--npu", pick.torch_npu, "--python-max", str(pick.python[1])]
    words = " ".join(shlex.quote(word) for word in ["setup_env", *flags])
    code = run(["bash", "-c", f"source {shlex.quote(str(ROOT / 'setup_env.sh'))} && {words}"], env, dry)
    if code != 0:
        raise Refusal("the environment could not be made; the lines above say why", "无法创建环境；原因见上文", 1)


# --- permissions -----------------------------------------------------------------------------------


def check_permissions(found: Found, env: Mapping[str, str], fix: bool, dry: bool) -> None:
    """Warn where this user may not use the cards; --fix adds the user to the group where that is possible."""
    shut = [device.path for device in [*found.cards, *found.managers] if not device.usable]
    member = host.may_use_devices(env, os.geteuid(), os.getgroups())
    if member and not shut:
        return
    user = getpass.getuser()
    remedy = f"sudo usermod -aG {host.GROUP} {user}"
    what = f"{shut[0]} is not readable and writable" if shut else f"{user} is not in group {host.GROUP}"
    what_zh = f"{shut[0]} 不可读写" if shut else f"用户 {user} 不在用户组 {host.GROUP} 中"
    if fix and not member:
        sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
        if run([*sudo, "usermod", "-aG", host.GROUP, user], env, dry) == 0:
            say(f"added {user} to group {host.GROUP}: log in again for it to count",
                f"已将 {user} 加入用户组 {host.GROUP}：重新登录后生效")  # fmt: skip
            return
    say(f"{what}: {remedy}, then log in again", f"{what_zh}：请执行 {remedy}，然后重新登录", "warning")


# --- the whole -------------------------------------------------------------------------------------


def set_up(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Everything; returns the exit code."""
    found = look(env)
    describe(found)
    pick = check_floors(found, options.torch_npu)
    cann = found.cann.version if found.cann else ""
    if pick.warning[0]:
        say(*pick.warning, mark="warning")
    if not found.cards:
        say("no card is visible (/dev/davinci*): the environment is made all the same",
            "看不到 NPU 卡（/dev/davinci*）：仍继续创建环境", "warning")  # fmt: skip
    check_permissions(found, env, options.fix, options.dry_run)

    python = own_python()
    pair = (
        probe(python, job_environment(found, pick.torch_npu, env, options.fix)) if python else Pair("", "", "no .venv")
    )
    if keeps(pair, cann, options.torch_npu):
        say(f"torch {pair.torch} and torch_npu {pair.torch_npu} load and fit CANN {cann}: kept",
            f"torch {pair.torch} 与 torch_npu {pair.torch_npu} 可用，且与 CANN {cann} 匹配：保留")  # fmt: skip
        torch_npu = pair.torch_npu
        make_environment(None, env, options.dry_run)
    else:
        torch_npu = pick.torch_npu
        say(f"CANN {cann or '?'} -> torch_npu {torch_npu} -> torch {pick.torch}")
        if options.fix and python and not options.dry_run and not re.search(LIBRARY, pair.failure):
            (ROOT / ".venv" / "setup.busy").touch()  # what is installed is broken: setup_env.sh makes it anew
        make_environment(pick, env, options.dry_run)
        pair = Pair("", "", "not yet loaded")

    new = job_environment(found, torch_npu, env, options.fix)
    if not options.dry_run and not pair.loads:  # a pair that was kept has just been loaded
        pair = probe(own_python() or shutil.which("python", path=new.get("PATH")) or sys.executable, new)
        if not pair.loads:
            report_load_failure(pair, bool(found.cards), options.fix)
    lines = changes(env, new)
    if options.env_file:
        Path(options.env_file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.dry_run:
        print("\n".join(lines))
    if not options.fix:
        for finding in environment.lint(new, torch_npu):
            say(f"{finding.english}; {finding.remedy}, or --fix", finding.chinese, "warning")
    return finish(options, found)


def report_load_failure(pair: Pair, cards: bool, fix: bool) -> None:
    """A pair that does not load: with cards an error that names the file, without them (an image's build) a word."""
    missing = re.search(LIBRARY, pair.failure)
    word = f" ({missing[0]})" if missing else ""
    more = "" if fix else "; bash setup_ascend.sh --fix repairs what can be repaired"
    more_zh = "" if fix else "；bash setup_ascend.sh --fix 可修复部分问题"
    english = f"torch_npu does not load{word}: {pair.failure}. `python check_npu.py` names the cause{more}"
    chinese = f"torch_npu 无法加载{word}：{pair.failure}。运行 python check_npu.py 可查明原因{more_zh}"
    if cards:
        raise Refusal(english, chinese)
    say(english, chinese, "warning")


def finish(options: argparse.Namespace, found: Found) -> int:
    """What to type next."""
    if options.dry_run:
        say("nothing was changed", "未做任何更改")
    elif options.env_file:
        say("ready: this shell has the variables. Next: python check_npu.py, bash speedrun_npu.sh",
            "就绪：变量已写入当前 shell。下一步：python check_npu.py，bash speedrun_npu.sh")  # fmt: skip
    else:
        say("ready. Next: source setup_ascend.sh, python check_npu.py, bash speedrun_npu.sh",
            "就绪。下一步：source setup_ascend.sh，python check_npu.py，bash speedrun_npu.sh")  # fmt: skip
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    plain = argparse.RawDescriptionHelpFormatter
    words = argparse.ArgumentParser("setup_ascend.sh", description=__doc__, formatter_class=plain, allow_abbrev=False)
    words.add_argument("--dry-run", action="store_true", help="print what would be done; change nothing")
    words.add_argument("--fix", action="store_true", help="repair what can be repaired")
    words.add_argument("--torch-npu", default=os.environ.get("NANOCHAT_TORCH_NPU", ""), metavar="VERSION",
                       help="take this torch_npu, not the one that the table names for the CANN")  # fmt: skip
    words.add_argument("--root", default="", help="look for absolute paths under this folder")
    words.add_argument("--env-file", default="", help=argparse.SUPPRESS)  # where a sourcing shell reads its variables
    return words


def main(words: Sequence[str] | None = None) -> int:
    """Exit code of setup_ascend.sh."""
    options, rest = parser().parse_known_args(words)
    if rest and not options.env_file:
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # a script that sources us hands on its own flags, whether it wants to or not
        say(f"not a flag of setup_ascend.sh, left alone: {' '.join(rest)}")
    env = dict(os.environ)
    if options.root:
        env["ASCEND_ROOT_PREFIX"] = options.root
    try:
        return set_up(options, env)
    except Refusal as refusal:
        if refusal.code == NO_NPU and options.env_file:  # a script that goes on without
            say(refusal.english, refusal.chinese)
            return NO_NPU
        print(f"error: {refusal.english}.", file=sys.stderr)
        print(f"错误：{refusal.chinese}。", file=sys.stderr)
        return refusal.code


if __name__ == "__main__":
    sys.exit(main())
