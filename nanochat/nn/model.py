"""What the engine, the evaluations and the training loop ask of a model, whatever its family."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.nn.cache import Cache, Spans
from nanochat.nn.operations import Operations

Reduction = Literal["mean", "sum", "none"]


class Tree(NamedTuple):
    """Rows whose tokens form trees, and the places that predict targets.

    Sequences that begin alike share the tokens of their common beginning. A row may hold several trees, and padding:
    tokens that see themselves only.
    """

    parents: Tensor  # (B, T) place in the row of the token before each token; its own place where a sequence begins
    seen: Tensor  # (B, T, T) bool, True where a token (dim 1) sees another one: itself and those before it
    places: Tensor  # (N,) place in all rows, one after the other, of the token that predicts each target


@dataclass
class TreeCall:
    """What the layers of a model share in one forward pass over trees."""

    tree: Tree
    depths: Tensor  # (B, T) how many tokens come before each token
    operations: Operations
    masks: dict[int, Tensor] = field(default_factory=dict)  # window -> (B, 1, T, T) which keys each query sees

    @classmethod
    def begin(cls, tree: Tree, operations: Operations) -> "TreeCall":
        """A call over one batch of rows."""
        return cls(tree, tree.seen.sum(dim=2) - 1, operations)

    def before(self, x: Tensor) -> Tensor:  # (B, T) or (B, T, C), as the result
        """What the token before each token has in `x`; zeros where a sequence begins."""
        parents = self.tree.parents
        begins = parents == torch.arange(parents.size(1), device=parents.device)
        if x.dim() == 3:
            parents, begins = parents[..., None].expand_as(x), begins[..., None]
        return x.gather(1, parents).masked_fill(begins, 0)

    def keys_before(self, layer: int, k: Tensor) -> Tensor:  # (B, T, Hkv, D), as the result
        """The key of the token before each token; zeros where a sequence begins."""
        return self.before(k.flatten(2)).view_as(k)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
        """Attend to the tokens that each token sees; shapes as in Operations.attend."""
        if window not in self.masks:
            near = self.depths[:, :, None] - self.depths[:, None] <= window
            self.masks[window] = (self.tree.seen & near)[:, None]
        return self.operations.attend_cached(q, k, v, self.masks[window], scale)


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
    """A language model that can be trained, evaluated and sampled from. Shapes: B batch, T time, C channels, V
    vocabulary."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def takes_trees(self) -> bool:
        """Whether calls may give a `tree`, a Tree; targets and weights are then (N,)."""
        ...

    @property
    def operations(self) -> Operations:
        """How the model computes on its device."""
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
    ) -> Any:
        """Logits (B, T, V); with targets the loss in nats: a scalar, or (B, T) for "none"."""
        ...

    def hidden(
        self,
        idx: Tensor,  # (B, T) token ids
        cache: Cache | None = None,
        slots: slice | None = None,  # B contiguous slots of the cache
        lengths: Tensor | None = None,  # (B,) how many of the T tokens are real
        spans: Spans | None = None,  # of the slots, if known: saves waiting for the device
    ) -> Tensor:  # (B, T, C)
        """The activations that the head reads. With a cache the tokens continue what the slots hold."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """fp32 logits (..., V) of activations (..., C)."""
        ...

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss (...) in nats of every target (...), from activations (..., C)."""
        ...

    def new_cache(self, slots: int, length: int, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for `slots` sequences of at most `length` tokens."""
        ...

    def parameter_roles(self) -> dict[str, Any]:
        """What each parameter is; train/optim.py gives every role its settings."""
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
