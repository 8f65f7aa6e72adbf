"""Writes the report as Markdown, in the user's language."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nanochat.common import tr
from nanochat.report.sections import COLUMNS, Sections
from nanochat.report.summary import columns
from nanochat.report.words import meanings, measure, titles, total_cost
from nanochat.runtime.progress import duration

MAX_GROUPS = 30  # examinations with more subjects list them in report.json only
SAMPLE_TASKS = (
    *("tinyworld_en", "tinyworld_zh", "calculator", "mental", "follow_ups_en", "follow_ups_zh"),
    *("storytelling_en", "storytelling_zh", "GSM8K", "SpellingBee"),
)


def cell(value: Any) -> str:
    """Return a value as the text of one table cell."""
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    escaped = str(value).replace("|", "\\|")
    return " ".join(escaped.split())


def grid(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table, with an empty line at the end."""
    lines = [_row(head), "|" + " --- |" * len(head)]
    for row in rows:
        lines.append(_row([cell(value) for value in row]))
    return [*lines, ""]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(section: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of the texts and numbers in a section, or [] if it has none."""
    rows = []
    for name, value in section.items():
        if isinstance(value, (str, int, float)) and value != "":
            rows.append([name.replace("_", " "), value])
    return grid([tr("figure"), tr("value")], rows) if rows else []


def _scores(tasks: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the lines of a table of task scores, then of each task's groups with wrong answers.

    Groups are listed only for tasks with 2 to 30 of them (MAX_GROUPS).
    """
    rows = []
    for name, score in tasks.items():
        accuracy = f"{100 * score['accuracy']:.1f} %"
        interval = f"{100 * score['low']:.1f}–{100 * score['high']:.1f}"
        rows.append([name, accuracy, interval, score["total"]])
    lines = grid([tr("task"), tr("right"), tr("95 % interval"), "n"], rows)
    for name, score in tasks.items():
        groups = score.get("groups", {})
        if not 1 < len(groups) <= MAX_GROUPS:
            continue
        weak = []
        for group, count in groups.items():
            if count["right"] < count["total"]:
                weak.append(f"{group} {count['right']:g}/{count['total']}")
        weak_groups = ", ".join(weak) or tr("none")
        lines.append(
            tr("{name}, relations with wrong answers: {groups}.", name=name, groups=weak_groups)
        )
        lines.append("")
    return lines


def _section(
    name: str,
    section: Mapping[str, Any],
    pictures: Collection[str],
) -> list[str]:
    """Return the Markdown lines of the section called `name`."""
    lines = [f"## {titles()[name]}", ""]
    if f"{name}.png" in pictures:
        lines += [f"![{tr('curves of {name}', name=name)}]({name}.png)", ""]
    lines += _plain(section)
    if "tasks" in section:
        lines += _scores(section["tasks"])
    if section.get("samples"):
        lines += [f"- `{prompt}` … {reply!r}" for prompt, reply in section["samples"].items()]
        lines.append("")
    if section.get("rows"):
        head = [str(key) for key in section["rows"][0]]
        rows = [[row.get(key, "") for key in head] for row in section["rows"]]
        lines += grid(head, rows)
    if section.get("settings"):
        lines += [f"<details><summary>{tr('all settings')}</summary>", ""]
        lines += _plain(section["settings"])
        lines += ["</details>", ""]
    return lines


def _samples(sections: Sections) -> list[str]:
    """Return the lines of a table of sample questions, with the reply of each stage.

    Returns [] if no stage has samples.
    """
    tasks_of = {}  # stage -> task -> score
    for stage in COLUMNS:
        tasks = sections.get(f"{stage}_eval", {}).get("tasks")
        if tasks:
            tasks_of[stage] = tasks
    replies: dict[str, dict[str, str]] = {}  # question -> stage -> reply
    for stage, tasks in tasks_of.items():
        for task in SAMPLE_TASKS:
            samples = tasks.get(task, {}).get("samples", [])
            for sample in samples[:4]:
                mark = "" if sample["grade"] >= 1 else tr(" (wrong)")
                reply = sample["reply"].strip() + mark
                replies.setdefault(sample["question"], {})[stage] = reply
    if not replies:
        return []
    head = [tr("question"), *(stage.upper() for stage in tasks_of)]
    rows = []
    for question, by_stage in replies.items():
        cells = [by_stage.get(stage, "") for stage in tasks_of]
        rows.append([question, *cells])
    return [f"## {tr('Samples')}", "", *grid(head, rows)]


def _environment(facts: Mapping[str, Any]) -> list[str]:
    """Return the lines of a list with the date, the commit, the host and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    commit = facts["commit"][:12] or tr("not a git checkout")
    if facts["changed_files"]:
        commit += tr(", {count} files changed since", count=facts["changed_files"])
    host = tr(
        "{processor}, {cores} cores, {memory:.0f} GB; {system}",
        processor=facts["processor"],
        cores=facts["cores"],
        memory=facts["memory_gb"],
        system=facts["system"],
    )
    return [
        tr("- date: {date}", date=facts["date"]),
        tr("- commit: {commit}", commit=commit),
        tr("- host: {host}", host=host),
        tr("- versions: Python {python}, {versions}", python=facts["python"], versions=versions),
    ]


def _measures(table: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of the table of measures by stage, then of the meanings of measures."""
    stages = columns(table)
    head = [tr("measure"), *(stage.upper() for stage in stages)]
    rows = []
    for name, row in table.items():
        values = [row.get(stage, "") for stage in stages]
        rows.append([measure(name), *values])
    meaning_of = meanings()
    explained = [f"- {measure(name)}: {meaning_of[name]}" for name in table if name in meaning_of]
    return [*grid(head, rows), *explained, ""]


def _costs(costs: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of the table of costs by stage."""
    rows = []
    for name, cost in costs.items():
        time = duration(60 * cost["minutes"])
        cpu_time = duration(60 * cost["cpu_minutes"])
        memory = f"{cost['memory_gb']:.2f}"
        rows.append([name, time, cpu_time, memory, int(cost["runs"])])
    return grid([tr("stage"), tr("time"), tr("CPU time"), tr("memory in GB"), tr("runs")], rows)


def markdown(report: Mapping[str, Any], pictures: Collection[str]) -> str:
    """Return the whole report as Markdown.

    `pictures` are the names of the picture files that exist, each "<section>.png".
    """
    lines = [f"# {tr('nanochat report')}", ""]
    if report["key"].startswith("smoke"):
        smoke = tr(
            "This was the smoke preset, which shows that every stage works. Its 20 steps teach a "
            "model nothing: its answers are nonsense, and its accuracies are near 0. To train a "
            "model that answers, type the same command without `--preset smoke`."
        )
        lines += [f"> {smoke}", ""]
    lines += _environment(report["environment"])
    lines += [tr("- cost: {cost}", cost=total_cost(report["summary"])), ""]
    lines += [f"## {tr('Summary')}", "", *_measures(report["table"])]
    if report["stages"]:
        lines += [f"## {tr('Cost of the stages')}", "", *_costs(report["stages"])]
    lines += _samples(report["sections"])
    for name, section in report["sections"].items():
        lines += _section(name, section, pictures)
    return "\n".join(lines)
