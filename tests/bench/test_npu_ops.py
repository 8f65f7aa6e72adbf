"""The benchmark of launched operators: its arithmetic, and a short count on the emulated NPU."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from bench.npu_ops import __main__ as npu_ops
from bench.npu_ops.__main__ import Config, Task
from nanochat.common import UserError
from tests.emulated_npu import build

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
    assert npu_ops.extra(counted(1, 1, 1)) == (0, 0, 0)
    worse = counted(
        1, 1, 1, synchronisations={"copy to host": 1, "item": 3}, unsupported={"det": 2},
        copies={"host to device": 3, "device to host": 4, "device to device": 1},
    )  # fmt: skip
    assert npu_ops.extra(worse) == (3, 1 + 3 + 1, 2)


def test_what_a_layer_adds_is_told_from_two_depths() -> None:
    assert npu_ops.per_layer(counted(100, 60, 20), counted(80, 40, 12), 4, "forward", "backward") == 10
    assert npu_ops.per_layer(counted(100, 60, 20), counted(80, 40, 12), 4) == 12


def test_the_command_prints_a_table_and_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = []

    def count(task: Task) -> dict[str, Any]:
        tasks.append(task)
        return counted(10, 20, 30) if task.kernels == "auto" else counted(100, 100, 100)

    monkeypatch.setattr(npu_ops, "count", count)
    npu_ops.main(Config(quick=True))
    fused = Task("auto", 12, 256, 1024, "910B3")
    assert tasks == [fused, replace(fused, kernels="plain"), replace(fused, graphs=True)]
    assert all(task.stacked for task in tasks)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["operators_vs_plain"] == 0.2
    tasks.clear()
    npu_ops.main(Config())
    assert (tasks[0].width, tasks[0].vocab_size, tasks[0].length) == (768, 32768, 2048)


def test_help_names_the_command_that_was_typed() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.npu_ops", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m bench.npu_ops [-h]")


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
    assert result["launches_with_graphs"] <= 40
    assert captured["loss"] == pytest.approx(fused["loss"], rel=1e-4)  # rates are fp32 inside a graph
    assert (result["host_syncs"], result["copies"], result["unsupported"]) == (0, 0, 0)
    assert fused["forward"]["npu_fusion_attention"] == fused["forward"]["npu_rotary_mul"] == 5


@pytest.mark.npu
def test_a_side_that_fails_ends_with_its_last_words() -> None:
    if why := build.missing():
        pytest.skip(f"the emulated NPU cannot be compiled: {why}")
    with pytest.raises(UserError, match=r"counting with --kernels fused failed with code 1;[\s\S]*a 910A has no"):
        npu_ops.count(replace(SHORT, kernels="fused", chip="910A"))
