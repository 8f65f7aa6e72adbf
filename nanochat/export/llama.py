"""Writes a Qwen or Llama model as a GGUF file, with llama.cpp's names and layout."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nanochat import device
from nanochat.checkpoint_manager.load import Loaded
from nanochat.common import UserError, log, tr
from nanochat.export import llama_rope, q8_0
from nanochat.export.gguf import PlannedTensor, Value, write
from nanochat.export.huggingface import converted
from nanochat.export.llama_vocabulary import vocabulary
from nanochat.models.llama import LlamaConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen
from nanochat.models.rope import rotary_divisors

# llama.cpp's codes for file types.
FILE_TYPES = {"float32": 0, "float16": 1, "q8_0": 7, "bfloat16": 32}
QUANTIZATION_VERSION = 2  # version of ggml's quantized formats
# Our name for a parameter outside the layers -> llama.cpp's name.
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# Our name for a module in a layer -> llama.cpp's name.
LAYER_NAMES = {
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
# The same for parameters that have no module of their own.
PARAMETER_NAMES = {"linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a"}
ROPE_DIVISORS = "rope_freqs.weight"  # a tensor of Llama 3 that is not a parameter


def architecture(config: QwenConfig) -> str:
    """Return llama.cpp's name for the architecture of a model.

    Raises UserError (exit code 2) if llama.cpp cannot compute a model of this shape.
    """
    _check_options(config)
    if config.has_experts:
        raise UserError(
            tr(
                "a model with experts has no export to GGUF here. Export with --format "
                "huggingface, and turn the folder into a GGUF file with llama.cpp's "
                "convert_hf_to_gguf.py"
            ),
            exit_code=2,
        )
    if isinstance(config, LlamaConfig):
        return "llama"
    if not config.output_gate:
        return "qwen3" if config.qk_norm else "qwen2"
    if config.delta_key_dim != config.delta_value_dim:
        raise UserError(
            tr(
                "llama.cpp computes DeltaNets whose keys and values have the same number "
                "of channels, and this model has {keys} and {values}. Export with --format "
                "huggingface",
                keys=config.delta_key_dim,
                values=config.delta_value_dim,
            ),
            exit_code=2,
        )
    return "qwen35"


def _check_options(config: QwenConfig) -> None:
    """Raise UserError (exit code 2) if a model has options that this export does not write."""
    options = {
        tr("sliding windows"): min(config.windows) < config.sequence_len - 1,
        tr("layers without positions"): not config.kinds.isupper(),
        tr("rotary embeddings of type {rope}", rope=config.rope): not llama_rope.is_supported(
            config
        ),
        tr("biases in every matrix of attention"): config.o_bias,
        tr("biases in its MLPs"): config.mlp_bias,
    }
    for option, is_present in options.items():
        if is_present:
            raise UserError(
                tr(
                    "the model has {option}, which is not written to a GGUF file. Export with "
                    "--format huggingface, and convert the folder with llama.cpp's own tool",
                    option=option,
                ),
                exit_code=2,
            )


def _shape(config: QwenConfig) -> dict[str, Value]:
    """Return the metadata that describes the shape of the model to llama.cpp."""
    c = config
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
        "vocab_size": c.vocab_size,
        **llama_rope.metadata(c),
    }
    name = architecture(config)
    if name == "qwen35":
        # Pairs of channels go in turn to time, height and width, which are equal in text.
        pairs = c.rotated // 2
        sections = [math.ceil((pairs - first) / 3) for first in range(3)]
        values |= {
            "rope.dimension_sections": [*sections, 0],
            "ssm.conv_kernel": c.delta_width,
            "ssm.state_size": c.delta_key_dim,
            "ssm.group_count": c.delta_key_heads,
            "ssm.time_step_rank": c.delta_value_heads,
            "ssm.inner_size": c.delta_value_heads * c.delta_value_dim,
            "attention.recurrent_layers": [kind == "D" for kind in c.kinds],
        }
    return {f"{name}.{key}": value for key, value in values.items()}


def tensor_name(name: str, config: QwenConfig) -> str:
    """Return llama.cpp's name for a parameter."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, _, layer, inner = name.split(".", 3)
    if inner in PARAMETER_NAMES:
        return f"blk.{layer}.{PARAMETER_NAMES[inner]}"
    module, _, kind = inner.rpartition(".")
    llama_module = LAYER_NAMES[module]
    if llama_module == "ffn_norm" and config.output_gate:
        llama_module = "post_attention_norm"
    return f"blk.{layer}.{llama_module}.{kind}"


def _reorder_heads(
    x: Tensor,
    config: QwenConfig,
    size: int,
    dim: int = 0,
) -> Tensor:
    """Return `x` with the value heads, which come last along `dim`, in llama.cpp's order.

    Ours are grouped by key head. llama.cpp puts the first value head of every key head first, then
    the second of every key head, and so on. A value head has `size` entries.
    """
    heads = config.delta_value_heads
    heads_per_key = heads // config.delta_key_heads
    order = torch.arange(heads).view(-1, heads_per_key).T.flatten()
    begin = x.size(dim) - heads * size  # queries and keys come before the values
    value_index = begin + order[:, None] * size + torch.arange(size)
    index = torch.cat((torch.arange(begin), value_index.flatten()))
    return x.index_select(dim, index.to(x.device))


def _layout(name: str, x: Tensor, config: QwenConfig) -> Tensor:
    """Return a parameter with the layout and the values that llama.cpp expects."""
    if ".linear_attn." in name:
        kind = name.split(".linear_attn.")[1].removesuffix(".weight")
        return _delta_layout(kind, x, config)
    if config.zero_centred and name.endswith("norm.weight"):
        return x + 1
    heads = _rotated_heads(name, config)
    # llama.cpp rotates pairs of neighbouring channels of a Llama, and we rotate channels of the
    # first half with channels of the second half.
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) if heads else x


def our_layout(name: str, x: Tensor, config: QwenConfig) -> Tensor:
    """Return a tensor of a GGUF file in the layout of our parameter; only without DeltaNets."""
    heads = _rotated_heads(name, config)
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if heads else x


def _rotated_heads(name: str, config: QwenConfig) -> int:
    """Return the number of heads in a parameter whose rows llama.cpp orders by pairs, else 0."""
    if not isinstance(config, LlamaConfig):
        return 0
    module = name.removesuffix(".weight").rpartition(".")[2]
    return {"q_proj": config.n_head, "k_proj": config.n_kv_head}.get(module, 0)


def _delta_layout(kind: str, x: Tensor, config: QwenConfig) -> Tensor:
    """Return a parameter of a Gated DeltaNet as llama.cpp expects it."""
    head_dim = config.delta_value_dim
    if kind == "norm":
        return x
    if kind == "conv1d":
        return _reorder_heads(x.squeeze(1), config, head_dim)
    if kind in ("in_proj_qkv", "in_proj_z"):
        return _reorder_heads(x, config, head_dim)
    if kind == "out_proj":
        return _reorder_heads(x, config, head_dim, dim=1)
    if kind == "A_log":
        x = -x.float().exp()
    return _reorder_heads(x, config, 1)


def tensors(model: Qwen, format: str) -> Iterator[PlannedTensor]:
    """Yield a PlannedTensor for each parameter of a model without adapters.

    Matrices, the embedding among them, are stored in `format`, and all other parameters in fp32, as
    llama.cpp's own converter does.
    """
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        stored_as = _format(shape, format)
        if len(shape) == 3:
            shape = (shape[0], shape[2])
        convert = partial(_convert, name, parameter, model.config, stored_as)
        yield PlannedTensor(tensor_name(name, model.config), shape, stored_as, convert)
    divisors = rotary_divisors(model.config, model.device)
    if divisors is not None and model.config.rope == "llama3":
        yield PlannedTensor(ROPE_DIVISORS, tuple(divisors.shape), "float32", lambda: divisors)


def _format(shape: tuple[int, ...], format: str) -> str:
    """Return the format in which a parameter is stored, if matrices are stored in `format`."""
    if len(shape) != 2:  # vectors, and the few numbers of convolutions
        return "float32"
    if format == "q8_0" and not q8_0.fits(shape):
        return "float16"
    return format


def _convert(
    name: str,
    parameter: Tensor,
    config: QwenConfig,
    format: str,
) -> Tensor:
    values = _layout(name, parameter.detach(), config)
    if format != "q8_0":
        return converted(name, values, device.DTYPES[format])
    values = converted(name, values, torch.float32)
    converted(name, values.abs().max() / 127, torch.float16)  # the largest scale
    return q8_0.quantized(values)


def _log_unrounded(plan: Sequence[PlannedTensor]) -> None:
    """Log which matrices of a file in Q8_0 are stored in fp16."""
    unrounded = [tensor for tensor in plan if tensor.format == "float16"]
    if unrounded:
        log(
            tr(
                "stored in fp16, as llama.cpp does it, and not in q8_0: every matrix whose row "
                "length is not a multiple of {numbers}, such as {name} with {length} ({count} of "
                "{total} tensors)",
                numbers=q8_0.NUMBERS,
                name=unrounded[0].name,
                length=unrounded[0].shape[-1],
                count=len(unrounded),
                total=len(plan),
            )
        )


def export(loaded: Loaded, path: Path, format: str) -> None:
    """Write a loaded model to a GGUF file atomically, with its matrices in a format of FILE_TYPES.

    Raises UserError if the file already exists or llama.cpp does not support the architecture or
    the tokenizer (exit code 2), or if a value is not finite in the format.
    """
    model = loaded.model
    if not isinstance(model, Qwen):
        raise UserError(
            tr(
                "llama.cpp knows the architectures of Qwen and Llama, and not that of "
                "nanochat's GPT. Train with `python -m scripts.base_train --family qwen3`, "
                "or export with --format huggingface"
            ),
            exit_code=2,
        )
    metadata: dict[str, Value] = {
        "general.architecture": architecture(model.config),
        "general.name": path.stem,
        "general.description": (
            f"trained with nanochat: stage {loaded.stage}, tag {loaded.tag}, step {loaded.step}"
        ),
        "general.file_type": FILE_TYPES[format],
        **_shape(model.config),
        **vocabulary(loaded.tokenizer),
    }
    plan = list(tensors(model, format))
    if format == "q8_0":
        metadata["general.quantization_version"] = QUANTIZATION_VERSION
        _log_unrounded(plan)
    write(path, metadata, plan)
