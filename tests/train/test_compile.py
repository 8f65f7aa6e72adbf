"""When a model is compiled, what that costs, and compiled models on several threads."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat import device
from nanochat.gpt import GPT, GPTConfig
from nanochat.platforms.nvidia import fp8
from nanochat.platforms.operations import Operations
from nanochat.runtime import parallel, signals
from nanochat.train import compile as compiling
from nanochat.train.compile import Ahead, Costs
from tests.support.qwens import tiny_qwen
from tests.support.tiny_training import CPU

SHAPE = GPTConfig(sequence_len=128, vocab_size=64, n_layer=1, n_head=2, n_kv_head=2, n_embd=64, window_pattern="L")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_two_threads_repeat_a_step_bit_for_bit() -> None:
    """The batch repeats a few tokens, so that both threads add to the same rows of the tables."""
    if missing := device.compiler_missing(CPU):
        pytest.skip(missing)
    torch.manual_seed(1)
    model = GPT(SHAPE)
    model.init_weights()
    torch.nn.init.normal_(model.lm_head.weight)
    for table in model.value_embeds.values():
        torch.nn.init.normal_(table.weight)
    fast = compiling.compiled(model, True, (32, 128), CPU, list(model.blocks))
    tokens, targets = torch.randint(4, (32, 128)), torch.randint(64, (32, 128))
    found = []
    for _ in range(20):
        model.zero_grad()
        fast(tokens, targets, "sum").backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for again in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], again, strict=True))


# --- whether compiling pays ------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a compiler that takes no time, and no kernels that make compiling needless."""
    monkeypatch.setattr(type(CPU.operations), "needs_no_compiler", lambda self, head_dim, dtype: "")
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.setattr(device, "compiler_missing", lambda compute: "")
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **rest: real(model, backend="eager", **rest))
    return folder


def tiny() -> GPT:
    model = GPT(SHAPE)
    model.init_weights()
    return model


def is_compiled(ahead: Ahead | None, wanted: bool | None = None) -> bool:
    model = tiny()
    return compiling.compiled(model, wanted, (1, 16), CPU, model.compile_groups(), ahead) is not model


def passes_take(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(compiling, "_timed_pass", lambda *_: seconds)


def never_timed(*_: Any) -> float:
    pytest.fail("a pass was timed")


@pytest.mark.usefixtures("cache")
def test_a_handful_of_steps_is_never_compiled_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "_timed_pass", never_timed)
    assert not is_compiled(Ahead(steps=5, passes=1, least_seconds=0.01))
    cost = compiling.MODEL_SECONDS + 2 * compiling.LAYER_SECONDS  # a layer and the head
    assert f"not compiled: 5 steps left would not repay about {cost:.0f} s" in capsys.readouterr().out


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("steps", "seconds", "pays"), [(1000, 0.01, False), (1000, 0.1, True), (50, 0.1, False)])
def test_a_timed_pass_decides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int, seconds: float, pays: bool
) -> None:
    """1,000 steps of 0.1 s save 30 s, those of 0.01 s save 3 s; compiling takes 18 s."""
    passes_take(monkeypatch, seconds / 2)
    assert is_compiled(Ahead(steps, passes=2, least_seconds=1e-6)) == pays
    assert ("compiling for the first time, about 18 s" in capsys.readouterr().out) == pays


@pytest.mark.usefixtures("cache")
def test_no_pass_is_timed_where_even_the_peak_of_a_card_would_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(CPU.platform), "peak_flops", lambda self: (1e12, "a card"))
    monkeypatch.setattr(compiling, "_timed_pass", never_timed)
    assert is_compiled(Ahead(steps=5, passes=1, least_seconds=60.0))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("products", "pays"), [(0.05, True), (0.095, False)])
def test_compiling_saves_no_time_of_the_products(monkeypatch: pytest.MonkeyPatch, products: float, pays: bool) -> None:
    """1,000 steps of .1 s save 30 s, but only 5 s if the products take .095 s of each."""
    passes_take(monkeypatch, 0.1)
    assert is_compiled(Ahead(steps=1000, passes=1, least_seconds=products)) == pays


@pytest.mark.usefixtures("cache")
def test_a_gpt_whose_kernels_are_as_fast_is_compiled_only_if_asked_for_or_as_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Operations, "needs_no_compiler", lambda self, head_dim, dtype: "kernels are as fast")
    passes_take(monkeypatch, 1.0)
    many = Ahead(steps=10**6, passes=1, least_seconds=0.1)
    assert not is_compiled(many) and not is_compiled(None)
    assert "not compiled: kernels are as fast (--compile overrides)" in capsys.readouterr().out
    assert is_compiled(many, wanted=True) and is_compiled(replace(many, as_before=True))
    with monkeypatch.context() as patch:
        patch.setattr(parallel, "least", lambda value, compute: 0)  # another rank has no such kernels
        assert compiling._unneeded(tiny(), CPU) == ""
    qwen: Any = tiny_qwen("qwen3")
    layers = qwen.compile_groups()
    ready = compiling.compiled(qwen, None, (1, 16), CPU, layers, many)
    assert compiling.is_compiled(ready, layers), "the kernels serve the GPT alone"


@pytest.mark.usefixtures("cache")
def test_the_layers_of_a_published_model_share_one_code_that_serves_passes_with_gradients_alone() -> None:
    """Eager and compiled passes have the same losses and gradients; a validation compiles nothing."""
    counters = torch._dynamo.utils.counters["stats"]
    idx = torch.arange(34).view(2, 17)
    losses: list[Any] = []
    for compiles in (False, True):
        qwen: Any = tiny_qwen("qwen3")
        before = counters["unique_graphs"]
        fast = compiling.compiled(qwen, True, (2, 16), CPU, qwen.compile_groups()) if compiles else qwen
        graphs = counters["unique_graphs"] - before
        loss = fast(idx[:, :-1], idx[:, 1:])
        loss.backward()
        losses.append((loss, qwen.blocks[0].self_attn.q_proj.weight.grad))
        with torch.no_grad():
            fast(idx[:, :5])
        assert counters["unique_graphs"] - before == graphs
    assert graphs == 1
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("cache")
def test_the_flags_override_what_pays_and_a_resumed_run_stays_compiled() -> None:
    few = Ahead(steps=1, passes=1, least_seconds=1e-6)
    assert not is_compiled(few)
    assert is_compiled(few, wanted=True)
    assert is_compiled(replace(few, as_before=True)), "its steps must round as those before"
    assert is_compiled(None), "nothing is known of the steps"
    assert not is_compiled(Ahead(10**6, 1, 1e6), wanted=False)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("main", [False, True])
def test_rank_0_decides_for_all_ranks(monkeypatch: pytest.MonkeyPatch, main: bool) -> None:
    """What this rank finds is the opposite of what rank 0 says."""
    monkeypatch.setattr(parallel, "agree", lambda value, compute: int(main))
    passes_take(monkeypatch, 0.0 if main else 1e6)
    assert is_compiled(Ahead(steps=1000, passes=1, least_seconds=1e-6)) == main


def test_a_timed_pass_leaves_no_gradients() -> None:
    model = tiny()
    assert compiling._timed_pass(model, compiling.sum_of_losses((1, 16), CPU), CPU) > 0
    assert all(parameter.grad is None for parameter in model.parameters())


# --- what compiling costs --------------------------------------------------------------------------


def test_the_estimate_learns_from_what_this_machine_measured(cache: Path) -> None:
    assert Costs("a", 5).estimate() == (compiling.MODEL_SECONDS + 5 * compiling.LAYER_SECONDS, "for the first time")
    Costs("a", 5).measured(60.0, first=True)
    assert Costs("a", 5).estimate() == (60 * compiling.CACHED_SHARE, "from the cache")
    slower = 60 / (compiling.MODEL_SECONDS + 5 * compiling.LAYER_SECONDS)
    expected = slower * (compiling.MODEL_SECONDS + 13 * compiling.LAYER_SECONDS)
    assert Costs("b", 13).estimate() == (pytest.approx(expected), "for the first time")
    Costs("a", 5).measured(4.0, first=False)
    Costs("a", 5).measured(9.0, first=False)  # beside other work
    assert Costs("a", 5).estimate() == (4.0, "from the cache")
    assert Costs("b", 13).estimate()[0] == pytest.approx(expected), "the first compilation is still known"
    (cache / "costs.json").write_text("{damaged")
    assert Costs("a", 5).estimate()[1] == "for the first time"


def test_the_next_stage_knows_what_this_one_compiled(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny()
    costs = compiling._costs(model, (1, 16), CPU, model.compile_groups())
    costs.measured(50.0, first=True)
    assert is_compiled(None)
    assert "compiling from the cache, about 10 s" in capsys.readouterr().out
    other = compiling._costs(model, (2, 16), CPU, model.compile_groups())
    assert other.estimate()[1] == "for the first time", "another shape compiles again"
    fp8.use(model)
    eight_bits = compiling._costs(model, (1, 16), CPU, model.compile_groups())
    assert eight_bits.estimate()[1] == "for the first time", "other products compile again"


# --- signals -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("failure", ["none", "its compiler was killed too"])
def test_a_signal_ends_a_ranks_compilation_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failure: str
) -> None:
    """A launcher gives its ranks 30 seconds; a compilation may take minutes."""
    monkeypatch.setenv("RANK", "0")
    compute = replace(CPU, pulse=type(CPU.pulse)(moments=3))

    def endless(*_: Any, **__: Any) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                pass
        except signals.Stopped:
            if failure == "none":
                raise
            raise RuntimeError(failure) from None
        pytest.fail("the compilation went on")

    monkeypatch.setattr(torch, "compile", endless)
    model = tiny()
    with pytest.raises(signals.Stopped), signals.caught(compute.pulse):
        compute.pulse.beat()
        compiling.compiled(model, None, (1, 16), compute, model.compile_groups())
    assert "SIGTERM: stopping\n" in capfd.readouterr().err
    assert not compute.pulse.at_once
