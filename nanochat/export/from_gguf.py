"""Turns a GGUF file into the folder of a published model, for transformers and for fine-tuning.

The weights are dequantised, and keep exactly the values that llama.cpp computes with. The folder
is larger than the file, and no more precise.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanochat.checkpoint_manager.families import checked_shape, families, family_of
from nanochat.checkpoint_manager.files import new_folder
from nanochat.checkpoint_manager.huggingface.config import published
from nanochat.checkpoint_manager.tensors import TensorFile
from nanochat.common import UserError, tr, write_json
from nanochat.device import DTYPES
from nanochat.export import llama, llama_rope
from nanochat.export.gguf_reader import GGUFFile, copy_again
from nanochat.export.gguf_tokenizer import published_tokenizer
from nanochat.export.huggingface import converted
from nanochat.models.llama import LlamaConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.rope import rotary_divisors

ARCHITECTURES: dict[str, type[QwenConfig]] = {
    "llama": LlamaConfig,
    "qwen2": QwenConfig,
    "qwen3": QwenConfig,
}


def _shape(source: GGUFFile) -> QwenConfig:
    """Return the configuration of the model in a file.

    Raises UserError if the architecture is not supported (exit code 2) or the file is damaged.
    """
    name = source.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(
            tr(
                "{path} holds a model of the architecture {name!r}, and the known ones are "
                "{known}. Use one of those",
                path=source.path,
                name=name,
                known=", ".join(ARCHITECTURES),
            ),
            exit_code=2,
        )

    def value(key: str, default: Any = None) -> Any:
        return source.get(f"{name}.{key}", default)

    scaling = value("rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(
            tr(
                "the model in {path} stretches positions by the rule {scaling!r}, which is "
                "not supported. Use another model",
                path=source.path,
                scaling=scaling,
            ),
            exit_code=2,
        )
    width = value("embedding_length")
    heads = value("attention.head_count")
    settings = {
        "sequence_len": value("context_length"),
        "vocab_size": len(source.get("tokenizer.ggml.tokens")),
        "n_layer": value("block_count"),
        "n_embd": width,
        "n_head": heads,
        "n_kv_head": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", width // heads),
        "n_hidden": value("feed_forward_length"),
        "rope_theta": _decimal(value("rope.freq_base", 10_000.0)),
        "norm_eps": _decimal(value("attention.layer_norm_rms_epsilon")),
        "tied": int("output.weight" not in source.shapes),
        "qkv_bias": int(name == "qwen2"),
        "qk_norm": int(name == "qwen3"),
    }
    if llama.ROPE_DIVISORS in source.shapes:
        divisors = source.tensor(llama.ROPE_DIVISORS)
        settings["rope"] = "llama3"
        settings["rope_factor"] = _decimal(divisors.max().item())
        settings["rope_original"] = value(llama_rope.ORIGINAL_KEY, LlamaConfig.rope_original)
    shape = checked_shape(ARCHITECTURES[name], settings, str(source.path))
    if "rope_factor" in settings:
        _check_divisors(source, shape)
    return shape


def _decimal(value: float) -> float:
    """Return the shortest decimal number that is `value` in fp32, such as 1e-05."""
    return float(str(np.float32(value)))


def _check_divisors(source: GGUFFile, shape: QwenConfig) -> None:
    """Raise UserError (exit code 2) unless rotary frequencies are divided as in Llama 3."""
    expected = None
    if isinstance(shape, LlamaConfig):
        expected = rotary_divisors(shape, torch.device("cpu"))
    divisors = source.tensor(llama.ROPE_DIVISORS)
    if expected is None or not torch.allclose(divisors, expected, rtol=1e-4):
        raise UserError(
            tr(
                "{path} divides rotary frequencies in another way than Llama 3, which is "
                "not supported. Use another model",
                path=source.path,
            ),
            exit_code=2,
        )


def _tensor_names(source: GGUFFile, shape: QwenConfig) -> dict[str, str]:
    """Return a dict from the names of a model's parameters to the names of a file's tensors.

    Raises UserError (exit code 2) unless the file has exactly the parameters of the model.
    """
    with torch.device("meta"):
        model = families()[family_of(shape)].model(shape)
    names = {}
    expected_shapes = {}
    for name, parameter in model.named_parameters():
        names[name] = llama.tensor_name(name, shape)
        expected_shapes[names[name]] = tuple(parameter.shape)
    shapes = dict(source.shapes)
    shapes.pop(llama.ROPE_DIVISORS, None)
    for name in sorted({*expected_shapes, *shapes}):
        if expected_shapes.get(name) != shapes.get(name):
            in_file = shapes.get(name, tr("missing"))
            in_model = expected_shapes.get(name, tr("nowhere"))
            raise UserError(
                tr(
                    "the tensors in {path} do not fit its metadata: {name} is {in_file} in "
                    "the file and {in_model} in the model. {copy}",
                    path=source.path,
                    name=name,
                    in_file=in_file,
                    in_model=in_model,
                    copy=copy_again(),
                ),
                exit_code=2,
            )
    return names


def convert(path: Path, folder: Path, dtype: str) -> None:
    """Write the model in a GGUF file to a new folder, which appears only once it is complete.

    Raises UserError if the folder already exists, or if the file is damaged or not supported (exit
    code 2), or if a value is not finite in `dtype`.
    """
    source = GGUFFile(path)
    shape = _shape(source)
    names = _tensor_names(source, shape)
    files = published_tokenizer(source)
    marks = {
        name: value
        for name, value in files["generation_config.json"].items()
        if name.endswith("_token_id")
    }
    files["config.json"] = {**published(shape), **marks, "torch_dtype": dtype}
    shapes = {name: (DTYPES[dtype], source.shapes[names[name]]) for name in names}
    with new_folder(folder) as temporary:
        for name, content in files.items():
            write_json(temporary / name, content)
        weights = TensorFile(temporary / "model.safetensors", shapes, {"format": "pt"})
        try:
            for name in weights.names:
                tensor = llama.our_layout(name, source.tensor(names[name]), shape)
                weights.add(name, converted(name, tensor, DTYPES[dtype]))
            weights.close()
        except BaseException:
            weights.abandon()
            raise
