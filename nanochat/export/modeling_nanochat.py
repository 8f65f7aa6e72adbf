"""The GPT of nanochat/gpt.py as a Hugging Face transformers model.

`python -m nanochat.export` copies this file into the folder of the weights, and no code of nanochat
imports it. To load the model:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

The model has no key-value cache: generate() recomputes all tokens in every step, which is correct
but slow.

Shapes: B batch, T time, C channels, H heads, Hkv key-value heads, D channels of a head, V tokens of
the vocabulary.
"""

import math
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

BIGRAM_FACTORS = (2654435, 40503)
SMEAR_CHANNELS = 24
VALUE_GATE_CHANNELS = 12
QK_SCALE = 1.2
SOFTCAP = 15.0
ROTARY_BASE = 100_000.0


class NanochatConfig(PretrainedConfig):
    """The configuration of a model, with the field names of GPTConfig in nanochat/gpt.py."""

    model_type = "nanochat_ascend"
    attribute_map = {  # noqa: RUF012 - transformers' own convention
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "max_position_embeddings": "sequence_len",
    }

    def __init__(
        self,
        sequence_len: int = 2048,
        vocab_size: int = 32768,
        n_layer: int = 12,
        n_head: int = 6,
        n_kv_head: int = 6,
        n_embd: int = 768,
        window_pattern: str = "SSSL",
        bigram_rows: int = 0,
        offset_layers: int = 0,
        exclusive_layers: int = 0,
        **options: Any,
    ) -> None:
        self.sequence_len = sequence_len
        self.vocab_size = vocab_size
        self.n_layer = n_layer
        self.n_head = n_head
        self.n_kv_head = n_kv_head
        self.n_embd = n_embd
        self.window_pattern = window_pattern
        self.bigram_rows = bigram_rows
        self.offset_layers = offset_layers
        self.exclusive_layers = exclusive_layers
        self.use_cache = False
        super().__init__(**{"tie_word_embeddings": False, **options, "use_cache": False})

    @property
    def padded_vocab(self) -> int:
        """The number of rows in each token table and in the head.

        This is `vocab_size` rounded up to a multiple of 64.
        """
        return math.ceil(self.vocab_size / 64) * 64

    def window(self, layer: int) -> int:
        """Return how many positions back a query in this layer can attend."""
        pattern = self.window_pattern.upper()
        if layer == self.n_layer - 1 or pattern[layer % len(pattern)] == "L":
            return self.sequence_len
        quarter = math.ceil(self.sequence_len / 4 / 128) * 128
        return min(quarter, self.sequence_len)

    def has_value_embedding(self, layer: int) -> bool:
        """Return whether a layer has a value embedding: every other layer, including the last."""
        return layer % 2 == (self.n_layer - 1) % 2


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    rotated_first = first * cos + second * sin
    rotated_second = second * cos - first * sin
    return torch.cat((rotated_first, rotated_second), dim=-1)


def _previous(x: Tensor, real: Tensor) -> Tensor:  # (B, T, ...), (B, T)
    """Return `x` shifted by one token, with zeros at the beginning and after padding."""
    ones = [1] * (x.dim() - 2)
    masked = x * real.view(*real.shape, *ones)
    beginning = torch.zeros_like(x[:, :1])
    return torch.cat((beginning, masked[:, :-1]), dim=1)


class _Attention(nn.Module):
    def __init__(self, config: NanochatConfig, layer: int):
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.window = config.window(layer)
        self.offset = layer < config.offset_layers
        self.exclusive = layer < config.exclusive_layers
        kv_dim = config.n_kv_head * self.head_dim
        self.c_q = _linear(config.n_embd, config.n_embd)
        self.c_k = _linear(config.n_embd, kv_dim)
        self.c_v = _linear(config.n_embd, kv_dim)
        self.c_proj = _linear(config.n_embd, config.n_embd)
        self.ve_gate: nn.Linear | None = None
        if config.has_value_embedding(layer):
            self.ve_gate = _linear(VALUE_GATE_CHANNELS, config.n_kv_head)

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        value_embedding: Tensor | None,  # (B, T, Hkv D)
        cos: Tensor,  # (1, T, 1, D / 2)
        sin: Tensor,
        mask: Tensor,  # (B, 1, T, T) bool
        real: Tensor,  # (B, T) bool, False for padding
    ) -> Tensor:
        heads = (-1, self.head_dim)
        q = self.c_q(x).unflatten(-1, heads)  # (B, T, H, D)
        k = self.c_k(x).unflatten(-1, heads)  # (B, T, Hkv, D)
        v = self.c_v(x).unflatten(-1, heads)
        q = QK_SCALE * _norm(_rotate(q, cos, sin))
        k = QK_SCALE * _norm(_rotate(k, cos, sin))
        if self.offset:  # the slowly turning half of each key comes from the token before
            halves = (2, 2, -1)
            fast = k.unflatten(-1, halves)[..., 0, :]
            slow = _previous(k, real).unflatten(-1, halves)[..., 1, :]
            k = torch.stack((fast, slow), dim=-2).flatten(-3)
        if value_embedding is not None and self.ve_gate is not None:
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., :VALUE_GATE_CHANNELS]))
            v = v + gate.unsqueeze(-1) * value_embedding.view_as(v)
        positions = torch.arange(x.size(1), device=x.device)
        in_window = (positions[:, None] - positions[None]) <= self.window  # (T, T)
        queries_per_key = q.size(2) // k.size(2)
        k = k.repeat_interleave(queries_per_key, dim=2)
        v = v.repeat_interleave(queries_per_key, dim=2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask & in_window,
        )
        if self.exclusive:  # without the component along the token's own value
            own = _norm(v).transpose(1, 2)
            y = y - (y * own).mean(-1, keepdim=True) * own
        return self.c_proj(y.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, config: NanochatConfig):
        super().__init__()
        self.c_fc = _linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = _linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class _Block(nn.Module):
    def __init__(self, config: NanochatConfig, layer: int):
        super().__init__()
        self.attn = _Attention(config, layer)
        self.mlp = _MLP(config)


class NanochatForCausalLM(PreTrainedModel, GenerationMixin):
    """The GPT as a causal language model, with the parameter names of nanochat/gpt.py."""

    config_class = NanochatConfig
    main_input_name = "input_ids"
    base_model_prefix = ""
    _no_split_modules = ["_Block"]  # noqa: RUF012 - transformers' own convention
    _supports_sdpa = True

    def __init__(self, config: NanochatConfig):
        super().__init__(config)
        kv_dim = config.n_kv_head * (config.n_embd // config.n_head)
        self.wte = nn.Embedding(config.padded_vocab, config.n_embd)
        self.value_embeds = nn.ModuleDict()
        for i in range(config.n_layer):
            if config.has_value_embedding(i):
                self.value_embeds[str(i)] = nn.Embedding(config.padded_vocab, kv_dim)
        self.h = nn.ModuleList([_Block(config, i) for i in range(config.n_layer)])
        self.lm_head = _linear(config.n_embd, config.padded_vocab)
        self.bigrams: nn.Embedding | None = None
        if config.bigram_rows:
            self.bigrams = nn.Embedding(config.bigram_rows, config.n_embd)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        self.smear_gate = _linear(SMEAR_CHANNELS, 1)
        self.smear_lambda = nn.Parameter(torch.zeros(1))
        self.backout_lambda = nn.Parameter(torch.zeros(1))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.wte

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head."""
        return self.lm_head

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, because the weights always come from a checkpoint."""

    def _hidden(self, idx: Tensor, real: Tensor) -> Tensor:
        """Return the final normed hidden states (B, T, C); `real` (B, T) is False for padding."""
        dtype = self.wte.weight.dtype
        cos, sin = self._rotary_tables(idx)
        mask = self._mask(real)
        x = self._embed(idx, real)
        x0 = x
        middle = x
        blocks = cast(list[Any], list(self.h))
        for i, block in enumerate(blocks):
            x = self.resid_lambdas[i].to(dtype) * x + self.x0_lambdas[i].to(dtype) * x0
            value_embedding = None
            if self.config.has_value_embedding(i):
                value_embedding = self.value_embeds[str(i)](idx)
            x = x + block.attn(_norm(x), value_embedding, cos, sin, mask, real)
            x = x + block.mlp(_norm(x))
            if i == self.config.n_layer // 2:
                middle = x
        return _norm(x - self.backout_lambda.to(dtype) * middle)

    def _rotary_tables(self, idx: Tensor) -> tuple[Tensor, Tensor]:  # (1, T, 1, D / 2) each
        head_dim = self.config.n_embd // self.config.n_head
        channels = torch.arange(0, head_dim, 2, device=idx.device).float()
        frequencies = ROTARY_BASE ** (-channels / head_dim)
        positions = torch.arange(idx.size(1), device=idx.device).float()
        angles = torch.outer(positions, frequencies)[None, :, None]
        dtype = self.wte.weight.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _mask(self, real: Tensor) -> Tensor:  # (B, T) -> (B, 1, T, T)
        """Return a mask, True where a query may attend to a key, before the windows are applied."""
        positions = torch.arange(real.size(1), device=real.device)
        causal = positions[:, None] >= positions[None]
        # Padding may attend to itself, because softmax over no keys gives NaN.
        itself = positions[:, None] == positions[None]
        return (causal & real[:, None, None, :]) | itself

    def _embed(self, idx: Tensor, real: Tensor) -> Tensor:  # (B, T) -> (B, T, C)
        """Return each token's embedding, plus a gated share of the previous token's.

        If the model has a table of bigrams, the row for the two tokens is added too.
        """
        x = _norm(self.wte(idx))
        gate = torch.sigmoid(self.smear_gate(x[..., :SMEAR_CHANNELS]))  # (B, T, 1)
        x = x + self.smear_lambda.to(x.dtype) * gate * _previous(x, real)
        if self.bigrams is not None:  # a hash of each token and the one before selects the row
            first, second = BIGRAM_FACTORS
            hashes = _previous(idx, real) * first + idx * second
            x = x + self.bigrams(hashes % self.config.bigram_rows)
        return x

    def forward(
        self,
        input_ids: Tensor,  # (B, T)
        attention_mask: Tensor | None = None,  # (B, T), 1 = token, 0 = padding
        labels: Tensor | None = None,  # (B, T), -100 = ignored; forward() shifts them
        **_: Any,
    ) -> CausalLMOutput:
        """Return softcapped fp32 logits (B, T, V) and, with `labels`, the mean loss in nats."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        hidden = self._hidden(input_ids, attention_mask.bool())
        uncapped = self.lm_head(hidden)
        uncapped = uncapped[..., : self.config.vocab_size]
        logits = SOFTCAP * torch.tanh(uncapped.float() / SOFTCAP)
        loss = None
        if labels is not None:
            predictions = logits[:, :-1].flatten(0, 1)
            targets = labels[:, 1:].flatten()
            loss = F.cross_entropy(predictions, targets, ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits)  # pyright: ignore[reportArgumentType]

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        """Return the arguments of forward(): all tokens so far, because there is no cache."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}
