"""Reads and writes the config.json of a published model: which family it is of, and its shape."""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.families import checked_shape
from nanochat.common import UserError, read_json
from nanochat.models.qwen.config import QwenConfig

# The architectures that are known, and the models that have them.
ARCHITECTURES = {
    "Qwen2ForCausalLM": "Qwen1.5, Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3_5ForCausalLM": "Qwen3.5, text",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5",
}


def read_config(folder: Path, sequence_len: int | None = None) -> QwenConfig:
    """The shape of the model in a folder; `sequence_len` replaces the context that the publisher names.

    UserError (code 2) if the folder has no config.json, if the architecture is not known, or if the model needs
    something that this program does not compute.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder} is no model: it has no config.json. Name the folder that holds config.json",
            2,
        )
    content = read_json(path)
    names = content.get("architectures") if isinstance(content, dict) else None
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(f"{known} ({models})" for known, models in ARCHITECTURES.items())
        raise UserError(
            f"{path} names the architecture {reprlib.repr(name)}, and the known ones are {known}. Use one of those",
            2,
        )
    text = content.get("text_config", content)
    try:
        shape = _shape(name, {**text, "tie_word_embeddings": _tied(content, text)})
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        ZeroDivisionError,
    ) as failure:
        if isinstance(failure, UserError):
            raise UserError(f"{path}: {failure}", 2) from failure
        raise UserError(
            f"{path} is damaged: {failure!r}. Copy the model again from its source", 2
        ) from failure
    if sequence_len is not None:
        if sequence_len > shape["sequence_len"]:
            raise UserError(
                f"a context of {sequence_len:,} tokens was asked for, and the model in {folder} was made for at most "
                f"{shape['sequence_len']:,}. Ask for less",
                2,
            )
        shape["sequence_len"] = sequence_len
    return checked_shape(QwenConfig, shape, str(path))


def _tied(content: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding: the outer value counts where a model has text and vision."""
    return bool(content.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def _refuse_unknown(text: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """UserError for everything that would change the computation and is not supported."""
    layers = text.get("layer_types") or []
    kind = rope.get("rope_type", rope.get("type", "default"))
    unsupported = {
        f"the activation {text.get('hidden_act', 'silu')!r}; silu is": text.get(
            "hidden_act", "silu"
        )
        != "silu",
        f"rotary embeddings of type {kind!r}; only the default type is": kind != "default",
        "a sliding window; full attention is": bool(text.get("use_sliding_window"))
        or "sliding_attention" in layers,
        "quantised weights; bf16, fp16 and fp32 are": "quantization_config" in text,
        "biases in every matrix of attention; only those of Qwen2 are": bool(
            text.get("attention_bias")
        ),
    }
    for what, asked in unsupported.items():
        if asked:
            raise UserError(f"the model has {what} supported. Use another model")


def _shape(architecture: str, text: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a QwenConfig from the publisher's."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    _refuse_unknown(text, rope)
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    shape = {
        "sequence_len": text["max_position_embeddings"],
        "vocab_size": text["vocab_size"],
        "n_layer": text["num_hidden_layers"],
        "n_embd": text["hidden_size"],
        "n_head": heads,
        "n_kv_head": text.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "n_hidden": text["intermediate_size"],
        "rope_theta": float(rope.get("rope_theta") or text.get("rope_theta") or 10_000.0),
        "norm_eps": float(text["rms_norm_eps"]),
        "tied": int(text["tie_word_embeddings"]),
        "qkv_bias": int(architecture == "Qwen2ForCausalLM"),
        "qk_norm": int(architecture != "Qwen2ForCausalLM"),
    }
    if architecture.startswith("Qwen3_5"):
        part = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 0.25
        shape |= {
            "layers": _layers(text),
            "rotary_dim": int(head_dim * part),
            "zero_centred": 1,
            "output_gate": 1,
            "delta_key_heads": text["linear_num_key_heads"],
            "delta_value_heads": text["linear_num_value_heads"],
            "delta_key_dim": text["linear_key_head_dim"],
            "delta_value_dim": text["linear_value_head_dim"],
            "delta_width": text["linear_conv_kernel_dim"],
        }
    return shape


def _layers(text: Mapping[str, Any]) -> str:
    """A or D for each layer."""
    letters = {"full_attention": "A", "linear_attention": "D"}
    if types := text.get("layer_types"):
        return "".join(letters[kind] for kind in types)
    every = text.get("full_attention_interval", 4)
    return "".join(
        "D" if (i + 1) % every else "A" for i in range(min(text["num_hidden_layers"], 1000))
    )


def published(shape: QwenConfig) -> dict[str, Any]:
    """The config.json of a model, as its publisher would write it; read_config() reads it back."""
    name = "qwen3_5_text" if shape.output_gate else "qwen3" if shape.qk_norm else "qwen2"
    architecture = {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
    }
    content: dict[str, Any] = {
        "architectures": [architecture[name]],
        "model_type": name,
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
    if name == "qwen2":
        del content["head_dim"]  # which its readers compute
    if name == "qwen3_5_text":
        del content["rope_theta"]
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
            "layer_types": [
                "full_attention" if kind == "A" else "linear_attention" for kind in shape.kinds
            ],
        }
    return content
