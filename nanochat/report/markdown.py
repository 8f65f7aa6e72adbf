"""The report as Markdown."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nanochat.report.sections import COLUMNS, TITLES
from nanochat.report.summary import columns
from nanochat.runtime.progress import duration

SMOKE = (
    "This was the smoke preset, which shows that every stage works. Its 20 steps teach a model nothing: its answers "
    "are nonsense, and its accuracies are near 0. To train a model that answers, type `bash speedrun.sh`."
)
MEANINGS = {
    "bits per byte of documents": "how well the base model predicts held-out documents; lower is better",
    "bits per byte of conversations": "the same after midtraining, on held-out conversations, which are easier text",
    "bits per byte of answers in midtraining": "the same after midtraining on the assistant's words alone",
    "bits per byte of answers": "the same after fine-tuning, on the assistant's words alone; not comparable either",
    "bits per byte of answers of your own data": "how well the fine-tuned model predicts the answers it was not shown",
    "preferences of your own data that the model follows": "the share of held-out pairs in which the preferred answer "
    "has gained on the other one since before training",
    "bits per byte of the base corpus": "the same texts after every stage; a rise is what the stage has forgotten",
    "CORE": "the mean of 22 tasks without a chat, each scaled so that guessing gives 0 and perfection gives 1",
    "ChatCORE": "the mean of the chat tasks, scaled in the same way",
    "tinyworld_en": "open questions in English, in phrasings that training never showed",
    "tinyworld_zh": "open questions in Chinese, in phrasings that training never showed",
    "calculator": "sums for which the model must call its calculator, with numbers that training never showed",
    "mental": "sums without the calculator, with numbers that training never showed; RL trains these",
    "held_out_combinations_en": "questions in English about facts that documents state and no training question asks",
    "held_out_combinations_zh": "the same in Chinese",
    "follow_ups_en": "later questions of a conversation in English that need the turns before, in pairs that training "
    "never showed; a right answer is a sentence that names the thing",
    "follow_ups_zh": "the same in Chinese",
    "storytelling_en": "stories in English on request, a third of them about things of which no story of training "
    "tells; right if every sentence is sound and all facts agree",
    "storytelling_zh": "the same in Chinese",
    "persona_en": "questions in English about the model itself, in wordings that training never showed",
    "persona_zh": "the same in Chinese",
}
MOST_GROUPS = 30  # examinations with more subjects have them in report.json
SAMPLE_TASKS = (
    *("tinyworld_en", "tinyworld_zh", "calculator", "mental", "follow_ups_en", "follow_ups_zh"),
    *("storytelling_en", "storytelling_zh", "GSM8K", "SpellingBee"),
)


def cell(value: Any) -> str:
    """A figure or a text as one cell of a table."""
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else " ".join(str(value).replace("|", "\\|").split())
    )


def grid(head: list[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a table, with an empty line at the end."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return [*lines, *("| " + " | ".join(cell(value) for value in row) + " |" for row in rows), ""]


def _plain(data: Mapping[str, Any]) -> list[str]:
    """A table of the texts and numbers in a section."""
    rows = [
        [name.replace("_", " "), value]
        for name, value in data.items()
        if isinstance(value, (str, int, float)) and value != ""
    ]
    return grid(["figure", "value"], rows) if rows else []


def _scores(tasks: Mapping[str, dict[str, Any]]) -> list[str]:
    rows = [
        [
            name,
            f"{100 * score['accuracy']:.1f} %",
            f"{100 * score['low']:.1f} to {100 * score['high']:.1f}",
            score["total"],
        ]
        for name, score in tasks.items()
    ]
    lines = grid(["task", "right", "95 % interval", "n"], rows)
    for name, score in tasks.items():
        weak = {
            group: count
            for group, count in score.get("groups", {}).items()
            if count["right"] < count["total"]
        }
        if 1 < len(score.get("groups", {})) <= MOST_GROUPS:
            listed = ", ".join(
                f"{group} {count['right']:g}/{count['total']}" for group, count in weak.items()
            )
            lines += [f"{name}, relations with wrong answers: {listed or 'none'}.", ""]
    return lines


def _section(name: str, data: Mapping[str, Any], pictures: Collection[str]) -> list[str]:
    lines = [f"## {TITLES[name]}", ""]
    if f"{name}.png" in pictures:
        lines += [f"![curves of {name}]({name}.png)", ""]
    lines += _plain(data)
    if "tasks" in data:
        lines += _scores(data["tasks"])
    if data.get("samples"):
        lines += [f"- `{prompt}` … {said!r}" for prompt, said in data["samples"].items()] + [""]
    if data.get("rows"):
        head = [str(key) for key in data["rows"][0]]
        lines += grid(head, [[row.get(key, "") for key in head] for row in data["rows"]])
    if data.get("settings"):
        lines += [
            "<details><summary>settings</summary>",
            "",
            *_plain(data["settings"]),
            "</details>",
            "",
        ]
    return lines


def _samples(found: Mapping[str, dict[str, Any]]) -> list[str]:
    """The same questions with the answers of every stage, in both languages."""
    scored = {
        stage: found[f"{stage}_eval"]["tasks"]
        for stage in COLUMNS
        if found.get(f"{stage}_eval", {}).get("tasks")
    }
    replies: dict[str, dict[str, str]] = {}
    for stage, tasks in scored.items():
        for task in SAMPLE_TASKS:
            for sample in tasks.get(task, {}).get("samples", [])[:4]:
                mark = "" if sample["grade"] >= 1 else " (wrong)"
                replies.setdefault(sample["question"], {})[stage] = sample["reply"].strip() + mark
    if not replies:
        return []
    rows = [
        [question, *(said.get(stage, "") for stage in scored)] for question, said in replies.items()
    ]
    return ["## Samples", "", *grid(["question", *(stage.upper() for stage in scored)], rows)]


def markdown(report: Mapping[str, Any], pictures: Collection[str]) -> str:
    """The whole report as Markdown; `pictures` are the files that it may show, each named after its section."""
    where, costs, total = report["environment"], report["stages"], report["summary"]
    shown = columns(report["table"])
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    changed = f", {where['changed_files']} files changed since" if where["changed_files"] else ""
    lines = [
        "# nanochat report",
        "",
        f"- date: {where['date']}",
        f"- commit: {where['commit'][:12] or 'not a git checkout'}{changed}",
        f"- host: {where['processor']}, {where['cores']} cores, {where['memory_gb']:.0f} GB; {where['system']}",
        f"- versions: Python {where['python']}, {versions}",
        f"- cost: {duration(60 * total['minutes'])}, {duration(60 * total['cpu_minutes'])} of CPU time, at most "
        f"{total['memory_gb']:.2f} GB of memory",
        "",
        "## Summary",
        "",
        *grid(
            ["measure", *(stage.upper() for stage in shown)],
            [
                [name, *(row.get(stage, "") for stage in shown)]
                for name, row in report["table"].items()
            ],
        ),
        *(f"- {name}: {MEANINGS[name]}" for name in report["table"] if name in MEANINGS),
        "",
    ]
    if report["key"].startswith("smoke"):
        lines[1:1] = ["", f"> {SMOKE}"]
    if costs:
        rows = [
            [
                name,
                duration(60 * cost["minutes"]),
                duration(60 * cost["cpu_minutes"]),
                f"{cost['memory_gb']:.2f}",
                int(cost["runs"]),
            ]
            for name, cost in costs.items()
        ]
        lines += [
            "## Cost of the stages",
            "",
            *grid(["stage", "time", "CPU time", "memory in GB", "runs"], rows),
        ]
    lines += _samples(report["sections"])
    for name, data in report["sections"].items():
        lines += _section(name, data, pictures)
    return "\n".join(lines)
