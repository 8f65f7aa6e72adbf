"""The report: every stage leaves a section, `generate` makes report.md, report.json and the curves.

python -m nanochat.report generate
python -m nanochat.report reset
"""

from pathlib import Path
from typing import Any

from nanochat import device
from nanochat.common import base_dir, write_json
from nanochat.device import Compute
from nanochat.tracking import read_metrics


def report_dir() -> Path:
    """The folder of the report."""
    return base_dir() / "report"


def write_section(stage: str, data: dict[str, Any]) -> None:
    """Keep a stage's figures for the report."""
    write_json(report_dir() / "sections" / f"{stage}.json", data)


def training_section(
    stage: str, tag: str, folder: Path, settings: dict[str, Any], counts: dict[str, int], compute: Compute
) -> None:
    """The section of a training stage, from its metrics.jsonl; written by rank 0."""
    if not compute.main:
        return
    lines = read_metrics(folder)
    validated = [line["val_bpb"] for line in lines if "val_bpb" in line]
    data = {
        "tag": tag,
        "folder": str(folder),
        "settings": settings,
        "parameters": counts,
        "steps": lines[-1]["step"],
        "tokens_per_second": sum(line["tokens_per_second"] for line in lines) / len(lines),
        "mfu": sum(line["mfu"] for line in lines) / len(lines),
        "minutes": lines[-1]["total_seconds"] / 60,
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["smooth_loss"],
        "validation_bits_per_byte": validated,
        "skipped_updates": sum(line["skipped"] for line in lines),
        "memory_gb": device.memory_peak(compute) / 1e9,
        "device": device.describe(compute),
        "dtype": str(compute.dtype).removeprefix("torch."),
        "ranks": compute.world_size,
    }
    write_section(f"{stage}_train", data)
