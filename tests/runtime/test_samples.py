"""Samples of checkpoints are kept, replaced by newer ones of the same checkpoint, and read back."""

from pathlib import Path

import pytest

from nanochat.runtime.samples import MAX_LETTERS, Sample, forget_samples, keep_samples, newest_samples, read_samples


def test_samples_of_other_checkpoints_and_measurements_stay(tmp_path: Path) -> None:
    first, second = Sample(200, "base_loss", "The", " cat"), Sample(100, "base_loss", "The", " dog")
    graded = Sample(200, "GSM8K", "1+1?", "2", 1.0)
    for samples in ([first], [second], [graded]):
        keep_samples(tmp_path, samples)
    assert read_samples(tmp_path) == [second, first, graded]
    again = Sample(200, "base_loss", "The", " fox 🦊")
    keep_samples(tmp_path, [again])
    assert read_samples(tmp_path) == [second, graded, again]


def test_a_run_that_goes_back_forgets_what_later_steps_said(tmp_path: Path) -> None:
    samples = [Sample(step, "base_loss", "The", f" {step}") for step in (100, 200, 300)]
    keep_samples(tmp_path, samples)
    before = (tmp_path / "samples.jsonl").stat().st_ino
    forget_samples(tmp_path, 300)
    assert (tmp_path / "samples.jsonl").stat().st_ino == before  # not written again
    forget_samples(tmp_path, 200)
    assert read_samples(tmp_path) == samples[:2]
    forget_samples(tmp_path, 0)
    assert read_samples(tmp_path) == []
    forget_samples(tmp_path / "nothing", 0)


def test_no_file_holds_no_samples(tmp_path: Path) -> None:
    assert read_samples(tmp_path) == []


@pytest.mark.parametrize("line", [
    b"", b"[]", b"{", b'{"step": "1", "source": "a", "asked": "b", "said": "c"}', b'{"step": 1, "source": "a"}',
    b'{"step": 1, "source": 1, "asked": "b", "said": "c"}', b"\xff",
])  # fmt: skip
def test_a_line_without_a_sample_is_left_out(tmp_path: Path, line: bytes) -> None:
    good = b'{"step": 1, "source": "a", "asked": "b", "said": "' + b"c" * 5000 + b'", "grade": Infinity}\n'
    (tmp_path / "samples.jsonl").write_bytes(line + b"\n" + good)
    assert read_samples(tmp_path) == [Sample(1, "a", "b", "c" * MAX_LETTERS)]


def test_the_newest_samples_come_from_the_end_of_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [Sample(step, "base_loss", "The", f" {step} " + "x" * 500) for step in range(1, 101)]
    keep_samples(tmp_path, said)
    assert newest_samples(tmp_path, 3) == said[:-4:-1]
    monkeypatch.setattr("nanochat.runtime.samples.TAIL_BYTES", 3000)
    newest = newest_samples(tmp_path, 100)
    assert 1 < len(newest) < 6 and newest == said[::-1][: len(newest)]
    (tmp_path / "samples.jsonl").unlink()
    with pytest.raises(FileNotFoundError):
        newest_samples(tmp_path, 3)
