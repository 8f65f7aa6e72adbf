"""Muon's arithmetic for devices on which every operator costs a launch.

update() and subtract() work on K matrices of one shape (rows, cols).
"""

from collections.abc import Sequence

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.muon import MuonArithmetic, polar_express
from nanochat.platforms.together import as_stack, place_together


class ForeachMuon(MuonArithmetic):
    """Matches MuonArithmetic bit for bit, but subtracts from all matrices of a shape at once."""

    def subtract(
        self,
        matrices: Sequence[Tensor],
        updates: Tensor,
        lr: float | Tensor,
        weight_decay: float | Tensor,
    ) -> None:
        """Implement MuonArithmetic.subtract for all matrices at once."""
        if weight_decay:
            stack = torch.stack(list(matrices))
            agrees = (updates * stack >= 0).to(stack.dtype)
            updates = updates + weight_decay * stack * agrees
        torch._foreach_sub_(  # pyright: ignore[reportPrivateImportUsage]
            list(matrices),
            list(updates),
            alpha=lr,  # pyright: ignore[reportArgumentType]
        )


class FusedMuon(MuonArithmetic):
    """Matches MuonArithmetic up to rounding, with fewer operators and less memory traffic.

    Updates include the learning rate, and a step can be captured as a graph.
    """

    is_capturable = True

    def place(self, matrices: Sequence[nn.Parameter]) -> None:
        """Move the matrices of each shape into one block of memory."""
        place_together(matrices)

    def update(
        self,
        g: Tensor,
        variance: Tensor,
        beta: float,
        lr: float | Tensor,
    ) -> Tensor:
        """Return the updates, including the learning rate, and change `variance` in place.

        To read large tensors less often, norms and factors are derived from the norms of rows or
        columns.
        """
        x = polar_express(_equilibrated(g))
        size = min(g.size(-2), g.size(-1)) ** 0.5  # the Frobenius norm of an update

        longer = -1 if variance.size(-1) == 1 else -2
        norms = _norms(x, dim=longer)
        norm = _norms(norms, dim=(-2, -1)).clamp_min_(1e-6)
        norms.div_(norm)
        share = (1 - beta) * size**2 / g.size(longer)
        variance.mul_(beta)
        variance.addcmul_(norms, norms, value=share)

        scale = variance.clamp_min(1e-10).rsqrt_()
        norm_after = _norms(norms * scale, dim=(-2, -1))
        norm.mul_(norm_after).clamp_min_(1e-16)
        scale.div_(norm)
        scale.mul_(lr * size)
        return x.float().mul_(scale)

    def subtract(
        self,
        matrices: Sequence[Tensor],
        updates: Tensor,
        lr: float | Tensor,
        weight_decay: float | Tensor,
    ) -> None:
        """Implement MuonArithmetic.subtract for updates that already include the learning rate."""
        decay = lr * weight_decay
        stack = as_stack(matrices)
        agrees = (updates * stack >= 0) * decay
        updates.addcmul_(stack, agrees)
        is_view = stack.data_ptr() == matrices[0].data_ptr()
        if is_view:
            stack.sub_(updates)
        else:
            torch._foreach_sub_(  # pyright: ignore[reportPrivateImportUsage]
                list(matrices),
                list(updates),
            )


def _equilibrated(g: Tensor) -> Tensor:  # (K, rows, cols)
    """Return the matrices scaled to equal row norms, with singular values of at most 1."""
    row_norms = _norms(g, dim=-1)
    norm = _norms(row_norms, dim=-2)
    factor = norm / row_norms.clamp_min(1e-6)
    norm = _norms(row_norms * factor, dim=-2)
    root = g.size(-2) ** 0.5
    norm.mul_(1.01).add_(1e-6 * root)
    factor.div_(norm)
    return g * factor.to(g.dtype)


def _norms(x: Tensor, dim: int | tuple[int, int]) -> Tensor:
    """Return fp32 norms over the given dimensions, which are kept with size 1."""
    return torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=torch.float32)
