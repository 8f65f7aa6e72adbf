"""The data benchmarks: documents, rows, questions, checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.data import __main__ as bench
from bench.data import checkpoint, evaluation
from bench.data.__main__ import Config, documents
from bench.training import QWEN3
from nanochat.checkpoint_manager import files as step_files
from nanochat.gpt import GPTConfig

SMALL = GPTConfig(16, 1024, 2, 2, 2, 32)


def test_documents_are_the_text_cut_again_and_again() -> None:
    text = "".join(map(chr, range(200, 60_000 // 2)))
    pieces = list(documents(text, 2))
    assert "".join(pieces) == text * 2
    assert pieces == list(documents(text, 2))
    lengths = [len(piece) for piece in documents("x" * 10_000_000, 1)]
    assert 2_500 < np.median(lengths) < 2_900
    assert 3_900 < np.mean(lengths) < 4_600


def test_quick_prints_a_table_and_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"the cat number {i} sat on the mat of cat number {i + 1}; " for i in range(6_000)]
    text = SimpleNamespace(documents=["".join(lines)])
    monkeypatch.setattr(bench, "standard_library", lambda: text)
    sizes = {"LENGTH": 512, "BATCH": 4, "PASSES": 6, "VOCABULARY": 340}
    for name, size in sizes.items():
        monkeypatch.setattr(bench, name, size)
    bench.main(Config(quick=True))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["prepare_tokens_per_cpu_second"] > 0
    assert result["loader_tokens_per_cpu_second"] > 0


@pytest.mark.slow
def test_a_quick_evaluation_prints_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = evaluation.model.make
    small = replace(QWEN3, vocab_size=600, n_layer=1, n_embd=32, n_hidden=32)
    monkeypatch.setattr(evaluation.model, "make", lambda folder: make(folder, small, text=50_000))
    evaluation.main(evaluation.Config(quick=True))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["cpu_seconds"] > 0
    assert result["problems"] == 6


def test_both_writers_write_all_the_bytes(tmp_path: Path) -> None:
    stage = checkpoint.Stage(SMALL)
    tensors = stage.tensors()
    checkpoint.measure(stage, tmp_path, 2)
    raw = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    assert (tmp_path / "raw").read_bytes() == raw
    step = tmp_path / "run" / "step_000001"
    assert step_files.verify(step) == ""
    saved = {}
    for path in step.glob("*.safetensors"):
        saved |= load_file(path)
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)


def test_a_quick_run_of_checkpoints_prints_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "QUICK", SMALL)
    checkpoint.main(checkpoint.Config(quick=True))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ours_of_raw"] > 0
