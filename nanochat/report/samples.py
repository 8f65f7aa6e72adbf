"""samples.jsonl: what the checkpoints of a stage said to prompts and questions, one JSON object per line."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanochat.common import check_regular, parse_json, to_json, write_atomic

MOST_BYTES = 16 << 20  # of a samples.jsonl that is read
MOST_LETTERS = 2000  # of a prompt or a reply


@dataclass(frozen=True)
class Sample:
    """What the checkpoint of a step said. `source` names the measurement, such as GSM8K; `grade` is 1.0 for right."""

    step: int
    source: str
    asked: str
    said: str
    grade: float | None = None


def keep_samples(folder: Path, samples: Iterable[Sample]) -> None:
    """Add samples to those in the folder of a stage; they replace earlier ones of the same step and source."""
    new = list(samples)
    again = {(one.step, one.source) for one in new}
    kept = [one for one in read_samples(folder) if (one.step, one.source) not in again]
    _write(folder, sorted([*kept, *new], key=lambda one: one.step))


def forget_samples(folder: Path, step: int) -> None:
    """Drop the samples of later steps than `step` from the folder of a stage, which takes these steps again."""
    found = read_samples(folder)
    if any(one.step > step for one in found):
        _write(folder, [one for one in found if one.step <= step])


def _write(folder: Path, samples: Iterable[Sample]) -> None:
    write_atomic(folder / "samples.jsonl", "".join(to_json(asdict(one)) + "\n" for one in samples))


def read_samples(folder: Path) -> list[Sample]:
    """The samples in the folder of a stage, earlier steps first. A line that holds no sample is left out."""
    path = folder / "samples.jsonl"
    try:
        check_regular(path, MOST_BYTES)
        lines = path.read_bytes().splitlines()
    except (FileNotFoundError, ValueError):
        return []
    return [sample for line in lines if (sample := _sample(line)) is not None]


def _sample(line: bytes) -> Sample | None:
    try:
        found: Any = parse_json(line)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    step, grade = found.get("step"), found.get("grade")
    texts = [found.get(name) for name in ("source", "asked", "said")]
    if type(step) is not int or not all(isinstance(text, str) for text in texts):
        return None
    source, asked, said = (str(text)[:MOST_LETTERS] for text in texts)
    if not isinstance(grade, int | float) or not -1e9 < grade < 1e9:
        grade = None
    return Sample(step, source, asked, said, None if grade is None else float(grade))
