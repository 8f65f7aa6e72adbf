"""The arithmetic of Muon, which steps matrices along their orthogonalized momentum.

Muon is by Jordan 2024 (kellerjordan.github.io/posts/muon). Added to it are row equilibration (arXiv
2603.28254), Polar-Express coefficients (2505.16932), Frobenius renormalisation (2602.21545),
per-neuron variance (NorMuon, 2510.05491) and cautious decay. The arithmetic is that of upstream
nanochat. optim.py has the optimizer: its state, and how ranks share the work.

Shapes: K matrices of one shape (rows, cols).
"""

from collections.abc import Sequence

import torch
import torch.nn as nn
from torch import Tensor

# The coefficients (a, b, c) of five steps X <- a X + (b A + c A A) X, where A = X X^T, for a safety
# factor of 2e-2 and a cushion of 2.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(
    x: Tensor,  # (K, rows, cols), singular values at most 1
) -> Tensor:  # (K, rows, cols)
    """Return the matrices, their singular values brought near 1 by polynomials in Gram matrices."""
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:  # so that the Gram matrix is the smaller of the two
        x = x.mT
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def orthogonalize(
    g: Tensor,  # (K, rows, cols) in the dtype to multiply in
) -> Tensor:  # (K, rows, cols) fp32, Frobenius norm sqrt(min(rows, cols))
    """Return each matrix's approximate orthogonal factor, after scaling its rows to equal norms."""
    g_fp32 = g.float()
    row_norm = g_fp32.norm(dim=-1, keepdim=True)
    mean_norm = g_fp32.norm(dim=(-2, -1), keepdim=True) / g.size(-2) ** 0.5
    x = g * (mean_norm / row_norm.clamp_min(1e-6)).to(g.dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-6)
    x = polar_express(x).float()
    target_norm = min(g.size(-2), g.size(-1)) ** 0.5
    return x * (target_norm / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-6))


def equalize(
    g: Tensor,  # (K, rows, cols) fp32
    variance: Tensor,  # (K, rows, 1) or (K, 1, cols) fp32 running mean squares; updated in place
    beta: float,
) -> Tensor:  # (K, rows, cols)
    """Return the matrices, each neuron divided by the root of its running mean square (NorMuon).

    A neuron is a row of a tall or square matrix, and a column of a wide one. Every matrix is then
    scaled back to its original norm.
    """
    shorter = -1 if variance.size(-1) == 1 else -2
    mean_square = g.square().mean(dim=shorter, keepdim=True)
    variance.lerp_(mean_square, 1 - beta)
    scale = variance.clamp_min(1e-10).rsqrt()
    norm_before = mean_square.sum(dim=(-2, -1), keepdim=True).sqrt()
    norm_after = (mean_square * scale.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return g * (scale * (norm_before / norm_after.clamp_min(1e-10)))


def variance_shape(rows: int, cols: int) -> tuple[int, int]:
    """Return the shape of a matrix's running mean squares.

    There is one for each row of a tall or square matrix, and one for each column of a wide one.
    """
    return (rows, 1) if rows >= cols else (1, cols)


class MuonArithmetic:
    """Computes one step of Muon in plain torch, which a device's faster version must match."""

    stacks: bool  # whether all matrices of one shape are stepped together
    is_capturable = False  # whether a step, with tensors as its rates, can be captured as a graph

    def __init__(self, stacks: bool = True):
        self.stacks = stacks

    def place(self, matrices: Sequence[nn.Parameter]) -> None:
        """Move matrices to where they can be stepped fastest, keeping the Parameter objects.

        This class leaves them where they are.
        """

    def update(
        self,
        g: Tensor,  # (K, rows, cols) Nesterov momenta in the dtype to multiply in
        variance: Tensor,  # as in equalize(); updated in place
        beta: float,
        lr: float | Tensor,
    ) -> Tensor:  # (K, rows, cols) fp32
        """Return the updates of K matrices, which subtract() will multiply by the learning rate."""
        del lr
        return equalize(orthogonalize(g), variance, beta)

    def subtract(
        self,
        matrices: Sequence[Tensor],  # (rows, cols) fp32 each; changed in place
        updates: Tensor,  # (K, rows, cols) fp32 from update(); may be changed
        lr: float | Tensor,
        weight_decay: float | Tensor,
    ) -> None:
        """Subtract the updates, times the learning rate, from the matrices, with cautious decay.

        Entries that the update would move away from zero do not decay.
        """
        for matrix, update in zip(matrices, updates, strict=True):
            if weight_decay:
                agrees = (update * matrix >= 0).to(matrix.dtype)
                update = update + weight_decay * matrix * agrees
            matrix.sub_(update, alpha=lr)  # pyright: ignore[reportArgumentType]
