"""The benchmark of fine-tuning: its processes, its figures, and what it refuses."""

import json
from typing import Any

import pytest

from bench.finetune import __main__ as finetune
from bench.finetune.__main__ import SHAPES, Config, Measured, speed, table
from nanochat.common import UserError
from nanochat.models.qwen.config import QwenConfig

TINY = {"n_layer": 4, "n_embd": 32, "n_head": 2, "n_kv_head": 1, "head_dim": 16, "rotary_dim": 0, "n_hidden": 48,
        "vocab_size": 300, "delta_key_heads": 1, "delta_value_heads": 2, "delta_key_dim": 8,
        "delta_value_dim": 8}  # fmt: skip


def test_the_median_step_counts() -> None:
    measured = Measured(1, [4.0, 1.0, 2.0], [0.5, 0.4], 10**9)
    assert speed(measured, 100) == 50
    other = Measured(1, [4.0], [0.5], 2 * 10**9)
    assert table("x", {"ours": measured, "transformers": other}, 100).splitlines()[-1].split()[-2:] == ["2.00", "0.50"]


def test_a_process_that_fails_is_named() -> None:
    shape = QwenConfig(**{**SHAPES["qwen3"], **TINY, "n_kv_head": 2})
    once = Config(steps=1, rows=1, tokens=8, compile=False)
    with pytest.raises(UserError, match=r"ours ended with code 1; its last lines:(.|\n)*no_such_proj"):
        finetune.measure(["ours"], shape, 2, "float32", once, ("no_such_proj",))


def test_both_sides_train_the_same_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parameters on both sides, adapters included, and a loss near that of chance, log 300 = 5.70."""
    monkeypatch.setattr(finetune, "SHAPES", {name: {**shape, **TINY} for name, shape in SHAPES.items()})
    finetune.main(Config(against=("transformers",), families=("qwen3.5",), steps=1, rows=1, tokens=8, compile=False))
    printed = capsys.readouterr().out.splitlines()
    rows = [line.split("  ") for line in printed if " parameters, loss " in line]
    about = [row[-1].split(" parameters, loss ") for row in rows]
    assert [count for count, _ in about[:2]] == [about[0][0]] * 2 and [count for count, _ in about[2:]] == [
        about[2][0]
    ] * 2
    for _, losses in about:
        assert all(5.2 < float(loss) < 6.2 for loss in losses.split(" -> "))
    result: dict[str, Any] = json.loads(printed[-1])
    assert set(result["qwen3.5 lora"]) == {
        "tokens_per_cpu_second",
        "peak_gb",
        "vs_transformers",
        "memory_vs_transformers",
    }


@pytest.mark.parametrize(("given", "why"), [
    ({"steps": 0}, "--steps must be at least 1"), ({"tokens": 5000}, "at most 2,048"),
    ({"quick": True, "against": ("transformers",)}, "leave out"),
])  # fmt: skip
def test_flags_that_cannot_be_measured_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why) as failure:
        finetune.main(Config(**given))
    assert failure.value.exit_code == 2
