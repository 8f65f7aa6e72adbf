"""The benchmark of launched operators: its arithmetic, and a short count on the emulated NPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.npu_ops import __main__ as npu_ops
from bench.npu_ops.__main__ import Config, Task
from nanochat.common import UserError
from tests.emulated_npu import build

# The part of upstream's API that bench.npu_ops uses: a bf16 table, fp32 matrices, and an optimizer that reads a norm.
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
        self.layers = torch.nn.ModuleList([torch.nn.Linear(config.n_embd, config.n_embd, bias=False)
                                           for _ in range(config.n_layer)])

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
        return F.cross_entropy(F.linear(x, self.table.weight).float().flatten(0, 1), targets.flatten())

class Optimizer(torch.optim.SGD):
    def step(self):
        if torch.isnan(self.param_groups[0]["params"][0].grad).any():
            return
        super().step()
"""

SHORT = Task("auto", 5, 128, 256, "910B3", length=128)


def counted(forward: int, backward: int, optimizer: int, **more: Any) -> dict[str, Any]:
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


def test_ratios_are_of_operators_and_of_the_model_alone() -> None:
    result = npu_ops.figures(counted(30, 50, 20), counted(100, 100, 800), counted(2, 2, 3), SHORT)
    assert (result["operators"], result["plain_operators"]) == (100, 1000)
    assert (result["operators_vs_plain"], result["model_vs_plain"]) == (0.1, 0.4)
    assert (result["forward"], result["backward"], result["optimizer"]) == (30, 50, 20)
    assert result["launches_with_graphs"] == 7
    assert (result["vector_bytes_per_token"], result["plain_vector_bytes_per_token"]) == (400, 4000)
    assert result["vector_bytes_vs_plain"] == 0.1


def test_the_logs_read_and_the_batch_are_expected_and_the_rest_is_not() -> None:
    assert set(npu_ops.extra(counted(1, 1, 1)).values()) == {0}
    worse = counted(
        1, 1, 1, synchronisations={"copy to host": 1, "item": 3}, unsupported={"det": 2},
        copies={"host to device": 3, "device to host": 4, "device to device": 1},
    )  # fmt: skip
    assert npu_ops.extra(worse) == {"host_syncs": 3, "copies": 1 + 3 + 1, "unsupported": 2}


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
        tasks.append(task if checkout is None else checkout)
        if checkout is not None:
            return counted(200, 200, 200, casts=73)
        return counted(10, 20, 30) if task.kernels == "auto" else counted(100, 100, 100)

    monkeypatch.setattr(npu_ops, "count", count)
    npu_ops.main(Config(quick=True))
    fused = Task("auto", 12, 256, 1024, "910B3")
    assert tasks == [fused, replace(fused, kernels="plain"), replace(fused, graphs=True)]
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["operators_vs_plain"] == 0.2
    tasks.clear()
    npu_ops.main(Config())
    assert (tasks[0].width, tasks[0].vocab_size, tasks[0].length) == (768, 32768, 2048)
    tasks.clear()
    capsys.readouterr()
    peer = upstream(tmp_path / "peer")
    npu_ops.main(Config(quick=True, against=(peer,)))
    assert tasks == [fused, replace(fused, kernels="plain"), replace(fused, graphs=True), peer]
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["against"]["peer"]["ours_of_operators"] == 0.1
    assert "weights cast for the emulator 73" in said.out + said.err


@pytest.mark.parametrize("wrong", [Config(chip="910A"), Config(depth=4)])
def test_what_cannot_be_compared_is_refused(wrong: Config) -> None:
    with pytest.raises(UserError, match="--"):
        npu_ops.main(wrong)


@pytest.mark.npu
def test_a_step_needs_a_third_of_plains_operators_and_bytes_and_waits_for_nothing() -> None:
    if why := build.missing():
        pytest.skip(f"the emulated NPU cannot be compiled: {why}")
    fused, plain = npu_ops.count(SHORT), npu_ops.count(replace(SHORT, kernels="plain"))
    captured = npu_ops.count(replace(SHORT, graphs=True))
    result = npu_ops.figures(fused, plain, captured, SHORT)
    assert result["operators_vs_plain"] < 0.4
    assert result["model_vs_plain"] < 0.4
    assert result["vector_bytes_vs_plain"] < 0.5
    assert result["launches_with_graphs"] <= 40 < sum(captured["captured"].values())
    assert (result["host_syncs"], result["copies"], result["unsupported"]) == (0, 0, 0)
    assert fused["forward"]["npu_fusion_attention"] == fused["forward"]["npu_rotary_mul"] == 5


def upstream(folder: Path, source: str = UPSTREAM) -> Path:
    """A made-up checkout in upstream's shape."""
    (folder / "nanochat").mkdir(parents=True)
    for name, text in {"__init__": "", "gpt": source, "optim": ""}.items():
        (folder / "nanochat" / f"{name}.py").write_text(text)
    return folder


def test_ours_is_a_share_of_each_port() -> None:
    ours, port = counted(30, 50, 20), counted(100, 100, 200, synchronisations={"copy to host": 13})
    said = npu_ops.beside(ours, port, 128)
    assert (said["operators"], said["ours_of_operators"], said["host_syncs"]) == (400, 0.25, 12)
    assert (said["vector_bytes_per_token"], said["ours_of_vector_bytes"]) == (1600, 0.25)
    table = npu_ops.ports_table(ours, {"theirs": port}, 128).splitlines()
    assert (
        table[0].split() == "forward backward optimizer operators ours of it kB a token ours of it host syncs".split()
    )
    assert table[1].split() == ["fused", "30", "50", "20", "100", "1.000", "0", "1.000", "0"]
    assert table[2].split() == ["theirs", "100", "100", "200", "400", "0.250", "1", "0.250", "12"]


def test_checkouts_go_by_the_names_of_their_folders(tmp_path: Path) -> None:
    a, b, same = tmp_path / "x/a", tmp_path / "x/b", tmp_path / "y/a"
    assert npu_ops.names_of([a, b]) == {"a": a, "b": b}
    assert npu_ops.names_of([a, same]) == {str(a): a, str(same): same}


@pytest.mark.npu
def test_a_checkout_is_counted_with_its_own_model_and_optimizer(tmp_path: Path) -> None:
    if why := build.missing():
        pytest.skip(f"the emulated NPU cannot be compiled: {why}")
    counts = npu_ops.count(SHORT, upstream(tmp_path / "peer"))
    assert counts["forward"]["mm"] == SHORT.depth + 1 and counts["backward"]["mm"] == 2 * (SHORT.depth + 1)
    assert counts["forward"]["relu"] == SHORT.depth == counts["casts"]  # the table is bf16, and needs no cast
    assert counts["optimizer"]["isnan"] == 1 and not counts["captured"]
    assert sum(counts["synchronisations"].values()) == 2  # the optimizer looks for NaN, and the loss is read
    assert list(npu_ops.extra(counts).values()) == [1, 0, 0]
    assert counts["bytes"]["forward"]["relu"] == SHORT.depth * 2 * 2 * SHORT.length * SHORT.width


@pytest.mark.npu
def test_a_checkout_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    if why := build.missing():
        pytest.skip(f"the emulated NPU cannot be compiled: {why}")
    folder = upstream(tmp_path / "peer", UPSTREAM.replace("setup_optimizer", "setup_optimizers"))
    with pytest.raises(UserError, match=r"counting the step of .*peer ended with code 1;[\s\S]*setup_optimizer"):
        npu_ops.count(SHORT, folder)
