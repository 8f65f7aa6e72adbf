"""What every stage writes for the report, and which of it belongs to one run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat.common import base_dir, log, read_json, write_json
from nanochat.data.mixing import unweighted
from nanochat.runtime.timeline import report_rows
from nanochat.runtime.tracking import read_metrics

CURVES = (
    "val_bpb",
    "val_accuracy",
    "val_margin",
    "reward",
    "accuracy",
    "entropy",
    "length",
    "sampler_gap",
    "clipped",
    "kl",
    "policy_shift",
    "loss",
    "smooth_loss",
)
COLUMNS = ("base", "mid", "sft", "rl", "tune")
TITLES = {
    "tok_train": "Tokenizer",
    "tok_eval": "Tokenizer: bytes per token",
    "base_train": "Base: pretraining",
    "base_loss": "Base: bits per byte and samples",
    "base_eval": "Base: CORE",
    "mid_train": "Mid: midtraining",
    "mid_loss": "Mid: bits per byte of the base corpus",
    "mid_eval": "Mid: evaluation",
    "sft_train": "SFT: fine-tuning",
    "sft_loss": "SFT: bits per byte of the base corpus",
    "sft_eval": "SFT: evaluation",
    "rl_train": "RL: reinforcement learning",
    "rl_loss": "RL: bits per byte of the base corpus",
    "rl_eval": "RL: evaluation",
    "tune_train": "Fine-tuning of a published model",
    "tune_eval": "Fine-tuned published model: evaluation",
}


def report_dir() -> Path:
    """The folder of the report."""
    return base_dir() / "report"


def write_section(stage: str, data: Mapping[str, Any]) -> None:
    """Keep the figures of a stage for the report."""
    write_json(report_dir() / "sections" / f"{stage}.json", dict(data))


def has_training_section(stage: str, tag: str) -> bool:
    """Whether a training stage has a section, and the section belongs to this tag."""
    path = report_dir() / "sections" / f"{stage}_train.json"
    return path.exists() and read_json(path).get("tag") == tag


def training_section(
    stage: str, tag: str, folder: Path, settings: dict[str, Any], where: Mapping[str, Any]
) -> None:
    """Write the section of a training stage from its metrics.jsonl; `where` describes the device (device.summary)."""
    measured = read_metrics(folder)
    lines = [line for line in measured if "loss" in line]  # RL also measures before its first step
    curves = {}  # leaves out figures that were not finite
    for name in CURVES:
        curves[name] = [
            [line["step"], line[name]] for line in measured if line.get(name) is not None
        ]
    losses, smooth = curves.pop("loss"), curves.pop("smooth_loss")
    figures = {
        "tag": tag,
        **where,
        "steps": lines[-1]["step"],
        "minutes": lines[-1]["total_seconds"] / 60,
        "tokens_per_second": _median([line["tokens_per_second"] for line in lines]),
        "mfu_percent": _median([line["mfu"] for line in lines]),
        "first_loss": losses[0][1] if losses else None,
        "last_loss": smooth[-1][1] if smooth else None,
        "skipped_updates": sum(line["skipped"] for line in lines),
        "settings": settings,
    }
    curves = {name: points for name, points in curves.items() if points}
    rows = {"rows": found} if (found := report_rows(folder)) else {}  # from --profile
    write_section(f"{stage}_train", {**figures, **curves, **rows, "loss": smooth})


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def sections() -> dict[str, dict[str, Any]]:
    """The sections that stages have written, in the order of the pipeline."""
    folder = report_dir() / "sections"
    return {
        name: read_json(folder / f"{name}.json")
        for name in TITLES
        if (folder / f"{name}.json").exists()
    }


def _tags(found: Mapping[str, dict[str, Any]], newest: str) -> dict[str, str]:
    """The tag of every stage of the run that the section `newest` belongs to: of its parents, and of what followed."""

    def parent(stage: str) -> list[str]:  # its stage and its tag
        return found.get(f"{stage}_train", {}).get("settings", {}).get("parent", "").split(" ")[:2]

    stage, tag = newest.partition("_")[0], found[newest]["tag"]
    tags = {stage: tag}
    while found.get(f"{stage}_train", {}).get("tag") == tag and len(parent(stage)) == 2:
        stage, tag = parent(stage)
        tags[stage] = tag
    for stage in COLUMNS:
        own, before = found.get(f"{stage}_train", {}).get("tag"), parent(stage)
        if stage not in tags and own and len(before) == 2 and tags.get(before[0]) == before[1]:
            tags[stage] = own
    return tags


def current(found: Mapping[str, dict[str, Any]], newest: str) -> dict[str, dict[str, Any]]:
    """The sections that belong to the same run as the section `newest`, without those of other tags or corpora.

    The stages of a run are those that its parents lead to; a stage without a section has the tag of `newest`. A stage
    that names no corpus uses the corpus of its parent, and the tokenizer belongs to the corpus of a stage. A section
    that does not fit describes a model that has since been replaced.
    """
    tag, tags = found[newest]["tag"], _tags(found, newest)
    kept = {
        name: data
        for name, data in found.items()
        if data.get("tag", tag) == tags.get(name.partition("_")[0], tag) or "tag" not in data
    }
    if newest.startswith("tune_"):  # a published model has no earlier stage, and its own tokenizer
        return {name: data for name, data in kept.items() if name.startswith("tune_")}
    gone: set[str] = set()
    for stage in ("mid", "sft", "rl"):
        settings = kept.get(f"{stage}_train", {}).get("settings", {})
        source = settings.get("parent", "").partition(" ")[0]
        before = kept.get(f"{source}_train", {}).get("settings", {}).get("corpus")
        inherits = settings.get("data") is None and before is not None
        if source in gone or (inherits and settings.get("corpus") != before):
            gone.add(stage)
            kept = {name: data for name, data in kept.items() if not name.startswith(f"{stage}_")}
    trained = [
        kept[name]["settings"].get("corpus")
        for name in kept
        if name.endswith("_train") and "tag" in kept[name]
    ]
    corpora = {
        unweighted(corpus) for corpus in trained if corpus
    }  # one tokenizer serves a mixture with any weights
    for name in ("tok_train", "tok_eval"):
        section = kept.get(name, {})
        corpus = section.get("corpus") or section.get("settings", {}).get("data")
        if corpus and corpora and unweighted(corpus) not in corpora:
            del kept[name]
    return kept


def of_this_run() -> dict[str, dict[str, Any]]:
    """The sections that belong to the same run as the newest section of a model; the log names the others."""
    found = sections()
    ages = {name: (report_dir() / "sections" / f"{name}.json").stat().st_mtime_ns for name in found}
    tagged = [name for name, data in found.items() if "tag" in data]
    if not tagged:
        return found
    kept = current(found, max(tagged, key=lambda name: ages[name]))
    if others := [name for name in found if name not in kept]:
        log(f"left out of the report, since they belong to another run: {', '.join(others)}")
    return kept
