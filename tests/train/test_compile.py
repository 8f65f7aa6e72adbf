"""Compiled models on several threads; the tests of loop.py and of the scripts cover the rest of compiling."""

from collections.abc import Iterator

import pytest
import torch

from nanochat import device
from nanochat.gpt import GPT, GPTConfig
from nanochat.train import compile as compiling
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
