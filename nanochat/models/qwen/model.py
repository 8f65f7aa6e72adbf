"""The decoder of the published families, with their parameter names.

Its config says which options a family has: it began as the Qwen models, and the other families are
Qwen models with other options.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Literal, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from nanochat.attention import PlainAttention
from nanochat.cache import Cache
from nanochat.context import Context
from nanochat.gpt import RotaryCache, logits_or_loss, rotary_tables
from nanochat.linear import matrix_shapes
from nanochat.models.lora import LowRank, adapted
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.delta_rule import CHUNK
from nanochat.models.qwen.deltanet import add_states
from nanochat.models.qwen.experts import Experts, Router
from nanochat.models.qwen.layers import Block, Norm, Vocabulary
from nanochat.models.rope import rotary_base, rotary_divisors

Role = Literal["matrix", "embedding", "head", "scalar", "adapter"]
DEVIATION = 0.02  # standard deviation of new matrices


class Trunk(nn.Module):
    """The model without its head: the embedding, the layers and the final norm."""

    def __init__(self, config: QwenConfig):
        super().__init__()
        self.embed_tokens = Vocabulary(config)
        self.layers = nn.ModuleList([Block(config, i) for i in range(config.n_layer)])
        self.norm = Norm(config.n_embd, config)


class Qwen(nn.Module):
    """A Qwen model, with the members that model.py requires of every family.

    Build it, optionally under `torch.device("meta")`, then call init_weights() or load a
    checkpoint. The model computes in `dtype`, to which matrices are cast at every use.
    """

    def __init__(self, config: QwenConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.attention = PlainAttention()
        self.model = Trunk(config)
        if not config.tied:
            self.lm_head = Vocabulary(config)
        self._checkpoints = False
        self.offloads = False  # with `checkpoints`, the layers' inputs are kept in host memory
        self.offload_tensor = offload_tensor
        # (B, T, C), (B, T) -> (B, T, C): what training does to the embeddings of token ids
        self.embedding_noise: Callable[[Tensor, Tensor], Tensor] | None = None
        self._rotary = RotaryCache()

    @property
    def takes_trees(self) -> bool:
        """Whether passes may read a Tree: not with DeltaNets, whose memory follows one sequence."""
        return not self.config.deltanets

    @property
    def checkpoints(self) -> bool:
        """Whether training saves only the layers' inputs and recomputes each layer when needed."""
        return self._checkpoints

    @checkpoints.setter
    def checkpoints(self, enabled: bool) -> None:
        self._checkpoints = enabled
        for block in self.blocks:
            if block.linear_attn is not None:
                # otherwise part of the layer would be computed a third time
                block.linear_attn.recomputes = not enabled

    @property
    def head(self) -> Vocabulary:
        """The module that computes logits: the embedding if `config.tied`, else `lm_head`."""
        return self.model.embed_tokens if self.config.tied else self.lm_head

    @property
    def blocks(self) -> list[Block]:
        """The layers, in order."""
        return cast(list[Block], list(self.model.layers))

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @torch.no_grad()
    def init_weights(self, seed: int = 42) -> None:
        """Initialise every parameter, with values that do not depend on the device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            short_name = name.rpartition(".")[2]
            values = torch.zeros(parameter.shape)
            if name.endswith("conv1d.weight"):
                values.uniform_(-1, 1, generator=generator).mul_(parameter.size(2) ** -0.5)
            elif parameter.dim() > 1:
                values.normal_(0.0, DEVIATION, generator=generator)
            elif short_name == "A_log":
                values.uniform_(0.01, 16, generator=generator).log_()
            elif short_name == "dt_bias" or name.endswith("linear_attn.norm.weight"):
                values.fill_(1.0)
            elif short_name == "weight":
                values.fill_(0.0 if self.config.zero_centred else 1.0)
            parameter.copy_(values)

    def shard_groups(self) -> list[nn.Module]:
        """Return the modules that each gather their parameters together; see parallel.shard()."""
        return [self.model.embed_tokens, *self.compile_groups()]

    def compile_groups(self) -> list[nn.Module]:
        """Return the modules of a sharded model that are compiled one by one.

        See compile.compiled().
        """
        if self.config.tied:
            return [*self.blocks]
        return [*self.blocks, self.lm_head]

    def angles(self, length: int) -> tuple[Tensor, Tensor]:  # (length, rotated / 2) each, fp32
        """Return the cosines and sines of the rotary embedding at positions 0 .. length - 1."""
        c = self.config
        divisors = rotary_divisors(c, self.device)
        return rotary_tables(
            length, c.rotated, self.device, torch.float32, rotary_base(c), divisors
        )

    def rotary_tables(self, length: int) -> tuple[Tensor, Tensor]:  # (length, rotated / 2) each
        """Return what queries and keys are multiplied with at positions 0 .. length - 1.

        The sines are negated, because Qwen rotates in the opposite direction to our GPT.
        """
        cos, sin = self.angles(length)
        scale = self.config.rope_scale
        return (cos * scale).to(self.dtype), (sin * -scale).to(self.dtype)

    def rotary(self, context: Context, length: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines at the positions of a pass of `length` tokens.

        Each is (1 or B, T, 1, rotated / 2).
        """
        return self._rotary.at(context, length, self.device, self.rotary_tables)

    def new_cache(self, slots: int, length: int, dtype: torch.dtype | None = None) -> Cache:
        """Return an empty cache for `slots` sequences of at most `length` tokens.

        The default dtype is the one that the model computes in.
        """
        c = self.config
        dtype = dtype or self.dtype
        layers = len(c.windows)
        cache = Cache(layers, slots, length, c.n_kv_head, c.head_dim, self.device, dtype)
        if c.deltanets:
            add_states(cache, c, slots, self.device, dtype)
        return cache

    def embed(self, idx: Tensor) -> Tensor:
        """Return the embeddings (..., C) of tokens (...)."""
        return self.model.embed_tokens(idx).to(self.dtype)

    def hidden(self, idx: Tensor, context: Context | None = None) -> Tensor:  # (B, T) -> (B, T, C)
        """Return the final normalized activations, which are the input of the head.

        Without a context, every row is a whole sequence.
        """
        context = context or Context()
        context.bind(self)
        x = self.embed(idx)
        if self.embedding_noise is not None and torch.is_grad_enabled():
            x = self.embedding_noise(x, idx)
        rotary = self.rotary(context, idx.size(1))
        for block in self.blocks:
            if self.checkpoints and torch.is_grad_enabled():
                # here the compiler divides the model
                offload = self._offload(x.shape) if self.offloads else nullcontext()
                with offload:
                    x = cast(Tensor, checkpoint(block, x, rotary, context, use_reentrant=False))
            else:
                x = block(x, rotary, context)
        context.finish()
        return self.model.norm(x)

    def _offload(self, shape: torch.Size) -> saved_tensors_hooks:
        """Return a context manager that keeps tensors for the backward pass in host memory.

        Only tensors of the given shape are moved.
        """

        def pack(tensor: Tensor) -> Any:
            return self.offload_tensor(tensor) if tensor.shape == shape else tensor

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed()

        return saved_tensors_hooks(pack, unpack)

    def logits(self, x: Tensor) -> Tensor:
        """Return the fp32 logits (..., V) for normalized activations (..., C)."""
        return self.head(x)

    def log_totals(self, logits: Tensor) -> Tensor | None:  # (B, V) fp32 -> (B,)
        """Return None, because log_softmax is cheaper for this family; see model.py."""
        return None

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return each target's loss (...) in nats, given normalized activations (..., C)."""
        return self.head(x, targets, reduction="none")

    def forward(
        self,
        idx: Tensor,  # (B, T)
        targets: Tensor | None = None,  # (B, T), -1 = ignored
        reduction: Literal["mean", "sum", "none"] = "mean",
        weights: Tensor | None = None,  # (B, T) weight of each token's loss, with reduction "sum"
        context: Context | None = None,  # with targets_at, targets and weights are (N,)
    ) -> Tensor:
        """Return logits (B, T, V), or the loss in nats if there are targets.

        The loss is a scalar, or one number for each target with reduction "none".
        """
        x = self.hidden(idx, context)
        return logits_or_loss(self.head, x, targets, reduction, weights, context)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter, by name; a matrix counts while its weight is empty."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        return shapes | matrix_shapes(self)

    def parameter_roles(self) -> dict[str, Role]:
        """Return the role of each parameter, by name; optim.py has settings for every role."""
        return {name: _role(name, len(shape)) for name, shape in self.parameter_shapes().items()}

    def parameter_counts(self) -> dict[str, int]:
        """Return the number of parameters by role, with three sums: `total`, `active`, `scaling`.

        `active` counts those that a token passes through: of the experts, only its own. `scaling`
        counts the matrices and the head, as scaling laws do.
        """
        counts: dict[str, int] = {}
        for name, shape in self.parameter_shapes().items():
            role = _role(name, len(shape))
            counts[role] = counts.get(role, 0) + math.prod(shape)
        counts["total"] = sum(counts.values())
        counts["active"] = counts["total"] - sum(
            round(weight.numel() * (1 - share)) for weight, share in self._sparse_weights()
        )
        counts["scaling"] = counts["matrix"] + self.head.weight.numel()
        return counts

    def _sparse_weights(self) -> Iterator[tuple[Tensor, float]]:
        """Yield the experts' parameters, each with the share of it that a token passes through."""
        share = self.config.experts_per_token / max(self.config.n_experts, 1)
        for module in self.modules():
            if isinstance(module, Experts):
                for parameter in module.parameters():
                    yield parameter, share

    def flops_per_token(self) -> int:
        """Return the FLOPs of a forward and backward pass for one token (PaLM, appendix B).

        Each matrix entry costs 6, or 4 if it is frozen and needs no gradient. Of the experts, only
        those count that a token passes through. Each attention layer
        costs 12 for each key channel that a query sees. For each token, a DeltaNet reads its memory
        twice, writes it once, and does four multiplications with the tokens of its chunk.
        """
        c = self.config
        weights = dict(self.named_parameters())
        weights["head"] = self.head.weight
        shapes: dict[str, tuple[int, ...]] = {**matrix_shapes(self), "head": self.head.shape}
        for name, module in self.named_modules():
            if isinstance(module, Router):
                shapes[f"{name}.weight"] = tuple(module.weight.shape)
        for name, adapter in adapted(self):
            if isinstance(adapter, LowRank):
                shapes[f"{name}.lora_A.weight"] = adapter.first.weight.shape
                shapes[f"{name}.lora_B.weight"] = adapter.second.weight.shape
        matrices = 0
        for name, shape in shapes.items():
            matrices += math.prod(shape) * (6 if weights[name].requires_grad else 4)
        for weight, share in self._sparse_weights():
            matrices += round(share * weight.numel()) * (6 if weight.requires_grad else 4)
        attention = 12 * c.n_head * c.head_dim * sum(c.windows)
        memory = 3 * c.delta_key_dim * c.delta_value_dim
        chunk = 2 * CHUNK * (c.delta_key_dim + c.delta_value_dim)
        delta = 6 * c.delta_value_heads * (memory + chunk)
        return matrices + attention + delta * c.deltanets


def _role(name: str, dimensions: int) -> Role:
    if ".lora_" in name:
        return "adapter"
    if name.startswith("model.embed_tokens."):
        return "embedding"
    if name.startswith("lm_head."):
        return "head"
    is_matrix = dimensions == 2 or ".experts." in name  # the experts' matrices are stacked
    return "matrix" if is_matrix else "scalar"


def offload_tensor(x: Tensor) -> Callable[[], Tensor]:
    """Copy a tensor to host memory, and return a function that copies it back to its device.

    A tensor on the CPU is not copied.
    """
    if x.is_cpu:
        return lambda: x
    device = x.device
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    # no need to wait: the copy back is queued later in the same stream
    host.copy_(x.detach(), non_blocking=True)
    return lambda: host.to(device, non_blocking=True)
