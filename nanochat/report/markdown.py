"""Writes the report as Markdown."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nanochat.report.sections import COLUMNS, TITLES, Sections
from nanochat.report.summary import columns
from nanochat.runtime.progress import plain_duration

SMOKE = (
    "This was the smoke preset, which shows that every stage works. Its 20 steps teach a model "
    "nothing: its answers are nonsense, and its accuracies are near 0. To train a model that "
    "answers, type `bash speedrun.sh`."
)
MEANINGS = {
    "bits per byte of documents": (
        "how well the base model predicts held-out documents; lower is better"
    ),
    "bits per byte of conversations": (
        "the same after midtraining, on held-out conversations, which are easier text"
    ),
    "bits per byte of answers in midtraining": (
        "the same after midtraining on the assistant's words alone"
    ),
    "bits per byte of answers": (
        "the same after fine-tuning, on the assistant's words alone; not comparable either"
    ),
    "bits per byte of answers of your own data": (
        "how well the fine-tuned model predicts the answers it was not shown"
    ),
    "preferences of your own data that the model follows": (
        "the share of held-out pairs in which the preferred answer "
        "has gained on the other one since before training"
    ),
    "perplexity of general text": (
        "how well the fine-tuned model still predicts text that is not in your data; a rise since "
        "before training, in the curve, is what it has forgotten"
    ),
    "bits per byte of the base corpus": (
        "the same texts after every stage; a rise is what the stage has forgotten"
    ),
    "CORE": (
        "the mean of 22 tasks without a chat, each scaled so that guessing gives 0 and perfection "
        "gives 1"
    ),
    "ChatCORE": "the mean of the chat tasks, scaled in the same way",
    "tinyworld_en": "open questions in English, in phrasings that training never showed",
    "tinyworld_zh": "open questions in Chinese, in phrasings that training never showed",
    "calculator": (
        "sums for which the model must call its calculator, with numbers that training never showed"
    ),
    "mental": (
        "sums without the calculator, with numbers that training never showed; RL trains these"
    ),
    "held_out_combinations_en": (
        "questions in English about facts that documents state and no training question asks"
    ),
    "held_out_combinations_zh": "the same in Chinese",
    "follow_ups_en": (
        "later questions of a conversation in English that need the turns before, in pairs that "
        "training never showed; a right answer is a sentence that names the thing"
    ),
    "follow_ups_zh": "the same in Chinese",
    "storytelling_en": (
        "stories in English on request, a third of them about things of which no story of training "
        "tells; right if every sentence is sound and all facts agree"
    ),
    "storytelling_zh": "the same in Chinese",
    "persona_en": (
        "questions in English about the model itself, in wordings that training never showed"
    ),
    "persona_zh": "the same in Chinese",
}
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


def _plain(data: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of the texts and numbers in a section, or [] if it has none."""
    rows = []
    for name, value in data.items():
        if isinstance(value, (str, int, float)) and value != "":
            rows.append([name.replace("_", " "), value])
    return grid(["figure", "value"], rows) if rows else []


def _scores(tasks: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the lines of a table of task scores, then of each task's groups with wrong answers.

    Groups are listed only for tasks with 2 to 30 of them (MAX_GROUPS).
    """
    rows = []
    for name, score in tasks.items():
        accuracy = f"{100 * score['accuracy']:.1f} %"
        interval = f"{100 * score['low']:.1f} to {100 * score['high']:.1f}"
        rows.append([name, accuracy, interval, score["total"]])
    lines = grid(["task", "right", "95 % interval", "n"], rows)
    for name, score in tasks.items():
        groups = score.get("groups", {})
        if not 1 < len(groups) <= MAX_GROUPS:
            continue
        weak = []
        for group, count in groups.items():
            if count["right"] < count["total"]:
                weak.append(f"{group} {count['right']:g}/{count['total']}")
        lines += [f"{name}, relations with wrong answers: {', '.join(weak) or 'none'}.", ""]
    return lines


def _section(
    name: str,
    data: Mapping[str, Any],
    pictures: Collection[str],
) -> list[str]:
    """Return the Markdown lines of the section called `name`."""
    lines = [f"## {TITLES[name]}", ""]
    if f"{name}.png" in pictures:
        lines += [f"![curves of {name}]({name}.png)", ""]
    lines += _plain(data)
    if "tasks" in data:
        lines += _scores(data["tasks"])
    if data.get("samples"):
        lines += [f"- `{prompt}` … {reply!r}" for prompt, reply in data["samples"].items()]
        lines.append("")
    if data.get("rows"):
        head = [str(key) for key in data["rows"][0]]
        rows = [[row.get(key, "") for key in head] for row in data["rows"]]
        lines += grid(head, rows)
    if data.get("settings"):
        lines += ["<details><summary>settings</summary>", ""]
        lines += _plain(data["settings"])
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
                mark = "" if sample["grade"] >= 1 else " (wrong)"
                reply = sample["reply"].strip() + mark
                replies.setdefault(sample["question"], {})[stage] = reply
    if not replies:
        return []
    head = ["question", *(stage.upper() for stage in tasks_of)]
    rows = []
    for question, by_stage in replies.items():
        cells = [by_stage.get(stage, "") for stage in tasks_of]
        rows.append([question, *cells])
    return ["## Samples", "", *grid(head, rows)]


def _environment(facts: Mapping[str, Any]) -> list[str]:
    """Return the lines of a list with the date, the commit, the host and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    commit = facts["commit"][:12] or "not a git checkout"
    changed = f", {facts['changed_files']} files changed since" if facts["changed_files"] else ""
    hardware = f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gb']:.0f} GB"
    return [
        f"- date: {facts['date']}",
        f"- commit: {commit}{changed}",
        f"- host: {hardware}; {facts['system']}",
        f"- versions: Python {facts['python']}, {versions}",
    ]


def _total_cost(total: Mapping[str, Any]) -> str:
    return f"- cost: {cost_of(total)}"


def cost_of(total: Mapping[str, Any]) -> str:
    """Return the time of a run and, where a script measured them, its CPU time and memory."""
    time = plain_duration(60 * total["minutes"])
    if not total["cpu_minutes"]:
        return f"{time} of training"
    cpu_time = plain_duration(60 * total["cpu_minutes"])
    return f"{time}, {cpu_time} of CPU time, at most {total['memory_gb']:.2f} GB of memory"


def _measures(table: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of the table of measures by stage, then of the meanings of measures."""
    stages = columns(table)
    head = ["measure", *(stage.upper() for stage in stages)]
    rows = []
    for name, row in table.items():
        values = [row.get(stage, "") for stage in stages]
        rows.append([name, *values])
    meanings = [f"- {name}: {MEANINGS[name]}" for name in table if name in MEANINGS]
    return [*grid(head, rows), *meanings, ""]


def _costs(costs: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of the table of costs by stage."""
    rows = []
    for name, cost in costs.items():
        time = plain_duration(60 * cost["minutes"])
        cpu_time = plain_duration(60 * cost["cpu_minutes"])
        memory = f"{cost['memory_gb']:.2f}"
        rows.append([name, time, cpu_time, memory, int(cost["runs"])])
    return grid(["stage", "time", "CPU time", "memory in GB", "runs"], rows)


def markdown(report: Mapping[str, Any], pictures: Collection[str]) -> str:
    """Return the whole report as Markdown.

    `pictures` are the names of the picture files that exist, each "<section>.png".
    """
    lines = ["# nanochat report", ""]
    if report["key"].startswith("smoke"):
        lines += [f"> {SMOKE}", ""]
    lines += _environment(report["environment"])
    lines += [_total_cost(report["summary"]), ""]
    lines += ["## Summary", "", *_measures(report["table"])]
    if report["stages"]:
        lines += ["## Cost of the stages", "", *_costs(report["stages"])]
    lines += _samples(report["sections"])
    for name, data in report["sections"].items():
        lines += _section(name, data, pictures)
    return "\n".join(lines)
