"""Counts the work of a step on each card: FLOPs, bytes through memory and links, and operators.

The FLOPs of matmuls and attention follow from the shape of the model. The bytes that element-wise
operators move depend on how the model is computed, and are described by a Traffic. dev/LOG.md says
how they were counted.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch

from nanochat.common import UserError, tr
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import Rates
from nanochat.train.fit.disk import saved_bytes
from nanochat.train.sizes import table_rows


@dataclass(frozen=True)
class Size:
    """The shape of a model, and the counts of parameters, FLOPs and bytes that follow from it."""

    shape: GPTConfig
    flops_per_token: int
    matrices: int  # entries of the matrices in layers
    tables: int  # entries of the embedding tables
    parameters: int
    scaling: int  # matrices and head, which set the length of a run
    saved: int  # bytes of the tensors in a checkpoint

    @property
    def head(self) -> int:
        """The number of entries in the matrix that computes logits."""
        return self.scaling - self.matrices


@cache
def size_of(
    depth: int,
    vocab_size: int,
    window_pattern: str = "SSSL",
    upstream: bool = False,
) -> Size:
    """Return the size of a model of the given depth, with upstream's context of 2,048 tokens.

    The model is that of base_train or, if `upstream` is True, that of upstream nanochat. Raises
    UserError (exit code 2) if the depth or the vocabulary is below 1.
    """
    if depth < 1 or vocab_size < 1:
        raise UserError(
            tr(
                "depth and vocab_size must be at least 1, got {depth} and {vocab_size}",
                depth=depth,
                vocab_size=vocab_size,
            ),
            exit_code=2,
        )
    head_dim = 128 if depth >= 8 else 64
    heads = math.ceil(depth * 64 / head_dim)
    shape = GPTConfig(
        sequence_len=2048,
        vocab_size=vocab_size,
        n_layer=depth,
        n_head=heads,
        n_kv_head=heads,
        n_embd=heads * head_dim,
        window_pattern=window_pattern,
        bigram_rows=0 if upstream else table_rows("auto", vocab_size),
        offset_layers=0 if upstream else depth,
        exclusive_layers=0 if upstream else depth,
    )
    with torch.device("meta"):
        return size_of_model(GPT(shape))


def size_of_model(model: GPT) -> Size:
    """Return the size of a GPT, which may be on meta."""
    counts = model.parameter_counts()
    tables = sum(counts.get(role, 0) for role in ("embedding", "value_embedding", "bigram"))
    return Size(
        shape=model.config,
        flops_per_token=model.flops_per_token(),
        matrices=counts["matrix"],
        tables=tables,
        parameters=counts["total"],
        scaling=counts["scaling"],
        saved=saved_bytes(model, Rates()),
    )


@dataclass(frozen=True)
class Traffic:
    """The bytes that element-wise operators move through memory, by what they are proportional to.

    Bytes per pass include the forward and the backward pass.
    """

    stream: float  # for each token, layer and channel
    ends: float  # for each token and channel, before the first layer and after the last
    logits: float  # for each token and entry of the vocabulary
    # for each token and entry of the head: the head's gradient, summed over chunks of tokens
    head: float
    matrix: float  # for each entry of a matrix, in each pass: casts, and summing gradients
    table: float  # for each entry of an embedding table, in each pass
    matrix_step: float  # for each entry of a matrix, in each step: the optimizer
    table_step: float  # for each entry of a table, in each step
    exclusive: float = 0.0  # like `stream`, in the layers with exclusive attention

    def of_pass(self, size: Size, tokens: int) -> float:
        """Return the bytes that one pass over `tokens` tokens moves."""
        shape = size.shape
        stream = self.stream * shape.n_layer + self.exclusive * shape.exclusive_layers
        channels = (stream + self.ends) * shape.n_embd
        per_token = channels + self.logits * shape.padded_vocab + self.head * size.head
        weights = self.matrix * size.scaling + self.table * size.tables
        return tokens * per_token + weights

    def of_step(self, size: Size) -> float:
        """Return the bytes that the optimizer moves in a step, for one whole copy of the model."""
        return self.matrix_step * size.matrices + self.table_step * (size.tables + size.head)


@dataclass(frozen=True)
class Program:
    """The costs of one way to compute a model: bytes through memory and links, and operators."""

    traffic: Traffic
    layer_operators: float  # launched in one pass, for each layer
    pass_operators: float  # launched in one pass, outside of the layers
    step_operators: float  # launched by the optimizer
    exclusive_operators: float = 0.0  # in one pass, for each layer with exclusive attention
    sent: float = 6.0  # bytes for each parameter that a card sends in a step: 2 gathered, 4 reduced
    # Bytes for each matrix entry that its owner exchanges in a step: momentum and update.
    muon_sent: float = 4.0
    shortest: int = 0  # keys that attention computes for a query even if the window is smaller
    full: float = 0.0  # the share of the matmuls that runs in fp32


def keys(size: Size, shortest: int = 0) -> float:
    """Return the average number of keys that a query sees, summed over the layers.

    In a row of T tokens with a causal window of W tokens, that is W - W^2 / (2T) keys per layer. A
    window shorter than `shortest` counts as `shortest`.
    """
    length = size.shape.sequence_len
    windows = [min(max(window, shortest), length) for window in size.shape.windows]
    return sum(window - window**2 / (2 * length) for window in windows)


def attention_flops(size: Size, shortest: int = 0) -> float:
    """Return the FLOPs of attention per token.

    There are two matmuls in the forward pass, and five in the backward pass, which recomputes the
    scores.
    """
    return 14 * size.shape.n_embd * keys(size, shortest)


def matmul_flops(size: Size) -> float:
    """Return the FLOPs per token of matmuls with weights, forward and backward."""
    return 6.0 * size.scaling


def muon_flops(size: Size) -> float:
    """Return the FLOPs that Muon takes in a step to orthogonalize all matrices.

    Each of the five iterations computes three products for every matrix: its Gram matrix, the
    square of that, and a combination of both times the matrix.
    """
    dim = size.shape.n_embd
    return size.shape.n_layer * 5 * (4 * 6 + 2 * 18) * float(dim) ** 3
