"""4-bit matrices against a slow quantiser, and their products against those of the dequantised matrices."""

from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from nanochat.checkpoint_manager.families import families
from nanochat.checkpoint_manager.huggingface.weights import load_weights
from nanochat.common import UserError
from nanochat.linear import Linear, matrix_shapes
from nanochat.models import nf4
from nanochat.models.lora import LoraConfig, add_adapters, init_adapters
from nanochat.models.nf4 import LEVELS, Nf4, Tables, hold_in_nf4, nf4_matrices, scale_levels
from nanochat.models.qwen.model import Qwen
from tests.support.qwens import tiny_qwen, write_folder


def weight_of(outputs: int = 70, inputs: int = 320) -> Tensor:
    """Random weights with a block of zeros and a block with an outlier; their 350 scales fill a block and a part."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3)) * 0.02
    weight[3, 64:128] = 0
    weight[5, 7] = 3
    return weight


def packed(weight: Tensor, dtype: torch.dtype = torch.float32) -> Nf4:
    matrix = Nf4(*weight.shape, Tables(dtype))
    matrix.fill(lambda first, count: weight[first : first + count])
    return matrix


def nearest(x: float, levels: list[float]) -> int:
    return min(range(len(levels)), key=lambda i: (abs(levels[i] - x), i))


def slow_scales(largest: list[float]) -> list[float]:
    """Quantise the scales of all blocks to 8 bits in blocks of 256, and dequantise them."""
    levels = scale_levels().tolist()
    mean = sum(largest) / len(largest)
    scales = []
    for begin in range(0, len(largest), 256):
        group = [scale - mean for scale in largest[begin : begin + 256]]
        most = max(abs(scale) for scale in group)
        scales += [levels[nearest(scale / most, levels)] * most + mean for scale in group]
    return scales


def test_levels_are_the_means_of_quantiles_that_the_paper_describes() -> None:
    """Appendix E of arXiv 2305.14314: 8 levels above zero, 7 below, and zero itself, divided by the largest."""
    end = 0.9677083

    def half(levels: int) -> list[float]:
        places = torch.linspace(end, 0.5, levels + 1, dtype=torch.float64)[:-1]
        return [NormalDist().inv_cdf(float(place)) for place in places]

    quantiles = sorted([*half(8), 0.0, *(-quantile for quantile in half(7))])
    torch.testing.assert_close(torch.tensor(LEVELS), torch.tensor(quantiles) / max(quantiles), atol=1e-6, rtol=0)


def test_levels_of_scales_are_a_byte_and_twice_as_dense_in_each_decade() -> None:
    levels = scale_levels()
    assert len(levels) == 256 and bool((levels.diff() > 0).all()) and levels[-1] == 1
    for decade in range(7):
        inside = (levels > 10.0 ** (decade - 7)) & (levels < 10.0 ** (decade - 6))
        assert int(inside.sum()) == 2**decade


@pytest.mark.parametrize("chunk", [640, 1 << 24])
def test_codes_and_values_are_those_of_a_slow_quantiser(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(nf4, "CHUNK", chunk)
    weight = weight_of()
    matrix = packed(weight)
    codes = torch.stack((matrix.codes >> 4, matrix.codes & 15), dim=-1).flatten().tolist()
    values, blocks = matrix.dequantised().flatten().tolist(), weight.flatten().view(-1, 64).tolist()
    largest = [max(abs(value) for value in block) for block in blocks]
    scales = slow_scales(largest)
    for i, block in enumerate(blocks):
        for j, value in enumerate(block):
            code = nearest(value / (largest[i] or 1.0), list(LEVELS))
            assert codes[64 * i + j] == code
            assert values[64 * i + j] == pytest.approx(LEVELS[code] * scales[i], rel=1e-5, abs=1e-9)
    assert (matrix.dequantised() - weight).std() < 0.1 * weight.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [640, 1 << 24])
def test_the_product_and_the_inputs_gradient_are_those_of_the_dequantised_matrix(
    monkeypatch: pytest.MonkeyPatch, chunk: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(nf4, "CHUNK", chunk)
    matrix = packed(weight_of(), dtype)
    dense = matrix.dequantised()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 320, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(2, 5, 70, generator=generator).to(dtype)
    y, expected = matrix(x), x.float() @ dense.float().T
    (found,) = torch.autograd.grad(y, x, grad)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert y.dtype == found.dtype == dense.dtype == dtype
    torch.testing.assert_close(y.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.float(), grad.float() @ dense.float(), atol=tolerance, rtol=tolerance)


def with_adapters(seed: int = 1) -> Qwen:
    model = tiny_qwen("qwen3.5", seed)
    add_adapters(model, LoraConfig(rank=3, targets=("o_proj", "out_proj", "q_proj")))
    init_adapters(model)
    return model


def test_a_model_in_4_bits_is_the_model_with_rounded_matrices_and_counts_as_before() -> None:
    rounded, held = with_adapters(), with_adapters()
    counts, flops, roles = held.parameter_counts(), held.flops_per_token(), held.parameter_roles()
    hold_in_nf4(held, torch.float32)
    with torch.no_grad():
        weights = dict(rounded.named_parameters())
        for name, matrix in nf4_matrices(held).items():
            matrix.fill(lambda first, count, weight=weights[name]: weight[first : first + count])
            weights[name].copy_(matrix.dequantised())
    assert {name.rpartition("_attn.")[2] for name in nf4_matrices(held)} == {"out_proj.weight", "o_proj.weight"}
    idx, targets = torch.arange(20)[None], torch.arange(1, 21)[None]
    for model in (rounded, held):
        model(idx, targets).backward()
    torch.testing.assert_close(held(idx), rounded(idx), rtol=1e-5, atol=1e-5)
    gradients = {name: value.grad for name, value in rounded.named_parameters() if value.grad is not None}
    for name, value in held.named_parameters():
        if value.grad is not None:
            torch.testing.assert_close(value.grad, gradients.pop(name), rtol=1e-4, atol=1e-6)
    assert not gradients
    assert (held.parameter_counts(), held.flops_per_token(), held.parameter_roles()) == (counts, flops, roles)


def test_a_matrix_takes_little_more_than_a_quarter_of_its_bytes_in_16_bits() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(Linear(576, 1536), Linear(1536, 576))
    entries = sum(outputs * inputs for outputs, inputs in matrix_shapes(model).values())
    hold_in_nf4(model, torch.bfloat16)
    held = sum(tensor.numel() * tensor.itemsize for tensor in model.buffers())
    assert held <= 0.27 * 2 * entries and not sum(parameter.numel() for parameter in model.parameters())


def test_weights_are_loaded_matrix_by_matrix_and_nan_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen3")
    published = tiny_qwen("qwen3")
    with torch.device("meta"):
        model = families()["qwen"].model(published.config)
    hold_in_nf4(model, torch.float32)
    model.to_empty(device="cpu")
    load_weights(model, tmp_path)
    for name, matrix in nf4_matrices(model).items():
        weight = dict(published.named_parameters())[name]
        torch.testing.assert_close(matrix.dequantised(), packed(weight).dequantised(), rtol=0, atol=0)
    assert torch.equal(model.model.embed_tokens.weight, published.model.embed_tokens.weight)
    damage(tmp_path)
    with pytest.raises(UserError, match=r"o_proj\.weight .* NaN or infinite"):
        load_weights(model, tmp_path)


def damage(folder: Path) -> None:
    """Write NaN into the output matrix of a layer."""
    from safetensors.torch import load_file, save_file

    for path in folder.glob("model-*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("layers.1.self_attn.o_proj.weight"):
                tensor[0, 0] = torch.nan
        save_file(tensors, path, metadata={"format": "pt"})
