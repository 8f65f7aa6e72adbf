"""bench.gpu on a CPU: both sides train, and the figures come from the median steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu.__main__ import Config
from nanochat.common import UserError
from tests.bench.fakes import fake_upstream

TINY = Config(depth=2, rows=2, passes=2, max_seq_len=64, vocab_size=128, steps=2, rounds=1, compile=False,
              device_type="cpu")  # fmt: skip


def told(seconds: list[float], memory: float = 1e9) -> dict[str, Any]:
    return {"seconds": seconds, "memory": memory, "peak_flops": 1e9, "device": "a GPU", "attention": "some"}


def test_figures_are_of_the_median_step_of_all_runs() -> None:
    runs = [("ours", told([1.0, 2.0])), ("upstream", told([4.0, 4.0], 3e9)), ("ours", told([2.0], 2e9))]
    found = gpu.figures(TINY, runs)
    tokens = 2 * 2 * 64
    assert (found["tokens_per_second"], found["upstream_tokens_per_second"]) == (tokens / 2, tokens / 4)
    assert (found["vs_upstream"], found["memory_gb"], found["upstream_memory_gb"]) == (2.0, 2.0, 3.0)
    # each layer has 12 C^2 entries, and its attention costs 12 C for each of the 64 keys; then there is the head
    flops = 6 * (2 * 12 * 128**2 + 128 * 128) + 2 * 12 * 128 * 64
    assert found["mfu_percent"] == pytest.approx(100 * tokens / 2 * flops / 1e9, rel=0.02)
    assert "vs_upstream" not in gpu.figures(TINY, runs[:1])


@pytest.mark.slow
def test_both_sides_train_in_turns(
    tmp_path: Path, base_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_PEAK_TFLOPS", "1")
    gpu.main(Config(**{**vars(TINY), "upstream": fake_upstream(tmp_path / "up")}))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["ours", "upstream", "ours"]
    result = json.loads(lines[-1])
    assert result["vs_upstream"] > 0 and result["upstream_attention"] == "FlashAttention 3"
    assert result["tokens_per_step"] == 256 and not result["compiled"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"upstream": Path("nowhere")}, "--upstream.*nowhere"),
        ({"rows": 0}, "--rows.*got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        gpu.main(Config(**{**vars(TINY), **flags}))
