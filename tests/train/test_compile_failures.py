"""What happens where a compiler fails, is missing or is switched off, and what compiled updates give."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.updates import update
from nanochat import device
from nanochat.common import UserError
from nanochat.gpt import GPT
from nanochat.step import LossScale
from nanochat.train import compile as compiling
from tests.test_step import CPU, gpt, optimizers_of, rows, split


@pytest.fixture(autouse=True)
def compile_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """compiled() sets this variable for good; here it is put back."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


def compile_it(model: GPT, wanted: bool | None) -> Any:
    return compiling.compiled(model, wanted, (2, 16), CPU, model.blocks)


def failing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the compiler is broken\nsecond line")

    monkeypatch.setattr(device, "compiler_missing", lambda compute: "")
    monkeypatch.setattr(torch, "compile", broken)


def test_a_failing_compiler_is_named_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_compiler(monkeypatch)
    model = gpt()
    before = [p.detach().clone() for p in model.parameters()]
    assert compile_it(model, None) is model
    said = capsys.readouterr().err
    assert "torch.compile failed, and training continues uncompiled: the compiler is broken" in said
    assert "second line" not in said
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before, strict=True))


def test_a_failing_compiler_stops_a_run_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_compiler(monkeypatch)
    with pytest.raises(RuntimeError, match="the compiler is broken"):
        compile_it(gpt(), True)


@pytest.mark.parametrize(
    ("wanted", "missing", "all_ranks_can", "why"),
    [
        (None, "no C++ compiler", True, "no C++ compiler"),
        (None, "", False, "another rank has no compiler"),  # the first pass takes all ranks, or the others would wait
        (False, "", True, "switched off"),
    ],
)
def test_where_nothing_is_compiled_the_log_says_why(
    wanted: bool | None, missing: str, all_ranks_can: bool, why: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    failing_compiler(monkeypatch)
    monkeypatch.setattr(device, "compiler_missing", lambda compute: missing)
    monkeypatch.setattr(compiling.parallel, "least", lambda value, compute: int(all_ranks_can and value))
    model = gpt()
    assert compile_it(model, wanted) is model
    assert f"not compiled: {why}" in capsys.readouterr().out


def test_a_missing_compiler_that_was_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "compiler_missing", lambda compute: "no C++ compiler")
    with pytest.raises(UserError, match=r"--compile .* no C.. compiler"):
        compile_it(gpt(), True)


@pytest.mark.slow
def test_compiled_updates_equal_eager_ones_and_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced through dynamo and autograd, with the generated code left out: that is what takes a compiler's time."""
    real = torch.compile
    monkeypatch.setattr(device, "compiler_missing", lambda compute: "")
    monkeypatch.setattr(torch, "compile", lambda model, **rest: real(model, backend="aot_eager", **rest))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    models = [gpt(), gpt()]
    fast = compile_it(models[0], True)
    assert fast is not models[0]
    pairs = [(fast, optimizers_of(models[0])), (models[1], optimizers_of(models[1]))]
    for seed in range(3):
        outcomes = [
            update(model, optimizers, split(rows(seed)[:2], [2] * 4), LossScale(), CPU) for model, optimizers in pairs
        ]
        assert outcomes[0].loss == pytest.approx(outcomes[1].loss, rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)
