"""The GPT: rotary attention with sliding windows, value embeddings, squared-ReLU MLPs, untied head.

The architecture follows upstream nanochat as of July 2026. In training, parameters are fp32
masters, and every use casts them to the compute dtype. Shapes: B batch, T time, C channels, H
heads, Hkv heads of keys and values, D head dimension, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from nanochat.attention import PlainAttention
from nanochat.cache import Cache
from nanochat.common import UserError, tr
from nanochat.context import Context
from nanochat.linear import Embedding, Linear
from nanochat.loss import Softcapped, chunked_loss, softcap, token_losses

SMEAR_CHANNELS = 24  # leading channels of the embedding that the smear gate reads
VALUE_GATE_CHANNELS = 12  # leading channels of a layer's input that the value gates read
QK_SCALE = 1.2  # sharpens attention: multiplies q and k after their norm
# The hash of a pair multiplies the token before by the first factor and the token by the second.
# Both are odd, so that every row is used.
BIGRAM_FACTORS = (2654435, 40503)

Role = Literal["matrix", "embedding", "value_embedding", "bigram", "head", "resid", "x0", "smear"]


@dataclass(frozen=True)
class GPTConfig:
    """The sizes and options of a model, from which a checkpoint's model can be rebuilt."""

    sequence_len: int = 2048  # row length T in training, and the longest context in inference
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    # repeated over the layers: L sees the whole context, S a quarter; the last layer is always L
    window_pattern: str = "SSSL"
    bigram_rows: int = 0  # rows of the table of hashed token pairs; 0: no table
    # how many layers, from the first on, take half of each key from the token before
    offset_layers: int = 0
    # how many layers, from the first on, remove what lies along a token's own value from attention
    exclusive_layers: int = 0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab(self) -> int:
        """The number of rows of the token embeddings and the head.

        It is `vocab_size` rounded up to a multiple of 64.
        """
        return -(-self.vocab_size // 64) * 64

    @property
    def windows(self) -> tuple[int, ...]:
        """The attention window of each layer: how many keys before its own a query may see.

        A layer marked S sees a quarter of the sequence, rounded up to a multiple of 128, but never
        more than the sequence. The last layer always sees all of it.
        """
        short = -(-self.sequence_len // 4 // 128) * 128
        sizes = {"L": self.sequence_len, "S": min(short, self.sequence_len)}
        pattern = self.window_pattern.upper()
        tiled = [sizes[pattern[i % len(pattern)]] for i in range(self.n_layer)]
        return (*tiled[:-1], self.sequence_len)

    def has_value_embedding(self, layer: int) -> bool:
        """Return whether a layer has a value embedding (arXiv 2410.17897).

        The last layer has one, and so does every second layer before it.
        """
        return layer % 2 == (self.n_layer - 1) % 2


def rms_norm(x: Tensor) -> Tensor:
    """Return x divided by its root mean square along the last dimension, without learned weights.

    Source: arXiv 1910.07467.
    """
    return F.rms_norm(x, (x.size(-1),))


def rotary_tables(
    length: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    base: float = 100_000,
    divisors: Tensor | None = None,  # (D/2,) of the frequencies
) -> tuple[Tensor, Tensor]:  # (length, D/2) each
    """Return the cosines and sines of the rotary embedding at positions 0 .. length - 1.

    Source: RoFormer, arXiv 2104.09864.
    """
    channels = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    frequency = base ** (-channels / head_dim)
    if divisors is not None:
        frequency = frequency / divisors
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequency)
    return angle.cos().to(dtype), angle.sin().to(dtype)


class RotaryCache:
    """Keeps a model's rotary tables and rebuilds them only for another device or more positions."""

    def __init__(self) -> None:
        self._tables: tuple[Tensor, Tensor] | None = None

    def at(
        self,
        context: Context,
        length: int,  # tokens of the pass
        device: torch.device,
        make: Callable[[int], tuple[Tensor, Tensor]],  # makes tables with that many rows
        min_rows: int = 0,  # the least number of rows of new tables
    ) -> tuple[Tensor, Tensor]:  # (1 or B, T, 1, D/2) each
        """Return the cosines and sines at the positions of a forward pass."""
        needed = context.longest or length
        tables = self._tables
        if tables is None or tables[0].device != device or tables[0].size(0) < needed:
            with torch.inference_mode(False):  # tables made while sampling must serve training too
                tables = make(max(needed, min_rows))
            self._tables = tables
        cos, sin = tables
        if context.positions is None:
            return cos[None, :length, None], sin[None, :length, None]
        return cos[context.positions][:, :, None], sin[context.positions][:, :, None]


def logits_or_loss(
    head: Callable[..., Tensor],  # a Head, or another module with the same call signature
    x: Tensor,  # (B, T, C) normed activations
    targets: Tensor | None,  # (B, T), -1 = ignored
    reduction: Literal["mean", "sum", "none"],
    weights: Tensor | None,  # (B, T) weight of each token's loss, with reduction "sum"
    context: Context | None,  # if it has targets_at, targets and weights are (N,)
) -> Tensor:
    """Return logits (B, T, V) or, given targets, the cross-entropy loss in nats.

    The loss is a scalar, or one value per target with reduction "none". If the context has
    `targets_at`, only those N tokens count, and logits are (N, V).
    """
    if context is not None and context.targets_at is not None:
        x = x.flatten(0, 1)[context.targets_at]
    if targets is None:
        return head(x)
    if reduction == "none":
        return head(x, targets, reduction="none")
    loss = head(x, targets, weights)
    if reduction == "sum":
        return loss
    return loss / (targets >= 0).sum().clamp_min(1)


def rotate(
    x: Tensor,  # (B, T, H, D)
    cos: Tensor,  # (1 or B, T, 1, D/2)
    sin: Tensor,  # (1 or B, T, 1, D/2)
) -> Tensor:
    """Return x with its channel pairs (i, i + D/2) rotated by minus the angle of `cos` and `sin`.

    The direction, upstream nanochat's, is only a convention, but it must match the one that the
    weights were trained with. To rotate the other way, negate `sin`.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


def offset_keys(k: Tensor, previous: Tensor) -> Tensor:  # (B, T, Hkv, D) each
    """Return the keys `k` with the slowly rotating half of each taken from `previous`.

    `previous` holds the key of the token before each token, so half of a key tells what that token
    was. A query can then find the earlier occurrences of its own token and read what followed them,
    in a single layer; without the offset this takes two layers (induction heads, arXiv 2209.11895).
    The idea is modded-nanogpt's partial key offset. Channels i and i + D/2 rotate together, more
    slowly the larger i is.
    """
    fast = k.unflatten(-1, (2, 2, -1))[..., 0, :]
    slow = previous.unflatten(-1, (2, 2, -1))[..., 1, :]
    return torch.stack((fast, slow), dim=-2).flatten(-3)


def exclude_own(y: Tensor, own: Tensor) -> Tensor:  # (B, T, H, D), (B, T, Hkv, D) -> (B, T, H, D)
    """Return what attention computed, without its component along each token's own value.

    `y` is attention's output, and `own` holds each token's normed value. Without this step, most of
    a head's output repeats the token's own value, which the residual stream holds already, and the
    head tells less of the context (exclusive self attention, arXiv 2603.09078).
    """
    grouped = y.unflatten(2, (own.size(2), -1))  # (B, T, Hkv, H / Hkv, D)
    own = own.unsqueeze(3)
    # The mean of squares of a normed vector is 1, so this mean is the length along it.
    along = (grouped * own).mean(-1, keepdim=True)
    return (grouped - along * own).flatten(2, 3)


class Bigrams(Embedding):
    """Embeddings of pairs of neighbouring tokens, hashed into the rows of one shared table.

    They cost a look-up but no matrix product. The idea is modded-nanogpt's hashed bigrams of
    January 2026, which are added in every layer. Here they are added once, to the token embedding,
    and the model learns as much (dev/LOG.md).
    """

    # A step reads few rows, so ranks need not exchange the others; see parallel.shard().
    few_rows = True

    def __init__(self, rows: int, channels: int):
        if rows < 1:
            raise UserError(
                tr("bigram_rows must be at least 1, or 0 for none, got {rows}", rows=rows),
                exit_code=2,
            )
        super().__init__(rows, channels)

    def forward(self, before: Tensor, input: Tensor) -> Tensor:  # (B, T) each -> (B, T, C)
        """Return the embedding of each token in `input`, paired with the token before it.

        `before` holds 0 where there is no token before.
        """
        rows = (before * BIGRAM_FACTORS[0] + input * BIGRAM_FACTORS[1]) % self.num_embeddings
        return F.embedding(rows, self.weight, sparse=self.sparse and not is_compiling())


class CausalSelfAttention(nn.Module):
    """Causal attention with normed queries and keys, and with value embeddings in some layers."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.window = config.windows[layer]
        self.has_offset = layer < config.offset_layers
        self.is_exclusive = layer < config.exclusive_layers
        kv_dim = config.n_kv_head * config.head_dim
        self.c_q = Linear(config.n_embd, config.n_embd)
        self.c_k = Linear(config.n_embd, kv_dim)
        self.c_v = Linear(config.n_embd, kv_dim)
        self.c_proj = Linear(config.n_embd, config.n_embd)
        self.ve_gate: Linear | None = None
        if config.has_value_embedding(layer):
            self.ve_gate = Linear(VALUE_GATE_CHANNELS, config.n_kv_head)

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        value_embedding: Tensor | None,  # (B, T, Hkv * D) value embedding of each token
        rotary: tuple[Tensor, Tensor],  # cosines and sines, (1 or B, T, 1, D/2) each
        context: Context,
    ) -> Tensor:  # (B, T, C)
        q = self.c_q(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = self.c_k(x).unflatten(-1, (-1, self.head_dim))  # (B, T, Hkv, D)
        v = self.c_v(x).unflatten(-1, (-1, self.head_dim))
        if value_embedding is not None and self.ve_gate is not None:
            # the value residual, gated per head (arXiv 2410.17897)
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., :VALUE_GATE_CHANNELS]))  # (B, T, Hkv)
            v = v + gate.unsqueeze(-1) * value_embedding.view_as(v)
        q = rms_norm(rotate(q, *rotary)) * QK_SCALE
        k = rms_norm(rotate(k, *rotary)) * QK_SCALE
        if self.has_offset:
            k = offset_keys(k, context.previous_keys(self.layer, k))
        y = context.attend(self.layer, q, k, v, self.window)
        if self.is_exclusive:
            y = exclude_own(y, rms_norm(v))
        return self.c_proj(y.flatten(2))


class MLP(nn.Module):
    """Two matrices with a squared ReLU between them (Primer, arXiv 2109.08668)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    """One layer: attention, then an MLP, each applied to the normed residual stream."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        value_embedding: Tensor | None,  # (B, T, Hkv * D)
        rotary: tuple[Tensor, Tensor],
        context: Context,
    ) -> Tensor:  # (B, T, C)
        x = x + self.attn(rms_norm(x), value_embedding, rotary, context)
        return x + self.mlp(rms_norm(x))


class Head(Linear):
    """The matrix that turns activations into logits.

    It also computes the loss, so that every use of its weight passes through forward(), where the
    hooks of a sharded model gather it.
    """

    loss_tokens = 1024  # tokens per chunk: the logits of one chunk are in memory at a time
    capped_logits = 1 << 27  # most logits in memory at a time when each token's loss is wanted

    def __init__(self, config: GPTConfig):
        super().__init__(config.n_embd, config.padded_vocab)
        self.vocab = config.vocab_size
        self.criterion = Softcapped(self.vocab)

    def forward(
        self,
        input: Tensor,  # (..., C) normed activations
        targets: Tensor | None = None,  # (...) token ids, -1 = ignored
        weights: Tensor | None = None,  # (...) weight of each token's loss, with reduction "sum"
        reduction: Literal["sum", "none"] = "sum",
    ) -> Tensor:
        """Return softcapped fp32 logits (..., V) or, given targets, losses in nats.

        With reduction "sum" the result is the weighted sum of the losses, with "none" the loss of
        each token.
        """
        if targets is None:
            return self.logits(input)
        x = input.flatten(0, -2)
        if reduction == "none":
            return self.token_losses(x, targets.flatten()).view_as(targets)
        return self.loss(x, targets.flatten(), None if weights is None else weights.flatten())

    def logits(self, x: Tensor) -> Tensor:  # (..., C) -> (..., V) fp32
        """Return the softcapped logits of normed activations."""
        return softcap(self.scores(x))

    def scores(self, x: Tensor) -> Tensor:  # (..., C) -> (..., V)
        """Return logits before the softcap, without those of the head's padding rows."""
        return super().forward(x)[..., : self.vocab]

    def loss(
        self, x: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:  # (N, C), (N,), (N,) -> ()
        """Return the weighted sum of the losses of N tokens, in nats."""
        return chunked_loss(x, self.weight, targets, self.criterion, weights, self.loss_tokens)

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:  # (N, C), (N,) -> (N,)
        """Return the loss of each of N tokens, in nats."""
        return token_losses(x, self.weight, targets, self.criterion, self.single_loss_tokens)

    @property
    def single_loss_tokens(self) -> int:
        """The number of tokens in a chunk if each token's own loss is wanted."""
        return min(self.loss_tokens, max(self.capped_logits // self.vocab, 16))


class GPT(nn.Module):
    """The language model: token embedding, layers and head.

    After constructing it, call init_weights() or load a checkpoint.

    The model computes in `dtype` and casts its parameters to it, so one checkpoint serves every
    device. A platform may replace `attention`, and may swap the classes of modules for faster ones
    that have the same parameters.
    """

    takes_trees = True

    def __init__(self, config: GPTConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.attention = PlainAttention()
        kv_dim = config.n_kv_head * config.head_dim
        gated = [i for i in range(config.n_layer) if config.has_value_embedding(i)]
        self.wte = Embedding(config.padded_vocab, config.n_embd)
        self.value_embeds = nn.ModuleDict(
            {str(i): Embedding(config.padded_vocab, kv_dim) for i in gated}
        )
        self.h = nn.ModuleList([Block(config, i) for i in range(config.n_layer)])
        self.lm_head = Head(config)
        self.bigrams = Bigrams(config.bigram_rows, config.n_embd) if config.bigram_rows else None
        self.resid_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.smear_gate = Linear(SMEAR_CHANNELS, 1)
        self.smear_lambda = nn.Parameter(torch.empty(1))
        self.backout_lambda = nn.Parameter(torch.empty(1))
        self._rotary = RotaryCache()

    @property
    def blocks(self) -> list[Block]:
        """The layers, from first to last."""
        return cast(list[Block], list(self.h))

    @torch.no_grad()
    def init_weights(self, seed: int = 42) -> None:
        """Initialise every parameter, to the same values on any device and any number of ranks."""
        generator = torch.Generator().manual_seed(seed)
        # a uniform distribution in +-bound has standard deviation 1/sqrt(C)
        bound = (3 / self.config.n_embd) ** 0.5

        def uniform(weight: Tensor, low: float, high: float) -> None:
            weight.copy_(torch.empty(weight.shape).uniform_(low, high, generator=generator))

        def normal(weight: Tensor, deviation: float) -> None:
            weight.copy_(torch.empty(weight.shape).normal_(0.0, deviation, generator=generator))

        normal(self.wte.weight, 0.8)
        normal(self.lm_head.weight, 0.001)
        for block in self.blocks:
            for matrix in (block.attn.c_q, block.attn.c_k, block.attn.c_v):
                uniform(matrix.weight, -bound, bound)
            uniform(block.mlp.c_fc.weight, -0.4 * bound, 0.4 * bound)
            block.attn.c_proj.weight.zero_()  # every layer starts as the identity
            block.mlp.c_proj.weight.zero_()
            if block.attn.ve_gate is not None:
                uniform(block.attn.ve_gate.weight, 0.0, 0.02)
        for table in cast(list[nn.Embedding], list(self.value_embeds.values())):
            uniform(table.weight, -bound, bound)
        if self.bigrams:
            self.bigrams.weight.zero_()
        depth = torch.arange(self.config.n_layer) / max(self.config.n_layer - 1, 1)
        self.resid_lambdas.copy_(1.15 - 0.10 * depth)
        self.x0_lambdas.copy_(0.20 - 0.15 * depth)
        uniform(self.smear_gate.weight, 0.0, 0.02)
        self.smear_lambda.zero_()
        self.backout_lambda.fill_(0.2)

    def shard_groups(self) -> list[nn.Module]:
        """Return the modules that each gather parameters as one group; see parallel.shard()."""
        return [
            *self.value_embeds.values(),
            *filter(None, [self.bigrams]),
            self.wte,
            *self.blocks,
            self.lm_head,
        ]

    def compile_groups(self) -> list[nn.Module]:
        """Return the modules of a sharded model that train/compile.py compiles one by one."""
        return [*self.blocks, self.lm_head]

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    def new_cache(self, slots: int, length: int, dtype: torch.dtype | None = None) -> Cache:
        """Return an empty cache for `slots` sequences of at most `length` tokens.

        Its keys and values are in `dtype`, by default the compute dtype.
        """
        c = self.config
        return Cache(
            c.n_layer,
            slots,
            length,
            c.n_kv_head,
            c.head_dim,
            self.device,
            dtype or self.dtype,
            extra_keys=1 if c.offset_layers else 0,
        )

    def rotary_tables(self, length: int) -> tuple[Tensor, Tensor]:  # (length, D/2) each
        """Return the cosines and sines of positions 0 .. length - 1."""
        return rotary_tables(length, self.config.head_dim, self.device, self.dtype)

    def rotary(self, context: Context, length: int) -> tuple[Tensor, Tensor]:  # (1 or B, T, 1, D/2)
        """Return the cosines and sines at the positions of a pass of `length` tokens."""
        rows = self.config.sequence_len
        return self._rotary.at(context, length, self.device, self.rotary_tables, rows)

    def embed(self, idx: Tensor) -> Tensor:  # (...) -> (..., C)
        """Return the normed embeddings of tokens, before smearing."""
        return rms_norm(self.wte(idx).to(self.dtype))

    def smear(self, x: Tensor, context: Context) -> Tensor:  # (B, T, C)
        """Return each token's embedding plus a gated share of the embedding before it."""
        gate = torch.sigmoid(self.smear_gate(x[..., :SMEAR_CHANNELS]))
        return x + self.smear_lambda.to(x.dtype) * gate * context.previous(x)

    def mix(
        self,
        x: Tensor,  # (B, T, C)
        x0: Tensor,  # (B, T, C) the embeddings, before the first layer
        resid_lambda: Tensor,  # ()
        x0_lambda: Tensor,  # ()
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's input (a weighted sum of x and x0), and the x0 for the next layer.

        A platform whose mix() computes its own gradients adds to that of x0 through the second.
        """
        return resid_lambda * x + x0_lambda * x0, x0

    def backout(self, x: Tensor, middle: Tensor) -> Tensor:  # (B, T, C) each
        """Return x minus a share of `middle` (the stream after half of the layers), normed."""
        return rms_norm(x - self.backout_lambda.to(x.dtype) * middle)

    def hidden(self, idx: Tensor, context: Context | None = None) -> Tensor:  # (B, T) -> (B, T, C)
        """Return the normed activations that the head reads.

        Without a context, every row is one whole sequence.
        """
        context = context or Context()
        context.bind(self)
        rotary = self.rotary(context, idx.size(1))
        x = self.smear(self.embed(idx), context)
        if self.bigrams is not None:
            x = x + self.bigrams(context.previous(idx), idx).to(x.dtype)
        x0 = middle = x
        resid_lambdas = self.resid_lambdas.to(x.dtype).unbind()
        x0_lambdas = self.x0_lambdas.to(x.dtype).unbind()
        for i, block in enumerate(self.blocks):
            x, x0 = self.mix(x, x0, resid_lambdas[i], x0_lambdas[i])
            value_embedding = None
            if str(i) in self.value_embeds:
                value_embedding = self.value_embeds[str(i)](idx).to(x.dtype)
            x = block(x, value_embedding, rotary, context)
            if i == self.config.n_layer // 2:
                middle = x
        context.finish()
        return self.backout(x, middle)

    def logits(self, x: Tensor) -> Tensor:  # (..., C) -> (..., V) fp32
        """Return softcapped logits of normed activations."""
        return self.lm_head(x)

    def log_totals(self, logits: Tensor) -> Tensor | None:  # (B, V) fp32 -> (B,)
        """Return None, because log_softmax costs less for this model; see Model.log_totals()."""
        return None

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:  # (..., C), (...) -> (...)
        """Return the loss in nats of every target, from normed activations."""
        return self.lm_head(x, targets, reduction="none")

    def forward(
        self,
        idx: Tensor,  # (B, T)
        targets: Tensor | None = None,  # (B, T), -1 = ignored
        reduction: Literal["mean", "sum", "none"] = "mean",
        weights: Tensor | None = None,  # (B, T) weight of each token's loss, with reduction "sum"
        context: Context | None = None,  # if it has targets_at, targets and weights are (N,)
    ) -> Tensor:
        """Return logits (B, T, V) or, given targets, the cross-entropy loss in nats.

        logits_or_loss() describes the arguments.
        """
        x = self.hidden(idx, context)
        return logits_or_loss(self.lm_head, x, targets, reduction, weights, context)

    def parameter_roles(self) -> dict[str, Role]:
        """Return the role of each parameter, by name; optim.py has the settings of every role."""
        return {name: self._role(name) for name, _ in self.named_parameters()}

    @staticmethod
    def _role(name: str) -> Role:
        prefixes: tuple[tuple[str, Role], ...] = (
            ("h.", "matrix"),
            ("wte.", "embedding"),
            ("value_embeds.", "value_embedding"),
            ("lm_head.", "head"),
            ("bigrams.", "bigram"),
            ("resid", "resid"),
            ("x0", "x0"),
            ("smear", "smear"),
            ("backout", "smear"),
        )
        return next(role for prefix, role in prefixes if name.startswith(prefix))

    def parameter_counts(self) -> dict[str, int]:
        """Return a dict of the parameter count of each role, and two sums, "total" and "scaling".

        "scaling" counts the matrices and the head, as scaling laws do.
        """
        counts: dict[str, int] = {}
        for role, parameter in zip(self.parameter_roles().values(), self.parameters(), strict=True):
            counts[role] = counts.get(role, 0) + parameter.numel()
        counts["total"] = sum(counts.values())
        counts["scaling"] = counts["matrix"] + counts["head"]
        return counts

    def flops_per_token(self) -> int:
        """Return the FLOPs of the forward and backward pass for one token (PaLM, appendix B).

        Each entry of a matrix takes 6 FLOPs, and each key in a layer's attention window 12 C.
        """
        matrices = sum(
            module.weight.numel() for module in self.modules() if isinstance(module, Linear)
        )
        keys = sum(min(window, self.config.sequence_len) for window in self.config.windows)
        return 6 * matrices + 12 * self.config.n_embd * keys


def _check(config: GPTConfig) -> None:
    """Raise UserError if no model can have these sizes and options."""
    options = vars(config)
    if config.n_embd % config.n_head:
        raise UserError(
            tr("n_embd must be a multiple of n_head, got {n_embd} and {n_head}", **options)
        )
    if config.n_head % config.n_kv_head:
        raise UserError(
            tr("n_head must be a multiple of n_kv_head, got {n_head} and {n_kv_head}", **options)
        )
    if config.head_dim % (4 if config.offset_layers else 2):
        raise UserError(
            tr(
                "the head dimension must be a multiple of 2, of 4 with offset_layers, "
                "got {head_dim}",
                head_dim=config.head_dim,
            )
        )
    if config.n_embd < SMEAR_CHANNELS:
        raise UserError(
            tr(
                "n_embd must be at least {smear_channels}, which the smear gate reads, "
                "got {n_embd}",
                smear_channels=SMEAR_CHANNELS,
                **options,
            )
        )
    for name in ("offset_layers", "exclusive_layers"):
        if not 0 <= options[name] <= config.n_layer:
            raise UserError(
                tr(
                    "{name} must be from 0 to {n_layer}, n_layer, got {layers}",
                    name=name,
                    n_layer=config.n_layer,
                    layers=options[name],
                ),
                2,
            )
    if not config.window_pattern or set(config.window_pattern.upper()) - set("SL"):
        raise UserError(tr("window_pattern is made of S and L, got {window_pattern!r}", **options))
