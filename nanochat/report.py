"""The report: every stage writes a section; `generate` makes report.md, report.json and plots of the curves from them.

python -m nanochat.report generate    # make the report from the sections of the stages that have run
python -m nanochat.report show        # print the summary table
python -m nanochat.report reset       # delete all sections, before a run from scratch
"""

import datetime
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nanochat.common import UserError, base_dir, log, read_json, run, write_atomic, write_json
from nanochat.data.mixing import unweighted
from nanochat.runtime.cost import read_stages, stages_file
from nanochat.runtime.profiling import report_rows
from nanochat.runtime.tracking import read_metrics

COLUMNS = ("base", "mid", "sft", "rl")
TITLES = {
    "tok_train": "Tokenizer", "tok_eval": "Tokenizer: bytes per token", "base_train": "Base: pretraining",
    "base_loss": "Base: bits per byte and samples", "base_eval": "Base: CORE", "mid_train": "Mid: midtraining",
    "mid_eval": "Mid: evaluation", "sft_train": "SFT: fine-tuning", "sft_eval": "SFT: evaluation",
    "rl_train": "RL: reinforcement learning", "rl_eval": "RL: evaluation",
}  # fmt: skip
SAMPLE_TASKS = ("tinyworld_en", "tinyworld_zh", "calculator", "mental", "GSM8K", "SpellingBee")


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


def training_section(stage: str, tag: str, folder: Path, settings: dict[str, Any], where: Mapping[str, Any]) -> None:
    """Write the section of a training stage from its metrics.jsonl; `where` describes the device (device.summary)."""
    measured = read_metrics(folder)
    lines = [line for line in measured if "loss" in line]  # RL also measures before its first step
    curves = {}  # leaves out figures that were not finite
    for name in ("val_bpb", "reward", "accuracy", "entropy", "length", "loss", "smooth_loss"):
        curves[name] = [[line["step"], line[name]] for line in measured if line.get(name) is not None]
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


# --- sections ------------------------------------------------------------------------------------


def sections() -> dict[str, dict[str, Any]]:
    """The sections that stages have written, in the order of the pipeline."""
    folder = report_dir() / "sections"
    return {name: read_json(folder / f"{name}.json") for name in TITLES if (folder / f"{name}.json").exists()}


def current(found: Mapping[str, dict[str, Any]], newest: str) -> dict[str, dict[str, Any]]:
    """The sections that belong to the same run as the section `newest`, without those of other tags or corpora.

    All stages of a run have one tag. A stage that names no corpus uses the corpus of its parent, and the tokenizer
    belongs to the corpus of a stage. A section that does not fit describes a model that has since been replaced.
    """
    tag = found[newest].get("tag")
    kept = {name: data for name, data in found.items() if data.get("tag", tag) == tag}
    gone: set[str] = set()
    for stage in ("mid", "sft", "rl"):
        settings = kept.get(f"{stage}_train", {}).get("settings", {})
        source = settings.get("parent", "").partition(" ")[0]
        before = kept.get(f"{source}_train", {}).get("settings", {}).get("corpus")
        inherits = settings.get("data") is None and before is not None
        if source in gone or (inherits and settings.get("corpus") != before):
            gone.add(stage)
            kept = {name: data for name, data in kept.items() if not name.startswith(f"{stage}_")}
    trained = [kept[name]["settings"].get("corpus") for name in kept if name.endswith("_train") and "tag" in kept[name]]
    corpora = {unweighted(corpus) for corpus in trained if corpus}  # one tokenizer serves a mixture with any weights
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


def environment() -> dict[str, Any]:
    """The commit, the host and the versions of this run."""
    root = Path(__file__).resolve().parent.parent
    quoted = ("torch", "tiktoken", "rustbpe", "numpy")
    versions = {found.name: found.version for found in metadata.distributions() if found.name.startswith(quoted)}
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
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def table(found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Measure -> stage -> value, for the measures that can be compared across stages."""
    rows: dict[str, dict[str, float]] = {}
    for stage in COLUMNS:
        trained, scored = found.get(f"{stage}_train", {}), found.get(f"{stage}_eval", {})
        if trained.get("val_bpb"):
            rows.setdefault("validation bits per byte", {})[stage] = trained["val_bpb"][-1][1]
        if stage == "base" and scored.get("core"):
            rows.setdefault("CORE", {})[stage] = scored["core"]["core"]
        for name, score in scored.get("tasks", {}).items():
            rows.setdefault(name, {})[stage] = score["accuracy"]
        if scored.get("chat_core") is not None:
            rows.setdefault("ChatCORE", {})[stage] = scored["chat_core"]
    return rows


def summary(found: Mapping[str, dict[str, Any]], costs: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
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


# --- markdown ------------------------------------------------------------------------------------


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else " ".join(str(value).replace("|", "\\|").split())
    )


def _grid(head: list[str], rows: list[list[Any]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return [*lines, *("| " + " | ".join(_cell(value) for value in row) + " |" for row in rows), ""]


def _plain(data: Mapping[str, Any]) -> list[str]:
    """A table of the texts and numbers in a section."""
    rows = [[name.replace("_", " "), value] for name, value in data.items()
            if isinstance(value, (str, int, float)) and value != ""]  # fmt: skip
    return _grid(["figure", "value"], rows) if rows else []


def _scores(tasks: Mapping[str, dict[str, Any]]) -> list[str]:
    rows = [[name, f"{100 * score['accuracy']:.1f} %", f"{100 * score['low']:.1f} to {100 * score['high']:.1f}",
             score["total"]] for name, score in tasks.items()]  # fmt: skip
    lines = _grid(["task", "right", "95 % interval", "n"], rows)
    for name, score in tasks.items():
        weak = {group: count for group, count in score.get("groups", {}).items() if count["right"] < count["total"]}
        if len(score.get("groups", {})) > 1:
            listed = ", ".join(f"{group} {count['right']:g}/{count['total']}" for group, count in weak.items())
            lines += [f"{name}, relations with wrong answers: {listed or 'none'}.", ""]
    return lines


def _section(name: str, data: Mapping[str, Any], pictures: Mapping[str, str]) -> list[str]:
    lines = [f"## {TITLES[name]}", ""]
    if name in pictures:
        lines += [f"![curves of {name}]({pictures[name]})", ""]
    lines += _plain(data)
    if "tasks" in data:
        lines += _scores(data["tasks"])
    if data.get("samples"):
        lines += [f"- `{prompt}` … {said!r}" for prompt, said in data["samples"].items()] + [""]
    if data.get("rows"):
        head = [str(key) for key in data["rows"][0]]
        lines += _grid(head, [[row.get(key, "") for key in head] for row in data["rows"]])
    if data.get("settings"):
        lines += ["<details><summary>settings</summary>", "", *_plain(data["settings"]), "</details>", ""]
    return lines


def _samples(found: Mapping[str, dict[str, Any]]) -> list[str]:
    """The same questions with the answers of every stage, in both languages."""
    scored = {
        stage: found[f"{stage}_eval"]["tasks"] for stage in COLUMNS if found.get(f"{stage}_eval", {}).get("tasks")
    }
    replies: dict[str, dict[str, str]] = {}
    for stage, tasks in scored.items():
        for task in SAMPLE_TASKS:
            for sample in tasks.get(task, {}).get("samples", [])[:4]:
                mark = "" if sample["grade"] >= 1 else " (wrong)"
                replies.setdefault(sample["question"], {})[stage] = sample["reply"].strip() + mark
    if not replies:
        return []
    rows = [[question, *(said.get(stage, "") for stage in scored)] for question, said in replies.items()]
    return ["## Samples", "", *_grid(["question", *(stage.upper() for stage in scored)], rows)]


def markdown(report: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The whole report as Markdown; `pictures` maps a section to the file of its plot."""
    where, costs, total = report["environment"], report["stages"], report["summary"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    changed = f", {where['changed_files']} files changed since" if where["changed_files"] else ""
    lines = [
        "# nanochat report", "",
        f"- date: {where['date']}",
        f"- commit: {where['commit'][:12] or 'not a git checkout'}{changed}",
        f"- host: {where['processor']}, {where['cores']} cores, {where['memory_gb']:.0f} GB; {where['system']}",
        f"- versions: Python {where['python']}, {versions}",
        f"- cost: {total['minutes']:.1f} minutes, {total['cpu_minutes']:.1f} CPU minutes, at most "
        f"{total['memory_gb']:.2f} GB of memory", "",
        "## Summary", "",
        *_grid(["measure", *(stage.upper() for stage in COLUMNS)],
               [[name, *(row.get(stage, "") for stage in COLUMNS)] for name, row in report["table"].items()]),
    ]  # fmt: skip
    if costs:
        rows = [[name, cost["minutes"], cost["cpu_minutes"], cost["memory_gb"], int(cost["runs"])]
                for name, cost in costs.items()]  # fmt: skip
        lines += ["## Cost of the stages", "", *_grid(["stage", "minutes", "CPU minutes", "memory GB", "runs"], rows)]
    lines += _samples(report["sections"])
    for name, data in report["sections"].items():
        lines += _section(name, data, pictures)
    return "\n".join(lines)


# --- pictures ------------------------------------------------------------------------------------


def draw(name: str, data: Mapping[str, Any]) -> str:
    """Plot the curves of a training section and return the name of the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    left, right = ("reward", "accuracy") if "reward" in data else ("loss", "val_bpb")
    labels = {"reward": "mean reward", "accuracy": "accuracy, problems not trained", "loss": "training loss, nats",
              "val_bpb": "validation, bits per byte"}  # fmt: skip
    figure, axis = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    curves = axis.plot(*zip(*data[left], strict=True), color="tab:blue", linewidth=1.2, label=labels[left])
    axis.set(xlabel="step", ylabel=labels[left], title=TITLES[name])
    axis.grid(alpha=0.3)
    if data.get(right):
        other = axis.twinx()
        style = {"color": "tab:orange", "marker": "o", "markersize": 3, "linewidth": 1}
        curves += other.plot(*zip(*data[right], strict=True), label=labels[right], **style)
        other.set_ylabel(labels[right])
    axis.legend(handles=curves, loc="best", fontsize=8)
    file = f"{name}.png"
    figure.savefig(report_dir() / file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return file


# --- command line --------------------------------------------------------------------------------


def generate(key: str = "") -> Path:
    """Write report.md, report.json and the plots; `key` names the finished run for is_finished()."""
    found, costs = of_this_run(), read_stages()
    if not found:
        raise UserError(f"there are no figures in {report_dir()} yet; run a stage first, such as bash speedrun.sh", 2)
    report = {"key": key, "environment": environment(), "summary": summary(found, costs), "table": table(found),
              "stages": costs, "sections": found}  # fmt: skip
    pictures = {name: draw(name, data) for name, data in found.items() if name.endswith("_train") and data.get("loss")}
    write_atomic(report_dir() / "report.md", markdown(report, pictures))
    write_json(report_dir() / "report.json", report)  # last, since this file says that the report is complete
    return report_dir() / "report.md"


def begin(key: str) -> None:
    """Delete the costs of another run. Called when the run named `key` begins or resumes."""
    path = report_dir() / "run.json"
    if not path.exists() or read_json(path)["key"] != key:
        stages_file().unlink(missing_ok=True)
        write_json(path, {"key": key})


def is_finished(key: str) -> bool:
    """Whether there is a report of the finished run named `key`."""
    path = report_dir() / "report.json"
    return bool(key) and path.exists() and read_json(path).get("key") == key


def show() -> None:
    """Print the summary table to the terminal."""
    from rich.console import Console
    from rich.table import Table

    path = report_dir() / "report.json"
    if not path.exists():
        raise UserError(
            f"there is no report in {report_dir()} yet; make one with `python -m nanochat.report generate`", 2
        )
    report = read_json(path)
    grid = Table("measure", *(stage.upper() for stage in COLUMNS), title="nanochat")
    for name, row in report["table"].items():
        grid.add_row(name, *(_cell(row[stage]) if stage in row else "" for stage in COLUMNS))
    Console().print(grid)
    total = report["summary"]
    log(
        f"{total['minutes']:.1f} minutes, {total['cpu_minutes']:.1f} CPU minutes, {total['memory_gb']:.2f} GB of memory"
    )
    log(f"report: {report_dir() / 'report.md'}")


@dataclass(frozen=True)
class Config:
    """Make, show or delete the report."""

    verb: Annotated[Literal["generate", "show", "reset", "begin", "finished"], tyro.conf.Positional] = "generate"
    """generate writes the report; show prints its summary table; reset deletes the report and all sections;
    begin deletes the costs of runs other than --key; finished exits with 0 if run --key is finished, else with 3."""
    key: str = ""
    """Name of a run. generate keeps it in report.json, begin and finished compare it with the kept name."""


def main(cfg: Config) -> None:
    """The command line."""
    if cfg.verb == "generate":
        log(f"report: {generate(cfg.key)}")
    elif cfg.verb == "show":
        show()
    elif cfg.verb == "reset":
        shutil.rmtree(report_dir(), ignore_errors=True)
    elif cfg.verb == "begin":
        begin(cfg.key)
    elif not is_finished(cfg.key):
        raise SystemExit(3)


if __name__ == "__main__":
    run(main, Config, __doc__)
