"""The forecast of a step's memory, against what torch allocates when such a step really runs."""

import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nanochat.common import UserError
from nanochat.device import DTYPES, Compute, compute_init, local
from nanochat.models.lora import LoraConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.planner import forecast as planner_forecast
from nanochat.planner.forecast import (
    Memory,
    Tuning,
    build_model,
    build_optimizers,
    forecasts,
    take_step,
)
from nanochat.planner.tuning import flags_of
from nanochat.platforms.operations import Operations
from nanochat.runtime import parallel
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"sequence_len": 256, "vocab_size": 4096, "n_layer": 4, "n_embd": 128, "n_head": 4,
                         "n_kv_head": 2, "head_dim": 32, "n_hidden": 384, "tied": 0}  # fmt: skip
QWEN3 = QwenConfig(**SIZES)
OF_DELTANETS = {"layers": "DDDA", "rotary_dim": 8, "zero_centred": 1, "output_gate": 1, "delta_key_heads": 2,
                "delta_value_heads": 2, "delta_key_dim": 32, "delta_value_dim": 32}  # fmt: skip
QWEN35 = QwenConfig(**SIZES, **OF_DELTANETS)


def out_of_sight(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What is put aside lies in numpy's memory, which torch's profiler does not see."""
    dtype, kept = x.dtype, x.detach().view(torch.uint8).numpy().copy()
    return lambda: torch.from_numpy(kept).clone().view(dtype)


def measured(tuning: Tuning, compute: Compute) -> Memory:
    """Bytes of such a step on real tensors, by the allocations that torch's profiler records."""
    compute = replace(compute, dtype=DTYPES[tuning.dtype], operations=Operations())
    model = build_model(tuning, compute)
    model.offload_tensor = out_of_sight
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    for buffer in model.buffers():
        buffer.zero_()
    optimizers = build_optimizers(model, compute)

    def step() -> None:
        take_step(tuning, model, optimizers)
        optimizers.zero_grad()

    step()
    parameters = [local(tensor) for tensor in (*model.parameters(), *model.buffers())]
    state = [local(here) for here, _, _ in optimizers.state().values()]
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*parameters, *state))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return Memory(held, held + max(itertools.accumulate(size for _, size in changes)))


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        pytest.param(QWEN3, {"lora": LoraConfig()}, id="adapter"),
        pytest.param(QWEN35, {"lora": LoraConfig(), "base_bits": 4}, id="adapter on 4 bits"),
        pytest.param(QWEN35, {"lora": None, "several_passes": True}, id="full, two passes"),
        pytest.param(QWEN3, {"lora": None, "checkpoint_activations": True}, id="full, activations computed again"),
        pytest.param(
            QWEN35,
            {"lora": LoraConfig(), "checkpoint_activations": True, "offload_activations": True},
            id="adapter, inputs of layers moved away",
        ),
    ],
)
def test_one_rank_takes_what_was_forecast(shape: QwenConfig, changes: dict, told: Callable[[Tuning], Memory]) -> None:
    tuning = Tuning(shape, rows=2, **changes)
    expected, real = told(tuning), measured(tuning, compute_init("cpu"))
    assert abs(expected.state / real.state - 1) < 0.02
    assert abs(expected.peak / real.peak - 1) < 0.1, (expected, real)


def test_inputs_of_layers_that_are_moved_away_take_no_memory_of_the_card(told: Callable[[Tuning], Memory]) -> None:
    shape = replace(QWEN3, n_layer=6, sequence_len=512, vocab_size=64)
    kept, moved = (Tuning(shape, LoraConfig(), 2, False, True, away) for away in (False, True))
    inputs = 6 * 2 * 512 * shape.n_embd * 2  # bytes of all layers in bf16; one is back when the step takes the most
    saved = measured(kept, compute_init("cpu")).peak - measured(moved, compute_init("cpu")).peak
    assert 0.5 * inputs < saved < inputs
    assert abs((told(kept).peak - told(moved).peak) / saved - 1) < 0.1


def worker_measures(compute: Compute, tunings: list[Tuning]) -> list[Memory]:
    return [measured(tuning, compute) for tuning in tunings]


def test_two_ranks_take_what_was_forecast(told: Callable[[Tuning], Memory]) -> None:
    adapter = LoraConfig()
    modes: list[tuple[parallel.Sharding, LoraConfig | None]] = [("grad", None), ("full", None), ("full", adapter)]
    tunings = [Tuning(QWEN3, lora, 2, shard=shard, ranks=2) for shard, lora in modes]
    for tuning, real in zip(tunings, run_ranks(2, worker_measures, tunings)[0], strict=True):
        expected = told(tuning)
        assert abs(expected.peak / real.peak - 1) < 0.1, (tuning.shard, expected, real)


def test_each_of_several_servers_holds_a_copy_of_the_model(told: Callable[[Tuning], Memory]) -> None:
    full = Tuning(QWEN3, None, ranks=4, shard="full")
    two_servers = full.on_servers_of(3)
    assert two_servers.ranks_on_host == 2 and full.on_servers_of(4) == full
    assert told(two_servers).state == told(replace(full, ranks=2)).state > 1.9 * told(full).state


SAVING = {"checkpoint_activations": True, "offload_activations": True}


@pytest.mark.parametrize(
    "tuning",
    [
        Tuning(replace(QWEN3, n_layer=6), LoraConfig(), checkpoint_activations=True),
        Tuning(replace(QWEN3, n_layer=6), None, several_passes=True, ranks=2),
        Tuning(replace(QWEN3, n_layer=6), LoraConfig(), several_passes=True, ranks=8, shard="full", **SAVING),
        Tuning(
            replace(QWEN35, n_layer=8, layers="DA", sequence_len=64),
            LoraConfig(),
            several_passes=True,
            ranks=2,
            shard="full",
        ),
    ],
    ids=lambda tuning: f"{tuning.ranks} x {flags_of(tuning)}",
)
def test_shallow_models_tell_the_memory_of_a_deep_one(
    tuning: Tuning, told: Callable[[Tuning], Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forecasts count three and four layers, or one and two patterns of layers, and add up the others."""
    expected = told(tuning)
    monkeypatch.setattr(planner_forecast, "SHALLOW", tuning.shape.n_layer)
    assert told(tuning) == expected


def test_one_process_makes_several_forecasts_and_stops_at_the_first_that_fails(
    told: Callable[[Tuning], Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that are chosen for a card do not stop it."""
    adapter, full = Tuning(QWEN3, LoraConfig()), Tuning(QWEN3, None, ranks=2, shard="full")
    memories = forecasts([adapter, full, replace(adapter, lora=LoraConfig(targets=("no_such_proj",)))])
    expected = [told(adapter), told(full)]
    monkeypatch.setenv("NANOCHAT_KERNELS", "fused")
    assert [next(memories), next(memories)] == expected
    with pytest.raises(UserError, match=r"could not be forecast: .*no_such_proj"):
        next(memories)


def test_the_process_ends_with_the_last_forecast_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = tmp_path / "python"
    endless.write_text('#!/bin/sh\necho \'{"state": 1, "peak": 2}\'\nexec sleep 1000\n')
    endless.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(endless))
    processes = []

    class Watched(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    memories = forecasts([Tuning(QWEN3, None)] * 2)
    assert next(memories) == Memory(1, 2)
    del memories
    assert [process.returncode for process in processes] == [-signal.SIGKILL]
