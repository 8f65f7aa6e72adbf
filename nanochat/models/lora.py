"""Low-rank adapters (LoRA, arXiv 2106.09685), which are trained while the model stays frozen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.common import UserError, tr
from nanochat.linear import Linear
from nanochat.models.qwen.experts import Experts


@dataclass(frozen=True)
class LoraConfig:
    """The settings of an adapter: which matrices it changes, its rank, scaling and dropout."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0  # share of a matrix's inputs that the adapter drops in training
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
                tr(
                    "an adapter needs a rank of at least 1 and at least one target, got "
                    "rank {rank} and targets {targets}",
                    rank=self.rank,
                    targets=list(self.targets),
                ),
                exit_code=2,
            )
        if not 0 <= self.dropout < 1:
            raise UserError(
                tr(
                    "the dropout of an adapter must be at least 0 and below 1, got {dropout}",
                    dropout=self.dropout,
                ),
                exit_code=2,
            )

    @property
    def scale(self) -> float:
        """The factor by which the adapter's contribution is multiplied."""
        divisor = self.rank**0.5 if self.stabilised else self.rank
        return self.alpha / divisor


@dataclass(frozen=True)
class Adapter:
    """An adapter stored separately from its model: its settings, and its values by parameter name.

    For each matrix, the names are <matrix>.lora_A.weight and <matrix>.lora_B.weight. Adapters of
    peft may have further values, which merging understands: the factors of a table, magnitudes,
    biases and whole parameters. `configs` holds the settings of each module that has factors.
    """

    config: LoraConfig
    values: Mapping[str, Tensor]
    configs: Mapping[str, LoraConfig] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()  # modules that were trained as a whole

    def config_of(self, module: str) -> LoraConfig:
        """Return the settings for one module, which may have a rank and an alpha of its own."""
        return self.configs.get(module, self.config)


def delta(adapter: Adapter, module: str, device: torch.device) -> Tensor:
    """Return the fp32 matrix that an adapter adds to the weight of a module, on a device.

    For the experts of a layer, it is a stack of matrices (E, outputs, inputs).
    """
    values = {
        name.removeprefix(f"{module}."): value.to(device, torch.float32)
        for name, value in adapter.values.items()
        if name.startswith(f"{module}.lora_")
    }
    scale = adapter.config_of(module).scale
    if stack_of(module) is not None:
        A, B = stacked(
            values["lora_A.weight"], values["lora_B.weight"], adapter.config_of(module).rank
        )
        return B @ A * scale
    if "lora_A.weight" in values:
        product = values["lora_B.weight"] @ values["lora_A.weight"]
    else:  # an embedding, whose weight has a row for each token; A is (rank, V), B is (C, rank)
        product = values["lora_embedding_A"].mT @ values["lora_embedding_B"].mT
    return product * scale


class LowRank:
    """The adapter of one matrix, which adds scale * B A x to the matrix's product with x.

    It is stored in the matrix's `adapter` attribute. A and B are submodules of the matrix, so that
    their parameters have peft's names: `lora_A.weight` is (rank, inputs) and `lora_B.weight` is
    (outputs, rank).
    """

    def __init__(self, matrix: Linear, config: LoraConfig):
        """Add A and B to the matrix in fp32, on its device; init_adapters() fills them."""
        self.matrix = matrix
        self.config = config
        options = {"bias": False, "device": matrix.weight.device, "dtype": torch.float32}
        self.first = nn.Linear(matrix.in_features, config.rank, **options)
        self.second = nn.Linear(config.rank, matrix.out_features, **options)
        matrix.lora_A = self.first
        matrix.lora_B = self.second
        matrix.adapter = self

    def __call__(self, x: Tensor) -> Tensor:  # (..., inputs) -> (..., outputs)
        """Return what the adapter adds to the product of the matrix and x."""
        inputs = x
        if self.config.dropout:
            inputs = F.dropout(x, self.config.dropout, self.matrix.training)
        A = self.first.weight.to(x.dtype)
        B = self.second.weight.to(x.dtype)
        low = F.linear(inputs, A)  # (..., rank)
        return F.linear(low * self.config.scale, B)

    def merge(self) -> None:
        """Add the adapter to its matrix, computing in fp32, and remove it."""
        A = self.first.weight.float()
        B = self.second.weight.float()
        weight = self.matrix.weight
        weight.copy_(weight.float() + B @ A * self.config.scale)
        self.matrix.adapter = None
        del self.matrix.lora_A, self.matrix.lora_B


# --- adapters of experts --------------------------------------------------------------------------

# Stack of a layer's matrices -> the targets that it stands for.
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj")
USUAL_MLP = tuple(f".mlp.{target}" for target in EXPERT_TARGETS)  # ends of names
# The path from the experts to the factors of a stack, in peft. Its wrappers are nested, and that of
# the gate and up matrices is the inner one.
PATHS = {"gate_up_proj": "base_layer", "down_proj": ""}


def stack_of(module: str) -> str | None:
    """Return the name of the stack whose factors a module holds, or None if it holds none.

    The module of ...experts.down_proj is ...experts, for example.
    """
    for stack, path in PATHS.items():
        experts = module.removesuffix(f".{path}") if path else module
        if experts.endswith(".experts") and (path == "" or experts != module):
            return f"{experts}.{stack}"
    return None


def stacked(A: Tensor, B: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors of a stack as (E, rank, inputs) and (E, outputs, rank).

    As in peft, `A` is (E * rank, inputs) and `B` is (outputs, rank * E), in which the experts of
    the same rank are adjacent.
    """
    return A.unflatten(0, (-1, rank)), B.unflatten(1, (rank, -1)).permute(2, 0, 1)


def for_stack(config: LoraConfig, stack: str) -> LoraConfig:
    """Return the settings of a stack, with the rank and the alpha of each of its matrices.

    `stack` is its name, or ends with a dot and its name.
    """
    count = len(STACKS[stack.rpartition(".")[2]])
    return replace(config, rank=count * config.rank, alpha=count * config.alpha)


class StackLowRank:
    """The adapter of a stack of the experts' matrices, which adds scale * B A x to each product.

    The stack of gate and up matrices has twice the rank and alpha, as if each of them had an
    adapter. The factors are submodules of the experts with the names that peft gives them.
    """

    def __init__(self, experts: Experts, stack: str, config: LoraConfig):
        """Add A and B to the experts in fp32, on their device; init_adapters() fills them."""
        self.experts = experts
        self.stack = stack
        self.config = for_stack(config, stack)
        weight: nn.Parameter = getattr(experts, stack)
        E, outputs, inputs = weight.shape
        options = {"bias": False, "device": weight.device, "dtype": torch.float32}
        self.first = nn.Linear(inputs, E * self.config.rank, **options)
        self.second = nn.Linear(self.config.rank * E, outputs, **options)
        holder: nn.Module = experts
        if PATHS[stack]:
            holder = nn.Module()
            setattr(experts, PATHS[stack], holder)
        holder.lora_A = self.first
        holder.lora_B = self.second
        experts.adapters[stack] = self

    def __call__(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the factors (E, rank, inputs) and (E, outputs, rank), the second times the scale."""
        A, B = stacked(self.first.weight, self.second.weight * self.config.scale, self.config.rank)
        return A.to(dtype), B.to(dtype).contiguous()

    def merge(self) -> None:
        """Add the adapter to its stack, computing in fp32, and remove it."""
        weight = getattr(self.experts, self.stack)
        A, B = self(torch.float32)
        for expert, matrix in enumerate(weight.unbind()):
            matrix.copy_(matrix.float() + B[expert] @ A[expert])
        del self.experts.adapters[self.stack]
        if PATHS[self.stack]:
            delattr(self.experts, PATHS[self.stack])
        else:
            del self.experts.lora_A, self.experts.lora_B


def adapted(model: nn.Module) -> Iterator[tuple[str, LowRank | StackLowRank]]:
    """Yield (module name, adapter) for every matrix and every stack that is adapted.

    The module is the one that has the factors lora_A and lora_B.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear) and isinstance(module.adapter, LowRank):
            yield name, module.adapter
        elif isinstance(module, Experts):
            for stack, adapter in module.adapters.items():
                assert isinstance(adapter, StackLowRank)
                yield f"{name}.{PATHS[stack]}".removesuffix("."), adapter


def matches(name: str, targets: Sequence[str]) -> bool:
    """Return whether a matrix's dotted name is a target, or ends with a dot and a target."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def adapts_experts(targets: Sequence[str]) -> bool:
    """Return whether targets name a matrix of the experts."""
    return any(matches(f"mlp.experts.{target}", targets) for target in EXPERT_TARGETS)


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Freeze the model and add an adapter to every target matrix; init_adapters() sets its values.

    The targets gate_proj, up_proj and down_proj are the matrices of the experts, if there are any,
    and of the shared expert; as in peft, usual MLPs in other layers then get no adapter. Raises
    UserError (exit code 2) if a target matches no matrix, or if the experts cannot be adapted so.
    """
    matrices = {
        name: module for name, module in model.named_modules() if isinstance(module, Linear)
    }
    mixtures = {
        name: module for name, module in model.named_modules() if isinstance(module, Experts)
    }
    experts = [f"{name}.{target}" for name in mixtures for target in EXPERT_TARGETS]
    unmatched = []
    for target in config.targets:
        if not any(matches(name, [target]) for name in (*matrices, *experts)):
            unmatched.append(target)
    if unmatched:
        short_names = sorted({name.rpartition(".")[2] for name in (*matrices, *experts)})
        raise UserError(
            tr(
                "an adapter was asked for {targets}, which names no matrix of this model. "
                "Its matrices are {short_names}",
                targets=", ".join(map(repr, unmatched)),
                short_names=", ".join(short_names),
            ),
            exit_code=2,
        )
    adapted_experts = [name for name in experts if matches(name, config.targets)]
    _check_experts(adapted_experts, experts, config)
    model.requires_grad_(False)
    if adapted_experts:
        for mixture in mixtures.values():
            for stack in STACKS:
                StackLowRank(mixture, stack, config)
    for name, matrix in matrices.items():
        is_usual = adapted_experts and name.endswith(USUAL_MLP)
        if matches(name, config.targets) and not is_usual:
            LowRank(matrix, config)


def _check_experts(
    adapted_experts: Sequence[str], experts: Sequence[str], config: LoraConfig
) -> None:
    """Raise UserError (exit code 2) if the experts cannot get adapters of these settings."""
    if adapted_experts and adapted_experts != experts:
        raise UserError(
            tr(
                "the matrices of the experts get adapters together, since the gate and up "
                "matrices lie in one tensor, and the targets name only {some}. Name gate_proj, "
                "up_proj and down_proj, or leave out all three",
                some=", ".join(sorted({name.rpartition(".")[2] for name in adapted_experts})),
            ),
            exit_code=2,
        )
    if adapted_experts and config.dropout:
        raise UserError(
            tr(
                "the adapters of experts have no dropout, as in peft, got {dropout}. Set the "
                "dropout to 0, or leave gate_proj, up_proj and down_proj out of the targets",
                dropout=config.dropout,
            ),
            exit_code=2,
        )


def first_values(model: nn.Module, seed: int = 42) -> dict[str, Tensor]:
    """Return the unsharded initial values of all adapters, by parameter name.

    A is uniform in +-1/sqrt(inputs), as in peft. B is zero, so that training starts from the
    unchanged model. The values are the same on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, adapter in adapted(model):
        uniform = torch.empty(adapter.first.weight.shape).uniform_(-1, 1, generator=generator)
        values[f"{name}.lora_A.weight"] = uniform * adapter.first.in_features**-0.5
        values[f"{name}.lora_B.weight"] = torch.zeros(adapter.second.weight.shape)
    return values


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int = 42) -> None:
    """Fill every adapter of an unsharded model with its initial values."""
    values = first_values(model, seed)
    for name, adapter in adapted(model):
        adapter.first.weight.copy_(values[f"{name}.lora_A.weight"])
        adapter.second.weight.copy_(values[f"{name}.lora_B.weight"])


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Merge every adapter into its matrix or stack, computing in fp32, and remove it."""
    for _, adapter in list(adapted(model)):
        adapter.merge()
