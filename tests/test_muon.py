"""Muon against a slow implementation of its formulas, one matrix at a time, in float64."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nanochat.muon import MuonArithmetic, equalize, orthogonalize, variance_shape
from nanochat.optim import Muon
from nanochat.platforms.muon import ForeachMuon, FusedMuon
from tests.support.tensors import draw

# As printed in the Polar-Express paper (arXiv 2505.16932) for five steps.
COEFFICIENTS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
SHAPES = [(12, 12), (8, 20), (20, 8), (1, 6), (6, 1), (5, 12)]


@dataclass
class Slow:
    """One matrix and its state in float64; step() follows the formulas line by line."""

    p: Tensor
    momentum: Tensor
    variance: Tensor  # (longer side,)

    @staticmethod
    def begin(p: Tensor) -> "Slow":
        return Slow(p.double(), torch.zeros_like(p, dtype=torch.float64), torch.zeros(max(p.shape)).double())

    def step(self, g: Tensor, lr: float, momentum: float, decay: float) -> None:
        rows, cols = self.p.shape
        g = g.double()
        self.momentum = momentum * self.momentum + (1 - momentum) * g
        x = (1 - momentum) * g + momentum * self.momentum
        size = math.sqrt(float((x * x).sum()))
        x = torch.stack([row * (size / math.sqrt(rows)) / max(float(row.norm()), 1e-6) for row in x])
        x = x / (1.01 * x.norm() + 1e-6)
        for a, b, c in COEFFICIENTS:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x * math.sqrt(min(rows, cols)) / float(x.norm().clamp_min(1e-6))
        mean = (x * x).mean(dim=1 if rows >= cols else 0)
        self.variance = 0.9 * self.variance + 0.1 * mean
        root = self.variance.clamp_min(1e-10).sqrt()
        y = x / (root[:, None] if rows >= cols else root[None])
        y = y * (x.norm() / y.norm().clamp_min(1e-10))
        rate = lr * math.sqrt(max(1.0, rows / cols))
        self.p = self.p - rate * y - rate * decay * self.p * (y * self.p >= 0)


def test_steps_equal_the_formulas_under_changing_settings() -> None:
    """Three matrices of every shape, stacked and mixed; learning rate, momentum and decay change at every step."""
    named, slow = [], {}
    for number, shape in enumerate(SHAPES * 3):
        name = f"m{number}"
        named.append((name, torch.nn.Parameter(0.1 * draw(*shape, seed=number))))
        slow[name] = Slow.begin(named[-1][1].detach())
    muon = Muon(named)
    for step in range(6):
        lr, momentum, decay = 0.01 * (1 + step % 3), 0.85 + 0.02 * step, 0.3 - 0.05 * step
        muon.param_groups[0].update(lr=lr, momentum=momentum, weight_decay=decay)
        for number, (name, parameter) in enumerate(named):
            parameter.grad = draw(*parameter.shape, seed=1000 * step + number) * 10.0 ** (number % 5 - 2)
            slow[name].step(parameter.grad, lr, momentum, decay)
        muon.step()
    for name, parameter in named:
        torch.testing.assert_close(parameter.detach().double(), slow[name].p, atol=1e-6, rtol=1e-6, msg=name)
    state = muon.named_state()
    for name, reference in slow.items():
        momentum = state[f"{name}.momentum"][0].double()
        assert (momentum - reference.momentum).norm() < 1e-6 * reference.momentum.norm()
        variance = state[f"{name}.variance"][0].flatten().double()
        torch.testing.assert_close(variance, reference.variance, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (32, 128)])
def test_orthogonalize_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    x = orthogonalize(draw(3, *shape) * torch.tensor([1e-4, 1.0, 1e4])[:, None, None])
    values = torch.linalg.svdvals(x)
    assert values.min() > 0.8 and values.max() < 1.2
    torch.testing.assert_close(x.norm(dim=(-2, -1)), torch.full((3,), math.sqrt(min(shape))))


def test_orthogonalize_in_bf16_is_close() -> None:
    g = draw(2, 24, 48)
    exact, rough = orthogonalize(g), orthogonalize(g.bfloat16())
    assert rough.dtype == torch.float32
    assert (exact - rough).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_a_gradient_of_zeros_or_with_a_row_of_zeros_is_harmless(shape: tuple[int, int]) -> None:
    parameter = torch.nn.Parameter(draw(*shape))
    before = parameter.detach().clone()
    muon = Muon([("m", parameter)])
    for _ in range(3):
        parameter.grad = torch.zeros(shape)
        muon.step()
    assert torch.equal(parameter.detach(), before)
    parameter.grad = draw(*shape, seed=3)
    parameter.grad[2] = 0
    muon.step()
    assert parameter.isfinite().all()
    assert not torch.equal(parameter.detach(), before)


def test_fp16_is_not_used_for_the_products() -> None:
    for dtype, used in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        assert Muon([("m", torch.nn.Parameter(draw(4, 4)))], dtype=dtype).dtype == used


def test_bf16_products_leave_fp32_masters_and_state() -> None:
    parameter = torch.nn.Parameter(draw(8, 16))
    exact = torch.nn.Parameter(draw(8, 16))
    for p, dtype in ((parameter, torch.bfloat16), (exact, torch.float32)):
        muon = Muon([("m", p)], lr=0.1, dtype=dtype)
        p.grad = draw(8, 16, seed=1)
        muon.step()
        assert {value.dtype for value, _, _ in muon.named_state().values()} == {torch.float32}
    assert 0 < (parameter - exact).abs().max() < 0.01


# --- in few operators ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 12, 5), (4, 5, 12)])
def test_steps_in_few_operators_are_the_same_steps(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(7)
    slow = torch.zeros(shape[0], *variance_shape(*shape[1:]))
    fast = slow.clone()
    for _ in range(3):
        g = torch.randn(shape, generator=generator) * 1e-3
        g[0, 1] = 0  # a neuron without gradient
        expected = equalize(orthogonalize(g), slow, 0.9) * 0.02
        update = FusedMuon().update(g.clone(), fast, 0.9, 0.02)
        torch.testing.assert_close(update, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-9)
    nothing = FusedMuon().update(torch.zeros(shape), fast, 0.9, torch.tensor(0.02))
    assert not nothing.any()


@pytest.mark.parametrize("side_by_side", [False, True])
def test_an_update_is_subtracted_with_cautious_decay(side_by_side: bool) -> None:
    block, update = torch.tensor([[[1.0, -1.0, 2.0]], [[0.0, 3.0, -2.0]]]), torch.tensor([[[0.5, 0.5, 0.0]]] * 2)
    held = list(block) if side_by_side else [matrix.clone() for matrix in block]
    FusedMuon().subtract(held, update, 0.2, 0.5)
    expected = torch.tensor([[[1 - 0.5 - 0.1, -1.5, 2 - 0.2]], [[-0.5, 3 - 0.5 - 0.3, -2 + 0.2]]])
    torch.testing.assert_close(torch.stack(held), expected)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_one_launch_for_all_matrices_subtracts_the_same_bits(decay: float) -> None:
    matrices, updates = draw(3, 5, 7), draw(3, 5, 7, seed=1)
    plain, fast = list(matrices.clone()), list(matrices.clone())
    MuonArithmetic().subtract(plain, updates, 0.02, decay)
    ForeachMuon().subtract(fast, updates, 0.02, decay)
    assert torch.equal(torch.stack(plain), torch.stack(fast))
