"""Reads and writes samples.jsonl, which holds sample replies from the checkpoints of a stage."""

import os
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanochat.common import check_regular, parse_json, to_json, write_atomic

MAX_BYTES = 16 << 20  # a larger samples.jsonl is not read
TAIL_BYTES = 1 << 20  # how much of the end of a file newest_samples() reads
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
    new_samples = list(samples)
    replaced = {(sample.step, sample.source) for sample in new_samples}
    all_samples = []
    for sample in read_samples(folder):
        if (sample.step, sample.source) not in replaced:
            all_samples.append(sample)
    all_samples += new_samples
    all_samples.sort(key=lambda sample: sample.step)
    _write(folder, all_samples)


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


def newest_samples(folder: Path, count: int) -> list[Sample]:
    """Return up to `count` samples from the last 1 MiB of a stage's file, the latest first.

    Lines that hold no sample are skipped. Raises OSError if the file cannot be opened or is not a
    regular file.
    """
    file = open_to_read(folder / "samples.jsonl")
    try:
        size = os.fstat(file).st_size
        data = os.pread(file, TAIL_BYTES, max(0, size - TAIL_BYTES))
    finally:
        os.close(file)
    lines = data.splitlines()
    if size > TAIL_BYTES:
        del lines[:1]  # its beginning was not read
    samples: list[Sample] = []
    for line in reversed(lines):
        sample = _parse(line)
        if sample is not None:
            samples.append(sample)
        if len(samples) == count:
            break
    return samples


def open_to_read(path: Path) -> int:
    """Open a file for reading, and return its file descriptor.

    Raises OSError if it cannot be opened or is not a regular file; reading a pipe could block.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is not a regular file")
    return file


def _parse(line: bytes) -> Sample | None:
    """Return the sample in a line of the file, or None if the line holds none."""
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
