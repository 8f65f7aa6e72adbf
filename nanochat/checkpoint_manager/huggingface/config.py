"""Translates config.json, which describes a published model, to the model's shape and back."""

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.families import checked_shape
from nanochat.checkpoint_manager.huggingface.quantised import SETTING, check_quantisation
from nanochat.checkpoint_manager.huggingface.rope import (
    longest_context,
    published_rope,
    rope_settings,
)
from nanochat.common import UserError, read_json, tr
from nanochat.models.llama import LlamaConfig
from nanochat.models.qwen.config import DELTANET, FULL, SLIDING, QwenConfig

# Supported architecture -> the models that have it.
ARCHITECTURES = {
    "Qwen2ForCausalLM": "Qwen1.5, Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3 with experts",
    "Qwen3_5ForCausalLM": "Qwen3.5, text",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5, Qwen3.6-27B, Qwen3.8-27B",
    "Qwen3_5MoeForCausalLM": "Qwen3.5 with experts, text",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5 with experts",
    "LlamaForCausalLM": "Llama 2 and 3, SmolLM2, TinyLlama, DeepSeek-R1-Distill-Llama",
    "MistralForCausalLM": "Mistral",
    "MinistralForCausalLM": "Ministral 2410",
    "SmolLM3ForCausalLM": "SmolLM3",
}
MISTRALS = ("MistralForCausalLM", "MinistralForCausalLM")
SMOLLM3 = "SmolLM3ForCausalLM"
LLAMAS = ("LlamaForCausalLM", *MISTRALS, SMOLLM3)  # the same layers under other names
# `model_type` in config.json -> architecture.
MODEL_TYPES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "smollm3": SMOLLM3,
}
# Kind of layer in config.json -> its letter in a configuration.
LAYER_LETTERS = {
    "full_attention": FULL,
    "sliding_attention": SLIDING,
    "linear_attention": DELTANET,
}
# Architectures in whose config.json attention_bias asks for biases, and the same for mlp_bias.
BIASED_ATTENTION = (
    "LlamaForCausalLM",
    SMOLLM3,
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
BIASED_MLP = ("LlamaForCausalLM", SMOLLM3)
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
    if not folder.exists():
        raise UserError(
            tr(
                "{folder} does not exist, and a model is a folder that holds config.json. Check the "
                "path, or name OWNER/NAME of a model that hf or modelscope has downloaded",
                folder=folder,
            ),
            2,
        )
    if not path.is_file():
        raise UserError(
            tr(
                "{folder} is not a model: it has no config.json. Name the folder that holds "
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
        tied = _tied(architecture, content, text)
        shape = _shape(architecture, {**text, "tie_word_embeddings": tied})
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
        longest = longest_context(shape)
        if sequence_len > longest:
            raise UserError(
                tr(
                    "a context of {sequence_len:,} tokens was asked for, and the model in "
                    "{folder} was made for at most {longest:,}. Ask for less, with --max_length "
                    "where it is trained and --context where it answers",
                    sequence_len=sequence_len,
                    folder=folder,
                    longest=longest,
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


def _tied(architecture: str, content: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Return whether the output head shares the weights of the embedding.

    A model for text and vision may have one value for the whole model (`content`) and one for its
    text part (`text`). The former takes precedence. Transformers 4 does not write the value of
    SmolLM3-3B, which is the default of its class; the other classes have the other default.
    """
    default = architecture == SMOLLM3
    return bool(content.get("tie_word_embeddings", text.get("tie_word_embeddings", default)))


def _kinds(architecture: str, text: Mapping[str, Any], longest: int) -> str:
    """Return a string with a letter per layer, or a single letter if all are of one kind.

    Without layer_types, use_sliding_window concerns the layers from max_window_layers on. Mistral
    has neither: its window, if any, concerns all layers. A window that is at least as long as the
    longest context hides nothing. Raises UserError if a kind of layer is unknown, or if layers slide
    and no window is given.
    """
    n_layer = min(text["num_hidden_layers"], MAX_LAYERS)
    rotates = _rotates(architecture, text, n_layer)
    types = text.get("layer_types")
    if types:
        _check_types(types, n_layer)
        kinds = "".join(LAYER_LETTERS[layer_type] for layer_type in types)
    elif architecture.startswith("Qwen3_5"):
        interval = text.get("full_attention_interval", 4)
        kinds = "".join(DELTANET if (i + 1) % interval else FULL for i in range(n_layer))
    elif architecture == SMOLLM3 and text.get("use_sliding_window"):
        kinds = "".join(FULL if rotated else SLIDING for rotated in rotates)
    elif architecture in MISTRALS:
        kinds = (SLIDING if text.get("sliding_window") else FULL) * n_layer
    else:
        first = text.get("max_window_layers", 0) if text.get("use_sliding_window") else n_layer
        kinds = "".join(SLIDING if i >= first else FULL for i in range(n_layer))
    window = text.get("sliding_window")
    if SLIDING in kinds and window is None:
        raise UserError(tr("sliding layers need a sliding_window, which is missing"))
    if window is not None and window >= longest:
        kinds = kinds.replace(SLIDING, FULL)
    layers = zip(kinds, rotates, strict=True)
    kinds = "".join(kind if rotated else kind.lower() for kind, rotated in layers)
    return kinds[0] if len(set(kinds)) == 1 else kinds


def _rotates(architecture: str, text: Mapping[str, Any], n_layer: int) -> list[bool]:
    """Return whether each layer has rotary embeddings: in SmolLM3, every fourth has none."""
    if architecture != SMOLLM3:
        return [True] * n_layer
    flags = text.get("no_rope_layers")  # despite the name, 1 means that the layer rotates
    if flags:
        return [bool(flag) for flag in flags[:n_layer]]
    interval = text.get("no_rope_layer_interval", 4)
    return [(i + 1) % interval != 0 for i in range(n_layer)]


def _check_types(types: Sequence[str], n_layer: int) -> None:
    """Raise UserError unless layer_types names a known kind for each layer."""
    unknown = next((kind for kind in types if kind not in LAYER_LETTERS), None)
    if unknown is not None:
        raise UserError(
            tr(
                "layer_types names layers of kind {unknown}, and the known ones are {known}. Use "
                "another model",
                unknown=reprlib.repr(unknown),
                known=", ".join(LAYER_LETTERS),
            )
        )
    if len(types) != n_layer:
        raise UserError(
            tr(
                "layer_types names {count} layers, and num_hidden_layers is {n_layer}. Copy the "
                "model again from its source",
                count=len(types),
                n_layer=n_layer,
            )
        )


def _shape(architecture: str, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the configuration from the text part of a config.json.

    Raises UserError if the model needs a computation that is not supported.
    """
    activation = text.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(
            tr(
                "the activation is {activation}, and only silu is supported. Use another model",
                activation=reprlib.repr(activation),
            )
        )
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    bias = int(architecture in BIASED_ATTENTION and bool(text.get("attention_bias")))
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
        "norm_eps": float(text["rms_norm_eps"]),
        "tied": int(text["tie_word_embeddings"]),
        "qkv_bias": 1 if is_qwen2 else bias,
        "o_bias": bias,
        "mlp_bias": int(architecture in BIASED_MLP and bool(text.get("mlp_bias"))),
        "qk_norm": int(not is_qwen2 and architecture not in LLAMAS),
        **rope_settings(text, head_dim, 0.25 if architecture.startswith("Qwen3_5") else 1.0),
    }
    if shape.get("rope") == "yarn":  # people add it to a config.json, and leave the context
        shape["sequence_len"] = longest_context(shape)
    shape["layers"] = _kinds(architecture, text, longest_context(shape))
    if SLIDING in shape["layers"].upper():
        shape["window"] = text["sliding_window"]
    if "Moe" in architecture:
        shape |= _experts(architecture, text)
    if architecture.startswith("Qwen3_5"):
        shape |= {
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
        "tie_word_embeddings": bool(shape.tied),
        **published_rope(shape, in_parameters=model_type.startswith("qwen3_5")),
    }
    if model_type == "qwen2" and shape.n_head * shape.head_dim == shape.n_embd:
        del content["head_dim"]  # the default, which publishers of this type leave out
    if shape.o_bias:
        content["attention_bias"] = True
    if shape.mlp_bias:
        content["mlp_bias"] = True
    if model_type == "smollm3":
        content |= {
            "no_rope_layers": [int(letter.isupper()) for letter in shape.kinds],
            "pad_token_id": None,  # by default a token that only the publisher's vocabulary has
        }
    if shape.window:
        content |= _published_windows(shape, model_type)
    if shape.has_experts:
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
        content |= {
            "linear_num_key_heads": shape.delta_key_heads,
            "linear_num_value_heads": shape.delta_value_heads,
            "linear_key_head_dim": shape.delta_key_dim,
            "linear_value_head_dim": shape.delta_value_dim,
            "linear_conv_kernel_dim": shape.delta_width,
            "layer_types": _layer_types(shape),
        }
    return content


def _layer_types(shape: QwenConfig) -> list[str]:
    """Return the kind of each layer as config.json names it."""
    types = {letter: layer_type for layer_type, letter in LAYER_LETTERS.items()}
    return [types[letter.upper()] for letter in shape.kinds]


def _published_windows(shape: QwenConfig, model_type: str) -> dict[str, Any]:
    """Return what config.json says about sliding windows, also to readers without layer_types."""
    if model_type == "mistral":
        return {"sliding_window": shape.window}
    return {
        "use_sliding_window": True,
        "sliding_window": shape.window,
        "max_window_layers": shape.kinds.upper().index(SLIDING),
        "layer_types": _layer_types(shape),
    }


def _model_type(shape: QwenConfig) -> str:
    """Return the model_type that a publisher's config.json has for this shape."""
    if isinstance(shape, LlamaConfig):
        if not shape.kinds.isupper():
            return "smollm3"
        if not shape.window:
            return "llama"
        return "ministral" if FULL in shape.kinds else "mistral"
    if shape.output_gate:
        return "qwen3_5_moe_text" if shape.has_experts else "qwen3_5_text"
    if shape.has_experts:
        return "qwen3_moe"
    return "qwen3" if shape.qk_norm else "qwen2"
