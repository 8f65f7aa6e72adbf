"""Reads and writes peft adapters: adapter_config.json and adapter_model.safetensors."""

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

from nanochat.checkpoint_manager.files import ADAPTER, ADAPTER_PREFIX, new_folder
from nanochat.checkpoint_manager.tensors import write_tensors
from nanochat.common import UserError, read_json, tr, write_json
from nanochat.device import local
from nanochat.linear import Linear
from nanochat.models.lora import Adapter, LoraConfig, LowRank, adapted, matches
from nanochat.models.qwen.model import Qwen
from nanochat.runtime import parallel

SETTINGS = "adapter_config.json"
TABLES = ("model.embed_tokens.", "lm_head.")  # parameters that adapters cannot change here
# Settings of peft that are not supported here -> the value that switches them off.
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
# Settings that may have any value, because they are read here or do not change what a trained
# adapter computes. Layers and modules that training left out have no tensors in the file, so the
# tensors show which ones they are.
HARMLESS = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules"),
    *("base_model_name_or_path", "revision", "peft_version", "task_type", "auto_mapping"),
    *("layers_to_transform", "layers_pattern", "exclude_modules"),
    *("inference_mode", "runtime_config", "megatron_core", "qalora_group_size"),
}
# Settings that exclude layers or modules from training although they match the targets.
PARTIAL = ("layers_to_transform", "exclude_modules")
# Values of init_lora_weights that leave the base's weights unchanged. Others, such as pissa and
# olora, first subtract a part of the base's weights, so their adapters are wrong on the published
# base.
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal")


# --- writing -------------------------------------------------------------------------------------


def facts(model: nn.Module) -> dict[str, str]:
    """Return the metadata for the safetensors file of an adapter. Every rank must call this.

    The metadata gives the format of the file, and identifies the base by the SHA-256 of its norms.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            norm = parallel.full_tensor(parameter.detach()).float().cpu()
            digest.update(norm.numpy().tobytes())
    return {"format": "pt", "base": digest.hexdigest()}


def write_settings(folder: Path, lora: Mapping[str, Any], base: str) -> None:
    """Write adapter_config.json, so that peft can load the adapter in a folder.

    `lora` has the fields of a LoraConfig, and `base` is the folder of the base model. A config.json
    in the folder is removed, because a folder that has one is taken for a whole model.
    """
    (folder / "config.json").unlink(missing_ok=True)
    content = {
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
    }
    write_json(folder / SETTINGS, content)


def save_adapter(model: Qwen, config: LoraConfig, base: str, folder: Path) -> None:
    """Write the adapters of an unsharded model to a new folder that peft can load.

    The folder appears only once it is complete. `base` is the name or the folder of the base model.
    Raises UserError (exit code 2) if the folder already exists.
    """
    tensors = {
        ADAPTER_PREFIX + name: parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    with new_folder(folder) as temporary:
        write_settings(temporary, asdict(config), base)
        write_tensors(tensors, temporary / ADAPTER, facts(model))


# --- reading -------------------------------------------------------------------------------------


def read_settings(folder: Path) -> tuple[LoraConfig, str, bool]:
    """Return an adapter's settings, the name of its base, and whether the adapter is partial.

    For a partial adapter, training left out some layers or modules that match its targets. Raises
    UserError if the folder has no adapter or an unsupported one (exit code 2), or a damaged one.
    """
    path = folder / SETTINGS
    if not path.is_file():
        raise UserError(
            tr(
                "{folder} is no adapter: it has no {settings}. Name the folder that peft or "
                "nanochat wrote",
                folder=folder,
                settings=SETTINGS,
            ),
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
        config = LoraConfig(
            rank=int(content["r"]),
            alpha=float(content["lora_alpha"]),
            dropout=float(content.get("lora_dropout") or 0.0),
            targets=tuple(targets) if isinstance(targets, list) else (str(targets),),
            stabilised=bool(content.get("use_rslora")),
        )
    except (KeyError, TypeError, ValueError) as failure:
        raise UserError(
            f"{path} is damaged: {failure!r}. Copy the adapter again from its source", 2
        ) from failure
    is_partial = any(content.get(name) not in (None, []) for name in PARTIAL)
    return config, str(content.get("base_model_name_or_path")), is_partial


def _refuse_unknown(content: Mapping[str, Any], path: Path) -> None:
    """Raise UserError (exit code 2) if an unsupported setting may change what the adapter computes.

    Unknown settings are refused too, unless they are null, false, 0 or an empty list or object, and
    therefore off. Each version of peft writes a few new ones.
    """
    start = content.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise UserError(
            f"{path} has init_lora_weights={reprlib.repr(start)}, which may have changed the "
            "base's own weights; true, false, 'gaussian' and 'orthogonal' are known to leave them "
            "unchanged. Save the adapter again with peft's "
            "path_initial_model_for_weight_conversion, or use another adapter",
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


def read_adapter(model: Qwen, folder: Path) -> Adapter:
    """Return the adapter in a folder, checked against the model. Every rank must call this.

    Raises UserError if the adapter is missing, damaged or not supported, if a value is not finite,
    or if the adapter belongs to another base: it records a different hash of the base's norms, or
    its matrices do not match the model's in name or size.
    """
    config, base, is_partial = read_settings(folder)
    path = folder / ADAPTER
    if not path.is_file():
        raise UserError(
            tr(
                "{folder} has no {adapter}. Copy the adapter again from its source",
                folder=folder,
                adapter=ADAPTER,
            ),
            2,
        )
    base_mark, tensors = _read_tensors(path)
    other_base = f"the adapter in {folder} belongs to another base, {base}"
    if base_mark is not None and base_mark != facts(model)["base"]:
        raise UserError(
            f"{other_base}: its base has other norms than this model. Name the model that it was "
            "trained on",
            2,
        )
    for name in tensors:
        if name.startswith(TABLES):
            raise UserError(
                f"{path} holds {name}: it changes the embedding or the head, and only matrices "
                "inside layers can have adapters here. Use another adapter, or train this one "
                "without that target",
                exit_code=2,
            )
    problem = _fit_problem(model, config, tensors, is_partial)
    if problem:
        raise UserError(f"{other_base}: {problem}. Name the model that it was trained on", 2)
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(
                f"{path} has values that are NaN or infinite, the first in {name}, so it would "
                "give no answers, and break the answers beside it. Use another step of its "
                "training",
                exit_code=2,
            )
    return Adapter(config, tensors)


def _read_tensors(path: Path) -> tuple[str | None, dict[str, Tensor]]:
    """Return the recorded hash of the base's norms (or None), and the tensors under our names."""
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = list(file.keys())
            for name in names:
                our_name = name.removeprefix(ADAPTER_PREFIX)
                our_name = our_name.replace("model.language_model.", "model.", 1)
                tensors[our_name] = file.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as failure:
        raise UserError(
            f"{path} is not a whole safetensors file ({failure}). Copy the adapter again", 2
        ) from failure
    return metadata.get("base"), tensors


def _matrices(model: Qwen) -> dict[str, Linear]:
    """Return the matrices of a model that can have adapters, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def _adapted_names(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the matrices that an adapter's tensors belong to."""
    return {name.rpartition(".lora_")[0] for name in tensors}


def _fit_problem(
    model: Qwen,
    config: LoraConfig,
    tensors: Mapping[str, Tensor],
    is_partial: bool,  # matrices that match the targets may have no tensors
) -> str:
    """Return why an adapter's tensors do not fit the model, or "" if they do.

    Each tensor must have the right shape for its matrix. Unless the adapter is partial, every
    matrix that matches its targets must have tensors.
    """
    matrices = _matrices(model)
    expected: dict[str, tuple[int, ...]] = {}
    for name in _adapted_names(tensors):
        if name in matrices:
            matrix = matrices[name]
            expected[f"{name}.lora_A.weight"] = (config.rank, matrix.in_features)
            expected[f"{name}.lora_B.weight"] = (matrix.out_features, config.rank)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted({*shapes, *expected}):
        shape = shapes.get(name, "missing")
        expected_shape = expected.get(name, "nothing")
        if shape != expected_shape:
            return f"{name} is {shape} instead of {expected_shape}"
    targets = [] if is_partial else [name for name in matrices if matches(name, config.targets)]
    lacking = [name for name in targets if f"{name}.lora_A.weight" not in shapes]
    if lacking or not tensors:
        return f"it has nothing for {(lacking or config.targets)[0]}"
    return ""


@torch.no_grad()
def load_adapter(model: Qwen, folder: Path) -> LoraConfig:
    """Freeze a model, add the adapter in a folder to it, and return the adapter's settings.

    The model may be sharded. Raises UserError as read_adapter() does.
    """
    adapter = read_adapter(model, folder)
    matrices = _matrices(model)
    model.requires_grad_(False)
    for name in _adapted_names(adapter.values):
        LowRank(matrices[name], adapter.config)
    for name, low_rank in adapted(model):
        _copy_rows(low_rank.first.weight, adapter.values[f"{name}.lora_A.weight"])
        _copy_rows(low_rank.second.weight, adapter.values[f"{name}.lora_B.weight"])
    return adapter.config


def _copy_rows(parameter: Tensor, whole: Tensor) -> None:
    """Fill this rank's rows of a parameter from the whole tensor."""
    local_rows = local(parameter)
    start = parallel.place_of(parameter).first_row(whole.shape[0])
    local_rows.copy_(whole[start : start + local_rows.shape[0]])
