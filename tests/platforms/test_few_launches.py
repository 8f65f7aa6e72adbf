"""The arithmetic in few operators, forward and backward, against the plain arithmetic and autograd's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nanochat.gpt import exclude_own
from nanochat.loss import Softcapped, chunked_loss
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
        return chunked_loss(x, head, targets, Softcapped(vocab), weights, chunk)[None]

    check(few, plain, 3 * draw(20, 16), 3 * draw(rows, 16, seed=1))


def test_the_loss_of_the_least_likely_token_is_exact() -> None:
    """Logits of 15 and -15: a probability of 1e-18, whose logarithm must not be that of zero."""
    x, head = torch.ones(1, 4), torch.cat((torch.full((31, 4), 1e3), torch.full((1, 4), -1e3)))
    few = few_launches.chunked_loss(x, head, torch.tensor([31]), 32, None, 8, -1e30)
    assert float(few) == pytest.approx(30 + torch.tensor(31.0).log().item(), rel=1e-6)


def test_the_component_along_the_own_value_and_its_gradients() -> None:
    def few(y: Tensor, own: Tensor) -> Tensor:
        return few_launches.exclude_own(y, own, torch.zeros(()))

    check(few, exclude_own, draw(2, 5, 3, 8), draw(2, 5, 3, 8, seed=1))
