"""The data benchmarks: packing by hand, documents, questions, evaluation, checkpoints."""

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
from bench.data.__main__ import Config, Loss, documents, packing_loss
from nanochat.checkpoint_manager import files as step_files
from nanochat.gpt import GPTConfig
from nanochat.prepare.packing import Packing
from nanochat.prepare.plan import Plan
from nanochat.prepare.token_files import TokenFile, TokenSet

SMALL = GPTConfig(16, 1024, 2, 2, 2, 32)


def test_documents_are_the_text_cut_again_and_again() -> None:
    text = "".join(map(chr, range(200, 60_000 // 2)))
    pieces = list(documents(text, 2))
    assert "".join(pieces) == text * 2
    assert pieces == list(documents(text, 2))
    lengths = [len(piece) for piece in documents("x" * 10_000_000, 1)]
    assert 2_500 < np.median(lengths) < 2_900
    assert 3_900 < np.mean(lengths) < 4_600


def test_what_packing_loses_by_hand() -> None:
    # Rows of 10 cells. Documents of 5, 12, 3 and 4 tokens; one token of the last is in no row.
    lengths = np.array([5, 12, 3, 4])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    token_file = TokenFile(np.zeros(24, np.uint16), offsets, None)
    tokens = TokenSet(Path(), {"parts": []}, (token_file,))
    # Row 0: nine of the second. Row 1: the first, and the end of the second. Row 2: the others.
    starts = np.array([5, 0, 14, 0, 17, 20])
    packing = Packing(np.array([0, 1, 4, 6]), starts, np.array([9, 5, 3, 0, 3, 3], np.int32))
    used = np.array([10, 11, 8], np.int32)
    plan = Plan(10, packing, used, np.array([9, 8, 6], np.int32), "key", 0, 0)
    loss = packing_loss(tokens, plan)
    assert loss == Loss(pytest.approx(1 / 24), 0.5, pytest.approx(1 / 30))


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
    assert result["packing"]["lost"] == 0
    assert result["prepare"]["tokens_per_cpu_second"] > 0
    assert result["loader"]["tokens_per_cpu_second"] > 0


def test_an_evaluation_runs_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = evaluation.model.make
    small = replace(evaluation.model.SHAPE, vocab_size=600, n_layer=1, n_embd=32, n_hidden=32)
    monkeypatch.setattr(evaluation.model, "make", lambda folder: make(folder, small, text=50_000))
    evaluation.main(evaluation.Config(quick=True))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["cpu_seconds"]) == {"ours"}
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
    assert 0 <= result["standstill_share"] <= 1
