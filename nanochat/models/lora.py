"""Low-rank adapters (LoRA, arXiv 2106.09685), trained while the matrices of a model are frozen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.common import UserError
from nanochat.linear import Linear


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
    # scale by alpha / sqrt(rank), which keeps high ranks learning (rsLoRA, arXiv 2312.03732)
    stabilised: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.targets:
            raise UserError(
                "an adapter needs a rank of at least 1 and at least one target, got rank "
                f"{self.rank} and targets {list(self.targets)}",
                exit_code=2,
            )
        if not 0 <= self.dropout < 1:
            raise UserError(
                f"the dropout of an adapter must be at least 0 and below 1, got {self.dropout}",
                exit_code=2,
            )

    @property
    def scale(self) -> float:
        """The factor of what the adapter adds."""
        divisor = self.rank**0.5 if self.stabilised else self.rank
        return self.alpha / divisor


@dataclass(frozen=True)
class Adapter:
    """An adapter apart from its model: its shape, and its values by the names of parameters.

    The names are MATRIX.lora_A.weight and MATRIX.lora_B.weight.
    """

    config: LoraConfig
    values: Mapping[str, Tensor]


class LowRank:
    """The adapter of a matrix, in its slot `adapter`: adds scale * B A x to the product.

    The two halves are modules of the matrix, so that their parameters have the names that peft
    gives them: `lora_A.weight` is (rank, inputs) and `lora_B.weight` is (outputs, rank).
    """

    def __init__(self, matrix: Linear, config: LoraConfig):
        """Give the matrix two halves in fp32 on its device. init_adapters() fills them."""
        self.matrix = matrix
        self.config = config
        options = {"bias": False, "device": matrix.weight.device, "dtype": torch.float32}
        self.first = nn.Linear(matrix.in_features, config.rank, **options)
        self.second = nn.Linear(config.rank, matrix.out_features, **options)
        matrix.lora_A = self.first
        matrix.lora_B = self.second
        matrix.adapter = self

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:  # (..., inputs), (..., outputs) -> as y
        """Return y, the product of the matrix and x, with what the adapter adds."""
        inputs = x
        if self.config.dropout:
            inputs = F.dropout(x, self.config.dropout, self.matrix.training)
        A = self.first.weight.to(x.dtype)
        B = self.second.weight.to(x.dtype)
        low = F.linear(inputs, A).flatten(0, -2)  # (N, rank)
        out = torch.addmm(y.flatten(0, -2), low, B.mT, alpha=self.config.scale)
        return out.view(y.shape)

    def remove(self) -> None:
        """Take the adapter out of its matrix."""
        self.matrix.adapter = None
        del self.matrix.lora_A, self.matrix.lora_B


def adapted(model: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """Yield the name of every matrix that has an adapter, and the adapter."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and isinstance(module.adapter, LowRank):
            yield name, module.adapter


def matches(name: str, targets: Sequence[str]) -> bool:
    """Whether a matrix is a target: a target names the last part, or parts, of its dotted name."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Freeze the model and give every target an adapter without values.

    Raises UserError if a target matches no matrix.
    """
    matrices = {
        name: module for name, module in model.named_modules() if isinstance(module, Linear)
    }
    unmatched = []
    for target in config.targets:
        if not any(matches(name, [target]) for name in matrices):
            unmatched.append(target)
    if unmatched:
        short_names = sorted({name.rpartition(".")[2] for name in matrices})
        raise UserError(
            f"an adapter was asked for {', '.join(map(repr, unmatched))}, which names no matrix of "
            f"this model. Its matrices are {', '.join(short_names)}",
            exit_code=2,
        )
    model.requires_grad_(False)
    for name, matrix in matrices.items():
        if matches(name, config.targets):
            LowRank(matrix, config)


def first_values(model: nn.Module, seed: int = 42) -> dict[str, Tensor]:
    """Return the unsharded first values of every adapter, by the names of its parameters.

    A is uniform in +-1/sqrt(inputs) as in peft, and B is zero, so that training starts from the
    model itself. The values are the same on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, adapter in adapted(model):
        uniform = torch.empty(adapter.first.weight.shape).uniform_(-1, 1, generator=generator)
        values[f"{name}.lora_A.weight"] = uniform * adapter.matrix.in_features**-0.5
        values[f"{name}.lora_B.weight"] = torch.zeros(adapter.second.weight.shape)
    return values


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int = 42) -> None:
    """Fill every adapter of an unsharded model with its first values."""
    values = first_values(model, seed)
    for name, adapter in adapted(model):
        adapter.first.weight.copy_(values[f"{name}.lora_A.weight"])
        adapter.second.weight.copy_(values[f"{name}.lora_B.weight"])


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add every adapter to its matrix, in fp32, and remove the adapter."""
    for _, adapter in list(adapted(model)):
        A = adapter.first.weight.float()
        B = adapter.second.weight.float()
        weight = adapter.matrix.weight
        weight.copy_(weight.float() + B @ A * adapter.config.scale)
        adapter.remove()
