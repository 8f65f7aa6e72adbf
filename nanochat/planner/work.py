"""What a step asks of each card: FLOPs, bytes through memory, bytes to other cards, and operators.

Matmuls and attention follow from the shape of the model. The bytes that element-wise operators move follow from how the
model is computed; a Traffic has them by what they grow with. dev/LOG.md says how they were counted.
"""

from dataclasses import dataclass
from functools import cache

import torch

from nanochat.common import UserError
from nanochat.gpt import GPT, GPTConfig
from nanochat.train.optim import Rates, saved_bytes
from nanochat.train.sizes import table_rows


@dataclass(frozen=True)
class Size:
    """The shape of a model, and what follows from it."""

    shape: GPTConfig
    flops_per_token: int
    matrices: int  # entries of the matrices in layers
    tables: int  # entries of the embedding tables
    parameters: int
    scaling: int  # matrices and head, which set the length of a run
    saved: int  # bytes of the tensors in a checkpoint

    @property
    def head(self) -> int:
        """Entries of the matrix that makes logits."""
        return self.scaling - self.matrices


@cache
def size_of(
    depth: int, vocab_size: int, window_pattern: str = "SSSL", upstream: bool = False
) -> Size:
    """The model of a depth with upstream's context of 2,048, as base_train makes it, or as upstream does."""
    if depth < 1 or vocab_size < 1:
        raise UserError(
            f"depth and vocab_size must be at least 1, got {depth} and {vocab_size}", exit_code=2
        )
    head = 128 if depth >= 8 else 64
    dim = -(-depth * 64 // head) * head
    pairs, offset = (0, 0) if upstream else (table_rows("auto", vocab_size), depth)
    shape = GPTConfig(
        2048, vocab_size, depth, dim // head, dim // head, dim, window_pattern, pairs, offset
    )
    with torch.device("meta"):
        model = GPT(shape)
    counts = model.parameter_counts()
    tables = sum(counts.get(role, 0) for role in ("embedding", "value_embedding", "bigram"))
    return Size(
        shape,
        model.flops_per_token(),
        counts["matrix"],
        tables,
        counts["total"],
        counts["scaling"],
        saved_bytes(model, Rates()),
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes that element-wise operators move through the card's memory, forward and backward."""

    stream: float  # for each token, layer and channel
    ends: float  # for each token and channel, before the first layer and after the last
    logits: float  # for each token and entry of the vocabulary
    head: float  # for each token and entry of the head: its gradient, which is added up over chunks of tokens
    matrix: float  # for each entry of a matrix, in each pass: casts, and gradients added up
    table: float  # for each entry of an embedding table, in each pass
    matrix_step: float  # for each entry of a matrix, in each step: the optimizer
    table_step: float  # for each entry of a table, in each step

    def of_pass(self, size: Size, tokens: int) -> float:
        """Bytes of one pass over `tokens` tokens."""
        shape = size.shape
        channels = (self.stream * shape.n_layer + self.ends) * shape.n_embd
        a_token = channels + self.logits * shape.padded_vocab + self.head * size.head
        return tokens * a_token + self.matrix * size.scaling + self.table * size.tables

    def of_step(self, size: Size) -> float:
        """Bytes of the optimizer for the whole model; ranks share them."""
        return self.matrix_step * size.matrices + self.table_step * (size.tables + size.head)


@dataclass(frozen=True)
class Program:
    """How a model is computed."""

    traffic: Traffic
    layer_operators: float  # launched in one pass, for each layer
    pass_operators: float  # launched in one pass, outside of the layers
    step_operators: float  # launched by the optimizer
    sent: float = 6.0  # bytes for each parameter that a card sends in a step: 2 gathered, 4 reduced
    muon_sent: float = (
        4.0  # bytes for each matrix entry that its owner exchanges in a step: momentum and update
    )
    shortest: int = (
        0  # attention computes at least this many keys before its own, whatever the window
    )
    full: float = 0.0  # the share of the matmuls that runs in fp32


def keys(size: Size, shortest: int = 0) -> float:
    """How many keys a query sees on average, summed over the layers. A causal window of W of T shows W - W^2 / 2T."""
    length = size.shape.sequence_len
    seen = (min(max(window, shortest), length) for window in size.shape.windows)
    return sum(window - window**2 / (2 * length) for window in seen)


def attention_flops(size: Size, shortest: int = 0) -> float:
    """FLOPs of attention for a token: two matmuls forward, and five backward, which computes the scores again."""
    return 14 * size.shape.n_embd * keys(size, shortest)


def matmul_flops(size: Size) -> float:
    """FLOPs of the matrices for a token, forward and backward."""
    return 6.0 * size.scaling


def muon_flops(size: Size) -> float:
    """FLOPs of orthogonalizing all matrices in a step: five times two products of each with its Gram matrix."""
    dim = size.shape.n_embd
    return size.shape.n_layer * 5 * (4 * 6 + 2 * 18) * float(dim) ** 3
