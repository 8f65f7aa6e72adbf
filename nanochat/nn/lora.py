"""Matrices, and the low-rank adapters (LoRA, arXiv 2106.09685) that are trained while the matrices stay as they are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.common import UserError
from nanochat.nn.together import Multiply, Pack, joined, restore


@dataclass(frozen=True)
class LoraConfig:
    """The shape of an adapter: which matrices it changes, and by how much."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0  # the share of a matrix's inputs that the adapter does not see in training
    targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    stabilised: bool = False  # scale by alpha / sqrt(rank), which keeps high ranks learning (rsLoRA, arXiv 2312.03732)

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.targets:
            raise UserError(
                f"an adapter needs a rank of at least 1 and at least one target, got rank {self.rank} and targets "
                f"{list(self.targets)}",
                exit_code=2,
            )
        if not 0 <= self.dropout < 1:
            raise UserError(
                f"the dropout of an adapter must be at least 0 and below 1, got {self.dropout}", 2
            )

    @property
    def scale(self) -> float:
        """The factor of what the adapter adds."""
        return self.alpha / (self.rank**0.5 if self.stabilised else self.rank)


@dataclass(frozen=True)
class Adapter:
    """An adapter apart from its model: its shape, and its values by the names of parameters, MATRIX.lora_A.weight and
    MATRIX.lora_B.weight."""

    config: LoraConfig
    values: Mapping[str, Tensor]


class Linear(nn.Linear):
    """A matrix, and its adapter if it has one; every use casts the parameters to the dtype of the activations.

    The adapter adds scale * B A x. The parameters are named as peft names them: `lora_A.weight` is (rank, inputs) and
    `lora_B.weight` is (outputs, rank).
    """

    only_multiplies = True

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias=bias)
        self.lora_A: nn.Linear | None = None
        self.lora_B: nn.Linear | None = None
        self.lora = LoraConfig()
        self.packed: Multiply | None = (
            None  # multiplies in place of the weight, see int8.py, hold()
        )
        # From inputs (B, T, inputs) and what the matrix gives for them: the same with the adapter of each row.
        self.several: Callable[[Tensor, Tensor], Tensor] | None = None

    def adapt(self, config: LoraConfig) -> None:
        """Add an adapter without values, in fp32, on the device of the weight; init_adapters() gives it values."""
        kept = {"bias": False, "device": self.weight.device, "dtype": torch.float32}
        self.lora_A = nn.Linear(self.in_features, config.rank, **kept)
        self.lora_B = nn.Linear(config.rank, self.out_features, **kept)
        self.lora = config

    def forward(self, input: Tensor) -> Tensor:  # (..., inputs) -> (..., outputs)
        dtype = input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.packed is None:
            y = F.linear(input, self.weight.to(dtype), bias)
        else:
            y = self.packed(input) if bias is None else self.packed(input) + bias
        return self.adapted(input, y)

    def release(self) -> None:
        """See Operations.release()."""
        self.packed = None
        restore(self)

    @property
    def plain(self) -> bool:
        """Whether there is no adapter."""
        return self.several is None and self.lora_A is None

    def adapted(
        self, input: Tensor, y: Tensor
    ) -> Tensor:  # (..., inputs), (..., outputs) -> (..., outputs)
        """What the matrix gives for `input`, which is `y`, with what its adapter adds."""
        dtype = input.dtype
        if self.several is not None:
            return self.several(input, y)
        if self.lora_A is None or self.lora_B is None:
            return y
        seen = F.dropout(input, self.lora.dropout, self.training) if self.lora.dropout else input
        low = F.linear(seen, self.lora_A.weight.to(dtype))  # (..., rank)
        up = self.lora_B.weight.to(dtype).mT
        added = torch.addmm(y.flatten(0, -2), low.flatten(0, -2), up, alpha=self.lora.scale)
        return added.view(y.shape)


class Joined:
    """Matrices with the same inputs and without biases as one, for inference. Their own weights are empty from then on,
    and their adapters still add to what they give."""

    def __init__(self, matrices: Sequence[Linear], multiply: Multiply):
        """`multiply` multiplies with all of them, as joined() makes it."""
        self._matrices, self._sizes, self.multiply = (
            matrices,
            [matrix.out_features for matrix in matrices],
            multiply,
        )

    @staticmethod
    def of(matrices: Sequence[Linear], pack: Pack, dtype: torch.dtype) -> "Joined | None":
        """The matrices as one, or None if joined() cannot join them."""
        multiply = joined(matrices, pack, dtype)
        return None if multiply is None else Joined(matrices, multiply)

    @property
    def plain(self) -> bool:
        """Whether no matrix has an adapter."""
        return all(matrix.plain for matrix in self._matrices)

    def __call__(self, x: Tensor) -> list[Tensor]:  # (..., inputs) -> (..., outputs) of each matrix
        parts = self.multiply(x).split(self._sizes, dim=-1)
        return [matrix.adapted(x, part) for matrix, part in zip(self._matrices, parts, strict=True)]


def adapted(model: nn.Module) -> Iterator[tuple[str, Linear, nn.Linear, nn.Linear]]:
    """The name of every matrix that has an adapter, the matrix, and the two halves A and B of the adapter."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.lora_A is not None and module.lora_B is not None:
            yield name, module, module.lora_A, module.lora_B


def matches(name: str, targets: Sequence[str]) -> bool:
    """Whether a matrix is a target: the last part of its dotted name, or its last parts, are a target's name."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Freeze the model and give every target an adapter without values. UserError if a target matches no matrix."""
    matrices = {
        name: module for name, module in model.named_modules() if isinstance(module, Linear)
    }
    unknown = [
        target for target in config.targets if not any(matches(name, [target]) for name in matrices)
    ]
    if unknown:
        known = sorted({name.rpartition(".")[2] for name in matrices})
        raise UserError(
            f"an adapter was asked for {', '.join(map(repr, unknown))}, which names no matrix of this model. Its "
            f"matrices are {', '.join(known)}",
            exit_code=2,
        )
    model.requires_grad_(False)
    for name, matrix in matrices.items():
        if matches(name, config.targets):
            matrix.adapt(config)


def first_values(model: nn.Module, seed: int = 42) -> dict[str, Tensor]:
    """The whole first values of every adapter, by the names of its parameters: A is uniform in +-1/sqrt(inputs) as in
    peft, B is zero, so that training starts from the model itself. The values are the same on every device."""
    generator, values = torch.Generator().manual_seed(seed), {}
    for name, matrix, first, second in adapted(model):
        drawn = torch.empty(first.weight.shape).uniform_(-1, 1, generator=generator)
        values[f"{name}.lora_A.weight"] = drawn * matrix.in_features**-0.5
        values[f"{name}.lora_B.weight"] = torch.zeros(second.weight.shape)
    return values


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int = 42) -> None:
    """Fill every adapter of an unsharded model with its first values."""
    values = first_values(model, seed)
    for name, _, first, second in adapted(model):
        first.weight.copy_(values[f"{name}.lora_A.weight"])
        second.weight.copy_(values[f"{name}.lora_B.weight"])


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add every adapter to its matrix, in fp32, and remove the adapter."""
    for _, matrix, first, second in list(adapted(model)):
        added = second.weight.float() @ first.weight.float() * matrix.lora.scale
        matrix.weight.copy_(matrix.weight.float() + added)
        matrix.lora_A = matrix.lora_B = None
