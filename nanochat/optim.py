"""The optimizers: AdamW for tables, head and scalars, and Muon for the matrices inside layers.

muon.py has the arithmetic of Muon, and schedule.py says how the rates change during a run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn as nn
from torch import Tensor

from nanochat import schedule
from nanochat.device import is_sharded, local
from nanochat.muon import MuonArithmetic, variance_shape
from nanochat.platforms.base import Platform
from nanochat.platforms.layers import operations_of
from nanochat.platforms.together import as_stack
from nanochat.runtime.exchange import MatrixExchange
from nanochat.runtime.graphs import StepGraph
from nanochat.runtime.parallel import State, place_of, trained
from nanochat.runtime.row_adam import RowAdam, apply_missed_decay, make_sparse, moments
from nanochat.runtime.untraced import AdamW, UntracedOptimizer

# AdamW's learning rate for matrices, as a share of matrix_lr at 768 channels; fitted in dev/LOG.md.
ADAMW_SHARE = 0.1


# --- rates of the parameters' roles --------------------------------------------------------------


@dataclass(frozen=True)
class AdamWSettings:
    """The AdamW settings of the parameters of one role."""

    lr: float
    betas: tuple[float, float]
    decay: float
    eps: float


@dataclass(frozen=True)
class Rates:
    """The unscheduled learning rates of all parameter roles, and the weight decay of matrices.

    The defaults are upstream's.
    """

    unembedding_lr: float = 0.008
    """learning rate of the head (AdamW), at 768 channels; other widths are scaled from there"""
    embedding_lr: float = 0.3
    """learning rate of the embedding (AdamW), at 768 channels; value embeddings use half of it,
    bigrams a tenth"""
    matrix_lr: float = 0.02
    """learning rate of the matrices inside layers (Muon);
    pretraining of less than 400 steps raises it up to twofold.
    With --matrix_optimizer=adamw a tenth of it is used"""
    matrix_optimizer: Literal["muon", "adamw"] = "muon"
    """optimizer of the matrices inside layers"""
    scalar_lr: float = 0.5
    """learning rate of the scalars of the residual stream (AdamW);
    smear and backout use 0.4 of it"""
    weight_decay: float = 0.28
    """weight decay of the matrices inside layers, before it is scaled to the length of the run"""

    def for_run(
        self,
        tokens_per_step: int,
        steps: int,
        target_param_data_ratio: float,
        short: bool = False,
    ) -> "Rates":
        """Return the rates and the weight decay for pretraining.

        `short` is whether the weight decay is that of a short run; see schedule.is_short(). The
        caller applies schedule.rate_scale() to all rates.
        """
        decay = schedule.weight_decay(
            self.weight_decay,
            tokens_per_step,
            steps * tokens_per_step,
            target_param_data_ratio * schedule.REFERENCE_SCALING_PARAMETERS,
            short,
        )
        matrix_lr = self.matrix_lr
        if self.matrix_optimizer == "muon":
            matrix_lr *= schedule.matrix_scale(steps)
        return replace(
            self.for_batch(tokens_per_step),
            weight_decay=decay,
            matrix_lr=matrix_lr,
        )

    def for_batch(self, tokens_per_step: int) -> "Rates":
        """Return the rates for a stage after pretraining.

        The caller applies schedule.rate_scale() to all rates.
        """
        return replace(self, scalar_lr=self.scalar_lr * schedule.scalar_scale(tokens_per_step))

    def by_role(self, model_dim: int, table_momentum: float) -> dict[str, AdamWSettings]:
        """Return the AdamW settings of every role except adapters and, with Muon, matrices.

        `table_momentum` is the first beta of the embeddings, the value embeddings and the head.
        """
        width = (model_dim / 768) ** -0.5  # tables and head were tuned at 768 channels
        table = self.embedding_lr * width
        settings = {
            "head": AdamWSettings(
                self.unembedding_lr * width, (table_momentum, 0.96), decay=0.01, eps=1e-10
            ),
            "embedding": AdamWSettings(table, (table_momentum, 0.995), decay=0.001, eps=1e-10),
            "value_embedding": AdamWSettings(
                0.5 * table, (table_momentum, 0.995), decay=0.01, eps=1e-10
            ),
            "bigram": AdamWSettings(0.1 * table, (0.0, 0.995), decay=0.0, eps=1e-10),  # see RowAdam
            # While the output projections are near zero, these scalars only scale the residual
            # stream, and the last norm undoes that. Their first gradients are rounding errors of
            # 1e-11, which upstream's eps of 1e-10 would turn into full steps.
            "resid": AdamWSettings(0.01 * self.scalar_lr, (0.8, 0.95), decay=0.05, eps=1e-6),
            "x0": AdamWSettings(self.scalar_lr, (0.96, 0.95), decay=0.0, eps=1e-6),
            # weights of norms, and biases
            "scalar": AdamWSettings(0.01 * self.scalar_lr, (0.8, 0.95), decay=0.0, eps=1e-8),
            # The default gives 0.2, as upstream has it. Small batches need less here, as they do
            # for x0: otherwise the backout grows to 1, where the middle of the network cancels its
            # end (dev/LOG.md).
            "smear": AdamWSettings(0.4 * self.scalar_lr, (0.8, 0.95), decay=0.0, eps=1e-6),
        }
        if self.matrix_optimizer == "adamw":
            matrix_lr = ADAMW_SHARE * self.matrix_lr * width
            settings["matrix"] = AdamWSettings(matrix_lr, (0.8, 0.95), self.weight_decay, eps=1e-8)
        return settings


@dataclass(frozen=True)
class OneRate:
    """One AdamW learning rate for all parameters, which is how published models are fine-tuned."""

    learning_rate: float
    weight_decay: float = 0.0  # for matrices and adapters only
    matrix_optimizer: Literal["muon", "adamw"] = "adamw"
    matrix_lr = 0.0  # Muon's, which steps no parameters here

    def by_role(self, model_dim: int, table_momentum: float) -> dict[str, AdamWSettings]:
        """Return the AdamW settings of the roles of published models; no argument affects them."""
        plain = AdamWSettings(self.learning_rate, (0.9, 0.95), decay=0.0, eps=1e-8)
        decayed = replace(plain, decay=self.weight_decay)
        return {
            "matrix": decayed,
            "adapter": decayed,
            "embedding": plain,
            "head": plain,
            "scalar": plain,
        }


# --- the optimizers ------------------------------------------------------------------------------


@dataclass
class _Stack:
    """Matrices of one shape that are stepped together, with this rank's part of their state."""

    names: list[str]
    matrices: list[Tensor]
    exchange: MatrixExchange
    momentum: Tensor  # (K, local rows, cols)
    variance: Tensor  # (share, rows, 1) or (share, 1, cols)

    @property
    def rate_factor(self) -> float:
        """The factor on the learning rate, which gives tall matrices larger steps."""
        return max(1.0, self.exchange.rows / self.exchange.cols) ** 0.5


class Muon(UntracedOptimizer):
    """Muon for matrices that are whole on every rank or that FSDP2 has sharded by rows.

    Every rank orthogonalizes its share of the matrices of one shape; see MatrixExchange.
    """

    def __init__(
        self,
        named_matrices: Iterable[tuple[str, Tensor]],
        lr: float = 0.02,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
        arithmetic: MuonArithmetic | None = None,
    ):
        """Create the optimizer; `arithmetic` is the device's, or the plain one by default.

        `dtype` is the compute dtype of the model. Muon multiplies in bf16 if `dtype` is bf16, and
        otherwise in fp32.
        """
        named = list(named_matrices)
        self.arithmetic = arithmetic or MuonArithmetic()
        super().__init__(
            [matrix for _, matrix in named],
            {"lr": lr, "momentum": 0.95, "beta2": 0.9, "weight_decay": weight_decay},
        )
        # fp16 has too few exponent bits for powers of the Gram matrices
        self.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self.place = place_of(named[0][1])
        # On several ranks FSDP2 holds references to the parameters, so their storage must not move.
        self.is_alone = self.place.shards == self.place.replicas == 1
        if self.is_alone:
            self.arithmetic.place([cast(nn.Parameter, matrix) for _, matrix in named])
        self._graph: StepGraph | None = None
        self.stacks: list[_Stack] = []
        first_owner = 0  # continues across stacks, so that no rank gets all the remainders
        for members in self._by_shape(named):
            self.stacks.append(self._stack(members, first_owner))
            first_owner += len(members)

    def _by_shape(self, named: Sequence[tuple[str, Tensor]]) -> list[list[tuple[str, Tensor]]]:
        """Return the matrices grouped by shape, or singly if the device does not stack them."""
        groups: dict[tuple[int, ...], list[tuple[str, Tensor]]] = {}
        for name, matrix in named:
            groups.setdefault(tuple(matrix.shape), []).append((name, matrix))
        by_shape = [groups[shape] for shape in sorted(groups)]
        if self.arithmetic.stacks:
            return by_shape
        return [[member] for members in by_shape for member in members]

    def _stack(self, members: Sequence[tuple[str, Tensor]], first_owner: int) -> _Stack:
        matrices = [matrix for _, matrix in members]
        rows, cols = matrices[0].shape
        device = local(matrices[0]).device
        exchange = MatrixExchange(self.place, len(members), rows, cols, first_owner, device)
        share = len(exchange.share)
        return _Stack(
            names=[name for name, _ in members],
            matrices=matrices,
            exchange=exchange,
            momentum=torch.zeros(len(members), exchange.local_rows, cols, device=device),
            variance=torch.zeros(share, *variance_shape(rows, cols), device=device),
        )

    def capture(self, platform: Platform) -> None:
        """From the second step on, replay each step as one launch, if that is possible.

        It is possible on a single rank if the arithmetic can be captured.
        """
        if self.arithmetic.is_capturable and self.is_alone:
            self._graph = StepGraph(platform, self._step_all)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every matrix from its gradient; no gradient may be missing."""
        settings = self.param_groups[0]
        rates = (settings["lr"], settings["momentum"], settings["weight_decay"])
        gradients = []
        for stack in self.stacks:
            stack_gradients = [
                local(matrix.grad) for matrix in stack.matrices if matrix.grad is not None
            ]
            gradients.append(as_stack(stack_gradients))
        take_step = self._graph or self._step_all
        take_step(gradients, rates)

    def _step_all(self, gradients: Sequence[Tensor], rates: Sequence[Any]) -> None:
        for stack, gradient in zip(self.stacks, gradients, strict=True):
            self._step(stack, gradient, *rates)

    def _step(
        self,
        stack: _Stack,
        gradient: Tensor,  # (K, local rows, cols)
        lr: float | Tensor,
        momentum: float | Tensor,
        weight_decay: float | Tensor,
    ) -> None:
        stack.momentum.lerp_(gradient, 1 - momentum)  # M <- momentum M + (1 - momentum) G
        nesterov = gradient.lerp_(stack.momentum, momentum)  # (1 - momentum) G + momentum M
        lr = lr * stack.rate_factor
        share = stack.exchange.collect(
            nesterov.to(self.dtype)
        )  # whole matrices (share, rows, cols)
        if len(share):
            beta2 = self.param_groups[0]["beta2"]
            share = self.arithmetic.update(share, stack.variance, beta2, lr)
        updates = stack.exchange.distribute(share, self.dtype)  # (K, local rows, cols)
        local_matrices = [local(matrix) for matrix in stack.matrices]
        self.arithmetic.subtract(local_matrices, updates, lr, weight_decay)

    def named_state(self) -> State:
        """Return this rank's momenta and mean squares, by name, for a checkpoint."""
        state: State = {}
        for stack in self.stacks:
            shape = (stack.exchange.rows, stack.exchange.cols)
            first_row = self.place.first_row(stack.exchange.rows)
            for name, momentum in zip(stack.names, stack.momentum, strict=True):
                state[f"{name}.momentum"] = (momentum, shape, first_row)
            for variance, index in zip(stack.variance, stack.exchange.share, strict=True):
                state[f"{stack.names[index]}.variance"] = (variance, tuple(variance.shape), 0)
        return state


# --- side by side --------------------------------------------------------------------------------


class Optimizers:
    """All optimizers of a model, stepped and scheduled together."""

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
        """Create the optimizers for the parameters that are not frozen.

        `roles` come from model.parameter_roles(). `scale` multiplies every learning rate; see
        schedule.rate_scale(). `dtype` is the model's compute dtype, in which Muon may multiply.
        `table_momentum` goes to rates.by_role(); see schedule.table_momentum().
        """
        by_role: dict[str, list[tuple[str, Tensor]]] = {}
        self.names: dict[Tensor, str] = {}
        for name, parameter in trained(model):
            by_role.setdefault(roles[name], []).append((name, parameter))
            self.names[parameter] = name
        groups: list[dict[str, Any]] = []
        row_groups: list[dict[str, Any]] = []
        for role, settings in rates.by_role(model_dim, table_momentum).items():
            if role not in by_role:
                continue
            parameters = [parameter for _, parameter in by_role[role]]
            group = {
                "params": parameters,
                "role": role,
                "lr": settings.lr * scale,
                "base_lr": settings.lr * scale,
                "betas": settings.betas,
                "weight_decay": settings.decay,
                "eps": settings.eps,
            }
            is_sparse = role == "bigram" and make_sparse(model, parameters)
            (row_groups if is_sparse else groups).append(group)
        places = map(place_of, self.names)
        self.place = max(places, key=lambda place: place.shards * place.replicas)
        self.adamw = AdamW(groups, fused=True)
        self.rows = RowAdam(row_groups, {}) if row_groups else None
        self.muon = None
        if rates.matrix_optimizer == "muon":
            self.muon = Muon(
                by_role["matrix"],
                lr=rates.matrix_lr * scale,
                weight_decay=rates.weight_decay,
                dtype=dtype,
                arithmetic=operations_of(model).muon,
            )
        self.before_step: Callable[[], None] = lambda: None  # called before anything changes
        self.base_matrix_lr = rates.matrix_lr * scale
        self.base_decay = rates.weight_decay

    def schedule(self, lr: float, momentum: float, decay: float) -> None:
        """Set the learning rates, the momentum and the weight decay of the next step.

        `lr` is a factor on the learning rates, `momentum` is Muon's momentum, and `decay` is a
        factor on the weight decay of matrices and adapters.
        """
        groups = list(self.adamw.param_groups)
        if self.rows is not None:
            groups += self.rows.param_groups
        for group in groups:
            group["lr"] = group["base_lr"] * lr
            if group["role"] in ("matrix", "adapter"):
                group["weight_decay"] = self.base_decay * decay
        if self.muon is not None:
            self.muon.param_groups[0].update(
                lr=self.base_matrix_lr * lr,
                momentum=momentum,
                weight_decay=self.base_decay * decay,
            )

    def step(self) -> None:
        """Call `before_step`, then update all parameters from their gradients."""
        self.before_step()
        for optimizer in self._all():
            optimizer.step()

    def capture(self, platform: Platform) -> None:
        """Make Muon replay each step as one launch, if possible; see Muon.capture()."""
        if self.muon is not None:
            self.muon.capture(platform)

    def zero_grad(self) -> None:
        """Discard all gradients."""
        for optimizer in self._all():
            optimizer.zero_grad(set_to_none=True)

    def _all(self) -> list[torch.optim.Optimizer]:
        optimizers = (self.adamw, self.rows, self.muon)
        return [optimizer for optimizer in optimizers if optimizer is not None]

    def state(self) -> State:
        """Return all optimizer state that this rank needs to resume, by name."""
        state = {} if self.muon is None else self.muon.named_state()
        for parameter, tensors in moments(self.adamw, self.rows).items():
            name = self.names[parameter]
            first_row = place_of(parameter).first_row(parameter.shape[0])
            for key in ("exp_avg", "exp_avg_sq", "age"):
                if key in tensors:
                    tensor = local(tensors[key])
                    shape = tuple(parameter.shape[: tensor.dim()])
                    state[f"{name}.{key}"] = (tensor, shape, first_row)
            state[f"{name}.step"] = (tensors["step"].reshape(1), (1,), 0)
        return state

    def saved(self) -> State:
        """Return the part of state() that this rank writes to a checkpoint.

        Replicas hold the same tensors, so they share the writing.
        """
        state = self.state()
        # Muon's variances belong to the matrices that this rank works on; no other rank has them.
        variances = {key for key in state if key.endswith(".variance")}
        shared = [key for key in state if key not in variances]
        written = {*variances, *shared[self.place.replica :: self.place.replicas]}
        if self.place.shard:  # the first shard writes the state of parameters that are not sharded
            whole = {name for parameter, name in self.names.items() if not is_sharded(parameter)}
            written -= {key for key in shared if key.rpartition(".")[0] in whole}
        return {key: state[key] for key in state if key in written}

    def restored(self) -> None:
        """Finish a restore, once the tensors of state() have been filled from a checkpoint."""
        apply_missed_decay(self.adamw)
