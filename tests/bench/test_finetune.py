"""The benchmark of fine-tuning: its figures, its processes, and what it refuses."""

import json
from dataclasses import replace
from typing import Any

import pytest

from bench.finetune import __main__ as finetune
from bench.finetune.__main__ import SHAPES, Config, Measured
from nanochat.common import UserError

TINY: dict[str, Any] = {
    "n_layer": 4,
    "n_embd": 32,
    "n_head": 2,
    "n_kv_head": 1,
    "head_dim": 16,
    "rotary_dim": 0,
    "n_hidden": 48,
    "vocab_size": 300,
    "delta_key_heads": 1,
    "delta_value_heads": 2,
    "delta_key_dim": 8,
    "delta_value_dim": 8,
}
ONCE = Config(steps=1, rows=1, tokens=8, compile=False)


def test_the_median_step_counts() -> None:
    own = Measured(1, [0.5], [4.0, 1.0, 2.0], 10**9)
    peer = Measured(1, [0.5], [4.0], 2 * 10**9)
    assert finetune.figures({"ours": own, "transformers": peer}, 100) == {
        "tokens_per_cpu_second": 50,
        "peak_gb": 1,
        "vs_transformers": 2,
        "memory_vs_transformers": 0.5,
    }


def test_a_process_that_fails_is_named() -> None:
    shape = replace(SHAPES["qwen3"], **{**TINY, "n_kv_head": 2})
    with pytest.raises(UserError, match=r"(?s)ours ended with code 1.*no_such_proj"):
        finetune.measure(["ours"], shape, 2, "float32", ONCE, ["no_such_proj"])


def test_both_sides_train_the_same_model() -> None:
    """As many parameters on both sides, adapters included, and a loss near that of chance, log 300 = 5.70."""
    shape = replace(SHAPES["qwen3.5"], **TINY)
    for rank in (2, 0):
        results = finetune.measure(["ours", "transformers"], shape, rank, "float32", ONCE)
        ours, theirs = results.values()
        assert ours.parameters == theirs.parameters
        assert all(5.2 < loss < 6.2 for loss in ours.losses + theirs.losses)


def test_it_prints_one_json_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "SMALL", TINY)
    finetune.main(replace(ONCE, quick=True, families=("qwen3",)))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["qwen3 lora"]) == {"tokens_per_cpu_second", "peak_gb"}


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"steps": 0}, "--steps"),
        ({"tokens": 5000}, "--tokens.*2,048"),
        ({"quick": True, "against": ("transformers",)}, "--quick"),
    ],
)
def test_flags_that_cannot_be_measured_are_refused(flags: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word) as refused:
        finetune.main(Config(**flags))
    assert refused.value.exit_code == 2
