"""Which optimizer steps which parameter: AdamW tables, head and scalars; Muon, or AdamW, the matrices in layers; and
RowAdam the table of bigrams on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn as nn
from torch import Tensor

from nanochat import schedule
from nanochat.device import is_sharded, local
from nanochat.model import Model
from nanochat.nn.operations import Operations
from nanochat.platforms.base import Platform
from nanochat.runtime.parallel import met, place_of, trained
from nanochat.train.muon import Muon

State = dict[
    str, tuple[Tensor, tuple[int, ...], int]
]  # name -> (tensor here, whole shape, first row)


@dataclass(frozen=True)
class Rates:
    """Learning rates of the parameters' roles, before schedules, and the decay of the matrices: upstream's values."""

    unembedding_lr: float = 0.008
    """learning rate of the head (AdamW), at 768 channels; other widths are scaled from there"""
    embedding_lr: float = 0.3
    """learning rate of the embedding (AdamW), at 768 channels; value embeddings use half of it, bigrams a tenth"""
    matrix_lr: float = 0.02
    """learning rate of the matrices inside layers (Muon); pretraining of less than 400 steps raises it up to twofold.
    With --matrix_optimizer=adamw a tenth of it is used"""
    matrix_optimizer: Literal["muon", "adamw"] = "muon"
    """optimizer of the matrices inside layers"""
    scalar_lr: float = 0.5
    """learning rate of the scalars of the residual stream (AdamW); smear and backout use 0.4 of it"""
    weight_decay: float = 0.28
    """weight decay of the matrices inside layers, before it is scaled to the length of the run"""

    def for_run(self, tokens_per_step: int, steps: int, target_param_data_ratio: float) -> "Rates":
        """Rates and decay for pretraining; the common factor on all rates is schedule.rate_scale."""
        reference = target_param_data_ratio * schedule.REFERENCE_SCALING_PARAMETERS
        further = schedule.matrix_scale(steps) if self.matrix_optimizer == "muon" else 1.0
        return replace(
            self.for_batch(tokens_per_step),
            weight_decay=schedule.weight_decay(
                self.weight_decay, tokens_per_step, steps * tokens_per_step, reference
            ),
            matrix_lr=self.matrix_lr * further,
        )

    def for_batch(self, tokens_per_step: int) -> "Rates":
        """Rates for a later stage; the common factor on all rates is schedule.rate_scale."""
        return replace(self, scalar_lr=self.scalar_lr * schedule.scalar_scale(tokens_per_step))

    def by_role(self, model_dim: int, table_momentum: float) -> dict[str, "AdamWSettings"]:
        """What AdamW takes for the parameters of every role; `table_momentum` is the first beta of tables and head."""
        width = (model_dim / 768) ** -0.5  # tables and head were tuned at 768 channels
        settings = {
            "head": AdamWSettings(self.unembedding_lr * width, (table_momentum, 0.96), 0.01, 1e-10),
            "embedding": AdamWSettings(
                self.embedding_lr * width, (table_momentum, 0.995), 0.001, 1e-10
            ),
            "value_embedding": AdamWSettings(
                0.5 * self.embedding_lr * width, (table_momentum, 0.995), 0.01, 1e-10
            ),
            "bigram": AdamWSettings(
                0.1 * self.embedding_lr * width, (0.0, 0.995), 0.0, 1e-10
            ),  # see RowAdam
            # While the projections are near zero, these scalars only scale the stream, which the last norm undoes.
            # Their first gradients are rounding errors of 1e-11, which upstream's eps of 1e-10 would make full steps.
            "resid": AdamWSettings(0.01 * self.scalar_lr, (0.8, 0.95), 0.05, 1e-6),
            "x0": AdamWSettings(self.scalar_lr, (0.96, 0.95), 0.0, 1e-6),
            # 0.2 at the default, as upstream has it. Small batches need less, as x0 does: otherwise the backout runs
            # away to 1, where the middle of the network cancels its end (dev/LOG.md).
            "scalar": AdamWSettings(
                0.01 * self.scalar_lr, (0.8, 0.95), 0.0, 1e-8
            ),  # weights of norms, and biases
            "smear": AdamWSettings(0.4 * self.scalar_lr, (0.8, 0.95), 0.0, 1e-6),
        }
        if self.matrix_optimizer == "adamw":
            matrix_lr = ADAMW_SHARE * self.matrix_lr * width
            settings["matrix"] = AdamWSettings(matrix_lr, (0.8, 0.95), self.weight_decay, 1e-8)
        return settings


ADAMW_SHARE = (
    0.1  # of matrix_lr, for AdamW on matrices of 768 channels; dev/LOG.md says how it was fitted
)


@dataclass(frozen=True)
class AdamWSettings:
    """What AdamW takes for the parameters of a role."""

    lr: float
    betas: tuple[float, float]
    decay: float
    eps: float


@dataclass(frozen=True)
class OneRate:
    """AdamW with one learning rate for all parameters, as published models are fine-tuned."""

    learning_rate: float
    weight_decay: float = 0.0  # of matrices and adapters
    matrix_optimizer: Literal["muon", "adamw"] = "adamw"
    matrix_lr = 0.0  # of Muon, which has no parameters here

    def by_role(self, model_dim: int, table_momentum: float) -> dict[str, AdamWSettings]:
        """What AdamW takes for the parameters of every role."""
        plain = AdamWSettings(self.learning_rate, (0.9, 0.95), 0.0, 1e-8)
        decayed = replace(plain, decay=self.weight_decay)
        return {
            "matrix": decayed,
            "adapter": decayed,
            "embedding": plain,
            "head": plain,
            "scalar": plain,
        }


class RowAdam(torch.optim.Optimizer):
    """AdamW without momentum and decay, for tables of which a step reads few rows: only these are touched.

    Without momentum a row that has no gradient stays where it is, and its mean squares only decay, which is made up for
    when the row is met again. The numbers are those of torch.optim.AdamW with a first beta of 0, up to rounding, and
    the time does not depend on the size of the table.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the rows that have a gradient, which may be a sparse tensor."""
        for group in self.param_groups:
            (_, beta), eps = group["betas"], group["eps"]
            for table in group["params"]:
                if table.grad is None:
                    continue
                held, (rows, g) = self.held(table), met(table.grad)
                held["step"] += 1
                held["age"] += 1
                square = held["exp_avg_sq"][rows] * (beta ** held["age"][rows])[:, None]
                square.addcmul_(g, g, value=1 - beta)
                held["exp_avg_sq"][rows], held["age"][rows] = square, 0.0
                size = square.div_(1 - beta ** float(held["step"])).sqrt_().add_(eps)
                table.index_add_(0, rows, g.div(size), alpha=-group["lr"])

    def held(self, table: Tensor) -> dict[str, Tensor]:
        """The state of a table, which is made here if no step has been taken yet: `step`, the mean squares, and for how
        many steps those of each row have yet to decay."""
        if not self.state[table]:
            self.state[table] = {
                "step": torch.zeros(()),
                "exp_avg_sq": torch.zeros_like(table),
                "age": torch.zeros(len(table)),
            }
        return self.state[table]


class Optimizers:
    """AdamW and Muon side by side, stepped and scheduled together."""

    def __init__(
        self,
        model: nn.Module,
        roles: Mapping[str, str],
        model_dim: int,
        rates: Rates | OneRate,
        scale: float,
        dtype: torch.dtype,
        table_momentum: float = 0.8,
    ):
        """`roles` come from model.parameter_roles(); frozen parameters are left out. `scale` multiplies every learning
        rate (schedule.rate_scale), Muon may multiply in `dtype`, and `table_momentum` is the first beta of embeddings
        and head (see schedule)."""
        named: dict[str, list[tuple[str, Tensor]]] = {}
        for name, parameter in trained(model):
            named.setdefault(roles[name], []).append((name, parameter))
        groups: list[dict[str, Any]] = []
        by_row: list[dict[str, Any]] = []
        for role, has in rates.by_role(model_dim, table_momentum).items():
            if role in named:
                lr, parameters = has.lr * scale, [parameter for _, parameter in named[role]]
                shared = {
                    "role": role,
                    "lr": lr,
                    "base_lr": lr,
                    "betas": has.betas,
                    "weight_decay": has.decay,
                }
                alone = role == "bigram" and _sparse(model, parameters)
                (by_row if alone else groups).append(
                    {"params": parameters, **shared, "eps": has.eps}
                )
        self.names = {parameter: name for members in named.values() for name, parameter in members}
        self.place = max(map(place_of, self.names), key=lambda place: place.shards * place.replicas)
        self.adamw = torch.optim.AdamW(groups, fused=True)
        self.rows = RowAdam(by_row, {}) if by_row else None
        self.muon = None
        if rates.matrix_optimizer == "muon":
            self.muon = Muon(
                named["matrix"],
                lr=rates.matrix_lr * scale,
                weight_decay=rates.weight_decay,
                dtype=dtype,
                operations=cast(Operations, model.operations),
            )
        self.before_step: Callable[[], None] = lambda: None  # called before anything changes
        self.base_matrix_lr, self.base_decay = rates.matrix_lr * scale, rates.weight_decay

    def schedule(self, lr: float, momentum: float, decay: float) -> None:
        """Set for this step the factor on learning rates, Muon's momentum, and the factor on the matrices' decay."""
        for group in [*self.adamw.param_groups, *(self.rows.param_groups if self.rows else [])]:
            group["lr"] = group["base_lr"] * lr
            if group["role"] in ("matrix", "adapter"):
                group["weight_decay"] = self.base_decay * decay
        if self.muon is None:
            return
        matrices = self.muon.param_groups[0]
        matrices["lr"], matrices["momentum"] = self.base_matrix_lr * lr, momentum
        matrices["weight_decay"] = self.base_decay * decay

    def step(self) -> None:
        """Update all parameters from their gradients."""
        self.before_step()
        for optimizer in self._all():
            optimizer.step()

    def capture(self, platform: Platform) -> None:
        """Let Muon's steps replay as one launch each, from the second on."""
        if self.muon is not None:
            self.muon.capture(platform)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self._all():
            optimizer.zero_grad(set_to_none=True)

    def _all(self) -> list[torch.optim.Optimizer]:
        return [
            optimizer for optimizer in (self.adamw, self.rows, self.muon) if optimizer is not None
        ]

    def state(self) -> State:
        """Everything that a resume needs, by name: the tensors that this rank holds, and their place in the whole."""
        state = {} if self.muon is None else self.muon.named_state()
        for parameter, held in self._adamw_state().items():
            name, start = self.names[parameter], place_of(parameter).first_row(parameter.shape[0])
            for key in (key for key in ("exp_avg", "exp_avg_sq", "age") if key in held):
                here = local(held[key])
                state[f"{name}.{key}"] = (here, tuple(parameter.shape[: here.dim()]), start)
            state[f"{name}.step"] = (held["step"].reshape(1), (1,), 0)
        return state

    def saved(self) -> State:
        """The part of state() that this rank writes; replicas, which hold the same tensors, share the work."""
        state, place = self.state(), self.place
        alike = [name for name in state if not name.endswith(".variance")]
        mine = set(alike[place.replica :: place.replicas])
        if place.shard:  # the first shard writes what every rank holds whole
            whole = tuple(
                f"{name}." for parameter, name in self.names.items() if not is_sharded(parameter)
            )
            mine = {name for name in mine if not name.startswith(whole)}
        return {name: part for name, part in state.items() if name in mine or name not in alike}

    def _adamw_state(self) -> dict[Tensor, dict[str, Tensor]]:
        """The state of AdamW and RowAdam, which is made here if no step has been taken yet. That of a table of bigrams
        is the same for both."""
        made: dict[Tensor, dict[str, Tensor]] = {}
        for group in self.adamw.param_groups:
            for parameter in group["params"]:
                held = self.adamw.state[parameter]
                if not held:
                    held["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    held |= {
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
                made[parameter] = held
                if group["role"] == "bigram":
                    held.setdefault(
                        "age", torch.zeros(len(local(parameter)), device=parameter.device)
                    )
                    made[parameter] = {key: held[key] for key in ("step", "exp_avg_sq", "age")}
        if self.rows is not None:
            for group in self.rows.param_groups:
                made |= {parameter: self.rows.held(parameter) for parameter in group["params"]}
        return made

    @torch.no_grad()
    def restored(self) -> None:
        """Make up for what RowAdam left undone, once the tensors of state() hold what it saved."""
        for group in self.adamw.param_groups:
            for parameter in group["params"] if group["role"] == "bigram" else []:
                held = self.adamw.state[parameter]
                local(held["exp_avg_sq"]).mul_((group["betas"][1] ** held["age"])[:, None])
                held["age"].zero_()


def saved_bytes(model: Model, rates: Rates | OneRate) -> int:
    """Return the bytes of the tensors in a checkpoint: every trained parameter and its optimizer state.

    AdamW saves two moments of each parameter. Muon saves one, and so does the table of bigrams,
    whose first beta is 0.
    """
    roles = model.parameter_roles()
    one_moment = {"bigram", "matrix"} if rates.matrix_optimizer == "muon" else {"bigram"}
    return sum(
        parameter.nbytes * (2 if roles[name] in one_moment else 3)
        for name, parameter in trained(cast(nn.Module, model))
    )


def _sparse(model: nn.Module, tables: Sequence[Tensor]) -> bool:
    """Make embeddings give sparse gradients, if RowAdam can step them: where this rank, a CPU, holds them whole."""
    place = place_of(tables[0])
    if place.shards * place.replicas > 1 or not tables[0].is_cpu:
        return False
    for module in model.modules():
        if isinstance(module, nn.Embedding) and any(module.weight is table for table in tables):
            module.sparse = True
    return True
