"""The shapes of the published decoders: the Qwen models, and what other families add."""

import math
from dataclasses import dataclass

from nanochat.common import UserError, tr

# Kinds of layers, by the letter in the pattern: attention to the whole context or to a sliding
# window, and Gated DeltaNets. Attention in lower case has no rotary embeddings.
FULL = "A"
SLIDING = "S"
DELTANET = "D"
ROPES = ("default", "linear", "dynamic", "llama3", "yarn")  # see models/rope.py


@dataclass(frozen=True)
class QwenConfig:
    """The shape of a model: everything that is needed to rebuild it without its weights.

    Qwen1.5 to 2.5 have biases on queries, keys and values; Qwen3 normalizes queries and keys
    instead. In Qwen3.5, three of every four layers are Gated DeltaNets, and attention has an output
    gate.
    """

    sequence_len: int = 2048  # the longest context, and T in training
    vocab_size: int = 151_936  # rows of the embedding
    n_layer: int = 28
    n_embd: int = 1024
    n_head: int = 16
    n_kv_head: int = 8
    head_dim: int = 128
    n_hidden: int = 3072  # channels inside the MLP, if a layer has one
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    tied: int = 1  # whether the head is the embedding
    qkv_bias: int = 0
    qk_norm: int = 1  # whether queries and keys are normalized
    o_bias: int = 0  # whether the output matrix of attention has a bias
    mlp_bias: int = 0  # whether the matrices of the MLP have biases
    layers: str = "A"  # pattern of kinds of layers, repeated; see the letters above
    window: int = 0  # tokens that a sliding layer sees, with the query's own; 0 = none slides
    rotary_dim: int = 0  # channels of a head that are rotated; 0 = all
    rope: str = "default"  # how rotary frequencies are changed, one of ROPES
    rope_factor: float = 1.0  # how many times longer than rope_original the context becomes
    rope_low: float = 1.0  # turns within rope_original up to which a frequency is low
    rope_high: float = 4.0  # turns from which a frequency stays as it is
    rope_original: int = 8192  # tokens of context in pretraining
    rope_scale: float = 1.0  # multiplies cosines and sines
    zero_centred: int = 0  # whether norms multiply by 1 + weight
    output_gate: int = 0  # whether the output of attention is gated
    delta_key_heads: int = 16
    delta_value_heads: int = 16
    delta_key_dim: int = 128
    delta_value_dim: int = 128
    delta_width: int = 4  # tokens that the convolution of a DeltaNet sees
    mlps: str = "M"  # pattern of MLPs, repeated: M is an MLP, E is a mixture of experts
    n_experts: int = 0  # experts of a mixture
    experts_per_token: int = 0
    n_expert_hidden: int = 0  # channels inside an expert
    n_shared_hidden: int = 0  # channels inside the expert that all tokens share; 0 = there is none
    normed_shares: int = 1  # whether the shares of a token's experts add up to 1

    def __post_init__(self) -> None:
        rules = (
            (
                "n_head",
                self.n_head,
                tr("a multiple of n_kv_head"),
                self.n_head % self.n_kv_head == 0,
            ),
            ("head_dim", self.head_dim, tr("even, for rotary embeddings"), self.head_dim % 2 == 0),
            (
                "rotary_dim",
                self.rotary_dim,
                tr("even and at most head_dim"),
                self.rotary_dim % 2 == 0 and 0 <= self.rotary_dim <= self.head_dim,
            ),
            (
                "layers",
                self.layers,
                tr("made of the letters A, S, a, s and D"),
                bool(self.layers) and not set(self.layers) - set("ASasD"),
            ),
            (
                "window",
                self.window,
                tr("at least {least}", least=2),
                self.window >= 2 or not set(self.layers) & set("Ss"),
            ),
            (
                "rope",
                self.rope,
                tr("one of {choices}", choices=", ".join(ROPES)),
                self.rope in ROPES,
            ),
            ("rope_theta", self.rope_theta, tr("above {least}", least=1), self.rope_theta > 1),
            (
                "rope_low",
                self.rope_low,
                tr("below rope_high, which is {rope_high}", rope_high=self.rope_high),
                self.rope_low < self.rope_high,
            ),
            (
                "mlps",
                self.mlps,
                tr("made of M and E"),
                bool(self.mlps) and not set(self.mlps) - set("ME"),
            ),
            (
                "experts_per_token",
                self.experts_per_token,
                tr("from 1 to n_experts, which is {experts}", experts=self.n_experts),
                not self.has_experts or 1 <= self.experts_per_token <= self.n_experts,
            ),
            (
                "n_expert_hidden",
                self.n_expert_hidden,
                tr("at least {least}", least=1),
                not self.has_experts or self.n_expert_hidden >= 1,
            ),
            (
                "delta_value_heads",
                self.delta_value_heads,
                tr("a multiple of delta_key_heads"),
                self.delta_value_heads % self.delta_key_heads == 0,
            ),
            (
                "delta_width",
                self.delta_width,
                tr("at least {least}", least=2),
                self.delta_width >= 2,
            ),
        )
        for name, value, rule, holds in rules:
            if not holds:
                raise UserError(
                    tr("{name} must be {rule}, got {value!r}", name=name, rule=rule, value=value)
                )

    @property
    def rotated(self) -> int:
        """The number of channels of a head that are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def kinds(self) -> str:
        """The kind of each layer, in order, as a letter."""
        return "".join(self.layers[i % len(self.layers)] for i in range(self.n_layer))

    @property
    def deltanets(self) -> int:
        """The number of layers that are Gated DeltaNets."""
        return self.kinds.count(DELTANET)

    @property
    def windows(self) -> tuple[int, ...]:
        """How many keys before its own a query may see, in each attention layer."""
        sizes = {FULL: self.sequence_len, SLIDING: min(self.window - 1, self.sequence_len)}
        return tuple(sizes[kind.upper()] for kind in self.kinds if kind != DELTANET)

    def rotates(self, layer: int) -> bool:
        """Return whether attention in a layer rotates queries and keys by their positions."""
        return self.kinds[layer].isupper()

    @property
    def mlp_kinds(self) -> str:
        """The kind of each layer's MLP, in order: M for an MLP, E for a mixture of experts."""
        return "".join(self.mlps[i % len(self.mlps)] for i in range(self.n_layer))

    @property
    def has_experts(self) -> bool:
        """Whether any layer has a mixture of experts."""
        return "E" in self.mlps

    @property
    def period(self) -> int:
        """The number of layers after which the patterns of layers and of MLPs repeat together."""
        return math.lcm(len(self.layers), len(self.mlps))

    def index_of_kind(self, layer: int) -> int:
        """Return the index of a layer among the DeltaNets or the attention layers, as in caches."""
        deltanets = self.kinds[:layer].count(DELTANET)
        return deltanets if self.kinds[layer] == DELTANET else layer - deltanets

    @property
    def delta_channels(self) -> int:
        """The number of channels that a DeltaNet convolves: its queries, keys and values."""
        return (
            2 * self.delta_key_heads * self.delta_key_dim
            + self.delta_value_heads * self.delta_value_dim
        )
