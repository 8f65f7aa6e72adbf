"""Matrices in 8 bits against the matrices that they round."""

from dataclasses import replace

import pytest
import torch

from nanochat.engine import Engine
from nanochat.generate.sampling import Sampling
from nanochat.linear import Linear
from nanochat.models.lora import LoraConfig, add_adapters, init_adapters
from nanochat.models.qwen.int8 import MOST_ROWS, Int8, hold_in_int8
from nanochat.models.qwen.model import Qwen
from tests.support.qwens import CONFIGS, VOCABULARY, tiny_qwen
from tests.support.tiny_model import tiny_tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1])
def test_rows_are_multiplied_with_the_rounded_matrix(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(50, 48, generator=generator), torch.randn(rows, 1, 48, generator=generator).to(dtype)
    weight[3], weight[4, 0] = 0, 300  # a channel of zeros, and one whose largest weight hides the others
    packed = Int8(weight, dtype)
    assert (packed.whole().float() - weight).abs().max() <= 300 / 127 * (0.51 if dtype == torch.float32 else 0.6)
    y = packed(x)
    wanted = x.double() @ (packed.numbers.double() * packed.scales.double()[:, None]).T
    assert y.dtype == dtype and y.shape == (rows, 1, 50) and not y[..., 3].any()
    torch.testing.assert_close(
        y.double(), wanted, rtol=0, atol=float(wanted.abs().max()) * (1e-6, 8e-3)[dtype != torch.float32]
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3.5"])
def test_a_model_in_8_bits_is_the_model_with_rounded_matrices(family: str) -> None:
    packed, rounded = tiny_qwen(family), tiny_qwen(family)
    plain = rounded(torch.arange(20)[None])
    with torch.no_grad():
        matrices = {module.weight for module in rounded.modules() if isinstance(module, Linear)}
        for parameter in {*matrices, rounded.head.weight}:
            parameter.copy_(Int8(parameter, torch.float32).whole())
    hold_in_int8(packed)
    idx = torch.arange(20)[None]
    found = packed(idx)
    torch.testing.assert_close(found, rounded(idx), rtol=1e-4, atol=1e-4)
    assert 0 < (found - plain).abs().max() < 0.2 * plain.abs().max()
    targets = idx.roll(-1, 1)
    torch.testing.assert_close(packed(idx, targets), rounded(idx, targets), rtol=1e-4, atol=1e-4)
    sampling = Sampling(0.0, max_tokens=12, ignore_eos=True)
    said = [Engine(model, tiny_tokenizer(VOCABULARY), 2).generate([[1, 2, 3], [4] * 30], sampling)
            for model in (packed, rounded)]  # fmt: skip
    assert [one.tokens for one in said[0]] == [one.tokens for one in said[1]]


def test_adapters_add_to_matrices_in_8_bits() -> None:
    models = []
    for _ in range(2):
        model = tiny_qwen("qwen3")
        add_adapters(model, LoraConfig(3))
        init_adapters(model)
        models.append(model)
    plain = models[0](torch.arange(9)[None])
    hold_in_int8(models[1])
    assert (models[1](torch.arange(9)[None]) - plain).abs().max() < 0.2 * plain.abs().max()


def test_matrices_that_torch_would_read_past_their_end_are_left_alone() -> None:
    """torch 2.13 crashes on them in bf16."""
    config = replace(CONFIGS["qwen3"], n_embd=40)
    model = Qwen(config, torch.bfloat16)
    model.init_weights()
    idx = torch.arange(9)[None]
    plain = model.to(torch.bfloat16)(idx)
    hold_in_int8(model)
    assert model.head.multiply is None
    packed = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, Linear) and m.multiply}
    assert packed == {"o_proj", "down_proj"}  # whose inputs are heads and hidden channels
    for rows in (idx, idx[:, :1]):
        assert (model(rows) - plain[:, : rows.size(1)]).abs().max() < 0.1
