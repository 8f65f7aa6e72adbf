"""The benchmark of inference: what it counts, and a run on a small model."""

import json

import pytest
import torch

from bench.serve import __main__ as serve
from bench.serve import engine
from nanochat import device
from nanochat.engine import Completion


def test_only_matrices_that_a_pass_reads_are_counted() -> None:
    model = engine.untrained(1, device.compute_init("cpu"), torch.bfloat16, 320)
    C, scalars = 128, 4 * (1 + 1 + 1 + 1)  # of resid, x0, smear_lambda and backout, in fp32
    gates = 2 * (12 * 1 + 24)  # of the value embedding and of the smear
    assert engine.weight_bytes(model) == 2 * (12 * C * C + 320 * C) + gates + scalars


def test_a_tokenizer_has_the_size_that_was_asked_for() -> None:
    assert engine.tokenizer(2048).vocab_size == 2048


def test_replies_that_differ_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, words = engine.untrained(1, device.compute_init("cpu"), torch.float32, 320), engine.tokenizer(320)
    assert engine.exact(model, words, 3, 4) == engine.Exact(3, 3, 3)
    monkeypatch.setattr(engine, "replies", lambda *given: [Completion([1])] * 3)
    assert engine.exact(model, words, 3, 4) == engine.Exact(3, 0, 3)


def test_a_run_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "VOCAB", 512)
    monkeypatch.setattr(engine, "bandwidth", lambda: 1e10)
    untrained = engine.untrained
    monkeypatch.setattr(engine, "untrained", lambda depth, *given: untrained(1, *given))
    threads = torch.get_num_threads()
    try:
        serve.main(serve.Config(quick=True))
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["batched_equal"] == result["prefix_equal"] == result["rows"] == 8
    assert set(result["adapter_rows_per_cpu_second"]) == {"base", "one", "four"}
    assert result["second_turn_read"] == 12 < result["second_turn_tokens"]
