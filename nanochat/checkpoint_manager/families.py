"""Maps the name of a model family, as in meta.json, to the family's classes, and builds models."""

import functools
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn

from nanochat.common import UserError, appendix, tr
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.platforms.layers import accelerate
from nanochat.runtime import parallel

# Upper limits for the settings of a shape, so that no file can make us allocate all memory. No
# model of this project is larger.
LARGEST = {
    "sequence_len": 1 << 20,
    "vocab_size": 1 << 24,
    "n_layer": 1_000,
    "n_head": 1 << 12,
    "n_kv_head": 1 << 12,
    "n_embd": 1 << 17,
    "n_hidden": 1 << 20,
    "head_dim": 1 << 12,
    "delta_key_heads": 1 << 12,
    "delta_value_heads": 1 << 12,
    "delta_key_dim": 1 << 12,
    "delta_value_dim": 1 << 12,
    "delta_width": 1 << 6,
    "rope_original": 1 << 20,
}
# The same for settings that may be zero.
MAY_BE_ZERO = {
    "bigram_rows": 1 << 30,
    "offset_layers": 1_000,
    "exclusive_layers": 1_000,
    "tied": 1,
    "qkv_bias": 1,
    "qk_norm": 1,
    "zero_centred": 1,
    "output_gate": 1,
    "o_bias": 1,
    "mlp_bias": 1,
    "rotary_dim": 1 << 12,
    "window": 1 << 20,
    "n_experts": 1 << 12,
    "experts_per_token": 1 << 12,
    "n_expert_hidden": 1 << 20,
    "n_shared_hidden": 1 << 20,
    "normed_shares": 1,
}
POSITIVE_FRACTIONS = (
    "rope_theta",
    "norm_eps",
    "rope_factor",
    "rope_low",
    "rope_high",
    "rope_scale",
)
LONGEST_TEXT = 1_000  # characters of a text such as window_pattern: one per layer
Shape = TypeVar("Shape")


@dataclass(frozen=True)
class Family:
    """The two classes of a model family: the model, and the configuration that it is built from."""

    model: Any
    config: Any


@functools.cache
def families() -> dict[str, Family]:
    """Return a dict of the model families by name: the GPT, and the published families.

    A published family is missing if its module was removed from this copy of nanochat.
    """
    table = {"gpt": Family(GPT, GPTConfig)}
    qwen = appendix("nanochat.models.qwen.model")
    if qwen is not None:
        table["qwen"] = Family(qwen.Qwen, qwen.QwenConfig)
    llama = appendix("nanochat.models.llama")
    if llama is not None:
        table["llama"] = Family(llama.Llama, llama.LlamaConfig)
    return table


def family_of(config: Any) -> str:
    """Return the name of the model family that a configuration belongs to."""
    return next(name for name, family in families().items() if type(config) is family.config)


def _fits(name: str, value: Any) -> bool:
    """Return whether the value of a setting has the right type and is within bounds."""
    if name in LARGEST:
        return type(value) is int and 1 <= value <= LARGEST[name]
    if name in MAY_BE_ZERO:
        return type(value) is int and 0 <= value <= MAY_BE_ZERO[name]
    if name in POSITIVE_FRACTIONS:
        return type(value) is float and 0 < value < float("inf")
    return type(value) is str and len(value) <= LONGEST_TEXT


def _renamed_settings(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a shape under today's names.

    Instead of `offset_layers`, checkpoints of 2026-11-24 have `key_offset`, which gives either all
    layers an offset or none. Until 2026-11-28 every model with a `rope_factor` was a Llama 3.
    """
    settings = dict(shape)
    if "key_offset" in settings:
        has_offsets = settings.pop("key_offset")
        settings["offset_layers"] = settings.get("n_layer") if has_offsets else 0
    if settings.get("rope_factor", 1.0) != 1 and "rope" not in settings:
        settings["rope"] = "llama3"
    return settings


def checked_shape(kind: type[Shape], shape: Mapping[str, Any], where: str) -> Shape:
    """Return the configuration of class `kind` that has the settings in `shape`.

    Raises UserError, whose message begins with `where`, if a setting is unknown, has the wrong type
    or is out of bounds.
    """
    settings = _renamed_settings(shape)
    names = {field.name for field in fields(cast(Any, kind))}
    wrong = [
        tr("{name} is {value}", name=name, value=reprlib.repr(value))
        for name, value in settings.items()
        if name not in names or not _fits(name, value)
    ]
    if wrong:
        limits = [f"{name} {limit:,}" for name, limit in LARGEST.items() if name in names]
        raise UserError(
            tr(
                "{where} describes no model that this version can build: {wrong}, and the "
                "limits are {limits}. Copy the checkpoint again, or update nanochat to the "
                "version that wrote it",
                where=where,
                wrong=", ".join(wrong[:3]),
                limits=", ".join(limits),
            )
        )
    return kind(**settings)


def build(
    meta: Mapping[str, Any], values: Mapping[str, parallel.Rows], compute: Compute, where: str
) -> GPT:
    """Return the model that a meta.json describes, on the host and without its weights.

    `where` names that meta.json in error messages. `values` are the parameters that the model will
    get; their shapes are compared before memory is allocated, so that a damaged meta.json cannot
    ask for too much. A meta.json without a family describes a GPT. Raises UserError if the family
    is unknown, the shape is invalid, or the parameters belong to another model.
    """
    name = meta.get("family", "gpt")
    if name not in families():
        raise UserError(
            tr(
                "the checkpoint holds a model of family {name!r}, and this version knows "
                "{known}. Update nanochat to the version that wrote the checkpoint.",
                name=name,
                known=", ".join(families()),
            )
        )
    family = families()[name]
    shape = checked_shape(family.config, meta["model"], where)
    with torch.device("meta"):
        parallel.check_shapes(family.model(shape), values)
    model = family.model(shape, dtype=compute.dtype)
    accelerate(model, compute.operations)
    return model


def on_meta(shape: Any, compute: Compute) -> Any:
    """Return a model with the configuration `shape` on the meta device, where it takes no memory.

    To use it, call allocate(), and then init_weights() or load its parameters.
    """
    family = families()[family_of(shape)]
    with torch.device("meta"):
        model = family.model(shape, dtype=compute.dtype)
    accelerate(model, compute.operations)
    return model


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the tensors of a whole model on the meta device uninitialised memory on `device`.

    The model must not be sharded. Its own to_empty() does the same, but
    torch computes the strides of a tensor on the meta device with sympy, whose import takes more
    than a second and 40 MB that stay.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(memory, parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def cast_matrices(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's matrices, tables and convolutions to `dtype`, in place.

    Scalars and vectors are left as they are.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)
