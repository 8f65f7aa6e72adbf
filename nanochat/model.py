"""What the engine, the evaluations and the training loop ask of a model, whatever its family."""

from typing import Any, Literal, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.attention import PlainAttention
from nanochat.cache import Cache
from nanochat.context import Context

Reduction = Literal["mean", "sum", "none"]


class ModelConfig(Protocol):
    """The sizes of a model that other code may read."""

    @property
    def sequence_len(self) -> int:
        """The longest context in tokens, and the length of a row in training."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def n_layer(self) -> int: ...

    @property
    def n_embd(self) -> int: ...


class Model(Protocol):
    """A language model that can be trained, evaluated and sampled from.

    Shapes: B batch, T time, C channels, V vocabulary.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def takes_trees(self) -> bool:
        """Whether the context of a pass may be a Tree; targets and weights are then (N,)."""
        ...

    @property
    def attention(self) -> PlainAttention:
        """How the device attends."""
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
        """Logits (B, T, V); with targets the loss in nats: a scalar, or (B, T) for "none"."""
        ...

    def hidden(self, idx: Tensor, context: Context | None = None) -> Tensor:  # (B, T) -> (B, T, C)
        """The activations that the head reads. By default the rows are whole sequences."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """fp32 logits (..., V) of activations (..., C)."""
        ...

    def log_totals(self, logits: Tensor) -> Tensor | None:  # (B, V) fp32 -> (B,)
        """Return the log of the sum of each row's exponentials; None if log_softmax costs less."""
        ...

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss (...) in nats of every target (...), from activations (..., C)."""
        ...

    def new_cache(self, slots: int, length: int, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for `slots` sequences of at most `length` tokens."""
        ...

    def parameter_roles(self) -> dict[str, Any]:
        """What each parameter is; optim.py gives every role its settings."""
        ...

    def shard_groups(self) -> list[nn.Module]:
        """The modules whose parameters a rank gathers together when the model is sharded."""
        ...

    def compile_groups(self) -> list[nn.Module]:
        """The modules that are compiled each by itself when the model is sharded."""
        ...

    def parameter_counts(self) -> dict[str, int]:
        """Parameters of each role, `total`, and `scaling`: those that scaling laws count."""
        ...

    def flops_per_token(self) -> int:
        """FLOPs of forward and backward for a token."""
        ...
