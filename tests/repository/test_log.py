"""dev/LOG.md holds entries of one form, and the raw numbers that they name lie beside it."""

import csv
import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LOG = ROOT / "dev/LOG.md"
RAW = ROOT / "dev/log"
MOST_ROWS = 15


@dataclass(frozen=True)
class Entry:
    """One entry: its day, its heading without the day, and the text below."""

    day: date
    title: str
    body: str


def entries(text: str) -> list[Entry]:
    """The entries of a log in their order. ValueError for a heading that is no `## DATE: question`."""
    found = []
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        heading, _, body = section.partition("\n")
        day, separator, title = heading.partition(": ")
        if not separator or not title.endswith("?"):
            raise ValueError(f"`## {heading}` must read `## DATE: the question`, with a question mark at the end")
        found.append(Entry(date.fromisoformat(day), title, body))
    return found


def fields(body: str, name: str) -> list[str]:
    """The paragraphs of an entry that begin with `**NAME.** `, each as one line without that beginning."""
    found = re.findall(rf"^\*\*{name}\.\*\* (.+?)(?=\n\n|\Z)", body.strip(), re.M | re.S)
    return [" ".join(paragraph.split()) for paragraph in found]


def tables(body: str) -> list[list[str]]:
    """The tables of an entry: the rows of each, without its heading."""
    found: list[list[str]] = []
    inside = False
    for line in re.sub(r"^```.*?^```", "", body, flags=re.M | re.S).splitlines():
        if line.startswith("|") and not inside:
            found.append([])
        inside = line.startswith("|")
        if inside:
            found[-1].append(line)
    return [table[2:] for table in found]


def commands(body: str) -> list[str]:
    """The lines of an entry's shell blocks that are no comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", body, re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def named(text: str) -> set[str]:
    """The CSV files that a text links to, relative to dev/."""
    return set(re.findall(r"\]\((log/[^)]+\.csv)\)", text))


def problems(entry: Entry) -> list[str]:
    """What an entry lacks, as sentences."""
    found = []
    for name in ("Question", "Answer", "Host"):
        if len(fields(entry.body, name)) != 1:
            found.append(f"needs one paragraph that begins with **{name}.**")
    for name in ("Question", "Answer"):
        for text in fields(entry.body, name):
            if not re.search(r"[.?]$", text) or re.search(r"[.?!] [A-Z]", text):
                found.append(f"its {name.lower()} must be one sentence")
    if len(tables(entry.body)) > 1:
        found.append("has more than one table; put the second into an entry of its own, or into a CSV")
    if any(len(rows) > MOST_ROWS for rows in tables(entry.body)):
        found.append(f"has a table of more than {MOST_ROWS} rows; put the rest into a CSV")
    if not commands(entry.body):
        found.append("names no command in a bash block")
    for path in re.findall(r"\btests/[\w./]+", "\n".join(commands(entry.body))):
        if not (ROOT / path).exists():
            found.append(f"runs {path}, which does not exist")
    return found


@pytest.fixture(scope="module")
def log() -> list[Entry]:
    return entries(LOG.read_text(encoding="utf-8"))


def test_entries_are_newest_first(log: list[Entry]) -> None:
    days = [entry.day for entry in log]
    assert days and days == sorted(days, reverse=True)


def test_no_question_is_asked_twice(log: list[Entry]) -> None:
    titles = [entry.title for entry in log]
    assert len(titles) == len(set(titles))


def test_every_entry_has_its_parts(log: list[Entry]) -> None:
    assert [f"{entry.title}: {why}" for entry in log for why in problems(entry)] == []


def test_every_raw_file_is_named_and_every_named_file_exists(log: list[Entry]) -> None:
    links = {link for entry in log for link in named(entry.body)}
    assert links == {file.relative_to(LOG.parent).as_posix() for file in RAW.iterdir()}


@pytest.mark.parametrize("path", sorted(RAW.glob("*.csv")), ids=lambda path: path.name)
def test_a_raw_file_parses(path: Path) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.csv", path.name)
    with open(path, encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file, strict=True)
    assert all(header) and len(header) == len(set(header))
    assert rows and {len(row) for row in rows} == {len(header)}
    assert any(re.fullmatch(r"-?\d+(\.\d+)?", cell) for row in rows for cell in row)


def test_the_tests_that_hold_the_items_of_the_review_are_there() -> None:
    with open(RAW / "2026-11-22-review-items.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["item"]) for row in rows] == list(range(1, 46))
    for name in (name for row in rows for name in row["tests"].split() if name != "-"):
        path, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), name


# --- the checks themselves -----------------------------------------------------------------------

GOOD = """# Log

## 2026-02-03: Is it fast?

**Question.** How fast is it
on one thread?

**Answer.** It takes 0.5 s.

| a | b |
| --- | --- |
| 1 | 2 |

```bash
# by hand
bash test.sh tests/repository
```

**Host.** Any.

**Data.** [log/2026-02-03-x.csv](log/2026-02-03-x.csv) has the rest.
"""


def test_a_good_entry_has_no_problem() -> None:
    (entry,) = entries(GOOD)
    assert entry.day == date(2026, 2, 3) and entry.title == "Is it fast?"
    assert fields(entry.body, "Question") == ["How fast is it on one thread?"]
    assert tables(entry.body) == [["| 1 | 2 |"]] and named(entry.body) == {"log/2026-02-03-x.csv"}
    assert problems(entry) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("**Answer.** It takes 0.5 s.", "It takes 0.5 s.", "**Answer.**"),
        ("**Host.** Any.\n", "", "**Host.**"),
        ("0.5 s.", "0.5 s. That is fast.", "its answer must be one sentence"),
        ("0.5 s.", "0.5 s", "its answer must be one sentence"),
        ("| 1 | 2 |\n", "| 1 | 2 |\n\n| a |\n| --- |\n| 1 |\n", "more than one table"),
        ("| 1 | 2 |\n", "| 1 | 2 |\n" * 16, "more than 15 rows"),
        ("bash test.sh tests/repository\n", "", "names no command"),
        ("tests/repository", "tests/no_such_folder", "tests/no_such_folder, which does not exist"),
    ],
)
def test_what_an_entry_lacks_is_found(old: str, new: str, problem: str) -> None:
    assert GOOD.count(old) == 1
    (entry,) = entries(GOOD.replace(old, new))
    (found,) = problems(entry)
    assert problem in found


@pytest.mark.parametrize("heading", ["## 2026-02-03: Speed", "## Is it fast?", "## Yesterday: is it fast?"])
def test_a_heading_without_day_or_question_is_refused(heading: str) -> None:
    with pytest.raises(ValueError):
        entries(GOOD.replace("## 2026-02-03: Is it fast?", heading))
