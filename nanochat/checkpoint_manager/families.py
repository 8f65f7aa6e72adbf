"""The families of models: a checkpoint's meta.json names one, and this table maps its name to its classes."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
import torch.nn as nn

from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen
from nanochat.platforms.layers import accelerate
from nanochat.runtime import parallel

# No model of this project is larger, and a shape from a file must not be able to ask for all memory.
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
}
MAY_BE_ZERO = {
    "bigram_rows": 1 << 30,
    "offset_layers": 1_000,
    "tied": 1,
    "qkv_bias": 1,
    "qk_norm": 1,
    "zero_centred": 1,
    "output_gate": 1,
    "rotary_dim": 1 << 12,
}
Shape = TypeVar("Shape", GPTConfig, QwenConfig)


@dataclass(frozen=True)
class Family:
    """The class of a family's models, and of the configuration that one is built from."""

    model: Any
    config: Any


FAMILIES = {"gpt": Family(GPT, GPTConfig), "qwen": Family(Qwen, QwenConfig)}


def family_of(config: Any) -> str:
    """The name of the family whose configuration this is."""
    return next(name for name, family in FAMILIES.items() if type(config) is family.config)


def _fits(name: str, value: Any) -> bool:
    """Whether a value of a configuration has the right type and is within bounds."""
    if name in LARGEST:
        return type(value) is int and 1 <= value <= LARGEST[name]
    if name in MAY_BE_ZERO:
        return type(value) is int and 0 <= value <= MAY_BE_ZERO[name]
    if name in ("rope_theta", "norm_eps"):
        return type(value) is float and 0 < value < float("inf")
    return type(value) is str and len(value) <= LARGEST["n_layer"]


def checked_shape(kind: type[Shape], shape: Mapping[str, Any], where: str) -> Shape:
    """The configuration that a file describes. UserError, which names the file `where`, if a value has a wrong type or
    is out of bounds."""
    if (
        "key_offset" in shape
    ):  # of a checkpoint of 2026-11-24, whose layers all had an offset, or none
        rest = {name: value for name, value in shape.items() if name != "key_offset"}
        shape = rest | {"offset_layers": shape.get("n_layer") if shape["key_offset"] else 0}
    names = {field.name for field in fields(kind)}
    wrong = [
        f"{name} is {reprlib.repr(value)}"
        for name, value in shape.items()
        if name not in names or not _fits(name, value)
    ]
    if wrong:
        raise UserError(
            f"{where} describes no model that this version can build: {', '.join(wrong[:3])}, and the limits are "
            f"{', '.join(f'{name} {LARGEST[name]:,}' for name in LARGEST if name in names)}. Copy the checkpoint "
            "again, or update nanochat to the version that wrote it"
        )
    return kind(**shape)


def build(
    meta: Mapping[str, Any], values: Mapping[str, parallel.Rows], compute: Compute, where: str
) -> GPT:
    """A model of the family and shape that the meta.json `where` names, on the host, without weights yet.

    `values` are the parameters that it will get. They are compared first, so that no shape costs more memory than its
    file. Checkpoints written before there were families name none and are of family gpt. UserError for an unknown
    family, an impossible shape, or parameters of another model.
    """
    name = meta.get("family", "gpt")
    if name not in FAMILIES:
        raise UserError(
            f"the checkpoint holds a model of family {name!r}, and this version knows {', '.join(FAMILIES)}. Update "
            "nanochat to the version that wrote the checkpoint."
        )
    family = FAMILIES[name]
    shape = checked_shape(family.config, meta["model"], where)
    with torch.device("meta"):
        parallel.check_shapes(family.model(shape), values)
    model = family.model(shape, dtype=compute.dtype)
    accelerate(model, compute.operations)
    return model


def on_meta(shape: GPTConfig | QwenConfig, compute: Compute, fp8: bool = False) -> Any:
    """A model of a shape that takes no memory yet: call to_empty(), then init_weights() or load its parameters. With
    `fp8` it trains in FP8; UserError where the device or the family cannot."""
    with torch.device("meta"):
        model = FAMILIES[family_of(shape)].model(shape, dtype=compute.dtype)
    accelerate(model, compute.operations)
    if fp8:
        compute.platform.use_fp8(model)
    return model


def held_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert matrices and tables to a number format, in place; the few scalars stay fp32, as in training."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)
