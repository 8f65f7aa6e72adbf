"""Reads and writes the sections of a report, and finds those that belong to one run."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat.common import appendix, base_dir, log, read_json, tr, write_json
from nanochat.data.mixing import unweighted
from nanochat.runtime.tracking import read_metrics

CURVES = (
    "val_bpb",
    "val_accuracy",
    "val_margin",
    "general_perplexity",
    "core",
    "chat_core",
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
PIPELINE = ("base", "mid", "sft", "rl")
FROM_FOLDERS = ("published", "tune")  # models of published folders, before and after finetune
COLUMNS = (*PIPELINE, *FROM_FOLDERS)
# The sections of a report, in their order; words.py has their titles.
SECTIONS = (
    *("tok_train", "tok_eval"),
    *("base_train", "base_loss", "base_eval"),
    *("mid_train", "mid_loss", "mid_eval", "mid_core"),
    *("sft_train", "sft_loss", "sft_eval", "sft_core"),
    *("rl_train", "rl_loss", "rl_eval", "rl_core"),
    *("published_loss", "published_eval", "published_core"),
    *("tune_train", "tune_loss", "tune_eval", "tune_core"),
)

# The identity of a parent: its stage, its tag, which may have spaces, its step and its weights.
PARENT = re.compile(r"(\w+) (.+) step [0-9]+ [0-9a-f]+")

Sections = Mapping[str, dict[str, Any]]  # name of a section, such as base_train -> its figures


def report_dir() -> Path:
    """Return the folder of the report."""
    return base_dir() / "report"


def _section_path(name: str) -> Path:
    return report_dir() / "sections" / f"{name}.json"


def write_section(name: str, section: Mapping[str, Any]) -> None:
    """Save the figures of a stage as the section called `name`, replacing an earlier one."""
    write_json(_section_path(name), dict(section))


def has_training_section(stage: str, tag: str) -> bool:
    """Return whether the section of a training stage exists and has the tag `tag`."""
    path = _section_path(f"{stage}_train")
    return path.exists() and read_json(path).get("tag") == tag


def training_section(
    stage: str,
    tag: str,
    folder: Path,
    settings: dict[str, Any],
    device_facts: Mapping[str, Any],
) -> None:
    """Write the section of a training stage from its metrics.jsonl, which is in `folder`.

    `device_facts` are further figures of the section, about the model, the device and the data.
    """
    metrics = read_metrics(folder)
    steps = [line for line in metrics if "loss" in line]  # RL also measures before its first step
    curves = {name: _curve(metrics, name) for name in CURVES}
    losses = curves.pop("loss")
    smooth_losses = curves.pop("smooth_loss")
    section = {
        "tag": tag,
        **device_facts,
        "steps": steps[-1]["step"],
        "minutes": steps[-1]["total_seconds"] / 60,
        "tokens_per_second": _median([line["tokens_per_second"] for line in steps]),
        "mfu_percent": _median([line["mfu"] for line in steps]),
        "first_loss": losses[0][1] if losses else None,
        "last_loss": smooth_losses[-1][1] if smooth_losses else None,
        "skipped_updates": sum(line["skipped"] for line in steps),
        "settings": settings,
    }
    section |= {name: points for name, points in curves.items() if points}
    timeline = appendix("nanochat.runtime.timeline")
    profile = [] if timeline is None else timeline.report_rows(folder)
    if profile:  # the run had --profile
        section["rows"] = profile
    section["loss"] = smooth_losses
    write_section(f"{stage}_train", section)


def _curve(metrics: Sequence[Mapping[str, Any]], name: str) -> list[list[Any]]:
    """Return [step, value] for each step that has a finite value of the figure `name`."""
    points = [[line["step"], line.get(name)] for line in metrics]
    return [point for point in points if point[1] is not None]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def read_sections() -> dict[str, dict[str, Any]]:
    """Return the sections that stages have written, by name, in the order of the pipeline."""
    paths = {name: _section_path(name) for name in SECTIONS}
    return {name: read_json(path) for name, path in paths.items() if path.exists()}


def trained_after(sections: Sections, file: Path) -> bool:
    """Return whether the section of a training stage was written after `file`."""
    written_at = file.stat().st_mtime_ns
    names = [name for name in sections if name.endswith("_train") and "tag" in sections[name]]
    return any(_section_path(name).stat().st_mtime_ns > written_at for name in names)


# --- the sections of one run ---------------------------------------------------------------------


def current_sections() -> dict[str, dict[str, Any]]:
    """Return the sections of the newest run, and log the names of all other sections.

    The newest run is the one with the newest section that has a model tag. If no section has a tag,
    all sections are returned.
    """
    sections = read_sections()
    tagged = [name for name, section in sections.items() if "tag" in section]
    if not tagged:
        return sections
    newest = max(tagged, key=lambda name: _section_path(name).stat().st_mtime_ns)
    of_run = sections_of_run(sections, newest)
    omitted = [name for name in sections if name not in of_run]
    if omitted:
        log(
            tr(
                "left out of the report, since they belong to another run: {omitted}",
                omitted=", ".join(omitted),
            )
        )
    return of_run


def sections_of_run(sections: Sections, newest: str) -> dict[str, dict[str, Any]]:
    """Return the sections that belong to the same run as the section `newest`.

    Sections of other tags or corpora are left out, since they describe a model that has been
    replaced. Each training section names its parent stage and tag, which gives the tags of the
    stages before and after `newest`; all other stages must have its tag. A stage without --data
    must have its parent's corpus. The tokenizer is left out if all stages used other corpora. A
    published model has only its own sections, and a fine-tuned one also those of its base.
    """
    if newest.partition("_")[0] in FROM_FOLDERS:
        return _sections_of_folder(sections, newest)
    newest_tag = sections[newest]["tag"]
    tags = _tags(sections, newest)
    of_run = {}
    for name, section in sections.items():
        stage = name.partition("_")[0]
        if "tag" not in section or section["tag"] == tags.get(stage, newest_tag):
            of_run[name] = section
    of_run = _without_other_corpora(of_run)
    return _without_other_tokenizers(of_run)


def _sections_of_folder(sections: Sections, newest: str) -> dict[str, dict[str, Any]]:
    """Return the sections of the published or fine-tuned model that has the section `newest`.

    A fine-tuned model has those of its base too. Neither has an earlier stage of the pipeline.
    """
    stage = newest.partition("_")[0]
    tags = {stage: sections[newest]["tag"]}
    if stage == "tune" and _training_tag(sections, stage) == tags[stage]:
        # Its parent is the name of the base's folder and a mark of its weights.
        tags["published"] = _training_settings(sections, stage).get("parent", "").rpartition(" ")[0]
    of_model = {}
    for name, section in sections.items():
        section_stage = name.partition("_")[0]
        if section_stage in tags and section["tag"] == tags[section_stage]:
            of_model[name] = section
    return of_model


def _training_settings(sections: Sections, stage: str) -> Mapping[str, Any]:
    return sections.get(f"{stage}_train", {}).get("settings", {})


def _training_tag(sections: Sections, stage: str) -> str | None:
    return sections.get(f"{stage}_train", {}).get("tag")


def _parent(sections: Sections, stage: str) -> tuple[str, str] | None:
    """Return the stage and tag of the model from which `stage` started, or None if unknown."""
    identity = _training_settings(sections, stage).get("parent", "")
    match = PARENT.fullmatch(identity)
    return (match[1], match[2]) if match else None


def _tags(sections: Sections, newest: str) -> dict[str, str]:
    """Return stage -> tag for the stage of `newest`, its ancestors and its descendants."""
    stage = newest.partition("_")[0]
    tag = sections[newest]["tag"]
    tags = {stage: tag}
    parent = _parent(sections, stage)
    while parent and _training_tag(sections, stage) == tag:
        stage, tag = parent
        tags[stage] = tag
        parent = _parent(sections, stage)
    for stage in COLUMNS:
        stage_tag = _training_tag(sections, stage)
        parent = _parent(sections, stage)
        if stage in tags or not stage_tag or not parent:
            continue
        parent_stage, parent_tag = parent
        if tags.get(parent_stage) == parent_tag:
            tags[stage] = stage_tag
    return tags


def _without_other_corpora(sections: Sections) -> dict[str, dict[str, Any]]:
    """Return the sections, without stages that should have their parent's corpus but do not.

    A stage whose parent is left out is left out too.
    """
    remaining = dict(sections)
    dropped: set[str] = set()
    for stage in ("mid", "sft", "rl"):
        settings = _training_settings(remaining, stage)
        parent_stage = settings.get("parent", "").partition(" ")[0]
        parent_corpus = _training_settings(remaining, parent_stage).get("corpus")
        inherits = settings.get("data") is None and parent_corpus is not None
        if parent_stage in dropped or (inherits and settings.get("corpus") != parent_corpus):
            dropped.add(stage)
            for name in sections:
                if name.startswith(f"{stage}_"):
                    remaining.pop(name, None)
    return remaining


def _without_other_tokenizers(sections: Sections) -> dict[str, dict[str, Any]]:
    """Return the sections, without those of the tokenizer if all stages used other corpora."""
    remaining = dict(sections)
    corpora = set()
    for name, section in sections.items():
        if name.endswith("_train") and "tag" in section:
            corpora.add(section["settings"].get("corpus"))
    # One tokenizer serves a mixture with any weights.
    corpora = {unweighted(corpus) for corpus in corpora if corpus}
    for name in ("tok_train", "tok_eval"):
        section = sections.get(name, {})
        corpus = section.get("corpus") or section.get("settings", {}).get("data")
        if corpus and corpora and unweighted(corpus) not in corpora:
            del remaining[name]
    return remaining
