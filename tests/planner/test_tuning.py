"""Fine-tuning that does not fit a card: what is refused, and which setting is named instead."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from nanochat.checkpoint_manager.families import on_meta
from nanochat.checkpoint_manager.huggingface.config import published
from nanochat.common import UserError
from nanochat.device import compute_init
from nanochat.models.lora import LoraConfig, add_adapters
from nanochat.models.qwen.config import QwenConfig
from nanochat.planner import tuning
from nanochat.planner.__main__ import Config, main
from nanochat.planner.forecast import Memory, Tuning
from nanochat.planner.published_tuning import RUNS, SHAPES, SPEEDS
from nanochat.planner.recipes import MODELS
from nanochat.planner.tuning import check_fits, flags_of, nearest, refusal, remedies
from nanochat.planner.tuning_speed import counts_of

SHAPE = QwenConfig(sequence_len=1024, vocab_size=512, n_layer=2, n_embd=64, n_head=2, n_kv_head=1, head_dim=32,
                   n_hidden=128)  # fmt: skip
FULL = Tuning(SHAPE, None, rows=4, ranks=2)


def size(asked: Tuning) -> Memory:
    """A stand-in that is quick: state shared by ranks, and activations by rows, tokens and whether they are kept."""
    state = (8 if asked.lora else 100) // (asked.ranks if asked.shard == "full" else 1)
    kept = 1 if asked.checkpoint_activations else 4
    return Memory(state, state + kept * asked.rows * asked.shape.sequence_len // 64)


def sizes(tunings: Sequence[Tuning]) -> Iterator[Memory]:
    return map(size, tunings)


def test_what_changes_the_result_comes_last() -> None:
    assert [flags_of(one) for one in remedies(FULL)] == [
        "--device_batch_size=2 --max_length=1024 --lora_rank=0 --shard=grad",
        "--device_batch_size=1 --max_length=1024 --lora_rank=0 --shard=grad",
        "--device_batch_size=1 --max_length=1024 --lora_rank=0 --checkpoint_activations --shard=grad",
        "--device_batch_size=1 --max_length=1024 --lora_rank=0 --offload_activations --shard=grad",
        "--device_batch_size=1 --max_length=1024 --lora_rank=0 --offload_activations --shard=full",
        "--device_batch_size=1 --max_length=512 --lora_rank=0 --offload_activations --shard=full",
        "--device_batch_size=1 --max_length=256 --lora_rank=0 --offload_activations --shard=full",
        "--device_batch_size=1 --max_length=256 --offload_activations --shard=full",
        "--device_batch_size=1 --max_length=256 --base_bits=4 --offload_activations --shard=full",
    ]


def test_an_adapter_keeps_its_rows_and_gets_a_base_in_4_bits() -> None:
    adapter = replace(FULL, lora=LoraConfig(), rows=1, ranks=1)
    assert [flags_of(one) for one in remedies(adapter)][:4] == [
        "--device_batch_size=1 --max_length=1024 --checkpoint_activations",
        "--device_batch_size=1 --max_length=1024 --offload_activations",
        "--device_batch_size=1 --max_length=1024 --base_bits=4 --offload_activations",
        "--device_batch_size=1 --max_length=512 --base_bits=4 --offload_activations",
    ]


def test_a_base_in_4_bits_is_named_for_no_model_with_experts() -> None:
    experts = replace(FULL, shape=replace(SHAPE, mlps="E", n_experts=4, experts_per_token=2, n_expert_hidden=64))
    for lora in (None, LoraConfig()):
        assert not any(one.base_bits == 4 for one in remedies(replace(experts, lora=lora)))


@pytest.mark.parametrize("finetune", [True, False])
def test_a_plan_of_experts_in_4_bits_is_refused(tmp_path: Path, finetune: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published(A3B)))
    with pytest.raises(UserError, match="cannot hold the experts"):
        main(Config(chip="910B3", model=tmp_path, base_bits=4, finetune=finetune))


def test_a_host_has_no_other_memory_to_move_inputs_to() -> None:
    assert not any(one.offload_activations for one in remedies(replace(FULL, on_host=True)))


@pytest.mark.parametrize(
    "budget, flags",
    [
        (250, "--device_batch_size=2 --max_length=1024 --lora_rank=0 --shard=grad"),
        (120, "--device_batch_size=1 --max_length=1024 --lora_rank=0 --checkpoint_activations --shard=grad"),
        (70, "--device_batch_size=1 --max_length=1024 --lora_rank=0 --offload_activations --shard=full"),
        (10, "--device_batch_size=1 --max_length=256 --offload_activations --shard=full"),
    ],
)
def test_the_first_setting_that_fits_is_named(budget: float, flags: str) -> None:
    fits = nearest(FULL, budget, sizes)
    assert fits is not None and flags_of(fits) == flags
    error = refusal(FULL, size(FULL), budget, sizes)
    assert error.exit_code == 2 and str(error).endswith(f"The nearest setting that fits: {flags}")


def test_where_nothing_fits_that_is_said() -> None:
    assert nearest(FULL, 1, sizes) is None
    assert "No setting of one row and 256 tokens fits" in str(refusal(FULL, size(FULL), 1, sizes))


def test_a_step_that_does_not_fit_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, asked = compute_init("cpu"), Tuning(SHAPE, LoraConfig(), rows=2)
    model = on_meta(SHAPE, compute)
    add_adapters(model, LoraConfig())

    def told(one: Tuning) -> Memory:
        return Memory(one.rows * 2**20, one.rows * 10 * 2**20)

    monkeypatch.setattr(tuning, "reachable", lambda compute: 15 * 2**20)
    words = r"20\.0 MiB of each card.* 13\.5 MiB .*: --device_batch_size=1 "
    with pytest.raises(UserError, match=words):
        check_fits(asked, model, compute, partial(map, told))
    check_fits(replace(asked, rows=1), model, compute, partial(map, told))


def test_what_surely_fits_is_not_forecast() -> None:
    compute = compute_init("cpu")

    def never(one: Tuning) -> Memory:
        raise AssertionError("takes seconds for nothing")

    check_fits(Tuning(SHAPE, None), on_meta(SHAPE, compute), compute, partial(map, never))


@pytest.mark.slow
def test_the_command_reads_a_config_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published(SHAPE)))
    command = [sys.executable, "-m", "nanochat.planner", "--model", str(tmp_path), "--chip", "910B3", "--ranks", "2",
               "--lora_rank=0", "--max_length=512", "--shard=full"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "--device_batch_size=1 --max_length=512 --lora_rank=0 --shard=full\n"
    assert f"910B3 x 2: a step of {tmp_path.name} takes" in done.stderr


def test_the_published_shapes_have_the_parameters_of_their_names() -> None:
    compute = compute_init("cpu")
    for name, shape in {**SHAPES, **MODELS}.items():
        billions = on_meta(shape, compute).parameter_counts()["total"] / 1e9
        assert abs(billions / float(name.rpartition("-")[2][:-1]) - 1) < 0.12, (name, billions)
    assert {run.model for run in (*RUNS, *SPEEDS)} == set(SHAPES)


A3B = QwenConfig(
    sequence_len=2048, vocab_size=151_936, n_layer=48, n_embd=2048, n_head=32, n_kv_head=4, head_dim=128, n_hidden=6144,
    tied=0, mlps="E", n_experts=128, experts_per_token=8, n_expert_hidden=768,
)  # fmt: skip


@pytest.mark.slow
def test_an_adapter_of_qwen3_30b_a3b_fits_8_cards_of_64_gb(told: Callable[[Tuning], Memory]) -> None:
    """The publisher says 30.5 billion parameters, 3.3 billion activated."""
    counts = counts_of(A3B, LoraConfig())
    assert counts.total == pytest.approx(30.5e9, rel=0.002)
    assert counts.active + 2 * counts.head == pytest.approx(3.3e9, rel=0.02)
    tuning = Tuning(A3B, LoraConfig(), checkpoint_activations=True, shard="full", ranks=8)
    memory = told(tuning)
    assert 2 * counts.total / 8 < memory.state < memory.peak < 0.9 * 64e9
