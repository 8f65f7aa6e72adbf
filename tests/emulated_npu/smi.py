"""An npu-smi that prints the tables of a fake host, in the published formats."""

import json
from pathlib import Path
from typing import Any

MIB = 1 << 20
RULE = "+---------------------------+---------------+----------------------------------------------------+"
DOUBLE = RULE.replace("-", "=")
WIDE = "+" + "-" * (len(RULE) - 2) + "+"
USED_MB = 3161  # what the firmware of an idle card uses

SCRIPT = """#!/usr/bin/env bash
# Prints the tables of the emulated host.
folder=$(dirname "${BASH_SOURCE[0]}")/npu-smi.tables
case "$*" in
    info) cat "$folder/info" ;;
    "info -t topo") cat "$folder/topo" ;;
    "info -l") cat "$folder/list" ;;
    "info -m") cat "$folder/mapping" ;;
    -v | --version) cat "$folder/version" ;;
    *)
        echo "npu-smi: $*: not emulated" >&2
        exit 1
        ;;
esac
"""


def install(folder: Path, chip: dict[str, Any], devices: int, driver: str) -> None:
    """Install npu-smi and its tables into a folder of programs."""
    tables = folder / "npu-smi.tables"
    tables.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("info", info(chip, devices, driver)),
        ("topo", topology(chip, devices)),
        ("list", card_list(chip, devices)),
        ("mapping", mapping(chip, devices)),
        ("version", f"npu-smi version: {driver}\n"),
        ("chip.json", json.dumps(chip)),
    ):
        (tables / name).write_text(text, encoding="utf-8")
    script = folder / "npu-smi"
    script.write_text(SCRIPT, encoding="utf-8")
    script.chmod(0o755)


def info(chip: dict[str, Any], devices: int, driver: str) -> str:
    """What `npu-smi info` prints: two rows per die. A3 cards have two dies, and both have the number of the card."""
    paired, low = chip["table"] == "Ascend910", chip["table"].startswith("310P")
    total = chip["memory"] // MIB
    second = "Chip  Phy-ID" if paired else "Chip    Device" if low else "Chip"
    memory = "Memory-Usage(MB)" if low else "Memory-Usage(MB)  HBM-Usage(MB)"
    version = f"npu-smi {driver}"
    lines = [
        WIDE, f"| {version:<33}Version: {driver:<53}|", RULE,
        f"| {'NPU   Name':<26}| Health        | {'Power(W)    Temp(C)           Hugepages-Usage(page)':<51}|",
        f"| {second:<26}| Bus-Id        | {'AICore(%)   ' + memory:<51}|",
        DOUBLE,
    ]  # fmt: skip
    for device in range(devices):
        card, die = divmod(device, 2) if paired else (device, 0)
        usage = f"{USED_MB:<5}/ {total}"
        name = f"{card:<6}{chip['table']}"
        place = f"{die:<6}{device}" if paired or low else f"{die}"
        power = "NA" if low else "-" if die else "93.4"
        used = f"0           {usage}" if low else f"0           0    / 0          {usage}"
        lines += [
            f"| {name:<26}| OK            | {power:<12}{40 + device:<18}0    / 0{'':<13}|",
            f"| {place:<26}| 0000:{0x81 + 2 * device:02X}:00.0  | {used:<51}|",
            DOUBLE,
        ]
    lines += [
        RULE,
        f"| {'NPU     Chip':<26}| Process id    | {'Process name             Process memory(MB)':<51}|",
        DOUBLE,
    ]
    for card in dict.fromkeys(device // 2 if paired else device for device in range(devices)):
        lines += [f"| {f'No running processes found in NPU {card}':<95}|", DOUBLE]
    return "\n".join(lines) + "\n"


def topology(chip: dict[str, Any], devices: int) -> str:
    """What `npu-smi info -t topo` prints: the links. The dies of an A3 card use SIO, other pairs HCCS or PCIe."""
    paired, low = chip["table"] == "Ascend910", chip["table"].startswith("310P")

    def link(a: int, b: int) -> str:
        if a == b:
            return "X"
        return "PHB" if low else "SIO" if paired and a // 2 == b // 2 else "HCCS"

    names = [f"NPU{device}" for device in range(devices)]
    lines = [f"{'':<11}" + "".join(f"{name:<11}" for name in names) + "CPU Affinity"]
    for device, name in enumerate(names):
        cells = "".join(f"{link(device, other):<11}" for other in range(devices))
        lines.append(f"{name:<11}{cells}{24 * device}-{24 * device + 23}")
    legend = {"X": "itself", "HCCS": "linked by HCCS", "SIO": "the two dies of one card", "PHB": "over the PCIe bridge"}
    return "\n".join([*lines, "", "Legend:", "", *(f"  {key:<5}= {words}" for key, words in legend.items())]) + "\n"


def card_list(chip: dict[str, Any], devices: int) -> str:
    """What `npu-smi info -l` prints: the cards."""
    per_card = 2 if chip["table"] == "Ascend910" else 1
    lines = [f"\tTotal Count                    : {-(-devices // per_card)}"]
    for card in range(-(-devices // per_card)):
        here = min(per_card, devices - card * per_card)
        lines += ["", f"\tNPU ID                         : {card}", f"\tChip Count                     : {here}"]
    return "\n".join(lines) + "\n"


def mapping(chip: dict[str, Any], devices: int) -> str:
    """What `npu-smi info -m` prints: the card and the chip of each logical device."""
    per_card = 2 if chip["table"] == "Ascend910" else 1
    lines = [f"\t{'NPU ID':<31}{'Chip ID':<31}{'Chip Logic ID':<31}Chip Name"]
    for device in range(devices):
        card, die = divmod(device, per_card)
        lines.append(f"\t{card:<31}{die:<31}{device:<31}{chip['table']}")
    return "\n".join(lines) + "\n"
