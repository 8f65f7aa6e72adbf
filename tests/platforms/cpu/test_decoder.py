"""Decoding passes in one call of C++, against the same operators called by Python."""

from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.families import cast_matrices
from nanochat.context import Cached
from nanochat.models.lora import LoraConfig, add_adapters
from nanochat.models.qwen.int8 import hold_in_int8
from nanochat.platforms import host
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.platforms.cpu.panels import serve_here
from tests.support.qwens import EVERY, tiny_qwen

pytestmark = pytest.mark.skipif(not serve_here(torch.float32), reason="panels are for AVX2 and AVX512")
# Families with a part that decode.h lacks: recurrent layers, experts, output gates, biases beside head norms or in MLPs.
BY_PYTHON = {"qwen3.5", "qwen3.5 yarn", "qwen3-moe", "qwen3.5-moe", "llama biases", "qwen3 biases"}


IN_BLOCKS = {"n_embd": 64, "n_hidden": 128, "head_dim": 32}  # products in bf16 take blocks of 64 outputs


def served(family: str, bits: int = 16, dtype: torch.dtype = torch.float32, **sizes: Any) -> tuple[Any, CpuOperations]:
    operations = CpuOperations()
    model = tiny_qwen(family, dtype=dtype, operations=operations, **sizes)
    if dtype != torch.float32:
        cast_matrices(model, dtype)
    if bits == 8:
        hold_in_int8(model)
    operations.serve(model)
    return model, operations


@torch.inference_mode()
def decoded(model: Any, rows: int, steps: int = 4) -> list[torch.Tensor]:
    """The activations of a prompt and of some tokens after it, in slots 1 and later, and the cache."""
    generator = torch.Generator().manual_seed(3)
    cache = model.new_cache(rows + 1, 64)
    slots = slice(1, rows + 1)
    prompts = torch.randint(300, (rows, 45), generator=generator)
    lengths = torch.tensor([45, 20, 33])[:rows]
    model.hidden(prompts, Cached(cache, prompts, slots, lengths))
    states = []
    for step in range(steps):
        idx = torch.randint(300, (rows, 3 if step == 1 else 1), generator=generator)
        states.append(model.hidden(idx, Cached(cache, idx, slots)))
    return [*states, cache.k[:, slots, :20], cache.v[:, slots, :20], cache.positions]


def check_one_call(model: Any) -> None:
    decoder = model.decoder
    for rows in (1, 3):
        model.decoder = decoder
        in_one_call = decoded(model, rows)
        model.decoder = None
        assert all(map(torch.equal, in_one_call, decoded(model, rows)))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("family", sorted(EVERY))
def test_a_pass_in_one_call_is_the_pass_that_python_computes(family: str, bits: int) -> None:
    model, _ = served(family, bits)
    assert (model.decoder is None) == (family in BY_PYTHON)
    check_one_call(model)


@pytest.mark.skipif("avx512_bf16" not in host.cpu_flags(), reason="blocks of bf16 numbers are for AVX512-BF16")
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("family", ["llama3", "smollm3", "qwen2", "qwen3"])
def test_a_pass_in_bf16_in_one_call_is_the_pass_that_python_computes(family: str, bits: int) -> None:
    model, _ = served(family, bits, torch.bfloat16, **IN_BLOCKS)
    assert model.decoder is not None
    check_one_call(model)


def test_a_token_beyond_its_slot_is_refused_and_what_is_no_decoding_is_left_to_python() -> None:
    model, operations = served("qwen3")
    cache, idx = model.new_cache(1, 2), torch.tensor([[5]])
    decoded(model, 1)  # makes rotary tables beyond this cache, which would refuse the token otherwise
    with torch.inference_mode():
        prompt = torch.tensor([[5] * 9])
        assert model.decoder(prompt, Cached(model.new_cache(1, 9), prompt)) is None
        assert model.decoder(idx, None) is None
        half = model.new_cache(1, 2, torch.bfloat16)
        assert model.decoder(idx, Cached(half, idx)) is None
        for _ in range(2):
            assert model.decoder(idx, Cached(cache, idx)) is not None
        with pytest.raises(IndexError, match="2 positions"):
            model.decoder(idx, Cached(cache, idx))
    assert model.decoder(idx, Cached(model.new_cache(1, 2), idx)) is None  # gradients may be wanted
    add_adapters(model, LoraConfig(rank=2))
    with torch.inference_mode():
        assert model.decoder(idx, Cached(model.new_cache(1, 2), idx)) is None
    operations.release(model)
    assert model.decoder is None
