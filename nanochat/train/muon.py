"""Muon: momentum, then the nearest orthogonal matrix, for the matrices inside the layers.

Jordan 2024 (kellerjordan.github.io/posts/muon), with row equilibration (arXiv 2603.28254), Polar-Express
coefficients (2505.16932), Frobenius renormalisation (2602.21545), per-neuron variance (NorMuon, 2510.05491) and
cautious decay. The arithmetic is upstream nanochat's HEAD. Matrices of one shape are stacked and stepped together.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from nanochat.device import local
from nanochat.platforms.base import Platform
from nanochat.platforms.operations import Operations
from nanochat.platforms.together import as_stack, place_together
from nanochat.runtime.parallel import gathered, place_of

# (a, b, c) of five steps X <- a X + (b A + c A A) X with A = X X^T, for a safety factor of 2e-2 and a cushion of 2.
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
    """Bring all singular values close to 1, by polynomials in the Gram matrix."""
    tall = x.size(-2) > x.size(-1)
    if tall:  # the Gram matrix of the shorter side is the smaller one
        x = x.mT
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalize(
    g: Tensor,  # (K, rows, cols) in the dtype to multiply in
) -> Tensor:  # (K, rows, cols) fp32, Frobenius norm sqrt(min(rows, cols))
    """Replace each matrix by an approximation of its orthogonal factor, after scaling its rows to equal norms."""
    wide = g.float()
    target = wide.norm(dim=(-2, -1), keepdim=True) / g.size(-2) ** 0.5
    x = g * (target / wide.norm(dim=-1, keepdim=True).clamp_min(1e-6)).to(g.dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-6)
    x = polar_express(x).float()
    size = min(g.size(-2), g.size(-1)) ** 0.5
    return x * (size / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-6))


def equalize(
    g: Tensor,  # (K, rows, cols) fp32
    variance: Tensor,  # (K, rows, 1) or (K, 1, cols) fp32 running mean square along the longer side; updated here
    beta: float,
) -> Tensor:  # (K, rows, cols)
    """Divide each neuron by the root of its running mean square, and keep each matrix's norm (NorMuon)."""
    along = -1 if variance.size(-1) == 1 else -2
    mean = g.square().mean(dim=along, keepdim=True)
    variance.lerp_(mean, 1 - beta)
    scale = variance.clamp_min(1e-10).rsqrt()
    before = mean.sum(dim=(-2, -1), keepdim=True).sqrt()
    after = (mean * scale.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return g * (scale * (before / after.clamp_min(1e-10)))


def equal_steps(
    g: Tensor,  # (K, rows, cols) in the dtype to multiply in
    variance: Tensor,  # as in equalize()
    beta: float,
    rate: float | Tensor,  # number or ()
) -> Tensor:  # (K, rows, cols) fp32
    """equalize(orthogonalize(g)) times `rate` up to rounding, with few operators that move few bytes: norms and factors
    come from norms of rows, and each large tensor is read once."""
    rows = torch.linalg.vector_norm(g, dim=-1, keepdim=True, dtype=torch.float32)
    root = g.size(-2) ** 0.5
    factor = torch.linalg.vector_norm(rows, dim=-2, keepdim=True) / rows.clamp_min(1e-6)
    after = torch.linalg.vector_norm(rows * factor, dim=-2, keepdim=True)
    x = polar_express(g * factor.div_(after.mul_(1.01).add_(1e-6 * root)).to(g.dtype))
    along = -1 if variance.size(-1) == 1 else -2
    norms = torch.linalg.vector_norm(x, dim=along, keepdim=True, dtype=torch.float32)
    whole = torch.linalg.vector_norm(norms, dim=(-2, -1), keepdim=True).clamp_min_(1e-6)
    norms.div_(whole)
    size = min(g.size(-2), g.size(-1)) ** 0.5
    variance.mul_(beta).addcmul_(norms, norms, value=(1 - beta) * size**2 / g.size(along))
    scale = variance.clamp_min(1e-10).rsqrt_()
    after = torch.linalg.vector_norm(norms * scale, dim=(-2, -1), keepdim=True)
    return x.float().mul_(scale.div_(whole.mul_(after).clamp_min_(1e-16)).mul_(rate * size))


def subtract(
    held: list[Tensor],  # (rows, cols) fp32 each
    update: Tensor,  # (K, rows, cols) fp32, the learning rate included; changed here
    decay: float | Tensor,  # number or (): learning rate times weight decay
) -> None:
    """Subtract an update from matrices, with cautious decay; in few operators where the matrices lie side by side."""
    here = as_stack(held)
    agrees = (update * here >= 0) * decay  # only where decay and update agree in sign
    update.addcmul_(here, agrees)
    if here.data_ptr() == held[0].data_ptr():
        here.sub_(update)
    else:
        torch._foreach_sub_(held, list(update))  # pyright: ignore[reportPrivateImportUsage]


def variance_shape(rows: int, cols: int) -> tuple[int, int]:
    """The shape of a matrix's running mean squares: one number for each row of a tall matrix, else for each column."""
    return (rows, 1) if rows >= cols else (1, cols)


@dataclass
class _Stack:
    """Matrices of one shape: the rows that this rank holds, and their state."""

    parameters: list[Tensor]
    names: list[str]
    rows: int
    cols: int
    owned: list[list[int]]  # shard -> the matrices that are gathered whole there
    row_counts: list[int]  # shard -> how many rows of each matrix it holds
    mine: list[
        int
    ]  # the matrices that this rank orthogonalizes: its share of those that are gathered here
    order: Tensor  # (K,) all of `owned` in order, on the device: a list would be copied there in every step
    place: Tensor  # (K,) where each matrix stands in `order`
    momentum: Tensor  # (K, local rows, cols)
    variance: Tensor  # (mine, rows, 1) or (mine, 1, cols)


class _StepGraph:
    """Muon's step as a graph: gradients and rates are copied to where the graph reads them."""

    def __init__(self, platform: Platform):
        self.platform = platform
        self.warm = False  # the first step runs operator by operator, which a capture asks for
        self._gradients: list[Tensor] = []
        self._rates = self._host = torch.empty(0)
        self._replay: Callable[[], None] | None = None

    def step(
        self, gradients: list[Tensor], rates: Sequence[float], work: Callable[..., None]
    ) -> None:
        """Take a step, captured at the first call. `work` takes the gradients and the rates, then as tensors ()."""
        if self._replay is None:
            self._gradients = [gradient.clone() for gradient in gradients]
            self._rates = torch.tensor(rates, device=gradients[0].device)
            self._replay = self.platform.captured(
                lambda: work(self._gradients, self._rates.unbind())
            )
        else:
            torch._foreach_copy_(self._gradients, gradients)  # pyright: ignore[reportPrivateImportUsage]
            self._host = torch.tensor(
                rates
            ).pin_memory()  # kept, since the copy may still be under way
            self._rates.copy_(self._host, non_blocking=True)
        self._replay()


class Muon(torch.optim.Optimizer):
    """One instance for all matrices, on one rank or with parameters that FSDP2 has sharded by rows.

    With N shards the ranks exchange the momenta of each stack all-to-all, so that each rank gets some matrices whole,
    multiplies them, and sends the rows of the update back. Replicas hold the same momenta: each replica multiplies its
    share of the matrices, and all gather the products.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        lr: float = 0.02,
        momentum: float = 0.95,
        beta2: float = 0.9,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
        operations: Operations | None = None,
    ):
        """`dtype` is the compute dtype; `operations` say whether matrices of one shape are stepped together."""
        named = list(named)
        self.operations = operations or Operations()
        super().__init__(
            [parameter for _, parameter in named],
            {"lr": lr, "momentum": momentum, "beta2": beta2, "weight_decay": weight_decay},
        )
        # fp16 has too few exponent bits for the Gram matrices' powers
        self.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self.place = place_of(named[0][1])
        # FSDP2 has its own references to the parameters of several ranks, replicated ones too
        if self.operations.fewest_launches and self.place.shards == self.place.replicas == 1:
            place_together([cast(nn.Parameter, parameter) for _, parameter in named])
        by_shape: dict[tuple[int, int], list[tuple[str, Tensor]]] = {}
        for name, parameter in named:
            rows, cols = parameter.shape
            by_shape.setdefault((rows, cols), []).append((name, parameter))
        groups = [by_shape[shape] for shape in sorted(by_shape)]
        if not self.operations.stacks_matrices:
            groups = [[member] for group in groups for member in group]
        self.stacks = []
        self.graph: _StepGraph | None = None
        first = 0  # deal matrices to ranks in turn, across stacks, so that no rank gets all the remainders
        for group in groups:
            self.stacks.append(self._stack(group, first))
            first += len(group)

    def _stack(self, members: list[tuple[str, Tensor]], first: int) -> _Stack:
        rows, cols = members[0][1].shape
        place = self.place
        owned: list[list[int]] = [[] for _ in range(place.shards)]
        for i in range(len(members)):
            owned[(first + i) % place.shards].append(i)
        mine = owned[place.shard][place.replica :: place.replicas]
        row_counts = place.row_counts(rows)
        device = local(members[0][1]).device
        momentum = torch.zeros(len(members), row_counts[place.shard], cols, device=device)
        variance = torch.zeros((len(mine), *variance_shape(rows, cols)), device=device)
        order = torch.tensor([i for indices in owned for i in indices], device=device)
        return _Stack(
            [p for _, p in members],
            [n for n, _ in members],
            rows,
            cols,
            owned,
            row_counts,
            mine,
            order,
            order.argsort(),
            momentum,
            variance,
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every matrix from its gradient; a matrix without a gradient is an error in the model."""
        settings = self.param_groups[0]
        rates: tuple[float, ...] = settings["lr"], settings["momentum"], settings["weight_decay"]
        gradients = [
            as_stack([local(p.grad) for p in s.parameters if p.grad is not None])
            for s in self.stacks
        ]
        if self.graph is not None and self.graph.warm:
            self.graph.step(
                gradients, rates, lambda given, now: self._steps(given, now, settings["beta2"])
            )
            return
        self._steps(gradients, rates, settings["beta2"])
        if self.graph is not None:
            self.graph.warm = True

    def _steps(self, gradients: Sequence[Tensor], rates: Sequence[Any], beta2: float) -> None:
        lr, momentum, weight_decay = rates
        for stack, gradient in zip(self.stacks, gradients, strict=True):
            self._step(stack, gradient, lr, momentum, beta2, weight_decay)

    def capture(self, platform: Platform) -> None:
        """Replay steps as one launch, from the second on; only where learning rates may be tensors."""
        if self.operations.fewest_launches and self.place.shards == self.place.replicas == 1:
            self.graph = _StepGraph(platform)

    def _step(
        self,
        stack: _Stack,
        gradients: Tensor,
        lr: float,
        momentum: float,
        beta2: float,
        weight_decay: float,
    ) -> None:
        stack.momentum.lerp_(gradients, 1 - momentum)
        g = gradients.lerp_(stack.momentum, momentum).to(self.dtype)  # Nesterov
        whole = g if self.place.shards == 1 else self._to_owners(g, stack)
        whole = whole[self.place.replica :: self.place.replicas]
        lr = lr * max(1.0, stack.rows / stack.cols) ** 0.5
        few = self.operations.fewest_launches
        if whole.size(0):
            whole = (
                equal_steps(whole, stack.variance, beta2, lr)
                if few
                else equalize(orthogonalize(whole), stack.variance, beta2)
            )
        if self.place.replicas > 1:
            whole = self._from_replicas(whole, stack)
        update = whole if self.place.shards == 1 else self._to_rows(whole, stack)
        held = [local(parameter) for parameter in stack.parameters]
        if few:
            subtract(held, update, lr * weight_decay)
            return
        if self.operations.launches_are_dear:  # the same arithmetic, in one launch for all matrices
            if weight_decay:
                here = torch.stack(held)
                update = update + weight_decay * here * (update * here >= 0).to(here.dtype)
            torch._foreach_sub_(held, list(update), alpha=lr)  # pyright: ignore[reportPrivateImportUsage]
            return
        for here, change in zip(held, update, strict=True):
            if weight_decay:  # cautious decay: only where decay and update agree in sign
                agrees = (change * here >= 0).to(here.dtype)
                change = change + weight_decay * here * agrees
            here.sub_(change, alpha=lr)

    def _to_owners(self, g: Tensor, stack: _Stack) -> Tensor:
        """(K, local rows, cols) momenta -> (owned, rows, cols) whole matrices on their owners."""
        mine = len(stack.owned[self.place.shard])
        here = stack.row_counts[self.place.shard]
        outgoing = g.index_select(0, stack.order).flatten()
        sizes_out = [len(indices) * here * stack.cols for indices in stack.owned]
        sizes_in = [mine * rows * stack.cols for rows in stack.row_counts]
        incoming = outgoing.new_empty(sum(sizes_in))
        dist.all_to_all_single(
            incoming, outgoing, sizes_in, sizes_out, group=self.place.shard_group
        )
        parts = incoming.split(sizes_in)
        return torch.cat(
            [p.view(mine, r, stack.cols) for p, r in zip(parts, stack.row_counts, strict=True)],
            dim=1,
        )

    def _from_replicas(self, mine: Tensor, stack: _Stack) -> Tensor:
        """(mine, rows, cols) updates of this replica -> (owned, rows, cols) updates of all replicas."""
        replicas, count = self.place.replicas, len(stack.owned[self.place.shard])
        share = -(-count // replicas)
        padded = mine.new_zeros(share, stack.rows, stack.cols, dtype=self.dtype)
        padded[: mine.size(0)] = mine
        parts = gathered(padded, replicas, self.place.replica_group)
        return (
            torch.stack(parts, dim=1).flatten(0, 1)[:count].float()
        )  # replica i % replicas had matrix i

    def _to_rows(self, whole: Tensor, stack: _Stack) -> Tensor:
        """(owned, rows, cols) updates on their owners -> (K, local rows, cols) on the ranks that hold the rows."""
        here = stack.row_counts[self.place.shard]
        outgoing = torch.cat(
            [part.to(self.dtype).flatten() for part in whole.split(stack.row_counts, dim=1)]
        )
        sizes_out = [whole.size(0) * rows * stack.cols for rows in stack.row_counts]
        sizes_in = [len(indices) * here * stack.cols for indices in stack.owned]
        incoming = outgoing.new_empty(sum(sizes_in))
        dist.all_to_all_single(
            incoming, outgoing, sizes_in, sizes_out, group=self.place.shard_group
        )
        return (
            incoming.view(len(stack.parameters), here, stack.cols)
            .index_select(0, stack.place)
            .float()
        )

    def named_state(self) -> dict[str, tuple[Tensor, tuple[int, ...], int]]:
        """State for a checkpoint: name -> (the tensor held here, the whole shape, the first row that is held here)."""
        state: dict[str, tuple[Tensor, tuple[int, ...], int]] = {}
        for stack in self.stacks:
            start = self.place.first_row(stack.rows)
            for i, name in enumerate(stack.names):
                state[f"{name}.momentum"] = (stack.momentum[i], (stack.rows, stack.cols), start)
            for variance, i in zip(stack.variance, stack.mine, strict=True):
                state[f"{stack.names[i]}.variance"] = (variance, tuple(variance.shape), 0)
        return state
