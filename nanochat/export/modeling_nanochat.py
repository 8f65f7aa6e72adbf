"""The GPT of nanochat/gpt.py for Hugging Face transformers. `python -m nanochat.export` copies it beside the weights.

Load the model with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`. No code of nanochat imports
this file. The model has no key-value cache: generate() computes all tokens again in every step, which is correct but
slow. Shapes: B batch, T time, C channels.
"""

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
    """The shape of a model, under the names of nanochat/gpt.py."""

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
        **rest: Any,
    ) -> None:
        self.sequence_len, self.vocab_size = sequence_len, vocab_size
        self.n_layer, self.n_head, self.n_kv_head, self.n_embd = n_layer, n_head, n_kv_head, n_embd
        self.window_pattern, self.bigram_rows, self.offset_layers = (
            window_pattern,
            bigram_rows,
            offset_layers,
        )
        self.use_cache = False
        super().__init__(**{"tie_word_embeddings": False, **rest, "use_cache": False})

    @property
    def padded_vocab(self) -> int:
        """The vocabulary rounded up to a multiple of 64: the rows of the embedding tables and of the head."""
        return -(-self.vocab_size // 64) * 64

    def window(self, layer: int) -> int:
        """How many keys before its own position a query in this layer sees."""
        short = min(-(-self.sequence_len // 4 // 128) * 128, self.sequence_len)
        pattern = self.window_pattern.upper()
        whole = layer == self.n_layer - 1 or pattern[layer % len(pattern)] == "L"
        return self.sequence_len if whole else short

    def has_value_embedding(self, layer: int) -> bool:
        """Whether a layer has a value embedding: every other layer has one, and the last layer always does."""
        return layer % 2 == (self.n_layer - 1) % 2


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


def _shifted(x: Tensor, real: Tensor) -> Tensor:  # (B, T, ...), (B, T)
    """What the token before each place has in `x`; zeros where there is none or padding."""
    kept = x * real.view(*real.shape, *(1 for _ in x.shape[2:]))
    return torch.cat((torch.zeros_like(x[:, :1]), kept[:, :-1]), dim=1)


class _Attention(nn.Module):
    def __init__(self, config: NanochatConfig, layer: int):
        super().__init__()
        self.head_dim, self.window = config.n_embd // config.n_head, config.window(layer)
        self.offset = layer < config.offset_layers
        kv_dim = config.n_kv_head * self.head_dim
        self.c_q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_k = nn.Linear(config.n_embd, kv_dim, bias=False)
        self.c_v = nn.Linear(config.n_embd, kv_dim, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        gated = config.has_value_embedding(layer)
        self.ve_gate = (
            nn.Linear(VALUE_GATE_CHANNELS, config.n_kv_head, bias=False) if gated else None
        )

    def forward(
        self, x: Tensor, value: Tensor | None, cos: Tensor, sin: Tensor, seen: Tensor, real: Tensor
    ) -> Tensor:
        q, k, v = (
            m(x).unflatten(-1, (-1, self.head_dim)) for m in (self.c_q, self.c_k, self.c_v)
        )  # (B, T, H, D)
        q, k = (_norm(_rotate(one, cos, sin)) * QK_SCALE for one in (q, k))
        if self.offset:  # the slowly turning half of a key is that of the token before
            own, earlier = (keys.unflatten(-1, (2, 2, -1)) for keys in (k, _shifted(k, real)))
            k = torch.stack((own[..., 0, :], earlier[..., 1, :]), dim=-2).flatten(-3)
        if value is not None and self.ve_gate is not None:
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., :VALUE_GATE_CHANNELS]))
            v = v + gate.unsqueeze(-1) * value.view_as(v)
        T = x.size(1)
        place = torch.arange(T, device=x.device)
        near = (place[:, None] - place[None]) <= self.window  # (T, T)
        groups = q.size(2) // k.size(2)
        k, v = (one.repeat_interleave(groups, dim=2) for one in (k, v))
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen & near
        )
        return self.c_proj(y.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, config: NanochatConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class _Block(nn.Module):
    def __init__(self, config: NanochatConfig, layer: int):
        super().__init__()
        self.attn, self.mlp = _Attention(config, layer), _MLP(config)


class NanochatForCausalLM(PreTrainedModel, GenerationMixin):
    """The model, with the parameter names of nanochat/gpt.py."""

    config_class = NanochatConfig
    main_input_name = "input_ids"
    base_model_prefix = ""
    _no_split_modules = ["_Block"]  # noqa: RUF012 - transformers' own convention
    _supports_sdpa = True

    def __init__(self, config: NanochatConfig):
        super().__init__(config)
        kv_dim = config.n_kv_head * (config.n_embd // config.n_head)
        self.wte = nn.Embedding(config.padded_vocab, config.n_embd)
        tables = {
            str(i): nn.Embedding(config.padded_vocab, kv_dim)
            for i in range(config.n_layer)
            if config.has_value_embedding(i)
        }
        self.value_embeds = nn.ModuleDict(tables)
        self.h = nn.ModuleList([_Block(config, i) for i in range(config.n_layer)])
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab, bias=False)
        self.bigrams = (
            nn.Embedding(config.bigram_rows, config.n_embd) if config.bigram_rows else None
        )
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        self.smear_gate = nn.Linear(SMEAR_CHANNELS, 1, bias=False)
        self.smear_lambda = nn.Parameter(torch.zeros(1))
        self.backout_lambda = nn.Parameter(torch.zeros(1))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.wte

    def get_output_embeddings(self) -> nn.Module:
        """The output head."""
        return self.lm_head

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the weights always come from a checkpoint."""

    def _hidden(self, idx: Tensor, real: Tensor) -> Tensor:
        """The normed hidden states (B, T, C); `real` (B, T) is True for tokens and False for padding."""
        config, T = self.config, idx.size(1)
        dtype, head_dim = self.wte.weight.dtype, config.n_embd // config.n_head
        frequency = ROTARY_BASE ** (
            -torch.arange(0, head_dim, 2, dtype=torch.float32, device=idx.device) / head_dim
        )
        angle = torch.outer(torch.arange(T, dtype=torch.float32, device=idx.device), frequency)
        cos, sin = (table.to(dtype)[None, :, None] for table in (angle.cos(), angle.sin()))
        place = torch.arange(T, device=idx.device)
        causal = place[:, None] >= place[None]
        itself = (
            place[:, None] == place[None]
        )  # a row of padding sees itself: softmax over no keys is NaN
        seen = (causal & real[:, None, None, :]) | itself  # (B, 1, T, T)

        x = _norm(self.wte(idx))
        gate = self.smear_lambda.to(dtype) * torch.sigmoid(self.smear_gate(x[..., :SMEAR_CHANNELS]))
        x = x + gate * _shifted(x, real)
        if self.bigrams is not None:  # of each token and the one before, by a hash
            rows = (
                _shifted(idx, real) * BIGRAM_FACTORS[0] + idx * BIGRAM_FACTORS[1]
            ) % self.config.bigram_rows
            x = x + self.bigrams(rows)
        x0 = middle = x
        for i, block in enumerate(cast(list[Any], list(self.h))):
            x = self.resid_lambdas[i].to(dtype) * x + self.x0_lambdas[i].to(dtype) * x0
            value = self.value_embeds[str(i)](idx) if str(i) in self.value_embeds else None
            x = x + block.attn(_norm(x), value, cos, sin, seen, real)
            x = x + block.mlp(_norm(x))
            if i == config.n_layer // 2:
                middle = x
        return _norm(x - self.backout_lambda.to(dtype) * middle)

    def forward(
        self,
        input_ids: Tensor,  # (B, T)
        attention_mask: Tensor | None = None,  # (B, T), 1 = token, 0 = padding
        labels: Tensor | None = None,  # (B, T), -100 = ignored; forward() shifts them
        **_: Any,
    ) -> CausalLMOutput:
        """Softcapped fp32 logits (B, T, V) and, with labels, the mean loss in nats."""
        real = (
            torch.ones_like(input_ids, dtype=torch.bool)
            if attention_mask is None
            else attention_mask.bool()
        )
        raw = self.lm_head(self._hidden(input_ids, real))[..., : self.config.vocab_size]
        logits = SOFTCAP * torch.tanh(raw.float() / SOFTCAP)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
            )
        return CausalLMOutput(loss=loss, logits=logits)  # pyright: ignore[reportArgumentType]

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        """Pass all tokens so far, because there is no cache."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}
