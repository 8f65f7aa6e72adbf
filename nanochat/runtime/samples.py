"""Reads and writes samples.jsonl, which holds sample replies from the checkpoints of a stage."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanochat.common import check_regular, parse_json, to_json, write_atomic

MAX_BYTES = 16 << 20  # a larger samples.jsonl is not read
MAX_LETTERS = 2000  # the longest prompt or reply, in characters; the rest is cut off


@dataclass(frozen=True)
class Sample:
    """A reply from the model at a given step; the names of the fields are the keys in the file."""

    step: int
    source: str  # the measurement, such as GSM8K
    asked: str  # the prompt
    said: str  # the reply
    grade: float | None = None  # 1.0 for a correct reply


def keep_samples(folder: Path, samples: Iterable[Sample]) -> None:
    """Add samples to a stage's file, replacing earlier samples of the same step and source."""
    new = list(samples)
    replaced = {(sample.step, sample.source) for sample in new}
    samples = []
    for sample in read_samples(folder):
        if (sample.step, sample.source) not in replaced:
            samples.append(sample)
    samples += new
    samples.sort(key=lambda sample: sample.step)
    _write(folder, samples)


def forget_samples(folder: Path, step: int) -> None:
    """Remove the samples of all steps after `step`, because the stage will run them again."""
    samples = read_samples(folder)
    remaining = [sample for sample in samples if sample.step <= step]
    if len(remaining) < len(samples):
        _write(folder, remaining)


def _write(folder: Path, samples: Iterable[Sample]) -> None:
    lines = [to_json(asdict(sample)) + "\n" for sample in samples]
    write_atomic(folder / "samples.jsonl", "".join(lines))


def read_samples(folder: Path) -> list[Sample]:
    """Return a stage's samples in the order of the file, skipping lines that hold no sample.

    Texts are cut off after 2,000 characters. Returns [] if there is no regular file of at most 16
    MiB.
    """
    path = folder / "samples.jsonl"
    try:
        check_regular(path, MAX_BYTES)
        lines = path.read_bytes().splitlines()
    except (FileNotFoundError, ValueError):
        return []
    samples = map(_parse, lines)
    return [sample for sample in samples if sample is not None]


def _parse(line: bytes) -> Sample | None:
    try:
        fields: Any = parse_json(line)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    step = fields.get("step")
    texts = [fields.get(name) for name in ("source", "asked", "said")]
    if type(step) is not int or not all(isinstance(text, str) for text in texts):
        return None
    source, prompt, reply = (str(text)[:MAX_LETTERS] for text in texts)
    grade = fields.get("grade")
    if not isinstance(grade, int | float) or not -1e9 < grade < 1e9:
        return Sample(step, source, prompt, reply)
    return Sample(step, source, prompt, reply, float(grade))
