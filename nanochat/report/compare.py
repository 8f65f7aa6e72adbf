"""Compares runs: their measures side by side, what differed in their settings, and their curves in one picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat.common import UserError, read_json, write_atomic
from nanochat.report.curves import draw
from nanochat.report.html import page
from nanochat.report.markdown import MEANINGS, cell, grid
from nanochat.report.sections import COLUMNS, TITLES
from nanochat.runtime.progress import duration

# Figures of a training stage that are worth comparing, and their names in the table.
FIGURES = {
    "parameters": "parameters",
    "steps": "steps",
    "last_loss": "last training loss",
    "tokens_per_second": "tokens a second",
    "mfu_percent": "MFU in percent",
    "minutes": "minutes of training",
    "skipped_updates": "skipped updates",
}
IGNORED = {"parent", "run", "device_type"}  # settings that always differ, or that change nothing


@dataclass(frozen=True)
class Run:
    """A finished run: its name in the comparison, and the content of its report.json."""

    name: str
    report: Mapping[str, Any] = field(repr=False)

    @property
    def sections(self) -> Mapping[str, Mapping[str, Any]]:
        return self.report["sections"]


def load_run(given: str) -> Run:
    """The run that a word names: NAME=PATH or PATH, where the path is a report.json, a folder that holds one, or a
    base folder. UserError (code 2) if there is no report, or it is none of ours."""
    name, equals, path = given.partition("=")
    where = Path(path if equals else given).expanduser()
    tried = (where, where / "report.json", where / "report" / "report.json")
    found = next((one for one in tried if one.is_file()), None)
    if found is None:
        raise UserError(
            f"there is no report.json in {where}. Name base folders or report.json files of finished runs; `python -m "
            "nanochat.report generate` makes the report of a run",
            2,
        )
    report = read_json(found)
    needed = {"environment": dict, "summary": dict, "table": dict, "stages": dict, "sections": dict}
    wrong = [
        key
        for key, kind in needed.items()
        if not isinstance(report, dict) or not isinstance(report.get(key), kind)
    ]
    if wrong:
        raise UserError(
            f"{found} is not a report of this version: it lacks {', '.join(wrong)}. Generate it again",
            2,
        )
    folder = found.parent.parent if found.parent.name == "report" else found.parent
    return Run(name if equals else folder.name, report)


def named(runs: Sequence[Run]) -> list[Run]:
    """The runs under different names: a repeated name gets a number."""
    names = [run.name for run in runs]
    return [
        Run(
            run.name
            if names.count(run.name) == 1
            else f"{run.name} ({names[: i + 1].count(run.name)})",
            run.report,
        )
        for i, run in enumerate(runs)
    ]


def measures(runs: Sequence[Run]) -> list[list[str]]:
    """A row for every measure after every stage: its name, then each run's value with its 95 % interval."""
    keys = dict.fromkeys(
        (name, stage)
        for stage in COLUMNS
        for run in runs
        for name, row in run.report["table"].items()
        if stage in row
    )
    return [
        [f"{name}, after {stage.upper()}", *(_measured(run, name, stage) for run in runs)]
        for name, stage in keys
    ]


def _measured(run: Run, name: str, stage: str) -> str:
    value = run.report["table"].get(name, {}).get(stage)
    score = run.sections.get(f"{stage}_eval", {}).get("tasks", {}).get(name)
    if value is None:
        return ""
    return (
        cell(value)
        if score is None
        else f"{100 * value:.1f} % ({100 * score['low']:.1f}–{100 * score['high']:.1f})"
    )


def figures(runs: Sequence[Run], price_per_hour: float | None) -> list[list[str]]:
    """Rows of cost: of whole runs, and of each training stage. `price_per_hour` is in any currency."""
    totals = [run.report["summary"] for run in runs]
    rows = [
        [
            "time",
            *(duration(60 * total["minutes"]) if total["minutes"] else "" for total in totals),
        ],
        [
            "CPU time",
            *(duration(60 * total["cpu_minutes"]) if total["minutes"] else "" for total in totals),
        ],
        [
            "memory in GB",
            *(f"{total['memory_gb']:.2f}" if total["minutes"] else "" for total in totals),
        ],
    ]  # a report of stages that no speedrun started does not know these
    rows = [row for row in rows if any(row[1:])]
    if price_per_hour is not None:
        rows.append(
            [
                f"cost at {price_per_hour:g} an hour",
                *(f"{price_per_hour * total['minutes'] / 60:,.2f}" for total in totals),
            ]
        )
    for stage in COLUMNS:
        trained = [run.sections.get(f"{stage}_train", {}) for run in runs]
        for key, name in FIGURES.items():
            if any(section.get(key) for section in trained):
                values = (section.get(key) for section in trained)
                rows.append(
                    [
                        f"{stage.upper()}: {name}",
                        *("" if value is None else cell(value) for value in values),
                    ]
                )
    return rows


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """A row for every setting of a stage, and every fact of the host, that is not the same in all runs."""
    rows = [
        [f"host: {key}", *(cell(run.report["environment"].get(key, "")) for run in runs)]
        for key in ("commit", "processor", "cores", "python", "versions")
    ]
    for name in TITLES:
        settings = [run.sections.get(name, {}).get("settings") for run in runs]
        known = [one for one in settings if one is not None]
        for key in dict.fromkeys(key for one in known for key in one if key not in IGNORED):
            values = ["" if one is None else cell(one.get(key, "")) for one in settings]
            rows.append([f"{name}: {key}", *values])
    return [row for row in rows if len({value for value in row[1:] if value}) > 1]


def compare(runs: Sequence[Run], folder: Path, price_per_hour: float | None = None) -> Path:
    """Write compare.md, compare.html and the pictures to a folder; returns the HTML file."""
    head = [run.name for run in runs]
    changed = differences(runs)
    settings = (
        grid(["setting", *head], changed) if changed else ["Nothing that the reports know.", ""]
    )
    pictures = {
        file: draw(
            TITLES[f"{stage}_train"],
            {run.name: run.sections.get(f"{stage}_train", {}) for run in runs},
        )
        for stage in COLUMNS
        if sum(bool(run.sections.get(f"{stage}_train", {}).get("loss")) for run in runs) > 1
        for file in [f"compare_{stage}.png"]
    }
    shown = measures(runs)
    meanings = [name for name in MEANINGS if any(row[0].startswith(f"{name}, ") for row in shown)]
    lines = [
        f"# {' and '.join(head) if len(head) < 4 else f'{len(head)} runs'} compared",
        "",
        "## Measures",
        "",
        *grid(["measure", *head], shown),
        "Intervals are 95 %. Where two intervals overlap widely, the difference may be chance.",
        "",
        *(f"- {name}: {MEANINGS[name]}" for name in meanings),
        "",
        "## Cost",
        "",
        *grid(["figure", *head], figures(runs, price_per_hour)),
        "## What differed",
        "",
        *settings,
        *(["## Curves", ""] if pictures else []),
        *(f"![{file}]({file})\n" for file in pictures),
    ]
    text = "\n".join(lines)
    folder.mkdir(parents=True, exist_ok=True)
    for file, picture in pictures.items():
        write_atomic(folder / file, picture)
    write_atomic(folder / "compare.md", text)
    write_atomic(folder / "compare.html", page(lines[0].removeprefix("# "), text, pictures))
    return folder / "compare.html"
