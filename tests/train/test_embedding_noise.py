"""Noise on embeddings: its size, and that it depends on the step and the row alone."""

import torch
from torch import Tensor

from nanochat.train.embedding_noise import EmbeddingNoise
from tests.support.qwens import VOCABULARY, tiny_qwen
from tests.support.tiny_model import on_cpu

CHANNELS = 256


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(0, VOCABULARY, (8, 50), generator=generator)
    return 3 * torch.randn(8, 50, CHANNELS, generator=generator), idx


def noise_of(step: int, x: Tensor, idx: Tensor) -> Tensor:
    noise = EmbeddingNoise(0.5, CHANNELS, 1, on_cpu())
    noise.renew(step)
    return noise(x, idx) - x


def test_noise_is_uniform_up_to_a_share_of_each_embedding_s_size() -> None:
    x, idx = inputs()
    x[0] *= 100
    relative = noise_of(0, x, idx) / x.square().mean(-1, keepdim=True).sqrt()
    assert 0.49 < relative.abs().max() < 0.501
    torch.testing.assert_close(relative.square().mean(), torch.tensor(0.25 / 3), rtol=0.03, atol=0)
    assert relative.mean().abs() < 0.005


def test_noise_differs_by_step_and_token_but_not_by_how_rows_are_divided() -> None:
    x, idx = inputs()
    noise = noise_of(7, x, idx)
    parts = [noise_of(7, x[row : row + 2], idx[row : row + 2]) for row in range(0, 8, 2)]
    assert torch.equal(torch.cat(parts), noise)
    assert not torch.isclose(noise_of(8, x, idx), noise).all(-1).any()
    same = torch.ones(1, 2, CHANNELS)
    first, second = noise_of(7, same, torch.tensor([[5, 5]]))[0]
    assert not torch.isclose(first, second).any()


def test_only_training_reads_noise() -> None:
    model = tiny_qwen("qwen3")
    _, idx = inputs()
    with torch.no_grad():
        plain = model(idx, idx)
        model.embedding_noise = EmbeddingNoise(0.5, model.config.n_embd, 1, on_cpu())
        assert torch.equal(model(idx, idx), plain)
    loss = model(idx, idx)
    assert not torch.isclose(loss, plain)
    loss.backward()
    assert model.model.embed_tokens.weight.grad is not None
