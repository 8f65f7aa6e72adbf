"""The benchmark of launched operators: its arithmetic, and a short count on the emulated NPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.npu_ops import __main__ as npu_ops
from bench.npu_ops.__main__ import Config, Task
from tests.bench.fakes import fake_upstream
from tests.emulated_npu import build

# The part of upstream's API that bench.npu_ops uses: a bf16 table, fp32 matrices, and an optimizer
# that reads a norm.
UPSTREAM = """
from dataclasses import dataclass
import os
import torch
import torch.nn.functional as F

assert os.environ["TORCHDYNAMO_DISABLE"] == "1" and os.environ["NANOCHAT_DTYPE"] == "bfloat16"

@dataclass
class GPTConfig:
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        print("chatter that is no answer")
        self.table = torch.nn.Embedding(config.vocab_size, config.n_embd)
        width = config.n_embd
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(config.n_layer)]
        self.layers = torch.nn.ModuleList(layers)

    def init_weights(self):
        assert self.table.weight.device.type == "npu"
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)
        self.table.to(torch.bfloat16)

    def setup_optimizer(self, weight_decay):
        self.optimizer = Optimizer(self.parameters())
        return self.optimizer

    def forward(self, idx, targets):
        x = self.table(idx)
        for layer in self.layers:
            x = layer(x).relu()
        logits = F.linear(x, self.table.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

class Optimizer(torch.optim.SGD):
    def step(self):
        if torch.isnan(self.param_groups[0]["params"][0].grad).any():
            return
        super().step()
"""

SHORT = Task("auto", 5, 128, 256, "910B3", length=128)


def counted(forward: int, backward: int, optimizer: int, **more: Any) -> dict[str, Any]:
    """Counts of a step with so many operators, which move 512 bytes each."""
    return {
        "forward": {"mm": forward},
        "backward": {"mm": backward - 1, "cat": 1},
        "optimizer": {"bmm": optimizer},
        "bytes": {
            "forward": {"mm": 10**9, "add": 512 * forward},
            "backward": {"npu_fusion_attention_grad": 10**9, "mul": 512 * backward},
            "optimizer": {"bmm": 10**9, "copy": 512 * optimizer},
        },
        "captured": {},
        "synchronisations": {"copy to host": 1},
        "copies": {"host to device": 2, "device to host": 1},
        "unsupported": {},
        **more,
    }


def test_figures_of_a_side_are_beside_those_of_the_fused_one() -> None:
    fused = counted(30, 50, 20)
    assert npu_ops.summary(counted(100, 100, 800), fused, SHORT.length) == {
        "forward": 100,
        "backward": 100,
        "optimizer": 800,
        "operators": 1000,
        "fused_of_operators": 0.1,
        "vector_bytes_per_token": 4000,
        "fused_of_vector_bytes": 0.1,
        "waits": 0,
        "copies": 0,
        "unsupported": 0,
        "weights_cast": 0,
    }


def test_only_waits_and_copies_beyond_the_needed_ones_are_extra() -> None:
    worse = counted(
        1,
        1,
        1,
        synchronisations={"copy to host": 1, "item": 3},
        unsupported={"det": 2},
        copies={"host to device": 3, "device to host": 4, "device to device": 1},
    )
    figures = npu_ops.summary(worse, worse, SHORT.length)
    assert (figures["waits"], figures["copies"], figures["unsupported"]) == (3, 1 + 3 + 1, 2)


def test_what_a_layer_adds_is_told_from_two_depths() -> None:
    assert npu_ops.per_layer(counted(100, 60, 20), counted(80, 40, 12), 12) == {
        "per_layer": 10,
        "optimizer_per_layer": 2,
        "per_pass": 40,
    }


def test_the_command_prints_a_table_and_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tasks: list[Any] = []

    def count(task: Task, checkout: Path | None = None) -> dict[str, Any]:
        tasks.append(checkout or task)
        if checkout is not None:
            return counted(200, 200, 200)
        return counted(10, 20, 30) if task.kernels == "auto" else counted(100, 100, 100)

    monkeypatch.setattr(npu_ops, "count", count)
    peer = fake_upstream(tmp_path / "peer")
    npu_ops.main(Config(quick=True, against=(peer,), layers=True))
    fused = Task("auto", 12, 256, 1024, "910B3")
    assert tasks == [
        fused,
        replace(fused, kernels="plain"),
        peer,
        replace(fused, graphs=True),
        replace(fused, depth=8),
    ]
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["plain"]["fused_of_operators"] == 0.2
    assert result[str(peer)]["fused_of_operators"] == 0.1
    tasks.clear()
    npu_ops.main(Config())
    assert (tasks[0].width, tasks[0].vocab_size, tasks[0].length) == (768, 32768, 2048)


@pytest.mark.npu
def test_a_step_needs_a_third_of_plains_operators_and_bytes_and_waits_for_nothing() -> None:
    skip_without_emulator()
    fused = npu_ops.count(SHORT)
    plain = npu_ops.count(replace(SHORT, kernels="plain"))
    graphs = npu_ops.count(replace(SHORT, graphs=True))
    ours = npu_ops.summary(fused, fused, SHORT.length)
    beside_plain = npu_ops.summary(plain, fused, SHORT.length)
    assert beside_plain["fused_of_operators"] < 0.4
    assert npu_ops.operators(fused, npu_ops.MODEL) < 0.4 * npu_ops.operators(plain, npu_ops.MODEL)
    assert beside_plain["fused_of_vector_bytes"] < 0.5
    assert npu_ops.operators(graphs) <= 40 < sum(graphs["captured"].values())
    assert (ours["waits"], ours["copies"], ours["unsupported"]) == (0, 0, 0)
    assert fused["forward"]["npu_fusion_attention"] == 5
    assert fused["forward"]["npu_rotary_mul"] == 5


@pytest.mark.npu
def test_a_checkout_is_counted_with_its_own_model_and_optimizer(tmp_path: Path) -> None:
    skip_without_emulator()
    counts = npu_ops.count(SHORT, fake_upstream(tmp_path / "peer", UPSTREAM))
    assert counts["forward"]["mm"] == SHORT.depth + 1
    assert counts["backward"]["mm"] == 2 * (SHORT.depth + 1)
    # The table is bf16, and needs no cast.
    assert counts["forward"]["relu"] == SHORT.depth == counts["casts"]
    assert counts["optimizer"]["isnan"] == 1
    assert not counts["captured"]
    # The optimizer looks for NaN, and the loss is read.
    assert sum(counts["synchronisations"].values()) == 2
    figures = npu_ops.summary(counts, counts, SHORT.length)
    assert (figures["waits"], figures["copies"], figures["unsupported"]) == (1, 0, 0)
    moved = SHORT.depth * 2 * 2 * SHORT.length * SHORT.width
    assert counts["bytes"]["forward"]["relu"] == moved


def skip_without_emulator() -> None:
    reason = build.missing()
    if reason:
        pytest.skip(f"the emulated NPU cannot be compiled: {reason}")
