"""The GPT: rotary attention with sliding windows, value embeddings, squared-ReLU MLPs, untied head.

The architecture follows upstream nanochat's HEAD of 2026-07. Parameters are fp32 masters, and every use casts them to
the compute dtype. Shapes: B batch, T time, C channels, H heads, D head dimension, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.common import UserError
from nanochat.context import Context, Rows, whole_rows
from nanochat.nn.cache import Cache
from nanochat.nn.operations import Operations
from nanochat.nn.previous import Bigrams, with_offset
from nanochat.nn.together import Embedding, Linear, Multiply, Pack, Unit, joined

SMEAR_CHANNELS = 24  # of the embedding, which the smear gate reads
VALUE_GATE_CHANNELS = 12  # of a layer's input, which the gates of the value embeddings read
QK_SCALE = 1.2  # sharpens attention: multiplies q and k after their norm
NOT_MADE = (None, None)  # every use casts its own matrix

Role = Literal["matrix", "embedding", "value_embedding", "bigram", "head", "resid", "x0", "smear"]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model: all that a checkpoint needs to rebuild the model."""

    sequence_len: int = 2048  # T in training, and the longest context in inference
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    window_pattern: str = (
        "SSSL"  # repeated over the layers: L sees everything, S a quarter; the last is always L
    )
    bigram_rows: int = 0  # of the table of hashed pairs of tokens; 0: the model has none
    offset_layers: int = (
        0  # of the first layers, where half of each key is that of the token before
    )

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise UserError(
                f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}"
            )
        if self.n_head % self.n_kv_head:
            raise UserError(
                f"n_head must be a multiple of n_kv_head, got {self.n_head} and {self.n_kv_head}"
            )
        if self.head_dim % (4 if self.offset_layers else 2):
            raise UserError(
                f"the head dimension must be a multiple of 2, of 4 with offset_layers, got {self.head_dim}"
            )
        if self.n_embd < SMEAR_CHANNELS:
            raise UserError(
                f"n_embd must be at least {SMEAR_CHANNELS}, which the smear gate reads, got {self.n_embd}"
            )
        if not 0 <= self.offset_layers <= self.n_layer:
            raise UserError(
                f"offset_layers must be from 0 to {self.n_layer}, n_layer, got {self.offset_layers}",
                2,
            )
        if not self.window_pattern or set(self.window_pattern.upper()) - set("SL"):
            raise UserError(f"window_pattern is made of S and L, got {self.window_pattern!r}")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab(self) -> int:
        """Rows of embedding and head: the vocabulary rounded up to a multiple of 64, which suits matrix units."""
        return -(-self.vocab_size // 64) * 64

    @property
    def windows(self) -> tuple[int, ...]:
        """For each layer, how many keys before its own a query sees; S is a quarter, rounded up to 128s."""
        short = -(-self.sequence_len // 4 // 128) * 128
        sizes = {"L": self.sequence_len, "S": min(short, self.sequence_len)}
        pattern = self.window_pattern.upper()
        tiled = [sizes[pattern[i % len(pattern)]] for i in range(self.n_layer)]
        return (*tiled[:-1], self.sequence_len)

    def has_value_embedding(self, layer: int) -> bool:
        """True for every other layer, counted back from the last (value residuals, arXiv 2410.17897)."""
        return layer % 2 == (self.n_layer - 1) % 2


class Head(Linear):
    """The matrix that makes logits. It computes the loss too, so that sharding hooks see every use of the weight."""

    def __init__(self, config: GPTConfig, operations: Operations):
        super().__init__(config.n_embd, config.padded_vocab)
        self.vocab, self.operations, self.only_multiplies = config.vocab_size, operations, False

    def forward(
        self,
        input: Tensor,  # (..., C) normed activations
        targets: Tensor | None = None,  # (...) token ids, -1 = ignored
        weights: Tensor | None = None,  # (...) weight of each token's loss
        each: bool = False,
    ) -> Tensor:
        """Softcapped fp32 logits (..., V). With targets: the weighted sum of losses, or with `each` the loss of every
        token, (...)."""
        if targets is None:
            return self.operations.softcap(super().forward(input)[..., : self.vocab])
        flat, wanted = input.flatten(0, -2), targets.flatten()
        if each:
            return self.operations.token_losses(flat, self.weight, wanted, self.vocab).view_as(
                targets
            )
        return self.operations.loss(
            flat, self.weight, wanted, self.vocab, None if weights is None else weights.flatten()
        )


class Attention(nn.Module):
    """Causal self-attention with normed queries and keys, and value embeddings on some layers."""

    def __init__(self, config: GPTConfig, layer: int, operations: Operations):
        super().__init__()
        self.layer, self.operations = layer, operations
        self.window, self.head_dim, self.offset = (
            config.windows[layer],
            config.head_dim,
            layer < config.offset_layers,
        )
        kv_dim = config.n_kv_head * config.head_dim
        self.c_q = Linear(config.n_embd, config.n_embd)
        self.c_k = Linear(config.n_embd, kv_dim)
        self.c_v = Linear(config.n_embd, kv_dim)
        self.c_proj = Linear(config.n_embd, config.n_embd)
        gated = config.has_value_embedding(layer)
        self.ve_gate = Linear(VALUE_GATE_CHANNELS, config.n_kv_head) if gated else None
        self._joined: Multiply | None = None

    def join(self, pack: Pack, dtype: torch.dtype) -> None:
        """Multiply with the matrices of queries, keys and values at once from here on, if joined() can join them."""
        self._joined = self._joined or joined((self.c_q, self.c_k, self.c_v), pack, dtype)

    def release(self) -> None:
        """Multiply with each matrix by itself again, see Operations.release()."""
        self._joined = None

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        value: Tensor | None,  # (B, T, Hkv * D) value embedding of each token
        cos: Tensor,  # (1 or B, T, 1, D/2)
        sin: Tensor,
        context: Context,
        made: Sequence[Tensor | None] = NOT_MADE,
    ) -> Tensor:  # (B, T, C)
        matrices = (self.c_q, self.c_k, self.c_v) if self._joined is None else self._joined
        turn = (self.head_dim, cos, sin, QK_SCALE)
        whole, back, *gate = made
        if value is None or self.ve_gate is None:
            q, k, v = self.operations.heads(x, matrices, *turn, whole)
        else:
            narrow = None if whole is None else (whole, cast(Tensor, gate[0]))
            q, k, v = self.operations.gated_heads(x, matrices, self.ve_gate, value, *turn, narrow)
        if self.offset:
            if whole_rows(context):
                k = self.operations.offset_keys(k)
            else:
                k = with_offset(k, context.previous_keys(self.layer, k))
        scale = self.operations.softmax_scale(self.head_dim, QK_SCALE)
        y = context.attend(self.layer, q, k, v, self.window, scale)
        return self.operations.project(y.flatten(2), self.c_proj, back)


class MLP(nn.Module):
    """Two matrices with a squared ReLU between them."""

    def __init__(self, config: GPTConfig, operations: Operations):
        super().__init__()
        self.operations = operations
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor, made: Sequence[Tensor | None] = NOT_MADE) -> Tensor:
        return self.operations.mlp(x, self.c_fc, self.c_proj, made)


class Block(nn.Module):
    """One layer: attention, then MLP, each on the normed residual stream."""

    def __init__(self, config: GPTConfig, layer: int, operations: Operations):
        super().__init__()
        self.operations = operations
        self.attn = Attention(config, layer, operations)
        self.mlp = MLP(config, operations)

    def units(self) -> list[Unit]:
        """The matrices as they are multiplied: MLP in and out, queries with keys and values, attention out, gate."""
        a = self.attn
        parts = [(self.mlp.c_fc,), (self.mlp.c_proj,), (a.c_q, a.c_k, a.c_v), (a.c_proj,)]
        parts += [] if a.ve_gate is None else [(a.ve_gate,)]
        return [tuple(matrix.weight for matrix in part) for part in parts]

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        value: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        context: Context,
        made: Sequence[Tensor]
        | None = None,  # the units() in the compute dtype, if the device casts all at once
    ) -> Tensor:  # (B, T, C)
        mlp, attention = (made[:2], made[2:]) if made else (NOT_MADE, NOT_MADE)
        normed, x = self.operations.norm_and_keep(x)
        y = self.attn(normed, value, cos, sin, context, attention)
        normed, x = self.operations.add_norm(x, y)
        return x + self.mlp(normed, mlp)


class GPT(nn.Module):
    """The model. Build it, also under `torch.device("meta")`, then call init_weights() or load a checkpoint.

    The model computes in `dtype`, to which it casts the fp32 masters: one checkpoint serves every device. `operations`
    is how the device computes; the default is plain torch.
    """

    takes_trees = True

    def __init__(
        self,
        config: GPTConfig,
        dtype: torch.dtype = torch.float32,
        operations: Operations | None = None,
    ):
        super().__init__()
        operations = operations or Operations()
        self.config, self.dtype, self.operations = config, dtype, operations
        kv_dim = config.n_kv_head * config.head_dim
        self.wte = Embedding(config.padded_vocab, config.n_embd)
        gated = [i for i in range(config.n_layer) if config.has_value_embedding(i)]
        self.value_embeds = nn.ModuleDict(
            {str(i): Embedding(config.padded_vocab, kv_dim) for i in gated}
        )
        self.h = nn.ModuleList([Block(config, i, operations) for i in range(config.n_layer)])
        self.lm_head = Head(config, operations)
        self.bigrams = Bigrams(config.bigram_rows, config.n_embd) if config.bigram_rows else None
        self.resid_lambdas, self.x0_lambdas = (
            nn.Parameter(torch.empty(config.n_layer)) for _ in range(2)
        )
        self.smear_gate = Linear(SMEAR_CHANNELS, 1)
        self.smear_lambda, self.backout_lambda = (nn.Parameter(torch.empty(1)) for _ in range(2))
        self._tables: tuple[Tensor, Tensor] | None = None

    @property
    def blocks(self) -> list[Block]:
        """The layers, in order."""
        return cast(list[Block], list(self.h))

    @torch.no_grad()
    def init_weights(self, seed: int = 42) -> None:
        """Fill every parameter, with the same values on every device and for any number of ranks."""
        generator = torch.Generator().manual_seed(seed)
        bound = (
            3 / self.config.n_embd
        ) ** 0.5  # uniform in +-bound has standard deviation 1/sqrt(C)

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
            block.attn.c_proj.weight.zero_()  # a layer starts as the identity
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
        """The modules whose parameters a rank gathers together when the model is sharded; see parallel.shard()."""
        return [
            *self.value_embeds.values(),
            *filter(None, [self.bigrams]),
            self.wte,
            *self.blocks,
            self.lm_head,
        ]

    def compile_groups(self) -> list[nn.Module]:
        """The modules that are compiled each by itself when the model is sharded; see compile.compiled()."""
        return [*self.blocks, self.lm_head]

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Rotary tables of `length` rows, made once per device."""
        if (
            self._tables is None
            or self._tables[0].device != self.device
            or self._tables[0].size(0) < length
        ):
            size = max(length, self.config.sequence_len)
            with torch.inference_mode(False):  # tables made while sampling must serve training too
                self._tables = self.operations.rotary_tables(
                    size, self.config.head_dim, self.device, self.dtype
                )
        cos, sin = self._tables
        return cos[:length], sin[:length]

    def _rotary_at(
        self, context: Context, length: int
    ) -> tuple[Tensor, Tensor]:  # (1 or B, T, 1, D/2) each
        """Rotary tables at the positions of a pass of `length` tokens."""
        tables = self._rotary(context.longest or length)
        if context.positions is None:
            return tables[0][None, :, None], tables[1][None, :, None]
        return tables[0][context.positions][:, :, None], tables[1][context.positions][:, :, None]

    def _cast_together(self, dtype: torch.dtype) -> list[list[Tensor]] | None:
        """The matrices of every layer in the compute dtype, if the device casts them all at once. Never of a sharded
        model, whose layers fully_shard gives a class of their own: it sees only gradients that a layer itself makes."""
        if not self.operations.fewest_launches or any(
            type(block) is not Block for block in self.blocks
        ):
            return None
        return self.operations.cast_together([block.units() for block in self.blocks], dtype)

    def new_cache(self, slots: int, length: int, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for `slots` sequences of at most `length` tokens, by default in the compute dtype."""
        c, dtype = self.config, dtype or self.dtype
        return Cache(
            c.n_layer,
            slots,
            length,
            c.n_kv_head,
            c.head_dim,
            self.device,
            dtype,
            bool(c.offset_layers),
        )

    def embed(self, idx: Tensor) -> Tensor:
        """Return the normed embeddings (..., C) of tokens (...), before smearing."""
        return self.operations.norm(self.wte(idx).to(self.dtype))

    def hidden(self, idx: Tensor, context: Context | None = None) -> Tensor:  # (B, T) -> (B, T, C)
        """Return the normed activations that the head reads; by default the rows are whole sequences."""
        context = context or Rows()
        context.bind(self)
        x = self.embed(idx)
        cos, sin = self._rotary_at(context, idx.size(1))
        previous = None if whole_rows(context) else context.previous(x)
        x = self.operations.smear(x, previous, self.smear_gate, self.smear_lambda)
        if self.bigrams:
            x = x + self.bigrams(context.previous(idx), idx).to(x.dtype)
        x0 = middle = x
        resid, again = self.resid_lambdas.to(x.dtype).unbind(), self.x0_lambdas.to(x.dtype).unbind()
        made = self._cast_together(x.dtype)
        for i, block in enumerate(self.blocks):
            x, x0 = self.operations.mix(x, x0, resid[i], again[i])
            value = (
                self.value_embeds[str(i)](idx).to(x.dtype) if str(i) in self.value_embeds else None
            )
            x = block(x, value, cos, sin, context, made[i] if made else None)
            if i == self.config.n_layer // 2:
                middle = x
        context.finish()
        return self.operations.norm(self.operations.backout(x, middle, self.backout_lambda))

    def logits(self, x: Tensor) -> Tensor:
        """Softcapped fp32 logits (..., V) of normed activations (..., C)."""
        return self.lm_head(x)

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss (...) in nats of every target (...), from normed activations (..., C)."""
        return self.lm_head(x, targets, each=True)

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
        if context is not None and context.targets_at is not None:
            x = x.flatten(0, 1)[context.targets_at]
        if targets is None or reduction == "none":
            return self.lm_head(x, targets, each=True)
        total = self.lm_head(x, targets, weights)
        return total if reduction == "sum" else total / (targets >= 0).sum().clamp_min(1)

    def parameter_roles(self) -> dict[str, Role]:
        """The role of each parameter; optim.py has settings for every role."""
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
        """How many parameters each role has, `total`, and `scaling`: matrices and head, which scaling laws count."""
        counts: dict[str, int] = {}
        for role, parameter in zip(self.parameter_roles().values(), self.parameters(), strict=True):
            counts[role] = counts.get(role, 0) + parameter.numel()
        counts["total"] = sum(counts.values())
        counts["scaling"] = counts["matrix"] + counts["head"]
        return counts

    def flops_per_token(self) -> int:
        """FLOPs of forward and backward for one token: 6 for each entry of a matrix, and 12 C for each key that a query
        sees in each layer (PaLM, appendix B)."""
        matrices = sum(
            module.weight.numel() for module in self.modules() if isinstance(module, Linear)
        )
        seen = sum(min(window, self.config.sequence_len) for window in self.config.windows)
        return 6 * matrices + 12 * self.config.n_embd * seen
