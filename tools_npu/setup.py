"""Sets up an Ascend host: picks the torch and torch_npu that fit its CANN, makes .venv, and exports variables.

    bash setup_ascend.sh             make the environment
    source setup_ascend.sh           make the environment and set its variables in this shell
    bash setup_ascend.sh --dry-run   print what would be done and change nothing
    bash setup_ascend.sh --fix       also repair the group of the user and a torch_npu that does not load
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
from typing import Mapping, NamedTuple, Sequence

from tools_npu import environment, host, lines, versions

ROOT = Path(__file__).resolve().parent.parent
NO_NPU = 3
PLACES = (
    "ASCEND_HOME",
    "ASCEND_OPP",
    "CUDA_",
)  # --fix keeps these, because only the user knows the right value
PROBE_SECONDS = 180
LIBRARY = r"lib\w+\.so[\w.]*"  # a missing library of CANN or the driver, which reinstalling the pair cannot fix
PROBE = (
    "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
    "import torch; print('torch', torch.__version__)\n"
    "import torch_npu; print('torch_npu', torch_npu.__version__, flush=True)\n"
)
OPEN = (  # an error here blames the card, its owner or numpy, not the pair
    "try: torch.npu.set_device(0)\n"
    "except Exception as failure: print('closed', ' '.join(str(failure).split()) or repr(failure))\n"
)


class Refusal(Exception):
    """Why set-up must stop, in both languages, and its exit code."""

    def __init__(self, english: str, chinese: str, code: int = 1):
        super().__init__(english)
        self.english, self.chinese, self.code = english, chinese, code


def say(english: str, chinese: str = "", mark: str = "ascend") -> None:
    """Print a line in English, and in Chinese if there is one."""
    print(f"{mark}: {english}", flush=True)
    if chinese:
        print(f"{mark}: {chinese}", flush=True)


def glibc() -> tuple[int, ...]:
    """The version of glibc; () if the C library is not glibc."""
    name, version = platform.libc_ver()
    return versions.release(version) if name == "glibc" else ()


# --- the host --------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What the host has: CANN or None, the driver or None, and the device files of cards and managers."""

    cann: host.Cann | None
    driver: host.Driver | None
    cards: list[host.Device]
    managers: list[host.Device]


def look(env: Mapping[str, str]) -> Found:
    """Find CANN, the driver and the device files of this host."""
    canns = host.find_canns(env)
    return Found(canns[0] if canns else None, host.find_driver(env), *host.find_devices(env))


def describe(found: Found) -> None:
    """Print one line each about CANN, the driver and the cards."""
    cann, driver = found.cann, found.driver
    say(
        f"CANN {cann.version or '(unknown version)'} in {cann.home} ({cann.layout})"
        if cann
        else "CANN not found"
    )
    say(
        f"driver {driver.version or '(unknown version)'} in {driver.path}"
        if driver
        else "driver not found"
    )
    say(f"{len(found.cards)} card(s)" + "".join(f" {Path(card.path).name}" for card in found.cards))


def check_floors(found: Found, asked: str) -> versions.Pick:
    """The pair to install on this host; raises Refusal if the host is too old or lacks something."""
    libc = glibc()
    if libc and libc < versions.GLIBC_FLOOR:
        raise Refusal(
            f"glibc {'.'.join(map(str, libc))} is too old: 2.28 or later is needed (Ubuntu 20.04, openEuler 20.03, "
            "Debian 10 or later; not Ubuntu 18.04). Upgrade the system, or use a container image",
            f"glibc {'.'.join(map(str, libc))} 版本过低：需要 2.28 或更高（Ubuntu 20.04、openEuler 20.03、Debian 10 "
            "及以上都可以，Ubuntu 18.04 不行）。请升级系统，或改用容器镜像",
        )
    if found.cann is None:
        if not found.cards and found.driver is None:
            raise Refusal(
                "this host has no Ascend NPU: no driver, no /dev/davinci*, no CANN. On a GPU or a CPU, run `bash "
                "speedrun.sh`",
                "本机没有昇腾 NPU：没有驱动，没有 /dev/davinci*，也没有 CANN。改用 GPU 或 CPU：bash speedrun.sh",
                NO_NPU,
            )
        raise Refusal(
            "no CANN was found (looked for set_env.sh in /usr/local/Ascend/{cann,ascend-toolkit,nnae,latest}, in "
            f"~/Ascend, and at ASCEND_HOME_PATH). Install the CANN toolkit {versions.CANN_FLOOR} or later and its ops "
            "(kernels) package for this chip. If CANN is in another folder, export ASCEND_HOME_PATH",
            "没有找到 CANN（查找过 /usr/local/Ascend/{cann,ascend-toolkit,nnae,latest}、~/Ascend 和 "
            f"ASCEND_HOME_PATH）。请安装 CANN toolkit {versions.CANN_FLOOR} 或更高版本，以及对应芯片的算子包。"
            "如果装在别处，请设置 ASCEND_HOME_PATH",
        )
    if asked:
        pick = versions.asked(asked)
    elif not found.cann.version:
        raise Refusal(
            f"the version of the CANN in {found.cann.home} cannot be read, because it has no ascend_*_install.info. "
            "Name the torch_npu for it: bash setup_ascend.sh --torch-npu VERSION",
            f"读不出 {found.cann.home} 里 CANN 的版本（没有 ascend_*_install.info）。请指定 torch_npu："
            "bash setup_ascend.sh --torch-npu 版本号",
        )
    else:
        pick = versions.resolve(found.cann.version)
    if pick.refusal[0]:
        raise Refusal(*pick.refusal)
    return pick


# --- variables -------------------------------------------------------------------------------------


def sourced(script: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment after CANN's set_env.sh; bash sources the script, because it may use features of bash."""
    code = f". {shlex.quote(script)} >/dev/null 2>&1; exec env -0"
    done = subprocess.run(
        ["bash", "-c", code], env=dict(env), stdout=subprocess.PIPE, timeout=PROBE_SECONDS
    )
    pairs = (
        item.split("=", 1)
        for item in done.stdout.decode("utf-8", "replace").split("\0")
        if "=" in item
    )
    return dict(pairs)


def is_sourced(cann: host.Cann, env: Mapping[str, str]) -> bool:
    """Whether the variables of this CANN are already set; sourcing set_env.sh twice would add its paths twice."""
    same = os.path.realpath(env.get("ASCEND_HOME_PATH") or "/") == os.path.realpath(cann.home)
    return same and bool(env.get("ASCEND_OPP_PATH"))


def job_environment(
    found: Found, torch_npu: str, env: Mapping[str, str], fix: bool
) -> dict[str, str]:
    """The complete environment that a job should see."""
    new = dict(env)
    if found.cann and found.cann.set_env and not is_sourced(found.cann, env):
        new = sourced(found.cann.set_env, env)
    if found.cann:
        new.setdefault("ASCEND_HOME_PATH", found.cann.home)
    paths = [path for path in new.get("LD_LIBRARY_PATH", "").split(":") if path]
    missing = [
        path for path in (found.driver.libraries if found.driver else ()) if path not in paths
    ]
    new["LD_LIBRARY_PATH"] = ":".join([*missing, *paths])
    allocator = environment.allocator_variable(torch_npu)
    others = {"PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"} - {allocator}
    for other in others & set(new):
        new.setdefault(
            allocator, new[other]
        )  # keep the user's value under the name that this torch_npu reads
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


# --- the environment -------------------------------------------------------------------------------


class Pair(NamedTuple):
    """The pair in .venv: the versions that load, the last line of the error if one does not load, and why card 0 does
    not open ("" if it opens, or was not asked)."""

    torch: str
    torch_npu: str
    failure: str
    closed: str = ""

    @property
    def loads(self) -> bool:
        """Whether both packages load."""
        return not self.failure


def probe(python: str, env: Mapping[str, str], cards: bool) -> Pair:
    """Import torch and torch_npu in the environment of a job; open card 0 if there are cards."""
    code = PROBE + (OPEN if cards else "")
    late = f"no answer within {PROBE_SECONDS} s"
    try:
        done = subprocess.run(
            [python, "-c", code], env=dict(env), capture_output=True, timeout=PROBE_SECONDS, cwd="/"
        )
        out, err, status = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as failure:
        out, err, status = failure.stdout or b"", late.encode(), 1
    words = [line.split(None, 1) for line in out.decode("utf-8", "replace").splitlines()]
    told = {line[0]: line[1] for line in words if len(line) == 2}
    why = (
        ((err.decode("utf-8", "replace").strip() or f"exit code {status}").splitlines())[-1]
        if status
        else ""
    )
    if cards and told.get("torch_npu") and status:
        return Pair(told["torch"], told["torch_npu"], "", why)
    return Pair(told.get("torch", ""), told.get("torch_npu", ""), why, told.get("closed", ""))


def own_python() -> str:
    """The Python of .venv; "" if there is none."""
    path = ROOT / ".venv" / "bin" / "python"
    return str(path) if path.exists() else ""


def keeps(pair: Pair, cann: str, asked: str) -> bool:
    """Whether the installed pair can stay: it loads, both packages match, and CANN is new enough for it."""
    if not pair.loads or (asked and asked != pair.torch_npu):
        return False
    return "FAIL" not in (
        versions.pair_fits(pair.torch, pair.torch_npu).status,
        versions.cann_fits(pair.torch_npu, cann).status,
    )


def run(command: Sequence[str], env: Mapping[str, str], dry: bool) -> int:
    """Run a command and return its exit code; in a dry run only print the command."""
    if dry:
        say("would run: " + " ".join(shlex.quote(word) for word in command))
        return 0
    return subprocess.run(list(command), env=dict(env)).returncode


def make_environment(
    pick: versions.Pick | None, numpy: int, env: Mapping[str, str], dry: bool
) -> None:
    """Make .venv with setup_env.sh and install the pair, beside this major version of numpy; None keeps the pair."""
    flags = [] if pick is None else ["--npu", pick.torch_npu, "--python-max", str(pick.python[1])]
    words = " ".join(shlex.quote(word) for word in ["setup_env", *flags, "--numpy", str(numpy)])
    code = run(
        ["bash", "-c", f"source {shlex.quote(str(ROOT / 'setup_env.sh'))} && {words}"], env, dry
    )
    if code != 0:
        raise Refusal(
            "the environment could not be made. The lines above say why and what to do; then type the same "
            "command again",
            "无法创建环境。原因和处理办法见上文；处理之后再次输入同一条命令",
            1,
        )


# --- permissions -----------------------------------------------------------------------------------


def check_permissions(found: Found, env: Mapping[str, str], fix: bool, dry: bool) -> None:
    """Warn if this user may not use the cards; with --fix, try to add the user to the group."""
    shut = [device.path for device in [*found.cards, *found.managers] if not device.usable]
    member = host.may_use_devices(env, os.geteuid(), os.getgroups())
    if member and not shut:
        return
    user = getpass.getuser()
    remedy = f"sudo usermod -aG {host.GROUP} {user}"
    what = (
        f"{user} may not read and write {shut[0]}"
        if shut
        else f"{user} is not in the group {host.GROUP}"
    )
    what_zh = f"用户 {user} 不能读写 {shut[0]}" if shut else f"用户 {user} 不在 {host.GROUP} 组里"
    if fix and not member:
        sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
        if run([*sudo, "usermod", "-aG", host.GROUP, user], env, dry) == 0:
            say(
                f"added {user} to the group {host.GROUP}; log in again for this to take effect",
                f"已把 {user} 加入 {host.GROUP} 组，重新登录后生效",
            )
            return
    say(
        f"{what}. Run {remedy}, then log in again",
        f"{what_zh}。请执行 {remedy}，然后重新登录",
        "warning",
    )


# --- set-up ----------------------------------------------------------------------------------------


def set_up(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Set the host up; returns the exit code."""
    found = look(env)
    describe(found)
    pick = check_floors(found, options.torch_npu)
    cann = found.cann.version if found.cann else ""
    if pick.warning[0]:
        say(*pick.warning, mark="warning")
    if not found.cards:
        say(
            "no card is visible (/dev/davinci*); making the environment anyway",
            "看不到 NPU 卡（/dev/davinci*），但仍会创建环境",
            "warning",
        )
    check_permissions(found, env, options.fix, options.dry_run)

    python, cards, numpy = own_python(), bool(found.cards), versions.numpy_for(cann)
    planned = job_environment(found, pick.torch_npu, env, options.fix)
    pair = probe(python, planned, cards) if python else Pair("", "", "no .venv")
    if keeps(pair, cann, options.torch_npu):
        say(
            f"torch {pair.torch} and torch_npu {pair.torch_npu} load and fit CANN {cann}: kept",
            f"torch {pair.torch} 和 torch_npu {pair.torch_npu} 能加载，与 CANN {cann} 配套：保留不动",
        )
        torch_npu = pair.torch_npu
        make_environment(None, numpy, env, options.dry_run)
    else:
        torch_npu = pick.torch_npu
        say(*versions.explain(cann, pick, bool(options.torch_npu)))
        if options.fix and python and not options.dry_run and not re.search(LIBRARY, pair.failure):
            (
                ROOT / ".venv" / "setup.busy"
            ).touch()  # .venv is broken: this mark makes setup_env.sh start from scratch
        make_environment(pick, numpy, env, options.dry_run)
        pair = Pair("", "", "not yet loaded")

    new = job_environment(found, torch_npu, env, options.fix)
    # A pair that was kept has already been loaded above; a card may have been closed for want of another numpy.
    if not options.dry_run and (not pair.loads or pair.closed):
        pair = probe(
            own_python() or shutil.which("python", path=new.get("PATH")) or sys.executable,
            new,
            cards,
        )
        if not pair.loads:
            report_load_failure(pair, cards, options.fix)
        if pair.closed:
            say(
                f"card 0 does not open: {pair.closed[:200]}. `python check_npu.py` names the cause",
                f"NPU 0 打不开：{pair.closed[:200]}。运行 python check_npu.py 查明原因",
                "warning",
            )
    lines = environment.changes(env, new)
    if options.env_file:
        Path(options.env_file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.dry_run:
        print("\n".join(lines))
    if not (options.fix and options.env_file):
        for finding in environment.lint(job_environment(found, torch_npu, env, False), torch_npu):
            say(*environment.advice(finding, options.fix), mark="warning")
    return finish(options)


def report_load_failure(pair: Pair, cards: bool, fix: bool) -> None:
    """Say that the pair does not load and which file is missing: an error if there are cards, otherwise a warning.

    Without cards, as in the build of an image, the pair cannot load yet.
    """
    missing = re.search(LIBRARY, pair.failure)
    word = f" ({missing[0]})" if missing else ""
    more = "" if fix else "; bash setup_ascend.sh --fix repairs a broken installation"
    more_zh = "" if fix else "；如果是安装损坏，bash setup_ascend.sh --fix 会重装"
    english = f"torch_npu does not load{word}: {pair.failure}. `python check_npu.py` names the cause{more}"
    chinese = (
        f"torch_npu 无法加载{word}：{pair.failure}。运行 python check_npu.py 查明原因{more_zh}"
    )
    if cards:
        raise Refusal(english, chinese)
    say(english, chinese, "warning")


def finish(options: argparse.Namespace) -> int:
    """Say what to type next; returns the exit code."""
    if options.dry_run:
        say("dry run: nothing was changed", "试运行：没有做任何更改")
    elif options.env_file:
        say(
            "ready, and this shell has the variables. Next: python check_npu.py, then bash speedrun_npu.sh",
            "就绪，变量已写入当前 shell。下一步：运行 python check_npu.py，再运行 bash speedrun_npu.sh",
        )
    else:
        again = "source setup_ascend.sh" + (" --fix" if options.fix else "")
        say(
            f"ready. Next: {again} (only `source` can change the variables of your shell), python check_npu.py, then "
            "bash speedrun_npu.sh",
            f"就绪。下一步：先 {again}（只有 source 才能改动当前 shell 的变量），再依次运行 python check_npu.py 和 "
            "bash speedrun_npu.sh",
        )
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    plain = argparse.RawDescriptionHelpFormatter
    words = argparse.ArgumentParser(
        "setup_ascend.sh", description=__doc__, formatter_class=plain, allow_abbrev=False
    )
    words.add_argument(
        "--dry-run", action="store_true", help="print what would be done and change nothing"
    )
    words.add_argument(
        "--fix",
        action="store_true",
        help="also repair harmful variables (only when sourced), the group of the user, and a torch_npu "
        "that does not load",
    )
    words.add_argument(
        "--torch-npu",
        default=os.environ.get("NANOCHAT_TORCH_NPU", ""),
        metavar="VERSION",
        help="version of torch_npu to install (default: NANOCHAT_TORCH_NPU, otherwise the version that "
        "the table pairs with the installed CANN)",
    )
    words.add_argument(
        "--root",
        default="",
        help="folder to put in front of every absolute path, for tests (default: none)",
    )
    words.add_argument(
        "--env-file", default="", help=argparse.SUPPRESS
    )  # the file that a sourcing shell reads
    return words


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code of setup_ascend.sh."""
    lines.show_what_cannot_be_shown()
    options, rest = parser().parse_known_args(words)
    if rest and not options.env_file:
        parser().error(
            f"unrecognized arguments: {' '.join(rest)}; bash setup_ascend.sh --help lists the flags"
        )
    if rest:  # a script that sources this file passes on its own flags, whether it wants to or not
        say(
            f"ignored, because they are not flags of setup_ascend.sh: {' '.join(rest)}",
            f"已忽略（不是 setup_ascend.sh 的参数）：{' '.join(rest)}",
        )
    env = dict(os.environ)
    if options.root:
        env["ASCEND_ROOT_PREFIX"] = options.root
    try:
        return set_up(options, env)
    except Refusal as refusal:
        if (
            refusal.code == NO_NPU and options.env_file
        ):  # the sourcing script may continue without an NPU
            say(refusal.english, refusal.chinese)
            return NO_NPU
        print(f"error: {refusal.english}.", file=sys.stderr)
        print(f"错误：{refusal.chinese}。", file=sys.stderr)
        return refusal.code


if __name__ == "__main__":
    sys.exit(main())
