"""Writes a model of the Qwen family as a GGUF file, under the names and in the layout that llama.cpp expects."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from nanochat import device
from nanochat.checkpoint_manager.load import Loaded
from nanochat.common import UserError
from nanochat.export.gguf import Planned, Value, write
from nanochat.export.huggingface import converted
from nanochat.export.llama_vocabulary import vocabulary
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen

FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}  # llama.cpp's numbers
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
WITHOUT_WEIGHT = {"linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a"}


def architecture(config: QwenConfig) -> str:
    """llama.cpp's name of the architecture. UserError (code 2) if it cannot compute this shape."""
    if not config.output_gate:
        return "qwen3" if config.qk_norm else "qwen2"
    if config.delta_key_dim != config.delta_value_dim:
        raise UserError(
            "llama.cpp computes DeltaNets whose keys and values have the same number of channels, and this model has "
            f"{config.delta_key_dim} and {config.delta_value_dim}. Export with --format huggingface",
            exit_code=2,
        )
    return "qwen35"


def _shape(config: QwenConfig) -> dict[str, Value]:
    """What llama.cpp has to know of the shape."""
    name, c = architecture(config), config
    values: dict[str, Value] = {
        "context_length": c.sequence_len,
        "embedding_length": c.n_embd,
        "block_count": c.n_layer,
        "feed_forward_length": c.n_hidden,
        "attention.head_count": c.n_head,
        "attention.head_count_kv": c.n_kv_head,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.norm_eps,
        "rope.freq_base": c.rope_theta,
        "rope.dimension_count": c.rotated,
        "vocab_size": c.vocab_size,
    }
    if name == "qwen35":
        pairs = c.rotated // 2  # dealt in turn to time, height and width, which are equal in texts
        values |= {
            "rope.dimension_sections": [-(-(pairs - first) // 3) for first in range(3)] + [0],
            "ssm.conv_kernel": c.delta_width,
            "ssm.state_size": c.delta_key_dim,
            "ssm.group_count": c.delta_key_heads,
            "ssm.time_step_rank": c.delta_value_heads,
            "ssm.inner_size": c.delta_value_heads * c.delta_value_dim,
            "attention.recurrent_layers": [kind == "D" for kind in c.kinds],
        }
    return {f"{name}.{key}": value for key, value in values.items()}


def _name(name: str, config: QwenConfig) -> str:
    """llama.cpp's name of a parameter."""
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    if rest in WITHOUT_WEIGHT:
        return f"blk.{layer}.{WITHOUT_WEIGHT[rest]}"
    module, _, kind = rest.rpartition(".")
    inner = INNER[module]
    if inner == "ffn_norm" and config.output_gate:
        inner = "post_attention_norm"
    return f"blk.{layer}.{inner}.{kind}"


def _dealt(x: Tensor, config: QwenConfig, size: int, dim: int = 0) -> Tensor:
    """The value heads, the last along `dim`, in llama.cpp's order: the first of each key head, then the second of each.

    We have all heads of the first key head before those of the second.
    """
    heads, per_key = config.delta_value_heads, config.delta_value_heads // config.delta_key_heads
    order = torch.arange(heads).view(-1, per_key).T.flatten()
    first = x.size(dim) - heads * size  # queries and keys come before the values
    index = (order[:, None] * size + torch.arange(size)).flatten() + first
    return x.index_select(dim, torch.cat((torch.arange(first), index)).to(x.device))


def _layout(name: str, x: Tensor, config: QwenConfig) -> Tensor:
    """A parameter as llama.cpp computes with it."""
    size = config.delta_value_dim
    if name.endswith("conv1d.weight"):
        return _dealt(x.squeeze(1), config, size)
    if ".linear_attn." in name:
        kind = name.split(".linear_attn.")[1].removesuffix(".weight")
        if kind in ("in_proj_qkv", "in_proj_z"):
            return _dealt(x, config, size)
        if kind == "out_proj":
            return _dealt(x, config, size, dim=1)
        if kind == "A_log":
            return _dealt(-x.float().exp(), config, 1)
        return x if kind == "norm" else _dealt(x, config, 1)
    return x + 1 if config.zero_centred and name.endswith("norm.weight") else x


def tensors(model: Qwen, dtype: torch.dtype) -> Iterator[Planned]:
    """The tensors of a model without adapters: matrices and tables in `dtype`, the rest in fp32."""

    def maker(name: str, parameter: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        return lambda: converted(name, _layout(name, parameter.detach(), model.config), dtype)

    for name, parameter in model.named_parameters():
        single = parameter.dim() != 2  # vectors, and the few numbers of convolutions
        shape = (
            (parameter.size(0), parameter.size(2))
            if parameter.dim() == 3
            else tuple(parameter.shape)
        )
        kept = torch.float32 if single else dtype
        yield Planned(_name(name, model.config), shape, kept, maker(name, parameter, kept))


def export(loaded: Loaded, path: Path, dtype: str) -> None:
    """Write the file, whole or not at all.

    UserError (code 2) if it exists already, or if llama.cpp does not know the architecture or the tokenizer.
    """
    model = loaded.model
    if not isinstance(model, Qwen):
        raise UserError(
            "llama.cpp knows the architecture of Qwen models, and not that of nanochat's GPT. Train with `python -m "
            "scripts.base_train --family qwen3`, or export with --format huggingface",
            exit_code=2,
        )
    metadata: dict[str, Value] = {
        "general.architecture": architecture(model.config),
        "general.name": path.stem,
        "general.description": f"trained with nanochat: stage {loaded.stage}, tag {loaded.tag}, step {loaded.step}",
        "general.file_type": FILE_TYPES[dtype],
        **_shape(model.config),
        **vocabulary(loaded.tokenizer),
    }
    write(path, metadata, list(tensors(model, device.DTYPES[dtype])))
