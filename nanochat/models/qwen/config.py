"""The shapes of the dense Qwen models: Qwen1.5, 2, 2.5, 3 and 3.5."""

from dataclasses import dataclass

from nanochat.common import UserError, tr


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
    n_hidden: int = 3072  # channels inside the MLP
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    tied: int = 1  # whether the head is the embedding
    qkv_bias: int = 0
    qk_norm: int = 1  # whether queries and keys are normalized
    layers: str = "A"  # layer pattern, repeated: A is attention, D is a Gated DeltaNet
    rotary_dim: int = 0  # channels of a head that are rotated; 0 = all
    zero_centred: int = 0  # whether norms multiply by 1 + weight
    output_gate: int = 0  # whether the output of attention is gated
    delta_key_heads: int = 16
    delta_value_heads: int = 16
    delta_key_dim: int = 128
    delta_value_dim: int = 128
    delta_width: int = 4  # tokens that the convolution of a DeltaNet sees

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
                tr("made of A and D"),
                bool(self.layers) and not set(self.layers) - set("AD"),
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
        """The kind of each layer, in order: A for attention, D for a Gated DeltaNet."""
        return "".join(self.layers[i % len(self.layers)] for i in range(self.n_layer))

    def index_of_kind(self, layer: int) -> int:
        """Return the index of a layer among the layers of its kind, which the cache uses too."""
        return self.kinds[:layer].count(self.kinds[layer])

    @property
    def delta_channels(self) -> int:
        """The number of channels that a DeltaNet convolves: its queries, keys and values."""
        return (
            2 * self.delta_key_heads * self.delta_key_dim
            + self.delta_value_heads * self.delta_value_dim
        )
