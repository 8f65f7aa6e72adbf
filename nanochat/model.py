"""The interface that the engine, evaluations and training use for a model of any family."""

from typing import Any, Literal, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.attention import PlainAttention
from nanochat.cache import Cache
from nanochat.context import Context

Reduction = Literal["mean", "sum", "none"]


class ModelConfig(Protocol):
    """The sizes of a model that other code may read (Protocol)."""

    @property
    def sequence_len(self) -> int:
        """The longest context in tokens, which is also the length of a row in training."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def n_layer(self) -> int: ...

    @property
    def n_embd(self) -> int: ...


class Model(Protocol):
    """A language model that can be trained, evaluated and sampled from (Protocol).

    Shapes: B batch, T time, C channels, V vocabulary.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def takes_trees(self) -> bool:
        """True if the context of a pass may be a Tree, whose targets and weights are (N,)."""
        ...

    @property
    def attention(self) -> PlainAttention:
        """The attention operators of the model's device."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The number format that the model computes in."""
        ...

    @property
    def device(self) -> torch.device: ...

    def __call__(
        self,
        idx: Tensor,  # (B, T) token ids
        targets: Tensor | None = None,  # (B, T), -1 = ignored
        reduction: Reduction = "mean",
        weights: Tensor | None = None,  # (B, T) weight of each token's loss, with reduction "sum"
        context: Context | None = None,
    ) -> Any:
        """Return logits (B, T, V) or, given targets, the cross-entropy loss in nats.

        The loss is a scalar, or one value per target with reduction "none".
        """
        ...

    def hidden(self, idx: Tensor, context: Context | None = None) -> Tensor:  # (B, T) -> (B, T, C)
        """Return the activations that the head reads.

        Without a context, every row is one whole sequence.
        """
        ...

    def logits(self, x: Tensor) -> Tensor:
        """Return the fp32 logits (..., V) of activations (..., C)."""
        ...

    def log_totals(self, logits: Tensor) -> Tensor | None:  # (B, V) fp32 -> (B,)
        """Return the log-sum-exp of each row of logits, or None if log_softmax costs less."""
        ...

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the loss (...) in nats of every target (...), from activations (..., C)."""
        ...

    def new_cache(self, slots: int, length: int, dtype: torch.dtype | None = None) -> Cache:
        """Return an empty cache for `slots` sequences of at most `length` tokens."""
        ...

    def parameter_roles(self) -> dict[str, Any]:
        """Return the role of each parameter, by name; optim.py has the settings of every role."""
        ...

    def shard_groups(self) -> list[nn.Module]:
        """Return the modules that each gather parameters as one group; see parallel.shard()."""
        ...

    def compile_groups(self) -> list[nn.Module]:
        """Return the modules of a sharded model that train/compile.py compiles one by one."""
        ...

    def parameter_counts(self) -> dict[str, int]:
        """Return a dict of the parameter count of each role, and two sums, "total" and "scaling".

        "scaling" counts only the parameters that scaling laws count.
        """
        ...

    def flops_per_token(self) -> int:
        """Return the FLOPs of the forward and backward pass for one token."""
        ...
