"""Translates config.json, which describes a published model, to the model's shape and back."""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.families import checked_shape
from nanochat.checkpoint_manager.huggingface.quantised import SETTING, check_quantisation
from nanochat.common import UserError, read_json, tr
from nanochat.models.llama import LlamaConfig
from nanochat.models.qwen.config import QwenConfig

# Supported architecture -> the models that have it.
ARCHITECTURES = {
    "Qwen2ForCausalLM": "Qwen1.5, Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3 with experts",
    "Qwen3_5ForCausalLM": "Qwen3.5, text",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5",
    "Qwen3_5MoeForCausalLM": "Qwen3.5 with experts, text",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5 with experts",
    "LlamaForCausalLM": "Llama, SmolLM2",
    "MistralForCausalLM": "Mistral",
}
LLAMAS = ("LlamaForCausalLM", "MistralForCausalLM")  # the same layers under two names
# `model_type` in config.json -> architecture.
MODEL_TYPES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "llama": "LlamaForCausalLM",
}
LAYER_LETTERS = {"full_attention": "A", "linear_attention": "D"}
MAX_LAYERS = 1_000  # limit, in case a damaged config.json asks for more


def read_config(folder: Path, sequence_len: int | None = None) -> QwenConfig:
    """Return the configuration of the published model in a folder.

    `sequence_len`, if given, becomes the length of the context. Raises UserError if config.json is
    missing or damaged, if the model is not supported, or if `sequence_len` is longer than the
    model's context.
    """
    path = folder / "config.json"
    if folder.is_file() and folder.suffix == ".gguf":
        raise UserError(
            tr(
                "{folder} is a GGUF file, and a model is a folder here. Make a folder of the file "
                "with `python -m nanochat.export --from-gguf {folder} {new_folder}`, then name "
                "{new_folder}",
                folder=folder,
                new_folder=folder.with_suffix(""),
            ),
            2,
        )
    if not path.is_file():
        raise UserError(
            tr(
                "{folder} is no model: it has no config.json. Name the folder that holds "
                "config.json",
                folder=folder,
            ),
            2,
        )
    content = read_json(path)
    architecture = _architecture(content, path)
    text = content.get("text_config", content)
    try:
        check_quantisation(content.get(SETTING, text.get(SETTING)))
        shape = _shape(architecture, {**text, "tie_word_embeddings": _tied(content, text)})
    except UserError as failure:
        raise UserError(tr("{path}: {failure}", path=path, failure=failure), 2) from failure
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        ZeroDivisionError,
    ) as failure:
        raise UserError(
            tr(
                "{path} is damaged: {failure!r}. Copy the model again from its source",
                path=path,
                failure=failure,
            ),
            2,
        ) from failure
    if sequence_len is not None:
        if sequence_len > shape["sequence_len"]:
            raise UserError(
                tr(
                    "a context of {sequence_len:,} tokens was asked for, and the model in "
                    "{folder} was made for at most {longest:,}. Ask for less",
                    sequence_len=sequence_len,
                    folder=folder,
                    longest=shape["sequence_len"],
                ),
                2,
            )
        shape["sequence_len"] = sequence_len
    return checked_shape(_kind(architecture), shape, str(path))


def _kind(architecture: str) -> type[QwenConfig]:
    """Return the class of a supported architecture's configuration."""
    return LlamaConfig if architecture in LLAMAS else QwenConfig


def _architecture(content: Any, path: Path) -> str:
    """Return the first architecture that config.json names.

    Raises UserError (exit code 2) if it names none or an unsupported one.
    """
    names = content.get("architectures") if isinstance(content, dict) else None
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and name in ARCHITECTURES:
        return name
    choices = [f"{choice} ({models})" for choice, models in ARCHITECTURES.items()]
    raise UserError(
        tr(
            "{path} names the architecture {name}, and the known ones are {choices}. Use one "
            "of those",
            path=path,
            name=reprlib.repr(name),
            choices=", ".join(choices),
        ),
        2,
    )


def _tied(content: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Return whether the output head shares the weights of the embedding.

    A model for text and vision may have one value for the whole model (`content`) and one for its
    text part (`text`). The former takes precedence.
    """
    return bool(content.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def _refuse_unknown(architecture: str, text: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Raise UserError if the model needs a computation that is not supported."""

    def refuse_if(is_unsupported: bool, feature: str) -> None:
        if is_unsupported:
            raise UserError(
                tr("the model has {feature} supported. Use another model", feature=feature)
            )

    activation = text.get("hidden_act", "silu")
    refuse_if(
        activation != "silu", tr("the activation {activation!r}; silu is", activation=activation)
    )
    rope_types = ("default", "llama3") if architecture in LLAMAS else ("default",)
    rope_type = _rope_type(rope)
    refuse_if(
        rope_type not in rope_types,
        tr(
            "rotary embeddings of type {rope_type!r}; {known} are",
            rope_type=rope_type,
            known=tr(" and ").join(rope_types),
        ),
    )
    refuse_if(_slides(architecture, text), tr("a sliding window; full attention is"))
    refuse_if(
        bool(text.get("attention_bias")),
        tr("biases in every matrix of attention; only those of Qwen2 are"),
    )
    refuse_if(bool(text.get("mlp_bias")), tr("biases in its MLPs; MLPs without biases are"))


def _rope_type(rope: Mapping[str, Any]) -> str:
    """Return the type of rotary embeddings that a config.json names under its new or old name."""
    return rope.get("rope_type") or rope.get("type") or "default"


def _slides(architecture: str, text: Mapping[str, Any]) -> bool:
    """Return whether a layer has a sliding window that is shorter than the context.

    Without layer_types, use_sliding_window concerns the layers from max_window_layers on. Mistral
    has neither: its window, if any, concerns all layers.
    """
    window = text.get("sliding_window")
    if window is not None and window >= text["max_position_embeddings"]:
        return False
    layers = text.get("layer_types")
    if layers:
        return "sliding_attention" in layers
    if architecture == "MistralForCausalLM":
        return window is not None
    first = text.get("max_window_layers", 0)
    return bool(text.get("use_sliding_window")) and first < text["num_hidden_layers"]


def _shape(architecture: str, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the configuration from the text part of a config.json.

    Raises UserError if the model needs a computation that is not supported.
    """
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    _refuse_unknown(architecture, text, rope)
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    rope_theta = rope.get("rope_theta") or text.get("rope_theta") or 10_000.0
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    shape = {
        "sequence_len": text["max_position_embeddings"],
        "vocab_size": text["vocab_size"],
        "n_layer": text["num_hidden_layers"],
        "n_embd": text["hidden_size"],
        "n_head": heads,
        "n_kv_head": text.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        # Qwen3.5 with experts has no layer with a usual MLP, and says no size of one
        "n_hidden": text.get("intermediate_size") or text["moe_intermediate_size"],
        "rope_theta": float(rope_theta),
        "norm_eps": float(text["rms_norm_eps"]),
        "tied": int(text["tie_word_embeddings"]),
        "qkv_bias": int(is_qwen2),
        "qk_norm": int(not is_qwen2 and architecture not in LLAMAS),
    }
    if _rope_type(rope) == "llama3":
        shape |= {
            "rope_factor": float(rope["factor"]),
            "rope_low": float(rope["low_freq_factor"]),
            "rope_high": float(rope["high_freq_factor"]),
            "rope_original": rope["original_max_position_embeddings"],
        }
    if "Moe" in architecture:
        shape |= _experts(architecture, text)
    if architecture.startswith("Qwen3_5"):
        rotary_share = (
            rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 0.25
        )
        shape |= {
            "layers": _layers(text),
            "rotary_dim": int(head_dim * rotary_share),
            "zero_centred": 1,
            "output_gate": 1,
            "delta_key_heads": text["linear_num_key_heads"],
            "delta_value_heads": text["linear_num_value_heads"],
            "delta_key_dim": text["linear_key_head_dim"],
            "delta_value_dim": text["linear_value_head_dim"],
            "delta_width": text["linear_conv_kernel_dim"],
        }
    return shape


def _experts(architecture: str, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the configuration that describe the mixtures of experts."""
    is_qwen3 = architecture == "Qwen3MoeForCausalLM"
    count = text.get("num_experts") or text["num_local_experts"]
    fields = {
        "mlps": _mlps(text) if is_qwen3 else "E",
        "n_experts": count,
        "experts_per_token": text["num_experts_per_tok"],
        "n_expert_hidden": text["moe_intermediate_size"],
    }
    if is_qwen3:
        return fields | {"normed_shares": int(text.get("norm_topk_prob", False))}
    return fields | {"n_shared_hidden": text["shared_expert_intermediate_size"]}


def _mlps(text: Mapping[str, Any]) -> str:
    """Return the pattern of MLPs: E for a mixture of experts, M for a usual MLP.

    It is as short as its repetition allows, so that a planner need not count every layer.
    """
    step = text.get("decoder_sparse_step", 1)
    usual = set(text.get("mlp_only_layers") or ())
    letters = ""
    for layer in range(min(text["num_hidden_layers"], MAX_LAYERS)):
        is_sparse = layer not in usual and (layer + 1) % step == 0
        letters += "E" if is_sparse else "M"
    for period in range(1, len(letters)):
        repeated = letters[:period] * -(-len(letters) // period)
        if repeated[: len(letters)] == letters:
            return letters[:period]
    return letters


def _layers(text: Mapping[str, Any]) -> str:
    """Return a string with a letter per layer: A for full attention, D for linear attention."""
    types = text.get("layer_types")
    if types:
        return "".join(LAYER_LETTERS[layer_type] for layer_type in types)
    interval = text.get("full_attention_interval", 4)
    letters = ""
    for layer in range(min(text["num_hidden_layers"], MAX_LAYERS)):
        is_full = (layer + 1) % interval == 0
        letters += "A" if is_full else "D"
    return letters


def published(shape: QwenConfig) -> dict[str, Any]:
    """Return the config.json that a publisher would write for a model of this shape, as a dict.

    read_config() can read it back.
    """
    model_type = _model_type(shape)
    content: dict[str, Any] = {
        "architectures": [MODEL_TYPES[model_type]],
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.n_embd,
        "hidden_act": "silu",
        "intermediate_size": shape.n_hidden,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.n_kv_head,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.sequence_len,
        "tie_word_embeddings": bool(shape.tied),
        "rope_theta": shape.rope_theta,
    }
    if model_type == "qwen2":
        del content["head_dim"]  # readers of this type compute it
    if isinstance(shape, LlamaConfig) and shape.rope_factor != 1:
        content["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": shape.rope_factor,
            "low_freq_factor": shape.rope_low,
            "high_freq_factor": shape.rope_high,
            "original_max_position_embeddings": shape.rope_original,
        }
    if "E" in shape.mlps:
        content |= {
            "num_experts": shape.n_experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.n_expert_hidden,
        }
    if model_type == "qwen3_moe":
        usual = [layer for layer, kind in enumerate(shape.mlp_kinds) if kind == "M"]
        content |= {
            "norm_topk_prob": bool(shape.normed_shares),
            "decoder_sparse_step": 1,
            "mlp_only_layers": usual,
        }
    if model_type == "qwen3_5_moe_text":
        del content["intermediate_size"]
        content["shared_expert_intermediate_size"] = shape.n_shared_hidden
    if model_type.startswith("qwen3_5"):
        del content["rope_theta"]
        types = {letter: layer_type for layer_type, letter in LAYER_LETTERS.items()}
        content |= {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": shape.rope_theta,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": shape.rotated / shape.head_dim,
            },
            "linear_num_key_heads": shape.delta_key_heads,
            "linear_num_value_heads": shape.delta_value_heads,
            "linear_key_head_dim": shape.delta_key_dim,
            "linear_value_head_dim": shape.delta_value_dim,
            "linear_conv_kernel_dim": shape.delta_width,
            "layer_types": [types[letter] for letter in shape.kinds],
        }
    return content


def _model_type(shape: QwenConfig) -> str:
    """Return the model_type that a publisher's config.json has for this shape."""
    if isinstance(shape, LlamaConfig):
        return "llama"
    if shape.output_gate:
        return "qwen3_5_moe_text" if "E" in shape.mlps else "qwen3_5_text"
    if "E" in shape.mlps:
        return "qwen3_moe"
    return "qwen3" if shape.qk_norm else "qwen2"
