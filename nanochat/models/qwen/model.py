"""The text models of Qwen1.5, 2, 2.5, 3 and 3.5 (dense), with the parameter names of their published checkpoints."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from nanochat.attention import PlainAttention
from nanochat.cache import Cache
from nanochat.context import Context, Rows
from nanochat.gpt import RotaryCache, logits_or_loss, rotary_tables
from nanochat.linear import Linear
from nanochat.models.lora import adapted
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.deltanet import CHUNK, add_states
from nanochat.models.qwen.layers import Block, Norm, Vocabulary

Role = Literal["matrix", "embedding", "head", "scalar", "adapter"]
DEVIATION = 0.02  # of new matrices


class Trunk(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: QwenConfig):
        super().__init__()
        self.embed_tokens = Vocabulary(config)
        self.layers = nn.ModuleList([Block(config, i) for i in range(config.n_layer)])
        self.norm = Norm(config.n_embd, config)


class Qwen(nn.Module):
    """A model with the members of model.py. Build it, also under `torch.device("meta")`, then call init_weights() or
    load a checkpoint. The model computes in `dtype`, to which every use casts the parameters."""

    def __init__(self, config: QwenConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.attention = PlainAttention()
        self.model = Trunk(config)
        if not config.tied:
            self.lm_head = Vocabulary(config)
        self._checkpoints = False
        self.offloads = False  # with `checkpoints`, the inputs of layers wait in the host's memory
        self.put_aside = put_aside
        self._rotary = RotaryCache()

    @property
    def takes_trees(self) -> bool:
        """Whether the context of a pass may be a Tree; the memory of a DeltaNet follows one sequence."""
        return "D" not in self.config.kinds

    @property
    def checkpoints(self) -> bool:
        """Whether training keeps only the inputs of layers, and computes each layer again."""
        return self._checkpoints

    @checkpoints.setter
    def checkpoints(self, asked: bool) -> None:
        self._checkpoints = asked
        for block in self.blocks:
            if (
                block.linear_attn is not None
            ):  # which would compute a part of the layer a third time
                block.linear_attn.recomputes = not asked

    @property
    def head(self) -> Vocabulary:
        """The module that scores tokens: the embedding itself where both are tied."""
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
        """Fill every parameter as Qwen's own pretraining does, with the same values on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            last = name.rpartition(".")[2]
            drawn = torch.zeros(parameter.shape)
            if name.endswith("conv1d.weight"):
                drawn.uniform_(-1, 1, generator=generator).mul_(parameter.size(2) ** -0.5)
            elif parameter.dim() > 1:
                drawn.normal_(0.0, DEVIATION, generator=generator)
            elif last == "A_log":
                drawn.uniform_(0.01, 16, generator=generator).log_()
            elif last == "dt_bias" or name.endswith("linear_attn.norm.weight"):
                drawn.fill_(1.0)
            elif last == "weight":
                drawn.fill_(0.0 if self.config.zero_centred else 1.0)
            parameter.copy_(drawn)

    def shard_groups(self) -> list[nn.Module]:
        """The modules whose parameters a rank gathers together when the model is sharded; see parallel.shard()."""
        return [
            self.model.embed_tokens,
            *self.blocks,
            *([] if self.config.tied else [self.lm_head]),
        ]

    def compile_groups(self) -> list[nn.Module]:
        """The modules that are compiled each by itself when the model is sharded; see compile.compiled()."""
        return [*self.blocks, *([] if self.config.tied else [self.lm_head])]

    def rotary_tables(self, length: int) -> tuple[Tensor, Tensor]:  # (length, rotated / 2) each
        """Return the rotary tables of positions 0 .. length - 1. Qwen rotates against the direction of our GPT."""
        c = self.config
        cos, sin = rotary_tables(length, c.rotated, self.device, self.dtype, c.rope_theta)
        return cos, -sin

    def rotary(self, context: Context, length: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines at the positions of a pass of `length` tokens, (1 or B, T, 1, rotated / 2)."""
        return self._rotary.at(context, length, self.device, self.rotary_tables)

    def new_cache(self, slots: int, length: int, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for `slots` sequences of at most `length` tokens, by default in the compute dtype."""
        c, dtype = self.config, dtype or self.dtype
        cache = Cache(
            c.kinds.count("A"), slots, length, c.n_kv_head, c.head_dim, self.device, dtype
        )
        if "D" in c.kinds:
            add_states(cache, c, slots, self.device, dtype)
        return cache

    def embed(self, idx: Tensor) -> Tensor:
        """Return the embeddings (..., C) of tokens (...)."""
        return self.model.embed_tokens(idx).to(self.dtype)

    def hidden(self, idx: Tensor, context: Context | None = None) -> Tensor:  # (B, T) -> (B, T, C)
        """Return the normed activations that the head reads; by default the rows are whole sequences."""
        context = context or Rows()
        context.bind(self)
        x = self.embed(idx)
        rotary = self.rotary(context, idx.size(1))
        for block in self.blocks:
            if self.checkpoints and torch.is_grad_enabled():
                # Here the compiler divides the model
                with self._aside(x.shape) if self.offloads else nullcontext():
                    x = cast(Tensor, checkpoint(block, x, rotary, context, use_reentrant=False))
            else:
                x = block(x, rotary, context)
        context.finish()
        return self.model.norm(x)

    def _aside(self, shape: torch.Size) -> saved_tensors_hooks:
        """A context in which tensors of this shape that are saved for the backward pass wait in the host's memory."""

        def pack(saved: Tensor) -> Any:
            return self.put_aside(saved) if saved.shape == shape else saved

        return saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, Tensor) else kept())

    def logits(self, x: Tensor) -> Tensor:
        """fp32 logits (..., V) of normed activations (..., C)."""
        return self.head(x)

    def log_totals(self, logits: Tensor) -> Tensor | None:  # (B, V) fp32 -> (B,)
        """Return the logarithm of the sum of each row's exponentials; None where log_softmax costs less."""
        return None

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss (...) in nats of every target (...), from normed activations (..., C)."""
        return self.head(x, targets, reduction="none")

    def forward(
        self,
        idx: Tensor,  # (B, T)
        targets: Tensor | None = None,  # (B, T), -1 = ignored
        reduction: Literal["mean", "sum", "none"] = "mean",
        weights: Tensor | None = None,  # (B, T) weight of each token's loss, with reduction "sum"
        context: Context | None = None,  # with targets_at, targets and weights are (N,)
    ) -> Tensor:
        """Logits (B, T, V); with targets the loss in nats: a scalar, or one for each target for "none"."""
        x = self.hidden(idx, context)
        return logits_or_loss(self.head, x, targets, reduction, weights, context)

    def parameter_roles(self) -> dict[str, Role]:
        """The role of each parameter; optim.py has settings for every role."""
        return {name: _role(name, parameter) for name, parameter in self.named_parameters()}

    def parameter_counts(self) -> dict[str, int]:
        """How many parameters each role has, `total`, and `scaling`: matrices and head, which scaling laws count."""
        counts: dict[str, int] = {}
        for name, parameter in self.named_parameters():
            role = _role(name, parameter)
            counts[role] = counts.get(role, 0) + parameter.numel()
        counts["total"] = sum(counts.values())
        counts["scaling"] = counts["matrix"] + self.head.weight.numel()
        return counts

    def flops_per_token(self) -> int:
        """FLOPs of forward and backward for one token: 6 for each entry of a matrix, 4 if it is frozen and needs no
        gradient, and in each layer of attention 12 for each channel of a key that a query sees (PaLM, appendix B). A
        DeltaNet reads its memory twice and writes it once for each token, and multiplies four times with the tokens of
        its chunk."""
        c = self.config
        weights = [module.weight for module in self.modules() if isinstance(module, Linear)]
        for _, adapter in adapted(self):
            weights += [adapter.first.weight, adapter.second.weight]
        matrices = sum(
            weight.numel() * (6 if weight.requires_grad else 4)
            for weight in [*weights, self.head.weight]
        )
        attention = 12 * c.n_head * c.head_dim * c.sequence_len * c.kinds.count("A")
        head = 3 * c.delta_key_dim * c.delta_value_dim + 2 * CHUNK * (
            c.delta_key_dim + c.delta_value_dim
        )
        delta = 6 * c.delta_value_heads * head * c.kinds.count("D")
        return matrices + attention + delta


def _role(name: str, parameter: Tensor) -> Role:
    if ".lora_" in name:
        return "adapter"
    if name.startswith("model.embed_tokens."):
        return "embedding"
    if name.startswith("lm_head."):
        return "head"
    return "matrix" if parameter.dim() == 2 else "scalar"


def put_aside(x: Tensor) -> Callable[[], Tensor]:
    """Move a tensor to the host's memory; the function brings it back to its device."""
    if x.is_cpu:
        return lambda: x
    device = x.device
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(
        x.detach(), non_blocking=True
    )  # nothing waits: the copy back comes later in the same stream
    return lambda: host.to(device, non_blocking=True)
