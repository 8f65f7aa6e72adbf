"""Adapters as peft's folders: adapter_config.json and adapter_model.safetensors, read and written."""

import hashlib
import reprlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanochat.checkpoint_manager.files import ADAPTER, new_folder
from nanochat.checkpoint_manager.tensors import write_tensors
from nanochat.common import UserError, read_json, write_json
from nanochat.device import local
from nanochat.linear import Linear
from nanochat.models.lora import Adapter, LoraConfig, LowRank, adapted, matches
from nanochat.models.qwen.model import Qwen
from nanochat.runtime import parallel

SETTINGS = "adapter_config.json"
PREFIX = "base_model.model."  # of peft's names
TABLES = ("model.embed_tokens.", "lm_head.")  # what no adapter can change here
# What an adapter of peft may ask for and this program does not compute -> the value that means "no".
ABSENT = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "trainable_token_indices": None,
    "target_parameters": None,
}
# Settings that may have any value: the settings that are read here, and those that change nothing
# about what a trained adapter computes. Layers and modules that training left out have no tensors
# in the file, so the tensors decide.
HARMLESS = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules"),
    *("base_model_name_or_path", "revision", "peft_version", "task_type", "auto_mapping"),
    *("layers_to_transform", "layers_pattern", "exclude_modules"),
    *("inference_mode", "runtime_config", "megatron_core", "qalora_group_size"),
}
# Values of init_lora_weights that leave the base's weights unchanged. Others, such as pissa and
# olora, first take a part out of the base's weights: on the published base the adapter is wrong.
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal")


def facts(model: nn.Module) -> dict[str, str]:
    """What the file of an adapter says about itself: its format, and a mark of the base that it was trained on, the
    SHA-256 of the base's norms. Every rank must call this."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            digest.update(parallel.whole(parameter.detach()).float().cpu().numpy().tobytes())
    return {"format": "pt", "base": digest.hexdigest()}


def write_settings(folder: Path, lora: Mapping[str, Any], base: str) -> None:
    """Make a folder one of peft's: adapter_config.json, by the fields of a LoraConfig and the folder of the base.

    No config.json stays, since a folder that has one passes for a whole model.
    """
    (folder / "config.json").unlink(missing_ok=True)
    write_json(
        folder / SETTINGS,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": lora["rank"],
            "lora_alpha": lora["alpha"],
            "lora_dropout": lora["dropout"],
            "target_modules": list(lora["targets"]),
            "use_rslora": lora["stabilised"],
            **ABSENT,
        },
    )


def save_adapter(model: Qwen, config: LoraConfig, base: str, folder: Path) -> None:
    """Write the adapters of an unsharded model, whole or not at all, so that peft loads the folder; `base` is the name
    or folder of the model that they belong to. UserError (code 2) if the folder exists."""
    values = {
        PREFIX + name: value.detach()
        for name, value in model.named_parameters()
        if ".lora_" in name
    }
    with new_folder(folder) as temporary:
        write_settings(temporary, asdict(config), base)
        write_tensors(values, temporary / ADAPTER, facts(model))


def read_settings(folder: Path) -> tuple[LoraConfig, str, bool]:
    """The shape of the adapter in a folder, the name of its base, and whether its training may have
    left out layers or modules that match the targets. UserError if this program cannot compute the
    adapter."""
    path = folder / SETTINGS
    if not path.is_file():
        raise UserError(
            f"{folder} is no adapter: it has no {SETTINGS}. Name the folder that peft or nanochat wrote",
            2,
        )
    content = read_json(path)
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        raise UserError(
            f"{path} is not of a LoRA adapter, and no other kind is known. Use a LoRA adapter", 2
        )
    _refuse_unknown(content, path)
    targets = content.get("target_modules")
    try:
        names = tuple(targets) if isinstance(targets, list) else (str(targets),)
        config = LoraConfig(
            int(content["r"]),
            float(content["lora_alpha"]),
            float(content.get("lora_dropout") or 0.0),
            names,
            bool(content.get("use_rslora")),
        )
    except (KeyError, TypeError, ValueError) as failure:
        raise UserError(
            f"{path} is damaged: {failure!r}. Copy the adapter again from its source", 2
        ) from failure
    partial = any(
        content.get(name) not in (None, []) for name in ("layers_to_transform", "exclude_modules")
    )
    return config, str(content.get("base_model_name_or_path")), partial


def _refuse_unknown(content: Mapping[str, Any], path: Path) -> None:
    """UserError for a setting that may change what the adapter computes, known here or not.

    A setting that is null, false or empty is off: each version of peft writes a few new ones.
    """
    start = content.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise UserError(
            f"{path} has init_lora_weights={reprlib.repr(start)}, which may have changed the base's "
            "own weights; true, false, 'gaussian' and 'orthogonal' are known to leave them unchanged. "
            "Save the adapter again with peft's path_initial_model_for_weight_conversion, or use "
            "another adapter",
            exit_code=2,
        )
    for name, value in content.items():
        if name in HARMLESS or name == "init_lora_weights":
            continue
        if value not in (ABSENT.get(name), None, False, [], {}):
            raise UserError(
                f"{path} asks for {name[:100]}={reprlib.repr(value)}, which is not supported. Use "
                "another adapter, or train this one without that setting",
                exit_code=2,
            )


def _own_name(name: str) -> str:
    """Our name of a tensor of peft's."""
    return name.removeprefix(PREFIX).replace("model.language_model.", "model.", 1)


def read_adapter(model: Qwen, folder: Path) -> Adapter:
    """The adapter of a folder, which fits the model. Every rank must call this.

    UserError if this program cannot compute the adapter, or if the adapter belongs to another base:
    it has the mark of one, or its matrices or their sizes are not the model's.
    """
    config, base, partial = read_settings(folder)
    path = folder / ADAPTER
    if not path.is_file():
        raise UserError(f"{folder} has no {ADAPTER}. Copy the adapter again from its source", 2)
    other = f"the adapter in {folder} belongs to another base, {base}"
    try:
        with safe_open(path, framework="pt") as file:
            mark = (file.metadata() or {}).get("base")
            values = {_own_name(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, ValueError) as failure:
        raise UserError(
            f"{path} is not a whole safetensors file ({failure}). Copy the adapter again", 2
        ) from failure
    if mark is not None and mark != facts(model)["base"]:
        raise UserError(
            f"{other}: its base has other norms than this model. Name the model that it was trained on",
            2,
        )
    if tables := [name for name in values if name.startswith(TABLES)]:
        raise UserError(
            f"{path} holds {tables[0]}: it changes the embedding or the head, and only matrices "
            "inside layers can have adapters here. Use another adapter, or train this one without "
            "that target",
            exit_code=2,
        )
    _check_fit(model, config, values, partial, other)
    if broken := [name for name, value in values.items() if not value.isfinite().all()]:
        raise UserError(
            f"{path} has values that are NaN or infinite, the first in {broken[0]}, so it would give "
            "no answers, and break the answers beside it. Use another step of its training",
            exit_code=2,
        )
    return Adapter(config, values)


@torch.no_grad()
def load_adapter(model: Qwen, folder: Path) -> LoraConfig:
    """Freeze a model and give it the adapter of a folder, sharded or not. UserError as in read_adapter()."""
    adapter = read_adapter(model, folder)
    config, values = adapter.config, adapter.values
    matrices = {
        name: module for name, module in model.named_modules() if isinstance(module, Linear)
    }
    model.requires_grad_(False)
    for name in {name.rpartition(".lora_")[0] for name in values}:
        LowRank(matrices[name], config)
    for name, matrix_adapter in adapted(model):
        halves = (("A", matrix_adapter.first), ("B", matrix_adapter.second))
        for half, module in halves:
            here, value = local(module.weight), values[f"{name}.lora_{half}.weight"]
            start = parallel.place_of(module.weight).first_row(value.shape[0])
            here.copy_(value[start : start + here.shape[0]])
    return config


def _check_fit(
    model: Qwen,
    config: LoraConfig,
    values: Mapping[str, Tensor],
    partial: bool,  # targets may have no tensors
    other: str,  # the beginning of the message
) -> None:
    """UserError if the tensors do not fit the model's matrices, or if a target has no tensors."""
    matrices = {
        name: module for name, module in model.named_modules() if isinstance(module, Linear)
    }
    wanted: dict[str, Any] = {}
    for name in {name.rpartition(".lora_")[0] for name in values}:
        if name in matrices:
            wanted[f"{name}.lora_A.weight"] = (config.rank, matrices[name].in_features)
            wanted[f"{name}.lora_B.weight"] = (matrices[name].out_features, config.rank)
    given = {name: tuple(value.shape) for name, value in values.items()}
    wrong = [
        f"{name} is {given.get(name, 'missing')} instead of {wanted.get(name, 'nothing')}"
        for name in sorted({*given, *wanted})
        if given.get(name) != wanted.get(name)
    ]
    targets = [] if partial else [name for name in matrices if matches(name, config.targets)]
    lacking = [name for name in targets if f"{name}.lora_A.weight" not in given]
    if wrong or lacking or not values:
        nothing = f"it has nothing for {(lacking or config.targets)[0]}"
        what = wrong[0] if wrong else nothing
        raise UserError(f"{other}: {what}. Name the model that it was trained on", 2)
