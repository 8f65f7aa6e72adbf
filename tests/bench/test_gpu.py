"""bench.gpu on a CPU: both sides train, and the figures come from the median steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu.__main__ import Config
from nanochat.common import UserError

UPSTREAM = """
import torch
import torch.nn.functional as F
class GPTConfig:
    def __init__(self, **sizes):
        self.sizes = sizes
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.sizes["vocab_size"], config.sizes["vocab_size"])
    def init_weights(self):
        torch.nn.init.zeros_(self.table.weight)
    def setup_optimizer(self, unembedding_lr, embedding_lr, matrix_lr, weight_decay, scalar_lr):
        return torch.optim.SGD(self.parameters(), lr=0.0)
    def forward(self, idx, targets):
        return F.cross_entropy(self.table(idx).flatten(0, 1), targets.flatten())
"""
TINY = Config(depth=2, rows=2, passes=2, max_seq_len=64, vocab_size=128, steps=2, rounds=1, compile=False,
              device_type="cpu")  # fmt: skip


def fake_upstream(folder: Path, gpt: str = UPSTREAM) -> Path:
    (folder / "nanochat").mkdir(parents=True)
    for name, text in (("__init__", ""), ("gpt", gpt), ("flash_attention", "USE_FA3 = True\n")):
        (folder / "nanochat" / f"{name}.py").write_text(text)
    return folder


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
    assert "loss 4.852" in lines[1]  # ln 128, since its table stays at zero
    result = json.loads(lines[-1])
    assert result["vs_upstream"] > 0 and result["upstream_attention"] == "FlashAttention 3"
    assert result["tokens_per_step"] == 256 and not result["compiled"]


@pytest.mark.slow
def test_a_side_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    old = fake_upstream(tmp_path / "old", UPSTREAM.replace("def setup_optimizer", "def other"))
    with pytest.raises(UserError, match=r"(?s)upstream ended with code 1.*setup_optimizer"):
        gpu.measure("upstream", Config(**{**vars(TINY), "upstream": old}))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"upstream": Path("nowhere")}, "which has no nanochat/gpt.py"),
        ({"rows": 0}, "--rows must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        gpu.main(Config(**{**vars(TINY), **flags}))
