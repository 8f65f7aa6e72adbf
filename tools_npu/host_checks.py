"""Runs the checks without torch: system, driver, CANN, cards, npu-smi, variables and limits."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Iterator, Mapping, Sequence

from tools_npu import environment, host, setup, versions
from tools_npu.lines import FAIL, PASS, SKIP, WARN, Line

DISK_GB = 20
# Remedies that need more than a command, in English and Chinese.
GROUP_REMEDY = (
    f"sudo usermod -aG {host.GROUP} $USER, then log in again",
    f"sudo usermod -aG {host.GROUP} $USER，然后重新登录",
)
DOCKER_RUN = (
    "docker run --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm "
    "--device /dev/hisi_hdc -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro ..."
)
CONTAINER = (f"start a container with: {DOCKER_RUN}", f"容器要这样启动：{DOCKER_RUN}")
DRIVER_REMEDY = (
    f"install the driver and firmware (.run packages, as root), or {CONTAINER[0]}",
    f"用 root 安装 NPU 驱动和固件（.run 包）；{CONTAINER[1]}",
)
CANN_REMEDY = (
    f"install the CANN toolkit {versions.CANN_FLOOR} or later and its ops (kernels) package; if "
    "CANN is in another folder, export ASCEND_HOME_PATH=...",
    f"安装 CANN toolkit（{versions.CANN_FLOOR} 或更高）和算子包（ops/kernels）；如果装在别处，先 export "
    "ASCEND_HOME_PATH=...",
)
MOUNTS = "-v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi -v /usr/local/dcmi:/usr/local/dcmi"
SMI_REMEDY = (f"install the driver; a container needs {MOUNTS}", f"安装驱动；容器要加上 {MOUNTS}")

ROOT_INFO = "/etc/hccl_rootinfo.json"
ROOT_INFO_MOUNTS = (
    f"-v {ROOT_INFO}:{ROOT_INFO}:ro -v "
    "/usr/local/Ascend/driver/topo:/usr/local/Ascend/driver/topo:ro"
)
ROOT_INFO_REMEDY = (
    f"a container needs {ROOT_INFO_MOUNTS}; on the host itself the driver's tools make the file",
    f"容器要加上 {ROOT_INFO_MOUNTS}；在主机上由驱动工具生成这个文件",
)


def system() -> Iterator[Line]:
    """Check Python and the C library."""
    python = sys.version.split()[0]
    if sys.version_info[:2] < versions.PYTHON_FLOOR:
        yield Line(
            "python",
            WARN,
            f"{python} is enough for this check, but the project needs 3.10 or later",
            f"{python} 只够运行本检查，项目需要 3.10 或更高版本",
            "bash setup_ascend.sh",
        )
    else:
        yield Line("python", PASS, python, python)
    libc = setup.glibc()
    version = ".".join(map(str, libc))
    if libc and libc < versions.GLIBC_FLOOR:
        yield Line(
            "glibc",
            FAIL,
            f"{version} is too old: 2.28 or later is needed (Ubuntu 18.04 is too old)",
            f"{version} 版本过低：需要 2.28 或更高（Ubuntu 18.04 不行）",
            ("upgrade the system, or use a container image", "升级系统，或改用容器镜像"),
        )
    elif libc:
        yield Line("glibc", PASS, version, version)


def driver_and_cann(inventory: setup.Inventory, env: Mapping[str, str]) -> Iterator[Line]:
    """Check the driver and CANN, and whether this shell has the variables of CANN."""
    driver = inventory.driver
    if driver and driver.version:
        yield Line(
            "driver",
            PASS,
            f"{driver.version} in {driver.path}",
            f"{driver.version}，位于 {driver.path}",
            data={"version": driver.version},
        )
    elif inventory.cards:
        yield Line(
            "driver",
            WARN,
            "there are cards, but the driver's version.info was not found (a container without "
            "/usr/local/Ascend/driver?)",
            "有 NPU 卡，但找不到驱动的 version.info（容器没有挂载驱动目录？）",
            CONTAINER,
        )
    else:
        yield Line(
            "driver",
            FAIL,
            "not installed: /usr/local/Ascend/driver/version.info does not exist",
            "未安装驱动：没有 /usr/local/Ascend/driver/version.info",
            DRIVER_REMEDY,
        )
    cann = inventory.cann
    closed = host.closed_cann(env) if cann is None else ""
    if closed:
        yield Line(
            "cann",
            FAIL,
            f"this user may not read {closed}",
            f"当前用户没有权限读取 {closed}",
            setup.CLOSED_REMEDY,
        )
        return
    if cann is None:
        yield Line(
            "cann",
            FAIL,
            "not found in /usr/local/Ascend, in ~/Ascend, or at ASCEND_HOME_PATH",
            "在 /usr/local/Ascend、~/Ascend 和 ASCEND_HOME_PATH 里都没有找到 CANN",
            CANN_REMEDY,
        )
        return
    key = versions.cann_key(cann.version)
    floor = versions.cann_key(versions.CANN_FLOOR)
    description = f"{cann.version or '?'} in {cann.home}"
    if key and floor and key < floor:
        yield Line(
            "cann",
            FAIL,
            f"{description} is too old: {versions.CANN_FLOOR} or later is needed",
            f"{description} 版本过低：需要 {versions.CANN_FLOOR} 或更高",
            (
                "upgrade CANN: both the toolkit and its ops (kernels) package",
                "升级 CANN：toolkit 和算子包（ops/kernels）都要升级",
            ),
        )
    elif not key:
        yield Line(
            "cann",
            WARN,
            f"{description}: the version of CANN cannot be read",
            f"{description}：读不出 CANN 的版本",
            "bash setup_ascend.sh --torch-npu VERSION",
        )
    else:
        yield Line(
            "cann",
            PASS,
            description,
            f"{cann.version}，位于 {cann.home}",
            data={"version": cann.version, "home": cann.home},
        )
    yield ops_package(cann)
    if setup.is_sourced(cann, env):
        yield Line("variables of CANN", PASS, "set in this shell", "当前 shell 中已设置")
    else:
        yield Line(
            "variables of CANN",
            WARN,
            "not set in this shell; this check sets them as setup_ascend.sh would",
            "当前 shell 中没有设置；本检查按 setup_ascend.sh 的设置运行",
            "source setup_ascend.sh",
        )


def ops_package(cann: host.Cann) -> Line:
    """Check that the ops (kernels) package is there and has the version of the toolkit."""
    ops = host.ops_version(Path(cann.home))
    remedy = (
        f"install the ops (kernels) package {cann.version or 'of the same version'} for your chip: "
        "Ascend-cann-kernels-CHIP or Ascend-cann-CHIP-ops, into the same folder as the toolkit",
        f"安装与 toolkit 同版本（{cann.version or '未知'}）、对应本机芯片的算子包："
        "Ascend-cann-kernels-芯片 或 Ascend-cann-芯片-ops，装到 toolkit 所在的目录",
    )
    if ops is None:
        return Line(
            "ops package",
            WARN,
            f"no ops (kernels) package was found in {cann.home}; without one every operator fails",
            f"在 {cann.home} 里没有找到算子包（ops/kernels）；没有它，所有算子都会报错",
            remedy,
        )
    key = versions.cann_key(ops)
    toolkit_key = versions.cann_key(cann.version)
    if not key or not toolkit_key or key == toolkit_key:
        version = ops or "?"
        return Line("ops package", PASS, version, version, data={"version": ops})
    return Line(
        "ops package",
        FAIL if key[:2] != toolkit_key[:2] else WARN,
        f"the ops (kernels) package is {ops}, but the toolkit is {cann.version}",
        f"算子包（ops/kernels）是 {ops}，而 toolkit 是 {cann.version}",
        remedy,
        {"version": ops},
    )


def permissions(inventory: setup.Inventory, env: Mapping[str, str]) -> Iterator[Line]:
    """Check the device files of the cards, and whether this user may use them."""
    if not inventory.cards:
        yield Line(
            "cards",
            FAIL,
            "/dev/davinci0 does not exist: this host has no card or no driver, or the container "
            "was started without the devices",
            "没有 /dev/davinci0：没有 NPU 卡，或没装驱动，或容器没有挂载设备",
            CONTAINER,
        )
        return
    names = [Path(card.path).name for card in inventory.cards]
    yield Line(
        "cards",
        PASS,
        f"{len(names)}: {', '.join(names)}",
        f"{len(names)} 张：{', '.join(names)}",
        data={"count": len(names)},
    )
    managers = [Path(device.path).name for device in inventory.managers]
    missing = [name for name in host.MANAGERS if name not in managers]
    if missing:
        yield Line(
            "device files",
            FAIL,
            f"/dev/{missing[0]} does not exist",
            f"缺少 /dev/{missing[0]}",
            CONTAINER,
        )
    devices = [*inventory.cards, *inventory.managers]
    unusable = [device.path for device in devices if not device.usable]
    is_member = host.may_use_devices(env, os.geteuid(), os.getgroups())
    if unusable:
        yield Line(
            "permissions",
            FAIL,
            f"this user may not read and write {', '.join(unusable)}",
            f"当前用户没有读写权限：{'、'.join(unusable)}",
            GROUP_REMEDY,
        )
    elif not is_member:
        yield Line(
            "permissions",
            WARN,
            f"this user is not in the group {host.GROUP}; npu-smi may answer -8005",
            f"当前用户不在 {host.GROUP} 组里，npu-smi 可能报 -8005",
            GROUP_REMEDY,
        )
    else:
        yield Line("permissions", PASS, "this user may use the cards", "当前用户可以使用 NPU 卡")


def smi(env: Mapping[str, str], has_cards: bool) -> Iterator[Line]:
    """Check the health, memory and processes of every chip, and the links between the cards."""
    output, failure = host.run_smi(["info"], env)
    if failure:
        remedy = GROUP_REMEDY if "-8005" in failure else SMI_REMEDY
        # A container may lack npu-smi.
        status = WARN if has_cards and failure.endswith("not found") else FAIL
        chinese = failure
        if failure == host.NO_SMI:
            chinese = "没有找到 npu-smi 命令"
        elif failure == host.SMI_TIMEOUT:
            chinese = f"npu-smi 在 {host.SMI_SECONDS} 秒内没有回答"
        yield Line("npu-smi", status, failure, chinese, remedy)
        return
    info = host.parse_smi(output)
    if not info.cards:
        yield Line(
            "npu-smi",
            WARN,
            "no card can be read from the table that it prints",
            "输出的表格里没有 NPU 卡",
            "npu-smi info",
        )
        return
    names = sorted({card.name for card in info.cards})
    memory = info.cards[0].total_mb // 1024
    finding = f"{info.version}: {len(info.cards)} x {', '.join(names)}, {memory} GiB"
    data = {"version": info.version, "cards": [card._asdict() for card in info.cards]}
    yield Line("npu-smi", PASS, finding, finding, data=data)
    chips = Counter(card.npu for card in info.cards)
    visible, _ = host.visible_cards(env, len(info.cards))
    usable = [
        str(number)
        for number, card in enumerate(info.cards)
        if card.health == "OK" and card.used_mb <= host.IN_USE * card.total_mb
    ]
    for number, card in enumerate(info.cards):
        name = f"card {card.npu}"
        if chips[card.npu] > 1:
            name += f".{card.chip}"
        on_card = [holder for holder in info.holders if holder.npu == card.npu]
        holders = [holder for holder in on_card if holder.chip in (None, card.chip)]
        yield from card_state(name, card, holders, number in visible, ",".join(usable))
    if len(info.cards) > 1:
        yield topology(env)
        if any(re.match("(Ascend)?950", name) for name in names):
            yield from links_of_new_servers(env)


def links_of_new_servers(env: Mapping[str, str]) -> Iterator[Line]:
    """Check the files in which HCCL looks up how the cards of an Ascend 950 server are linked."""
    root = host.prefix(env)
    missing = [name for name in ("/dev/ummu", "/dev/uburma") if not os.path.exists(root + name)]
    if missing:
        flags = " ".join(f"--device {name}" for name in missing)
        yield Line(
            "device files",
            WARN,
            f"{', '.join(missing)} missing; cards of a 950 server may be linked over them",
            f"缺少 {'、'.join(missing)}；950 服务器的卡间通信可能要用",
            (f"a container needs {flags}", f"容器要加上 {flags}"),
        )
    file = Path(root + ROOT_INFO)
    if not file.exists():
        yield Line(
            "hccl_rootinfo",
            WARN,
            f"{ROOT_INFO} does not exist: HCCL then asks the driver for the links",
            f"没有 {ROOT_INFO}：HCCL 会改向驱动查询互联信息",
            ROOT_INFO_REMEDY,
        )
        return
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        # If the host lacks a file that is mounted, Docker makes a folder of its name.
        yield Line(
            "hccl_rootinfo",
            FAIL,
            f"{ROOT_INFO} cannot be read: {failure}",
            f"{ROOT_INFO} 读不了：{failure}",
            ROOT_INFO_REMEDY,
        )
        return
    topology_file = ""
    if isinstance(content, dict):
        topology_file = str(content.get("topo_file_path", ""))
    if topology_file and not Path(root + topology_file).is_file():
        yield Line(
            "hccl_rootinfo",
            FAIL,
            f"{ROOT_INFO} names {topology_file}, which does not exist",
            f"{ROOT_INFO} 指向的 {topology_file} 不存在",
            ROOT_INFO_REMEDY,
        )
    else:
        yield Line("hccl_rootinfo", PASS, topology_file or ROOT_INFO, topology_file or ROOT_INFO)


def card_state(
    name: str,
    card: host.Card,
    holders: Sequence[host.Holder],
    visible: bool,
    usable_cards: str,
) -> Iterator[Line]:
    """Yield a FAIL if a chip is unhealthy or full, a WARN if it is in use or hot, else nothing.

    A chip that ASCEND_RT_VISIBLE_DEVICES leaves out (`visible` is False) fails nothing.
    `usable_cards` is the list of the healthy and free cards, as that variable takes it.
    """
    others = f"export ASCEND_RT_VISIBLE_DEVICES={usable_cards}" if usable_cards else ""
    if card.health != "OK":
        yield Line(
            name,
            FAIL if visible else WARN,
            f"health {card.health} ({card.bus})",
            f"健康状态 {card.health}（{card.bus}）",
            (
                f"npu-smi info -t health -i {card.npu}; leave the card out: "
                f"{others or 'no other card is healthy and free'}",
                f"npu-smi info -t health -i {card.npu}；避开这张卡：{others or '没有别的空闲卡'}",
            ),
        )
    if card.used_mb > host.IN_USE * card.total_mb:
        processes = [f"{holder.pid} {holder.name} {holder.used_mb} MB" for holder in holders]
        users = ", ".join(processes).replace("  ", " ")
        used = f"{card.used_mb} of {card.total_mb} MB, AICore {card.aicore} %"
        used_zh = f"显存 {card.used_mb}/{card.total_mb} MB，AICore {card.aicore}%"
        full = visible and card.used_mb > host.BUSY * card.total_mb
        processes_command = "python check_npu.py --processes"
        remedy: str | tuple[str, str] = processes_command
        if others:
            remedy = (
                f"{processes_command}; or use the free cards: {others}",
                f"{processes_command}；或改用空闲的卡：{others}",
            )
        yield Line(
            name,
            FAIL if full else WARN,
            f"in use: {used}; {users or 'process unknown'}",
            f"已被占用：{used_zh}；{users or '占用者未知'}",
            remedy,
            {"used_mb": sum(holder.used_mb for holder in holders)},
        )
    if card.celsius >= 85:
        yield Line(
            name,
            WARN,
            f"hot: {card.celsius} °C",
            f"温度过高：{card.celsius} °C",
            ("check the cooling of the card", "检查这张卡的散热"),
        )


def topology(env: Mapping[str, str]) -> Line:
    """Check how the cards are linked: HCCS is fast, and every other link goes through the host."""
    output, failure = host.run_smi(["info", "-t", "topo"], env)
    links = host.parse_topology(output)
    if failure or not links:
        return Line(
            "topology",
            SKIP,
            "npu-smi does not show the topology of this host",
            "npu-smi 没有给出本机的拓扑",
        )
    kinds = sorted({link for row in links.values() for link in row.values()})
    english = f"{len(links)} cards, linked by {', '.join(kinds)}"
    chinese = f"{len(links)} 张卡，互联方式：{', '.join(kinds)}"
    slow = [kind for kind in kinds if not kind.startswith(("HCCS", "SIO"))]
    if slow:
        return Line(
            "topology",
            WARN,
            f"{english}: links other than HCCS are slow",
            f"{chinese}：不走 HCCS 的链路较慢",
            (
                "npu-smi info -t topo; choose cards linked by HCCS with ASCEND_RT_VISIBLE_DEVICES",
                "npu-smi info -t topo；用 ASCEND_RT_VISIBLE_DEVICES 选 HCCS 互联的卡",
            ),
            {"links": links},
        )
    return Line("topology", PASS, english, chinese, data={"links": links})


def launch(inventory: setup.Inventory, env: Mapping[str, str]) -> Iterator[Line]:
    """Check that the number of ranks fits the visible cards, and that no rank variable is set."""
    if not inventory.cards:
        return
    visible, wrong = host.visible_cards(env, len(inventory.cards))
    if wrong:
        setting = f"ASCEND_RT_VISIBLE_DEVICES={env.get('ASCEND_RT_VISIBLE_DEVICES', '')}"
        last = len(inventory.cards) - 1
        yield Line(
            "visible cards",
            FAIL,
            f"{setting} names {', '.join(wrong)}; this host has the cards 0 to {last}",
            f"{setting} 里的 {'、'.join(wrong)} 不存在；本机的卡号是 0 到 {last}",
            "unset ASCEND_RT_VISIBLE_DEVICES",
        )
    ranks = env.get("NPROC_PER_NODE", "")
    if ranks and (not ranks.isdigit() or int(ranks) < 1 or int(ranks) > len(visible)):
        yield Line(
            "ranks",
            FAIL,
            f"NPROC_PER_NODE={ranks} must be from 1 to {len(visible)}, the visible cards",
            f"NPROC_PER_NODE={ranks}，应为 1 到 {len(visible)}（可见的卡数）",
            f"export NPROC_PER_NODE={len(visible)}",
        )
    elif not wrong:
        yield Line(
            "visible cards",
            PASS,
            f"{len(visible)} of {len(inventory.cards)}",
            f"共 {len(inventory.cards)} 张，可见 {len(visible)} 张",
            data={"visible": visible},
        )
    stray = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in env]
    if stray:
        names = ", ".join(stray)
        yield Line(
            "ranks",
            WARN,
            f"{names} set outside a launcher: a script would refuse to run alone",
            f"在启动器之外设置了 {names}：单进程的脚本会拒绝运行",
            f"unset {' '.join(stray)}",
        )


def variables(env: Mapping[str, str], torch_npu: str) -> Iterator[Line]:
    """Report environment variables that conflict, have no effect, or slow a run down."""
    findings = environment.lint(env, torch_npu)
    for finding in findings:
        yield Line(
            f"variable {finding.name}",
            finding.status,
            finding.english,
            finding.chinese,
            finding.remedy,
        )
    if not findings:
        yield Line("variables", PASS, "no harmful variable is set", "没有有害的变量")
    port = env.get("MASTER_PORT", "")
    if port and not (port.isdigit() and int(port) < 65536):
        yield Line(
            "MASTER_PORT",
            FAIL,
            f"MASTER_PORT={port} must be a whole number up to 65535",
            f"MASTER_PORT={port}，应为不超过 65535 的整数",
            "unset MASTER_PORT",
        )
    elif port and not environment.port_is_free(int(port)):
        yield Line(
            "MASTER_PORT",
            WARN,
            f"another process uses port {port}",
            f"端口 {port} 已被其他进程占用",
            "unset MASTER_PORT",
        )


def limits(folder: Path) -> Iterator[Line]:
    """Check the limit of open files, the access to the base folder, and the free disk space."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < environment.OPEN_FILES:
        yield Line(
            "open files",
            WARN,
            f"the limit is {soft}; jobs with many ranks need {environment.OPEN_FILES}",
            f"上限是 {soft}；多卡任务需要 {environment.OPEN_FILES}",
            "ulimit -n 65536",
        )
    else:
        yield Line("open files", PASS, f"the limit is {soft}", f"上限是 {soft}")
    existing = folder
    while not os.path.isdir(existing):
        existing = existing.parent
    if not os.access(str(existing), os.W_OK):
        yield Line(
            "base folder",
            FAIL,
            f"this user may not write {folder}",
            f"当前用户不能写入 {folder}",
            "export NANOCHAT_BASE_DIR=/larger/disk/nanochat",
        )
    free = shutil.disk_usage(str(existing)).free / 1e9
    status = PASS if free >= DISK_GB else WARN
    yield Line(
        "disk",
        status,
        f"{free:.0f} GB free in {existing}; {DISK_GB} GB or more are recommended",
        f"{existing} 剩余 {free:.0f} GB，建议不少于 {DISK_GB} GB",
        "export NANOCHAT_BASE_DIR=/larger/disk/nanochat",
        {"free_gb": round(free)},
    )


def base_folder(env: Mapping[str, str]) -> Path:
    """Return the folder of all data and checkpoints, by the same rules as nanochat."""
    folder = env.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat"
    if folder.startswith("~/"):
        home = env.get("HOME") or os.path.expanduser("~")
        return Path(home + folder[1:])
    return Path(os.path.expanduser(folder))


def all_of(
    inventory: setup.Inventory,
    env: Mapping[str, str],
    torch_npu: str,
) -> Iterator[Line]:
    """Run every check of this file, each before the checks that fail because of it."""
    yield from system()
    yield from driver_and_cann(inventory, env)
    yield from permissions(inventory, env)
    yield from smi(env, bool(inventory.cards))
    yield from launch(inventory, env)
    yield from variables(env, torch_npu)
    yield from limits(base_folder(env))
