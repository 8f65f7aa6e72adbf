"""Finds what an Ascend host has, without torch: CANN, driver, device files, groups and npu-smi.

Absolute paths are looked up under the folder ASCEND_ROOT_PREFIX, which is empty on a real host.
Tests set it to a folder that imitates a host.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Mapping, NamedTuple, Sequence

from tools_npu.versions import cann_key

GROUP = "HwHiAiUser"
MANAGERS = ("davinci_manager", "devmm_svm", "hisi_hdc")
# Subfolders of Ascend/ that hold set_env.sh, the newest layout first.
LAYOUTS = ("cann", "ascend-toolkit", "nnae", "latest")
# The variables that name a CANN, the first of which wins.
NAMING = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_HOME")
SMI_SECONDS = 30
NO_SMI = "npu-smi: not found"
SMI_TIMEOUT = f"npu-smi: no answer within {SMI_SECONDS} s"
IN_USE = 0.2  # the share of a card's memory that is taken where another process uses the card
BUSY = 0.5  # the same where too little memory is left to train


class Cann(NamedTuple):
    """An installed CANN: its folder, the script that sets its variables, its version and layout."""

    home: str
    set_env: str
    version: str  # "" if no file names it
    layout: str  # cann | ascend-toolkit | nnae | latest | environment


class Driver(NamedTuple):
    """The driver: its version ("" if unknown), its folder, and its folders for LD_LIBRARY_PATH."""

    version: str
    path: str
    libraries: tuple[str, ...]


class Device(NamedTuple):
    """A file under /dev, and whether this user may read and write it."""

    path: str
    usable: bool


def prefix(environment: Mapping[str, str]) -> str:
    """Return the folder to put in front of every absolute path, or ""."""
    return environment.get("ASCEND_ROOT_PREFIX", "").rstrip("/")


def read_text(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def first_value(path: Path, name: str) -> str:
    """Return the value in the first `name=value` line of a file, or "" if there is none."""
    match = re.search(rf"^{name}\s*=\s*(\S+)", read_text(path), re.M | re.I)
    return match[1] if match else ""


def cann_version(home: Path) -> str:
    """Return the version of the CANN in a folder, or "" if no file names it.

    It is in <arch>-linux/ascend_*_install.info, or else in version.cfg.
    """
    for info_file in sorted(home.glob("*-linux/ascend_*_install.info")):
        version = first_value(info_file, "version")
        if version:
            return version
    # In runtime_running_version=[7.0.0.1:8.3.RC1] the component's version comes first, the
    # package's second.
    pattern = r"(?:toolkit|runtime)_running_version=\[[^\]:]*:([^\]]+)\]"
    for name in ("version.cfg", "share/version.cfg"):
        match = re.search(pattern, read_text(home / name))
        if match:
            return match[1]
    return ""


def ops_version(home: Path) -> str | None:
    """Return the version of the ops (kernels) package in a CANN, or None if there is no package.

    The version is "" if the kernels are there and no file names their version. Up to CANN 8.3 the
    package is one folder, opp_kernel; later it is one folder for each group of operators.
    """
    files = [home / "opp_kernel/version.info"]
    files += sorted(home.glob("share/info/ops_*/version.info"))
    for file in files:
        # version_dir has the form of the toolkit's version, and Version is that of the build.
        version = first_value(file, "version_dir") or first_value(file, "Version")
        if version:
            return version
    for name in ("version.cfg", "share/version.cfg"):
        pattern = r"opp_kernel_running_version=\[[^\]:]*:([^\]]+)\]"
        match = re.search(pattern, read_text(home / name))
        if match:
            return match[1]
    kernels = home.glob("opp/built-in/op_impl/ai_core/tbe/kernel/ascend*")
    return "" if any(kernels) else None


def home_of(set_env: Path) -> Path:
    """Return the folder of the libraries that belong to a set_env.sh.

    In the old layout it is `latest` next to the script, and in the new one it is the script's own
    folder.
    """
    latest = set_env.parent / "latest"
    return latest if os.path.isdir(latest) else set_env.parent


def installed_in(folder: Path) -> list[Cann]:
    """Return every CANN in a folder such as /usr/local/Ascend, the newest first."""
    canns = []
    for layout in LAYOUTS:
        script = folder / layout / "set_env.sh"
        if os.path.isfile(script):
            home = home_of(script)
            canns.append(Cann(str(home), str(script), cann_version(home), layout))
    return newest_first(canns)


def newest_first(canns: list[Cann]) -> list[Cann]:
    """Return a list sorted by version, the newest first."""
    return sorted(canns, key=lambda cann: cann_key(cann.version) or (0, 0, 0, 0), reverse=True)


def named_cann(environment: Mapping[str, str]) -> Cann | None:
    """Return the CANN that the environment names, or None.

    A variable names the folder of CANN or, as ASCEND_HOME does in guides, the folder above it.
    """
    for variable in NAMING:
        home = Path(environment.get(variable) or "/nowhere")
        inside = installed_in(home)
        if os.path.isfile(home / "set_env.sh"):
            home = home_of(home / "set_env.sh")
        elif inside:
            return inside[0]._replace(layout="environment")
        candidates = (home / "set_env.sh", home.parent / "set_env.sh")
        scripts = [str(path) for path in candidates if os.path.isfile(path)]
        if os.path.isdir(home) and (scripts or variable != "ASCEND_HOME"):
            script = scripts[0] if scripts else ""
            return Cann(str(home), script, cann_version(home), "environment")
    return None


def usual_folders(environment: Mapping[str, str]) -> list[Path]:
    """Return the folders in which CANN is installed unless another one is named."""
    folders = [Path(prefix(environment) + "/usr/local/Ascend")]
    if environment.get("HOME"):
        folders.append(Path(environment["HOME"]) / "Ascend")
    return folders


def closed_cann(environment: Mapping[str, str]) -> str:
    """Return a folder of CANN that this user may not read, or "".

    Without --install-for-all, CANN is for the user who installed it.
    """
    paths = [Path(environment.get(name) or "/nowhere") for name in NAMING]
    for folder in usual_folders(environment):
        paths += [folder, *(folder / layout for layout in LAYOUTS)]
    closed = [path for path in paths if is_closed(path)]
    return str(closed[0]) if closed else ""


def is_closed(path: Path) -> bool:
    """Return whether the access to a folder is refused."""
    try:
        os.scandir(str(path)).close()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def find_canns(environment: Mapping[str, str]) -> list[Cann]:
    """Return every CANN of this host: the one that the environment names, then the newest first."""
    folders = usual_folders(environment)
    canns = newest_first([cann for folder in folders for cann in installed_in(folder)])
    named = named_cann(environment)
    if named:
        canns.insert(0, named)
    by_home: dict[str, Cann] = {}
    for cann in canns:
        by_home.setdefault(os.path.realpath(cann.home), cann)
    return list(by_home.values())


def find_driver(environment: Mapping[str, str]) -> Driver | None:
    """Return the driver, or None if there is none.

    /etc/ascend_install.info may name its folder. The Ascend Docker Runtime mounts the libraries
    without version.info, so in its containers the version is "".
    """
    root = prefix(environment)
    named = first_value(Path(root + "/etc/ascend_install.info"), "Driver_Install_Path_Param")
    paths = [Path(f"{root}{base}/driver") for base in (named, "/usr/local/Ascend") if base]
    candidates = [path for path in paths if os.path.isfile(path / "version.info")]
    if not candidates:
        candidates = [path for path in paths if os.path.isdir(path / "lib64")]
    if not candidates:
        return None
    path = candidates[0]
    folders = [path / "lib64" / name for name in ("common", "driver", "")]
    libraries = tuple(str(folder) for folder in folders if os.path.isdir(folder))
    return Driver(first_value(path / "version.info", "Version"), str(path), libraries)


def add_driver(job: dict[str, str], driver: Driver | None) -> None:
    """Put the libraries of the driver on LD_LIBRARY_PATH if they are not there yet."""
    paths = [path for path in job.get("LD_LIBRARY_PATH", "").split(":") if path]
    libraries = driver.libraries if driver else ()
    missing = [path for path in libraries if path not in paths]
    job["LD_LIBRARY_PATH"] = ":".join([*missing, *paths])


def find_devices(environment: Mapping[str, str]) -> tuple[list[Device], list[Device]]:
    """Return the device files of the cards, sorted by number, and the manager files that exist."""
    folder = Path(prefix(environment) + "/dev")

    def device(path: Path) -> Device:
        return Device(str(path), os.access(str(path), os.R_OK | os.W_OK))

    cards = [path for path in folder.glob("davinci[0-9]*") if path.name[7:].isdigit()]
    cards.sort(key=lambda path: int(path.name[7:]))
    managers = [folder / name for name in MANAGERS]
    return [device(path) for path in cards], [device(path) for path in managers if path.exists()]


def may_use_devices(
    environment: Mapping[str, str],
    user: int,
    groups: Sequence[int],
) -> bool:
    """Return whether a user is root or in the driver's group, or the host has no such group."""
    if user == 0:
        return True
    group_file = read_text(Path(prefix(environment) + "/etc/group"))
    match = re.search(rf"^{GROUP}:[^:]*:(\d+):", group_file, re.M)
    return match is None or int(match[1]) in groups


def visible_cards(environment: Mapping[str, str], cards: int) -> tuple[list[int], list[str]]:
    """Return the cards that ASCEND_RT_VISIBLE_DEVICES shows, and its entries that name no card."""
    setting = environment.get("ASCEND_RT_VISIBLE_DEVICES")
    if setting is None or not setting.strip():
        return list(range(cards)), []
    visible = []
    unknown_entries = []
    for word in setting.replace(" ", "").split(","):
        if word.isdigit() and (int(word) < cards or not cards):
            visible.append(int(word))
        else:
            unknown_entries.append(word)
    return visible, unknown_entries


# --- npu-smi -------------------------------------------------------------------------------------


class Card(NamedTuple):
    """A chip in the table that `npu-smi info` prints."""

    npu: int
    chip: int
    name: str
    health: str
    power: str  # "-" on the second die of a card
    celsius: int
    bus: str
    aicore: int  # percent
    used_mb: int
    total_mb: int


class Holder(NamedTuple):
    """A process that holds memory on a chip."""

    npu: int
    chip: int | None  # None if npu-smi names only the card, as it does for newer cards
    pid: int
    name: str  # empty if the process runs in another container
    used_mb: int


# A chip has two rows. The first shows NPU, name, health, power and temperature. The second shows
# chip, bus and memory; its last pair of numbers is HBM.
FIRST_ROW = re.compile(r"^\|\s*(\d+)\s+(\S+).*?\|\s*(\S+)\s+\|\s*(\S+)\s+(\d+)")
SECOND_ROW = re.compile(
    r"^\|\s*(\d+)\s+(\d*)\s*\|\s*([0-9A-Fa-f:.]+|NA)\s*\|\s*(\d+)\s.*?(\d+)\s*/\s*(\d+)\s*\|$"
)
# npu-smi 26 adds a column to a process: its id in the container.
HOLDER = re.compile(
    r"^\|\s*(\d+)(?:\s+(\d+))?\s*\|\s*(\d+)\s*\|\s*([^|]*?)\s*\|\s*(\d+)\s*\|(?:[^|]*\|)?$"
)


CARD_NAME = re.compile(r"(NPU|Phy-?ID)\d+", re.I)  # the name of a card in the topology


class SmiInfo(NamedTuple):
    """The output of `npu-smi info`: the version of the driver, the chips, and their processes."""

    version: str
    cards: list[Card]
    holders: list[Holder]


def parse_smi(text: str) -> SmiInfo:
    """Return the version, the chips and the processes from what `npu-smi info` prints."""
    version = re.search(r"npu-smi\s+(\S+)\s+Version:\s*(\S+)", text)
    cards = []
    holders = []
    first_row = None
    for line in text.splitlines():
        line = line.rstrip()
        second_row = SECOND_ROW.match(line)
        holder = HOLDER.match(line)
        if first_row and second_row:
            cards.append(_card(first_row, second_row))
            first_row = None
        elif holder:
            npu, chip, pid, name, used_mb = holder.groups()
            chip_number = int(chip) if chip else None
            holders.append(Holder(int(npu), chip_number, int(pid), name, int(used_mb)))
        else:
            first_row = FIRST_ROW.match(line) or first_row
    return SmiInfo(version[2] if version else "", cards, holders)


def _card(first_row: re.Match[str], second_row: re.Match[str]) -> Card:
    npu, name, health, power, celsius = first_row.groups()
    chip, _, bus, aicore, used_mb, total_mb = second_row.groups()
    return Card(
        npu=int(npu),
        chip=int(chip),
        name=name,
        health=health,
        power=power,
        celsius=int(celsius),
        bus=bus,
        aicore=int(aicore),
        used_mb=int(used_mb),
        total_mb=int(total_mb),
    )


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """Return the links between cards, as links[a][b], from what `npu-smi info -t topo` prints.

    The links of a card to itself and to the CPU are left out.
    """
    links: dict[str, dict[str, str]] = {}
    header: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if not words:
            continue
        if not header and CARD_NAME.fullmatch(words[0]):
            header = [word for word in words if CARD_NAME.fullmatch(word)]
        elif words[0] in header:
            card = words[0]
            row = dict(zip(header, words[1 : len(header) + 1]))
            row.pop(card, None)
            links[card] = row
    return links


def run_smi(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the output of npu-smi, and why the call failed, or "" if it succeeded."""
    root = prefix(environment)
    env = dict(environment)
    add_driver(env, find_driver(environment))  # whose libraries a container does not find by itself
    folders = [environment.get("PATH", ""), root + "/usr/local/bin", root + "/usr/local/sbin"]
    program = shutil.which("npu-smi", path=os.pathsep.join(folders))
    if program is None:
        return "", NO_SMI
    try:
        process = subprocess.run(
            [program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SMI_SECONDS,
            env=env,
        )
    except subprocess.TimeoutExpired:
        return "", SMI_TIMEOUT
    except OSError as failure:
        return "", f"npu-smi: {failure}"
    output = process.stdout.decode("utf-8", "replace")
    if process.returncode == 0:
        return output, ""
    output_lines = output.strip().splitlines() or [f"npu-smi: exit code {process.returncode}"]
    return output, output_lines[-1]
