"""The figures of a run: its host, its table of measures by stage, and the ones to quote."""

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from nanochat.report.sections import COLUMNS

# What bits per byte are measured on.
VALIDATED = {
    "base": "documents",
    "mid": "conversations",
    "sft": "answers",
    "tune": "answers of your own data",
}

PREFERRED = "preferences of your own data that the model follows"
KEPT = "bits per byte of the base corpus"


def environment() -> dict[str, Any]:
    """The commit, the host and the versions of this run."""
    root = Path(__file__).resolve().parent.parent.parent
    quoted = ("torch", "tiktoken", "rustbpe", "numpy")
    versions = {
        found.name: found.version
        for found in metadata.distributions()
        if found.name.startswith(quoted)
    }
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git(root, "rev-parse", "HEAD"),
        "changed_files": len(_git(root, "status", "--porcelain").splitlines()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "python": platform.python_version(),
        "versions": versions,
    }


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next(
                (line.partition(":")[2].strip() for line in f if line.startswith("model name")), ""
            )
    except OSError:
        return platform.processor()


def table(found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Measure -> stage -> value, for the measures that can be compared across stages."""
    rows: dict[str, dict[str, float]] = {}
    for (
        stage,
        text,
    ) in VALIDATED.items():  # a row for each stage, since each has a validation text of its own
        section = found.get(f"{stage}_train", {})
        if stage == "mid" and section.get("settings", {}).get("answers_only"):
            text = "answers in midtraining"
        if measured := section.get("val_bpb"):
            rows[f"bits per byte of {text}"] = {stage: measured[-1][1]}
    if measured := found.get("tune_train", {}).get("val_accuracy"):
        rows[PREFERRED] = {"tune": measured[-1][1]}
    later = [stage for stage in COLUMNS[1:] if f"{stage}_loss" in found]
    for stage in (
        "base",
        *later,
    ):  # the same texts for all stages, so the row shows what later stages have forgotten
        measured = found.get(f"{stage}_loss", {})
        if later and measured.get("val"):
            rows.setdefault(KEPT, {})[stage] = measured["val"]["bits_per_byte"]
        for name, loss in measured.get("domains", {}).items():
            rows.setdefault(f"{KEPT}: {name}", {})[stage] = loss["bits_per_byte"]
    for stage in COLUMNS:
        scored = found.get(f"{stage}_eval", {})
        if stage == "base" and scored.get("core"):
            rows.setdefault("CORE", {})[stage] = scored["core"]["core"]
        for name, score in scored.get("tasks", {}).items():
            rows.setdefault(name, {})[stage] = score["accuracy"]
        if scored.get("chat_core") is not None:
            rows.setdefault("ChatCORE", {})[stage] = scored["chat_core"]
    return rows


def columns(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The stages that have a figure in a table of table(), in the order of the pipeline."""
    return [stage for stage in COLUMNS if any(stage in row for row in rows.values())]


def summary(
    found: Mapping[str, dict[str, Any]], costs: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """The figures to quote: the accuracies after SFT, as fractions, and the costs of the whole run."""
    tasks = found.get("sft_eval", {}).get("tasks", {})
    figures = {name: score["accuracy"] for name, score in tasks.items()}
    if "mental" in found.get("rl_eval", {}).get("tasks", {}):
        figures["mental_after_rl"] = found["rl_eval"]["tasks"]["mental"]["accuracy"]
    return {
        **figures,
        "minutes": sum(cost["minutes"] for cost in costs.values()),
        "cpu_minutes": sum(cost["cpu_minutes"] for cost in costs.values()),
        "memory_gb": max((cost["memory_gb"] for cost in costs.values()), default=0.0),
    }
