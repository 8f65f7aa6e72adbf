"""What an Ascend host shows without torch: CANN, the driver, device files, groups, npu-smi.

Absolute paths are looked up under the folder ASCEND_ROOT_PREFIX, which is empty on a real host. Tests set it to a
folder that imitates a host.
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
LAYOUTS = (
    "cann",
    "ascend-toolkit",
    "nnae",
    "latest",
)  # subfolders of Ascend/ that hold set_env.sh, newest first
SMI_SECONDS = 30


class Cann(NamedTuple):
    """An installed CANN: the folder with its libraries, the script that sets its variables, its version."""

    home: str
    set_env: str
    version: str  # "" if no file names it
    layout: str  # cann | ascend-toolkit | nnae | latest | environment


class Driver(NamedTuple):
    """The driver's version ("" if unknown), and the folders of the driver that belong on LD_LIBRARY_PATH."""

    version: str
    path: str
    libraries: tuple[str, ...]


class Device(NamedTuple):
    """A file under /dev and whether this user may read and write it."""

    path: str
    usable: bool


def prefix(environment: Mapping[str, str]) -> str:
    """The folder that is put in front of every absolute path."""
    return environment.get("ASCEND_ROOT_PREFIX", "").rstrip("/")


def first_value(path: Path, name: str) -> str:
    """The value of the first `name=value` line of a file; "" if there is no such line or no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^{name}\s*=\s*(\S+)", text, re.M | re.I)
    return found[1] if found else ""


def cann_version(home: Path) -> str:
    """The version that the installer wrote to <arch>-linux/ascend_*_install.info, or else to version.cfg."""
    for info in sorted(home.glob("*-linux/ascend_*_install.info")):
        if version := first_value(info, "version"):
            return version
    for name in ("version.cfg", "share/version.cfg"):
        try:
            text = (home / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # In runtime_running_version=[7.0.0.1:8.3.RC1] the component's version comes first, the package's second.
        if found := re.search(r"(?:toolkit|runtime)_running_version=\[[^\]:]*:([^\]]+)\]", text):
            return found[1]
    return ""


def home_of(set_env: Path) -> Path:
    """The folder of the libraries beside a set_env.sh: `latest` in the old layout, the same folder in the new one."""
    latest = set_env.parent / "latest"
    return latest if latest.is_dir() else set_env.parent


def installed_in(folder: Path) -> list[Cann]:
    """Every CANN in a folder such as /usr/local/Ascend, the newest first."""
    found = []
    for layout in LAYOUTS:
        script = folder / layout / "set_env.sh"
        if script.is_file():
            home = home_of(script)
            found.append(Cann(str(home), str(script), cann_version(home), layout))
    return newest_first(found)


def newest_first(canns: list[Cann]) -> list[Cann]:
    """The same, sorted by version."""
    return sorted(canns, key=lambda cann: cann_key(cann.version) or (0, 0, 0, 0), reverse=True)


def named_cann(environment: Mapping[str, str]) -> Cann | None:
    """The CANN that the environment names, by its own folder or, as ASCEND_HOME does in guides, by the one above."""
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_HOME"):
        home = Path(environment.get(variable) or "/nowhere")
        inside = installed_in(home)
        if inside and not (home / "set_env.sh").is_file():
            return inside[0]._replace(layout="environment")
        scripts = [
            str(path / "set_env.sh")
            for path in (home, home.parent)
            if (path / "set_env.sh").is_file()
        ]
        if home.is_dir() and (scripts or variable != "ASCEND_HOME"):
            return Cann(str(home), (scripts or [""])[0], cann_version(home), "environment")
    return None


def find_canns(environment: Mapping[str, str]) -> list[Cann]:
    """Every CANN of this host: the one that the environment names comes first, then the newest."""
    named = named_cann(environment)
    folders = [Path(prefix(environment) + "/usr/local/Ascend")]
    if environment.get("HOME"):
        folders.append(Path(environment["HOME"]) / "Ascend")
    found, seen = [], set()
    for cann in [
        *([named] if named else []),
        *newest_first([one for path in folders for one in installed_in(path)]),
    ]:
        if os.path.realpath(cann.home) not in seen:
            found.append(cann)
            seen.add(os.path.realpath(cann.home))
    return found


def find_driver(environment: Mapping[str, str]) -> Driver | None:
    """The driver, read from its version.info; /etc/ascend_install.info may name the folder of the driver.

    In a container of the Ascend Docker Runtime, which mounts the libraries without version.info, the version is "".
    """
    root = prefix(environment)
    told = first_value(Path(root + "/etc/ascend_install.info"), "Driver_Install_Path_Param")
    paths = [Path(f"{root}{base}/driver") for base in (told, "/usr/local/Ascend") if base]
    installed = [path for path in paths if (path / "version.info").is_file()]
    for path in installed or [path for path in paths if (path / "lib64").is_dir()]:
        folders = [path / "lib64" / name for name in ("common", "driver", "")]
        there = tuple(str(folder) for folder in folders if folder.is_dir())
        return Driver(first_value(path / "version.info", "Version"), str(path), there)
    return None


def find_devices(environment: Mapping[str, str]) -> tuple[list[Device], list[Device]]:
    """The device files of the cards in the order of their numbers, and the manager files that exist."""
    folder = Path(prefix(environment) + "/dev")

    def device(path: Path) -> Device:
        return Device(str(path), os.access(str(path), os.R_OK | os.W_OK))

    cards = [path for path in folder.glob("davinci[0-9]*") if path.name[7:].isdigit()]
    cards.sort(key=lambda path: int(path.name[7:]))
    managers = [folder / name for name in MANAGERS]
    return [device(path) for path in cards], [device(path) for path in managers if path.exists()]


def may_use_devices(environment: Mapping[str, str], user: int, groups: Sequence[int]) -> bool:
    """Whether a user is root or in the driver's group; every user passes on a host that has no such group."""
    if user == 0:
        return True
    try:
        text = Path(prefix(environment) + "/etc/group").read_text(
            encoding="utf-8", errors="replace"
        )
    except OSError:
        return True
    found = re.search(rf"^{GROUP}:[^:]*:(\d+):", text, re.M)
    return found is None or int(found[1]) in groups


def visible_cards(environment: Mapping[str, str], cards: int) -> tuple[list[int], list[str]]:
    """The cards that ASCEND_RT_VISIBLE_DEVICES leaves visible, and the entries of the variable that name no card."""
    words = environment.get("ASCEND_RT_VISIBLE_DEVICES")
    if words is None or not words.strip():
        return list(range(cards)), []
    left, wrong = [], []
    for word in words.replace(" ", "").split(","):
        if word.isdigit() and (int(word) < cards or not cards):
            left.append(int(word))
        else:
            wrong.append(word)
    return left, wrong


# --- npu-smi ---------------------------------------------------------------------------------------


class Card(NamedTuple):
    """A chip as `npu-smi info` shows it."""

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
    """A process that holds memory of a chip."""

    npu: int
    chip: int | None  # None where npu-smi names the card alone, as it does for newer cards
    pid: int
    name: str  # empty if the process runs in another container
    used_mb: int


# A chip has two rows. The first shows NPU, name, health, power and temperature. The second shows chip, bus and memory;
# its last pair of numbers is HBM.
ROW_ONE = re.compile(r"^\|\s*(\d+)\s+(\S+).*?\|\s*(\S+)\s+\|\s*(\S+)\s+(\d+)")
ROW_TWO = re.compile(
    r"^\|\s*(\d+)\s+(\d*)\s*\|\s*([0-9A-Fa-f:.]+|NA)\s*\|\s*(\d+)\s.*?(\d+)\s*/\s*(\d+)\s*\|$"
)
# npu-smi 26 adds a column to a process: its id in the container.
HOLDER = re.compile(
    r"^\|\s*(\d+)(?:\s+(\d+))?\s*\|\s*(\d+)\s*\|\s*([^|]*?)\s*\|\s*(\d+)\s*\|(?:[^|]*\|)?$"
)


def parse_smi(text: str) -> tuple[str, list[Card], list[Holder]]:
    """The version, the chips and the processes that `npu-smi info` prints."""
    version = re.search(r"npu-smi\s+(\S+)\s+Version:\s*(\S+)", text)
    cards, holders, one = [], [], None
    for line in text.splitlines():
        line = line.rstrip()
        two = ROW_TWO.match(line)
        if two and one:
            chip, _, bus, aicore, used, total = two.groups()
            cards.append(
                Card(
                    int(one[1]),
                    int(chip),
                    one[2],
                    one[3],
                    one[4],
                    int(one[5]),
                    bus,
                    int(aicore),
                    int(used),
                    int(total),
                )
            )
            one = None
        elif held := HOLDER.match(line):
            npu, chip, pid, name, used = held.groups()
            holders.append(Holder(int(npu), int(chip) if chip else None, int(pid), name, int(used)))
        elif found := ROW_ONE.match(line):
            one = found
    return version[2] if version else "", cards, holders


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """`npu-smi info -t topo` as links[a][b], without the diagonal and the CPU column."""
    links: dict[str, dict[str, str]] = {}
    header: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if words and not header and re.fullmatch(r"(NPU|Phy-?ID)\d+", words[0], re.I):
            header = [word for word in words if re.fullmatch(r"(NPU|Phy-?ID)\d+", word, re.I)]
        elif header and words and words[0] in header:
            row = dict(zip(header, words[1 : len(header) + 1]))
            links[words[0]] = {other: link for other, link in row.items() if other != words[0]}
    return links


def run_smi(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """What npu-smi printed, and why the call failed ("" if it succeeded)."""
    places = [
        environment.get("PATH", ""),
        prefix(environment) + "/usr/local/bin",
        prefix(environment) + "/usr/local/sbin",
    ]
    program = shutil.which("npu-smi", path=os.pathsep.join(places))
    if program is None:
        return "", "npu-smi: not found"
    try:
        done = subprocess.run(
            [program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SMI_SECONDS,
            env=dict(environment),
        )
    except subprocess.TimeoutExpired:
        return "", f"npu-smi: no answer within {SMI_SECONDS} s"
    except OSError as failure:
        return "", f"npu-smi: {failure}"
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        return text, (text.strip().splitlines() or [f"npu-smi: exit code {done.returncode}"])[-1]
    return text, ""
