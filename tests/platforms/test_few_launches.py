"""The arithmetic in few operators, forward and backward, against the plain arithmetic and autograd's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nanochat.context import Rows
from nanochat.gpt import offset_keys
from nanochat.loss import chunked_loss
from nanochat.platforms import few_launches
from tests.support.tensors import draw


def check(few: Callable[..., Tensor], plain: Callable[..., Tensor], *given: Tensor) -> None:
    """Both give the same value, and the same gradients of a random mixture of it."""
    results, gradients = [], []
    for function in (few, plain):
        leaves = [x.clone().requires_grad_() for x in given]
        result = function(*leaves)
        (result * draw(*result.shape, seed=9)).sum().backward()
        results.append(result.detach())
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_squared_relu() -> None:
    zero = torch.zeros(())
    check(lambda x: few_launches.squared_relu(x, zero), lambda x: x.relu().square(), draw(5, 7))


def test_a_stream_mixed_layer_by_layer_with_its_start() -> None:
    """x0 is handed from layer to layer, so that its gradients are added up on the way back."""

    def few(x: Tensor, x0: Tensor, a: Tensor, b: Tensor) -> Tensor:
        for i in range(3):
            x, x0 = few_launches.mix(x.tanh(), x0, a[i], b[i])
        return x + x0.sin()

    def plain(x: Tensor, x0: Tensor, a: Tensor, b: Tensor) -> Tensor:
        for i in range(3):
            x = a[i] * x.tanh() + b[i] * x0
        return x + x0.sin()

    check(few, plain, draw(2, 3, 4), draw(2, 3, 4, seed=1), draw(3, seed=2), draw(3, seed=3))


def test_a_small_matrix_on_the_first_channels_beside_a_large_one_on_all() -> None:
    def few(x: Tensor, small: Tensor, large: Tensor) -> Tensor:
        x, narrow = few_launches.narrow(x * 2, small)
        return torch.cat((narrow, x @ large.mT), dim=-1)

    def plain(x: Tensor, small: Tensor, large: Tensor) -> Tensor:
        x = x * 2
        return torch.cat((x[..., :5] @ small.mT, x @ large.mT), dim=-1)

    check(few, plain, draw(2, 3, 8), draw(4, 5, seed=1), draw(6, 8, seed=2))


def test_keys_with_an_offset() -> None:
    for batch, length, heads, channels in ((2, 5, 3, 8), (1, 1, 1, 4)):
        none = torch.zeros(batch, 1, heads, 2, channels // 4)
        check(
            lambda k, none=none: few_launches.offset_keys(k, none),
            lambda k: offset_keys(k, Rows().previous(k)),
            draw(batch, length, heads, channels),
        )


def test_gated_values_are_added() -> None:
    def plain(v: Tensor, value: Tensor, logits: Tensor) -> Tensor:
        return v + (3 * torch.sigmoid(logits)).unsqueeze(-1) * value

    check(few_launches.add_values, plain, draw(2, 3, 4, 6), draw(2, 3, 4, 6, seed=1), draw(2, 3, 4, seed=2))


def test_sums_of_squares() -> None:
    parts = [draw(3, 4), draw(9, seed=1).bfloat16()]
    expected = torch.stack([part.float().square().sum() for part in parts])
    torch.testing.assert_close(few_launches.square_sums(parts), expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("vocab", "rows", "chunk"), [(50, 64, 100), (64, 64, 7), (50, 50, 1)])
def test_the_loss_and_both_gradients_are_those_of_the_loss_in_chunks(
    vocab: int, rows: int, chunk: int, weighted: bool
) -> None:
    targets = torch.randint(0, vocab, (20,), generator=torch.Generator().manual_seed(3))
    targets[::6] = -1
    weights = draw(20, seed=4) if weighted else None

    def few(x: Tensor, head: Tensor) -> Tensor:
        return few_launches.chunked_loss(x, head, targets, vocab, weights, chunk, -1e30)[None]

    def plain(x: Tensor, head: Tensor) -> Tensor:
        return chunked_loss(x, head, targets, vocab, weights, chunk)[None]

    check(few, plain, 3 * draw(20, 16), 3 * draw(rows, 16, seed=1))


def test_the_loss_of_the_least_likely_token_is_exact() -> None:
    """Logits of 15 and -15: a probability of 1e-18, whose logarithm must not be that of zero."""
    x, head = torch.ones(1, 4), torch.cat((torch.full((31, 4), 1e3), torch.full((1, 4), -1e3)))
    few = few_launches.chunked_loss(x, head, torch.tensor([31]), 32, None, 8, -1e30)
    assert float(few) == pytest.approx(30 + torch.tensor(31.0).log().item(), rel=1e-6)


def test_a_bf16_head_keeps_fp32_gradients_of_its_master() -> None:
    x, head = draw(20, 16).bfloat16().requires_grad_(), draw(64, 16, seed=1).requires_grad_()
    targets = torch.arange(20)
    few_launches.chunked_loss(x, head, targets, 64, None, 8, -1e30).backward()
    few = (x.grad, head.grad)
    x.grad = head.grad = None
    chunked_loss(x, head, targets, 64, None, 8).backward()
    assert few[0] is not None and few[1] is not None and few[1].dtype == torch.float32
    torch.testing.assert_close(few, (x.grad, head.grad), rtol=0.05, atol=0.02)
