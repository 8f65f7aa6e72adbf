"""bench.gpu on a CPU: both sides train, and the figures come from the median steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu.__main__ import Config
from tests.bench.fakes import fake_upstream

TINY = Config(
    depth=2,
    rows=2,
    passes=2,
    max_seq_len=64,
    vocab_size=128,
    steps=2,
    rounds=1,
    compile=False,
    device_type="cpu",
)


def answer(seconds: list[float], memory: float = 1e9) -> dict[str, Any]:
    about = {"peak_flops": 1e9, "device": "a GPU", "attention": "some", "start": 9.0, "loss": 3.0}
    return {"seconds": seconds, "memory": memory, **about}


def test_figures_are_of_the_median_step_of_all_runs() -> None:
    runs = [
        ("ours", answer([1.0, 2.0])),
        ("upstream", answer([4.0, 4.0], 3e9)),
        ("ours", answer([2.0], 2e9)),
    ]
    figures = gpu.figures(TINY, runs)
    tokens = 2 * 2 * 64
    assert figures["ours"]["tokens_per_second"] == tokens / 2
    assert figures["upstream"]["tokens_per_second"] == tokens / 4
    assert figures["vs_upstream"] == 2.0
    assert figures["ours"]["memory_gb"] == 2.0
    assert figures["upstream"]["memory_gb"] == 3.0
    # A layer has 12 C^2 entries, and its attention costs 12 C for each of the 64 keys.
    flops = 6 * (2 * 12 * 128**2 + 128 * 128) + 2 * 12 * 128 * 64
    assert figures["ours"]["mfu_percent"] == pytest.approx(100 * tokens / 2 * flops / 1e9, rel=0.02)


@pytest.mark.slow
def test_both_sides_train_in_turns(
    tmp_path: Path,
    base_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NANOCHAT_PEAK_TFLOPS", "1")
    gpu.main(replace(TINY, upstream=fake_upstream(tmp_path / "up")))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["vs_upstream"] > 0
    assert result["upstream"]["attention"] == "FlashAttention 3"
    assert result["tokens_per_step"] == 256
