"""Compares runs: their measures side by side, the settings that differ, and their curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat.common import UserError, read_json, tr, write_atomic
from nanochat.report.curves import draw
from nanochat.report.html import page
from nanochat.report.markdown import cell, grid
from nanochat.report.sections import COLUMNS, SECTIONS
from nanochat.report.words import meanings, measure, training_figures
from nanochat.runtime.progress import duration

IGNORED = {"parent", "run", "device_type"}  # settings that always differ, or that change nothing
HOST_FACTS = ("commit", "processor", "cores", "python", "versions")
# The keys of a report.json, and the type of each value.
REPORT_KEYS = {
    "environment": dict,
    "summary": dict,
    "table": dict,
    "stages": dict,
    "sections": dict,
}


@dataclass(frozen=True)
class Run:
    """A finished run: its name in the comparison, and the content of its report.json."""

    name: str
    report: Mapping[str, Any] = field(repr=False)

    @property
    def sections(self) -> Mapping[str, Mapping[str, Any]]:
        """The sections of the report, by name."""
        return self.report["sections"]

    @property
    def total(self) -> Mapping[str, Any]:
        """The report's summary: headline accuracies and the total cost of the run."""
        return self.report["summary"]

    def training(self, stage: str) -> Mapping[str, Any]:
        """Return the section of a training stage, or {} if the run has none."""
        return self.sections.get(f"{stage}_train", {})


def load_run(word: str) -> Run:
    """Return the run that the command-line argument `word` names as PATH or NAME=PATH.

    The path is a report.json, a folder that holds one, or a base folder. A word that exists as a
    path is taken whole. Raises UserError (exit code 2) if there is no report, or if it is not a
    report of this version.
    """
    name, equals, path = word.partition("=")
    if not equals or Path(word).expanduser().exists():
        name = ""
        path = word
    folder = Path(path).expanduser()
    candidates = (folder, folder / "report.json", folder / "report" / "report.json")
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise UserError(
            tr(
                "there is no report.json in {folder}. Name base folders or report.json "
                "files of finished runs; `python -m nanochat.report generate` makes the "
                "report of a run",
                folder=folder,
            ),
            2,
        )
    report = read_json(file)
    if not isinstance(report, dict):
        report = {}
    missing = [key for key, kind in REPORT_KEYS.items() if not isinstance(report.get(key), kind)]
    if missing:
        raise UserError(
            tr(
                "{file} is not a report of this version: it lacks {missing}. Generate it again",
                file=file,
                missing=", ".join(missing),
            ),
            2,
        )
    run_folder = file.parent.parent if file.parent.name == "report" else file.parent
    return Run(name or run_folder.name, report)


def named(runs: Sequence[Run]) -> list[Run]:
    """Return copies of the runs, with numbers after the names that several runs share."""
    names = [run.name for run in runs]
    renamed = []
    for i, run in enumerate(runs):
        name = run.name
        if names.count(name) > 1:
            occurrence = names[: i + 1].count(name)
            name = f"{name} ({occurrence})"
        renamed.append(Run(name, run.report))
    return renamed


def measures(runs: Sequence[Run]) -> list[list[str]]:
    """Return the rows of the table of measures, one for each (measure, stage) that any run has.

    A row holds a label, then a cell for each run: the value, with its 95 % interval if it is the
    accuracy of a chat task, or "" if the run lacks the measure.
    """
    keys: dict[tuple[str, str], None] = {}  # (measure, stage), in the order of the stages
    for stage in COLUMNS:
        for run in runs:
            for name, row in run.report["table"].items():
                if stage in row:
                    keys[name, stage] = None
    rows = []
    for name, stage in keys:
        label = tr("{measure}, after {stage}", measure=measure(name), stage=stage.upper())
        rows.append([label, *(_measure(run, name, stage) for run in runs)])
    return rows


def _measure(run: Run, name: str, stage: str) -> str:
    value = run.report["table"].get(name, {}).get(stage)
    if value is None:
        return ""
    section = run.sections.get(f"{stage}_eval", {})
    score = section.get("tasks", {}).get(name)
    if score is None:
        return cell(value)
    return f"{100 * value:.1f} % ({100 * score['low']:.1f}–{100 * score['high']:.1f})"


def figures(runs: Sequence[Run], price_per_hour: float | None) -> list[list[str]]:
    """Return the rows of the cost table: costs of whole runs, then figures of training stages.

    `price_per_hour`, in any currency, adds a row with the price of each run.
    """
    rows = _total_costs(runs)
    if price_per_hour is not None:
        minutes = [run.total["minutes"] for run in runs]
        prices = [f"{price_per_hour * time / 60:,.2f}" if time else "" for time in minutes]
        rows.append([tr("cost at {price:g} an hour", price=price_per_hour), *prices])
    for stage in COLUMNS:
        for key, name in training_figures().items():
            values = [run.training(stage).get(key) for run in runs]
            if any(values):
                cells = ["" if value is None else cell(value) for value in values]
                rows.append([f"{stage.upper()}: {name}", *cells])
    return rows


def _total_costs(runs: Sequence[Run]) -> list[list[str]]:
    """Return the rows with the costs of whole runs, without empty rows.

    Where speedrun.sh did not start the stages of a run, only the time of its training is known.
    """
    time = [tr("time")]
    cpu_time = [tr("CPU time")]
    memory = [tr("memory in GB")]
    for run in runs:
        minutes, cpu_minutes = run.total["minutes"], run.total["cpu_minutes"]
        spent = duration(60 * minutes) if minutes else ""
        if minutes and not cpu_minutes:
            spent = tr("{time} of training", time=spent)
        time.append(spent)
        cpu_time.append(duration(60 * cpu_minutes) if cpu_minutes else "")
        memory.append(f"{run.total['memory_gb']:.2f}" if cpu_minutes else "")
    return [row for row in (time, cpu_time, memory) if any(row[1:])]


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """Return a table row for each host fact and setting that differs between runs.

    Settings that always differ or have no effect (IGNORED) are left out.
    """
    rows = []
    for key in HOST_FACTS:
        facts = [cell(run.report["environment"].get(key, "")) for run in runs]
        rows.append([tr("host: {fact}", fact=key), *facts])
    for name in SECTIONS:
        sections = [run.sections.get(name, {}) for run in runs]
        settings = [section.get("settings") or {} for section in sections]
        keys = dict.fromkeys(key for run_settings in settings for key in run_settings)
        for key in keys:
            if key not in IGNORED:
                values = [cell(run_settings.get(key, "")) for run_settings in settings]
                rows.append([f"{name}: {key}", *values])
    return [row for row in rows if _differs(row[1:])]


def _differs(values: Sequence[str]) -> bool:
    """Return whether the values differ, ignoring empty ones, which mean that a run has no value."""
    distinct = {value for value in values if value}
    return len(distinct) > 1


def _pictures(runs: Sequence[Run]) -> dict[str, bytes]:
    """Return a dict from file name to PNG, with the curves of each stage that several runs have."""
    pictures = {}
    for stage in COLUMNS:
        sections = {run.name: run.training(stage) for run in runs}
        with_curves = [run for run in runs if run.training(stage).get("loss")]
        if len(with_curves) > 1:
            pictures[f"compare_{stage}.png"] = draw(f"{stage}: train", sections)
    return pictures


def compare(
    runs: Sequence[Run],
    folder: Path,
    price_per_hour: float | None = None,
) -> Path:
    """Write compare.md, compare.html and the pictures to a folder; return compare.html's path."""
    names = [run.name for run in runs]
    if len(names) < 4:
        title = tr("{names} compared", names=tr(" and ").join(names))
    else:
        title = tr("{count} runs compared", count=len(names))
    pictures = _pictures(runs)
    rows = measures(runs)
    in_table = {name for run in runs for name in run.report["table"]}
    changed = differences(runs)
    lines = [f"# {title}", "", f"## {tr('Measures')}", ""]
    lines += grid([tr("measure"), *names], rows)
    lines.append(
        tr("Intervals are 95 %. Where two intervals overlap widely, the difference may be chance.")
    )
    explained = [(name, meaning) for name, meaning in meanings().items() if name in in_table]
    lines += ["", *(f"- {measure(name)}: {meaning}" for name, meaning in explained), ""]
    lines += [f"## {tr('Cost')}", ""]
    lines += grid([tr("figure"), *names], figures(runs, price_per_hour))
    lines += [f"## {tr('What differed')}", ""]
    if changed:
        lines += grid([tr("setting"), *names], changed)
    else:
        lines += [tr("Nothing that the reports know."), ""]
    if pictures:
        lines += [f"## {tr('Curves')}", ""]
        lines += [f"![{file}]({file})\n" for file in pictures]
    text = "\n".join(lines)
    folder.mkdir(parents=True, exist_ok=True)
    for file, picture in pictures.items():
        write_atomic(folder / file, picture)
    write_atomic(folder / "compare.md", text)
    write_atomic(folder / "compare.html", page(title, text, pictures))
    return folder / "compare.html"
