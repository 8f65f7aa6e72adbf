"""The checks that need no torch: system, driver, CANN, cards, npu-smi, variables, limits."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Iterator, Mapping, Sequence

from tools_npu import environment, host, setup, versions
from tools_npu.lines import FAIL, PASS, SKIP, WARN, Line

DISK_GB = 20
# Remedies that are more than a command, in English and Chinese.
GROUP_REMEDY = (f"sudo usermod -aG {host.GROUP} $USER, then log in again",
                f"sudo usermod -aG {host.GROUP} $USER，然后重新登录")  # fmt: skip
RUN = (
    "docker run --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc "
    "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro ..."
)
CONTAINER = (f"in a container: {RUN}", f"容器中需要：{RUN}")
DRIVER_REMEDY = (f"install driver and firmware (.run, as root); {CONTAINER[0]}",
                 f"以 root 安装 NPU 驱动与固件（.run 包）；{CONTAINER[1]}")  # fmt: skip
CANN_REMEDY = (
    f"install the CANN toolkit, {versions.CANN_FLOOR} or later, and its ops (kernels); if it lies elsewhere: export "
    "ASCEND_HOME_PATH=...",
    f"安装 CANN toolkit（{versions.CANN_FLOOR} 或更高）与算子包（ops/kernels）；若装在别处：export "
    "ASCEND_HOME_PATH=...",
)
MOUNTS = "-v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi -v /usr/local/dcmi:/usr/local/dcmi"
SMI_REMEDY = (f"install the driver; in a container: {MOUNTS}", f"安装驱动；容器中需要：{MOUNTS}")


def system() -> Iterator[Line]:
    """Python and the C library."""
    python = sys.version.split()[0]
    if sys.version_info[:2] < versions.PYTHON_FLOOR:
        yield Line("python", WARN, f"{python} runs this check; the project needs 3.10 or later",
                   f"当前 {python} 只用于本检查；项目需要 3.10 或更高", "bash setup_ascend.sh")  # fmt: skip
    else:
        yield Line("python", PASS, python, python)
    libc = setup.glibc()
    version = ".".join(str(part) for part in libc)
    if libc and libc < versions.GLIBC_FLOOR:
        yield Line("glibc", FAIL, f"{version}; 2.28 or later is needed (no Ubuntu 18.04)",
                   f"{version}；需要 2.28 或更高（不支持 Ubuntu 18.04）",
                   ("upgrade the system, or use a container image", "升级系统，或使用容器镜像"))  # fmt: skip
    elif libc:
        yield Line("glibc", PASS, version, version)


def driver_and_cann(found: setup.Found, env: Mapping[str, str]) -> Iterator[Line]:
    """The driver, CANN, and whether its variables are in this shell."""
    if found.driver:
        yield Line("driver", PASS, f"{found.driver.version} in {found.driver.path}",
                   f"{found.driver.version}，位于 {found.driver.path}",
                   data={"version": found.driver.version})  # fmt: skip
    elif found.cards:
        yield Line("driver", WARN, "its version.info was not found, but there are cards (a container without "
                   "/usr/local/Ascend/driver?)", "找不到驱动的 version.info，但存在 NPU 卡（容器未挂载驱动目录？）",
                   CONTAINER)  # fmt: skip
    else:
        yield Line("driver", FAIL, "not installed: /usr/local/Ascend/driver/version.info is not there",
                   "未安装驱动：没有 /usr/local/Ascend/driver/version.info",
                   DRIVER_REMEDY)  # fmt: skip
    cann = found.cann
    if cann is None:
        yield Line("cann", FAIL, "not found in /usr/local/Ascend, ~/Ascend or at ASCEND_HOME_PATH",
                   "在 /usr/local/Ascend、~/Ascend 与 ASCEND_HOME_PATH 中都没有找到 CANN",
                   CANN_REMEDY)  # fmt: skip
        return
    key, floor = versions.cann_key(cann.version), versions.cann_key(versions.CANN_FLOOR)
    where = f"{cann.version or '?'} in {cann.home}"
    if key and floor and key < floor:
        yield Line("cann", FAIL, f"{where}; {versions.CANN_FLOOR} or later is needed",
                   f"{where}；需要 {versions.CANN_FLOOR} 或更高",
                   ("upgrade CANN: the toolkit and its ops (kernels)",
                    "升级 CANN：toolkit 与算子包（ops/kernels）"))  # fmt: skip
    elif not key:
        yield Line("cann", WARN, f"{where}: its version cannot be read", f"{where}：无法读取版本",
                   "bash setup_ascend.sh --torch-npu VERSION")  # fmt: skip
    else:
        yield Line("cann", PASS, where, where, data={"version": cann.version, "home": cann.home})
    if setup.is_sourced(cann, env):
        yield Line("variables of CANN", PASS, "in this shell", "已在当前 shell 中设置")
    else:
        yield Line("variables of CANN", WARN, "not in this shell; this check takes those of setup_ascend.sh",
                   "未在当前 shell 中设置；本检查使用 setup_ascend.sh 的变量", "source setup_ascend.sh")  # fmt: skip


def permissions(found: setup.Found, env: Mapping[str, str]) -> Iterator[Line]:
    """The cards' files and the user's group."""
    if not found.cards:
        yield Line("cards", FAIL, "no /dev/davinci0: no card, no driver, or a container started without the devices",
                   "没有 /dev/davinci0：没有 NPU 卡、未装驱动，或容器未挂载设备", CONTAINER)  # fmt: skip
        return
    names = [Path(card.path).name for card in found.cards]
    yield Line("cards", PASS, f"{len(names)}: {', '.join(names)}", f"{len(names)} 张：{', '.join(names)}",
               data={"count": len(names)})  # fmt: skip
    missing = [name for name in host.MANAGERS if name not in [Path(device.path).name for device in found.managers]]
    if missing:
        yield Line("device files", FAIL, f"/dev/{missing[0]} is not there", f"缺少 /dev/{missing[0]}", CONTAINER)
    shut = [device.path for device in [*found.cards, *found.managers] if not device.usable]
    member = host.may_use_devices(env, os.geteuid(), os.getgroups())
    if shut:
        yield Line("permissions", FAIL, f"{', '.join(shut)}: this user may not read and write",
                   f"{', '.join(shut)}：当前用户无读写权限", GROUP_REMEDY)  # fmt: skip
    elif not member:
        yield Line("permissions", WARN, f"this user is not in group {host.GROUP}; npu-smi may answer -8005",
                   f"当前用户不在用户组 {host.GROUP} 中；npu-smi 可能报 -8005", GROUP_REMEDY)  # fmt: skip
    else:
        yield Line("permissions", PASS, "the cards may be used", "可以使用 NPU 卡")


def smi(env: Mapping[str, str], cards_there: bool) -> Iterator[Line]:
    """Health, memory and holders of every chip, and the links between them."""
    text, failure = host.run_smi(["info"], env)
    if failure:
        remedy = GROUP_REMEDY if "-8005" in failure else SMI_REMEDY
        status = WARN if cards_there and failure.endswith("not found") else FAIL  # a container may lack it
        yield Line("npu-smi", status, failure, failure, remedy)
        return
    version, cards, holders = host.parse_smi(text)
    if not cards:
        yield Line("npu-smi", WARN, "its table shows no card that can be read here", "表格中没有可识别的 NPU 卡",
                   "npu-smi info")  # fmt: skip
        return
    names = sorted({card.name for card in cards})
    told = f"{version}: {len(cards)} x {', '.join(names)}, {cards[0].total_mb // 1024} GB"
    yield Line("npu-smi", PASS, told, told, data={"version": version, "cards": [card._asdict() for card in cards]})
    for card in cards:
        name = f"card {card.npu}" + (f".{card.chip}" if sum(other.npu == card.npu for other in cards) > 1 else "")
        yield from card_state(name, card, [h for h in holders if (h.npu, h.chip) == (card.npu, card.chip)])
    if len(cards) > 1:
        yield topology(env)


def card_state(name: str, card: host.Card, holders: Sequence[host.Holder]) -> Iterator[Line]:
    """One chip: unhealthy is FAIL, held by others or hot is WARN; a well one says nothing."""
    if card.health != "OK":
        yield Line(name, FAIL, f"health {card.health} ({card.bus})", f"健康状态 {card.health}（{card.bus}）",
                   (f"npu-smi info -t health -i {card.npu}; leave it out with ASCEND_RT_VISIBLE_DEVICES",
                    f"npu-smi info -t health -i {card.npu}；用 ASCEND_RT_VISIBLE_DEVICES 避开此卡"))  # fmt: skip
    used = sum(holder.used_mb for holder in holders)
    busy = card.used_mb > 0.2 * card.total_mb
    if busy:
        who = ", ".join(f"{holder.pid} {holder.name} {holder.used_mb} MB".replace("  ", " ") for holder in holders)
        yield Line(name, WARN, f"in use: {card.used_mb} of {card.total_mb} MB, AICore {card.aicore} %; {who or 'by ?'}",
                   f"已被占用：{card.used_mb}/{card.total_mb} MB，AICore {card.aicore} %；{who or '占用者未知'}",
                   "python check_npu.py --processes", {"used_mb": used})  # fmt: skip
    if card.celsius >= 85:
        yield Line(name, WARN, f"{card.celsius} °C", f"{card.celsius} °C", ("look at its cooling", "检查散热"))


def topology(env: Mapping[str, str]) -> Line:
    """How the cards are linked: HCCS is fast, everything else goes over the host."""
    text, failure = host.run_smi(["info", "-t", "topo"], env)
    links = host.parse_topology(text)
    if failure or not links:
        return Line("topology", SKIP, "npu-smi does not tell it here", "npu-smi 不提供拓扑信息")
    kinds = sorted({link for row in links.values() for link in row.values()})
    told = f"{len(links)} cards, linked by {', '.join(kinds)}"
    chinese = f"{len(links)} 张卡，互联方式：{', '.join(kinds)}"
    slow = [kind for kind in kinds if not kind.startswith(("HCCS", "SIO"))]
    if slow:
        return Line("topology", WARN, f"{told}: links that are not HCCS are slow", f"{chinese}：非 HCCS 链路较慢",
                    ("npu-smi info -t topo; choose cards linked by HCCS with ASCEND_RT_VISIBLE_DEVICES",
                     "npu-smi info -t topo；用 ASCEND_RT_VISIBLE_DEVICES 选用 HCCS 互联的卡"),
                    {"links": links})  # fmt: skip
    return Line("topology", PASS, told, chinese, data={"links": links})


def launch(found: setup.Found, env: Mapping[str, str]) -> Iterator[Line]:
    """The ranks that would be launched against the cards that are visible."""
    if not found.cards:
        return
    visible, wrong = host.visible_cards(env, len(found.cards))
    asked = env.get("ASCEND_RT_VISIBLE_DEVICES", "")
    if wrong:
        yield Line("visible cards", FAIL, f"ASCEND_RT_VISIBLE_DEVICES={asked} names {', '.join(wrong)}; this host has "
                   f"0 to {len(found.cards) - 1}", f"ASCEND_RT_VISIBLE_DEVICES={asked} 中的 {', '.join(wrong)} 不存在；"
                   f"本机有 0 到 {len(found.cards) - 1}", "unset ASCEND_RT_VISIBLE_DEVICES")  # fmt: skip
    ranks = env.get("NPROC_PER_NODE", "")
    if ranks and (not ranks.isdigit() or int(ranks) < 1 or int(ranks) > len(visible)):
        yield Line("ranks", FAIL, f"NPROC_PER_NODE={ranks}, but {len(visible)} card(s) are visible",
                   f"NPROC_PER_NODE={ranks}，但只有 {len(visible)} 张可见的卡",
                   f"export NPROC_PER_NODE={len(visible)}")  # fmt: skip
    elif not wrong:
        yield Line("visible cards", PASS, f"{len(visible)} of {len(found.cards)}",
                   f"{len(found.cards)} 张中的 {len(visible)} 张", data={"visible": visible})  # fmt: skip
    left_over = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in env]
    if left_over:
        names = ", ".join(left_over)
        yield Line("ranks", WARN, f"{names} set outside a launcher: a script would wait for others",
                   f"{names} 在启动器之外被设置：脚本会等待其他进程", f"unset {' '.join(left_over)}")  # fmt: skip


def variables(env: Mapping[str, str], torch_npu: str) -> Iterator[Line]:
    """Variables that conflict, do nothing or slow a run down."""
    found = environment.lint(env, torch_npu)
    for finding in found:
        yield Line(f"variable {finding.name}", finding.status, finding.english, finding.chinese, finding.remedy)
    if not found:
        yield Line("variables", PASS, "none that harms", "没有有害的变量")
    port = env.get("MASTER_PORT", "")
    if port.isdigit() and not environment.port_is_free(int(port)):
        yield Line("MASTER_PORT", WARN, f"{port} is taken by another process", f"{port} 已被其他进程占用",
                   "unset MASTER_PORT")  # fmt: skip


def limits(folder: Path) -> Iterator[Line]:
    """Open files and disk."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < environment.FILES_WANTED:
        yield Line("open files", WARN, f"at most {soft}; jobs of many ranks need {environment.FILES_WANTED}",
                   f"上限 {soft}；多卡任务需要 {environment.FILES_WANTED}", "ulimit -n 65536")  # fmt: skip
    else:
        yield Line("open files", PASS, f"at most {soft}", f"上限 {soft}")
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(str(folder)).free / 1e9
    status = PASS if free >= DISK_GB else WARN
    yield Line("disk", status, f"{free:.0f} GB free in {folder}", f"{folder} 剩余 {free:.0f} GB",
               "export NANOCHAT_BASE_DIR=/larger/disk/nanochat", {"free_gb": round(free)})  # fmt: skip


def all_of(found: setup.Found, env: Mapping[str, str], torch_npu: str) -> Iterator[Line]:
    """Every check of this file, in the order in which causes come before effects."""
    yield from system()
    yield from driver_and_cann(found, env)
    yield from permissions(found, env)
    yield from smi(env, bool(found.cards))
    yield from launch(found, env)
    yield from variables(env, torch_npu)
    yield from limits(Path(env.get("NANOCHAT_BASE_DIR") or Path(env.get("HOME", "/")) / ".cache" / "nanochat"))
