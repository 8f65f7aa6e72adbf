"""RowAdam: AdamW for a large table, which on a CPU updates only the rows that a step has read.

optim.py uses it for the table of bigrams, which is whole on every rank of a CPU. On other devices,
the ranks shard the table, and torch's AdamW updates all of its rows. The last two functions make
the state of both optimizers the same in a checkpoint, so that a run may resume on any device.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.device import local
from nanochat.runtime.parallel import nonzero_rows, place_of
from nanochat.runtime.untraced import UntracedOptimizer


class RowAdam(UntracedOptimizer):
    """AdamW without momentum and decay, for large tables in which each step reads few rows.

    A step changes only the rows that have a gradient. Without momentum, any other row stays as it
    is, and its mean square only decays; that decay is made up for when the row next has a gradient.
    Up to rounding, the results are those of torch.optim.AdamW with a first beta of 0. With sparse
    gradients, a step takes hardly more time for a larger table.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the rows that have a nonzero gradient; gradients may be sparse tensors."""
        for group in self.param_groups:
            beta = group["betas"][1]
            for table in group["params"]:
                if table.grad is not None:
                    rows, g = nonzero_rows(table.grad)
                    self._step(table, rows, g, group["lr"], beta, group["eps"])

    def _step(
        self,
        table: Tensor,  # (R, C)
        rows: Tensor,  # (n,) indices of the rows that have a gradient
        g: Tensor,  # (n, C) their gradients
        lr: float,
        beta: float,
        eps: float,
    ) -> None:
        state = self.state_of(table)
        state["step"] += 1
        state["age"] += 1
        missed_decay = beta ** state["age"][rows]
        mean_square = state["exp_avg_sq"][rows] * missed_decay[:, None]
        mean_square.addcmul_(g, g, value=1 - beta)
        state["exp_avg_sq"][rows] = mean_square
        state["age"][rows] = 0.0
        correction = 1 - beta ** float(state["step"])
        denominator = mean_square.div_(correction).sqrt_().add_(eps)
        table.index_add_(0, rows, g.div(denominator), alpha=-lr)

    def state_of(self, table: Tensor) -> dict[str, Tensor]:
        """Return the state of a table, which is all zeros before its first step.

        It consists of `step`, the mean squares `exp_avg_sq` (R, C), and `age` (R,), which counts,
        for each row, the steps whose decay has not been applied to its mean squares yet.
        """
        if not self.state[table]:
            self.state[table] = {
                "step": torch.zeros(()),
                "exp_avg_sq": torch.zeros_like(table),
                "age": torch.zeros(len(table)),
            }
        return self.state[table]


def make_sparse(model: nn.Module, tables: Sequence[Tensor]) -> bool:
    """Switch `tables` to sparse gradients if RowAdam can step them, and return whether it can.

    It can if they are in a CPU's memory, and if FSDP2 has left them whole; see parallel.shard().
    """
    place = place_of(tables[0])
    if place.shards * place.replicas > 1 or not tables[0].is_cpu:
        return False
    for module in model.modules():
        if isinstance(module, nn.Embedding) and any(module.weight is table for table in tables):
            module.sparse = True
    return True


def moments(
    adamw: torch.optim.AdamW,
    row_adam: RowAdam | None,
) -> dict[Tensor, dict[str, Tensor]]:
    """Return the state of both optimizers by parameter, which is all zeros before the first step.

    For a table of bigrams, both optimizers give the same entries: `step`, `exp_avg_sq` and `age`.
    """
    states: dict[Tensor, dict[str, Tensor]] = {}
    for group in adamw.param_groups:
        for parameter in group["params"]:
            state = adamw.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            states[parameter] = state
            if group["role"] == "bigram":
                if "age" not in state:
                    rows = len(local(parameter))
                    state["age"] = torch.zeros(rows, device=parameter.device)
                states[parameter] = {key: state[key] for key in ("step", "exp_avg_sq", "age")}
    if row_adam is not None:
        for group in row_adam.param_groups:
            for table in group["params"]:
                states[table] = row_adam.state_of(table)
    return states


@torch.no_grad()
def apply_missed_decay(adamw: torch.optim.AdamW) -> None:
    """Apply the decay that RowAdam had postponed to a state that AdamW has loaded."""
    for group in adamw.param_groups:
        if group["role"] != "bigram":
            continue
        beta = group["betas"][1]
        for parameter in group["params"]:
            state = adamw.state[parameter]
            missed_decay = beta ** state["age"]
            local(state["exp_avg_sq"]).mul_(missed_decay[:, None])
            state["age"].zero_()
