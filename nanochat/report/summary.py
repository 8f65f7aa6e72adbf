"""Collects the facts of a run: its host, its table of measures, and its headline figures."""

import contextlib
import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import nanochat
from nanochat.data import limits
from nanochat.report.sections import COLUMNS, FROM_FOLDERS, PIPELINE, Sections

# Training stage -> the text on which its bits per byte are measured.
VALIDATION_TEXTS = {
    "base": "documents",
    "mid": "conversations",
    "sft": "answers",
    "tune": "answers of your own data",
}
GENERAL_TEXT = "perplexity of general text"
PREFERENCES = "preferences of your own data that the model follows"
BASE_CORPUS = "bits per byte of the base corpus"
CPUINFO = Path("/proc/cpuinfo")
QUOTED_PACKAGES = ("torch", "tiktoken", "rustbpe", "numpy")

Table = dict[str, dict[str, float]]  # measure -> stage -> value
Costs = Mapping[str, Mapping[str, float]]  # stage -> minutes, cpu_minutes, memory_gb


def environment() -> dict[str, Any]:
    """Return a dict with the date, the commit, the host and the package versions."""
    root = Path(__file__).resolve().parent.parent.parent
    versions = {"nanochat": nanochat.__version__}
    for package in metadata.distributions():
        # A folder that a broken installation has left has no name.
        if package.name and package.name.startswith(QUOTED_PACKAGES):
            versions[package.name] = package.version
    now = datetime.datetime.now(datetime.timezone.utc)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min(memory, limits.memory_limit() or memory)
    return {
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        "commit": _git(root, "rev-parse", "HEAD"),
        "changed_files": len(_git(root, "status", "--porcelain").splitlines()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": limits.cores(),
        "memory_gb": memory / 1e9,
        "python": platform.python_version(),
        "versions": versions,
    }


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return process.stdout.strip()


def _processor() -> str:
    """Return the processor's name or, if the host does not say it, the architecture."""
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(sections: Sections) -> Table:
    """Return the measures of all stages, as measure -> stage -> value."""
    rows: Table = {}
    _add_validation(rows, sections)
    _add_base_corpus(rows, sections)
    for stage in COLUMNS:
        _add_base_eval(rows, sections, stage)
        section = sections.get(f"{stage}_eval", {})
        for name, score in section.get("tasks", {}).items():
            rows.setdefault(name, {})[stage] = score["accuracy"]
        if section.get("chat_core") is not None:
            rows.setdefault("ChatCORE", {})[stage] = section["chat_core"]
    return rows


def _add_base_eval(rows: Table, sections: Sections, stage: str) -> None:
    """Add to `rows` what base_eval measured of a model: CORE, and multiple choice by likelihood."""
    section = sections.get("base_eval" if stage == "base" else f"{stage}_core", {})
    if section.get("core"):
        rows.setdefault("CORE", {})[stage] = section["core"]["core"]
    for name, score in section.get("choices", {}).items():
        for measure in ("acc", "acc_norm"):
            if measure in score:  # sections of earlier versions lack acc_norm
                rows.setdefault(f"{name} {measure}", {})[stage] = score[measure]


def _add_validation(rows: Table, sections: Sections) -> None:
    """Add to `rows` each stage's last validation results: bits per byte, or preferences followed.

    Each stage has rows of its own, because the validation texts differ.
    """
    for stage, text in VALIDATION_TEXTS.items():
        section = sections.get(f"{stage}_train", {})
        if stage == "mid" and section.get("settings", {}).get("answers_only"):
            text = "answers in midtraining"
        curve = section.get("val_bpb")
        if curve:
            rows[f"bits per byte of {text}"] = {stage: curve[-1][1]}
    tuned = sections.get("tune_train", {})
    curve = tuned.get("val_accuracy")
    if curve:
        rows[PREFERENCES] = {"tune": curve[-1][1]}
    curve = tuned.get("general_perplexity")
    if curve:
        rows[GENERAL_TEXT] = {"tune": curve[-1][1]}
    for name in ("first_loss", "last_loss"):  # also there where no rows were held out
        if tuned.get(name) is not None:
            rows[f"training loss, {name.removesuffix('_loss')} step"] = {"tune": tuned[name]}


def _add_base_corpus(rows: Table, sections: Sections) -> None:
    """Add to `rows` the bits per byte of the base corpus and of its domains by stage.

    They show what later stages forgot. Without later stages, only the domains are added. A model of
    a published folder, or one that was measured on a corpus other than the base model's, has a row
    for that corpus instead.
    """
    corpora = {stage: sections.get(f"{stage}_loss", {}).get("corpus") for stage in COLUMNS}
    later = [stage for stage in PIPELINE[1:] if f"{stage}_loss" in sections]
    elsewhere = [
        stage
        for stage in later
        if corpora["base"] and corpora[stage] not in (None, corpora["base"])
    ]
    for stage in (*elsewhere, *FROM_FOLDERS):
        section = sections.get(f"{stage}_loss", {})
        if section.get("val"):
            name = f"bits per byte of {corpora[stage]}"
            rows.setdefault(name, {})[stage] = section["val"]["bits_per_byte"]
    later = [stage for stage in later if stage not in elsewhere]
    for stage in ("base", *later):
        section = sections.get(f"{stage}_loss", {})
        if later and section.get("val"):
            rows.setdefault(BASE_CORPUS, {})[stage] = section["val"]["bits_per_byte"]
        for name, loss in section.get("domains", {}).items():
            rows.setdefault(f"{BASE_CORPUS}: {name}", {})[stage] = loss["bits_per_byte"]


def columns(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the stages that have a value in the table `rows`, in the order of the pipeline."""
    return [stage for stage in COLUMNS if any(stage in row for row in rows.values())]


def summary(sections: Sections, costs: Costs) -> dict[str, Any]:
    """Return the headline figures: accuracies after SFT and RL, and the costs of the whole run.

    Accuracies are fractions. After RL, only that of the task `mental` is included.
    """
    tasks = sections.get("sft_eval", {}).get("tasks", {})
    figures = {name: score["accuracy"] for name, score in tasks.items()}
    rl_tasks = sections.get("rl_eval", {}).get("tasks", {})
    if "mental" in rl_tasks:  # the sums that RL trains
        figures["mental_after_rl"] = rl_tasks["mental"]["accuracy"]
    stages = costs.values()
    figures["minutes"] = sum(stage["minutes"] for stage in stages)
    if not costs:  # stages that were typed by hand know how long they trained, and no more
        trained = [section for name, section in sections.items() if name.endswith("_train")]
        figures["minutes"] = sum(section.get("minutes", 0.0) for section in trained)
    figures["cpu_minutes"] = sum(stage["cpu_minutes"] for stage in stages)
    figures["memory_gb"] = max((stage["memory_gb"] for stage in stages), default=0.0)
    return figures
