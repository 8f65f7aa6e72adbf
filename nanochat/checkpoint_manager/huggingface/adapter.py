"""Reads and writes peft adapters: adapter_config.json and adapter_model.safetensors."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanochat.checkpoint_manager.files import ADAPTER, ADAPTER_PREFIX, new_folder
from nanochat.checkpoint_manager.huggingface.folders import refuse_pickle, refuse_pointer
from nanochat.checkpoint_manager.huggingface.peft_settings import (
    SETTINGS,
    PeftSettings,
    read_settings,
)
from nanochat.checkpoint_manager.tensors import write_tensors
from nanochat.common import UserError, log, tr, write_json
from nanochat.data.library_words import in_words
from nanochat.device import Compute
from nanochat.linear import Linear
from nanochat.models.lora import (
    STACKS,
    Adapter,
    LoraConfig,
    LowRank,
    adapts_experts,
    delta,
    matches,
    stack_of,
)
from nanochat.models.nf4 import BITS, nf4_matrices
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.experts import Experts
from nanochat.models.qwen.layers import Vocabulary
from nanochat.models.qwen.model import Qwen
from nanochat.platforms.layers import accelerate
from nanochat.runtime import parallel

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"  # the tables
BASE_BITS = "bits"  # what meta.json calls the bits of a base's matrices; earlier runs had 16
BASE_BITS_FACT = "base_bits"  # the same in the metadata of an adapter's file, only if they are 4
BASE_LAYER = ".base_layer."  # in the name of a parameter of the base that peft saved too
# What peft does not do in an adapter that nanochat writes.
OFF = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "trainable_token_indices": None,
    "target_parameters": None,
}


# --- writing -------------------------------------------------------------------------------------


def facts(model: nn.Module) -> dict[str, str]:
    """Return the metadata for the safetensors file of an adapter. Every rank must call this.

    The metadata gives the format of the file, identifies the base by the SHA-256 of its norms, and
    says if the base was held in 4 bits.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            norm = parallel.full_tensor(parameter.detach()).float().cpu()
            digest.update(norm.numpy().tobytes())
    metadata = {"format": "pt", "base": digest.hexdigest()}
    if nf4_matrices(model):
        metadata[BASE_BITS_FACT] = str(BITS)
    return metadata


def base_bits(meta: Mapping[str, Any]) -> int:
    """Return the bits that a base's matrices had in training, by the meta.json of an adapter."""
    return meta["base"].get(BASE_BITS, 16)


def tell_base_bits(bits: int, model: nn.Module, folder: Path) -> None:
    """Log that the adapter in a folder runs on a base of another number format than in training.

    `bits` are those that the base had in training, and `model` is the base that it runs on. Nothing
    is logged unless they are 4 and the model is in 16 or 32 bits.
    """
    if bits == BITS and not nf4_matrices(model):
        log(
            tr(
                "the adapter in {folder} was trained on its base in 4 bits, and runs here on "
                "the base as it was published. chat_cli and chat_web run it as it was trained "
                "with --weights nf4",
                folder=folder,
            )
        )


def write_settings(folder: Path, lora: Mapping[str, Any], shape: QwenConfig, base: str) -> None:
    """Write adapter_config.json, so that peft can load the adapter in a folder.

    `lora` has the fields of a LoraConfig, and `base` is the folder of the base model, which has the
    configuration `shape`. A config.json in the folder is removed, because a folder that has
    one is taken for a whole model.
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
        **OFF,
        **_expert_settings(lora, shape),
    }
    write_json(folder / SETTINGS, content)


def _expert_settings(lora: Mapping[str, Any], shape: QwenConfig) -> dict[str, Any]:
    """Return the settings for adapters of experts, which are those that peft writes.

    Peft has gate and up matrices as one parameter, whose rank is doubled. Targets that only experts
    match are not target modules, since peft takes those of Qwen3 for experts again.
    """
    targets = lora["targets"]
    if not shape.has_experts or not adapts_experts(targets):
        return {}
    modules = targets
    if not shape.n_shared_hidden:
        modules = [target for target in targets if not adapts_experts([target])]
    return {
        "target_modules": list(modules),
        "target_parameters": [f"experts.{stack}" for stack in STACKS],
        "rank_pattern": {r".*\.gate_up_proj": 2 * lora["rank"]},
        "alpha_pattern": {r".*\.gate_up_proj": 2 * lora["alpha"]},
    }


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
        write_settings(temporary, asdict(config), model.config, base)
        write_tensors(tensors, temporary / ADAPTER, facts(model))


# --- reading -------------------------------------------------------------------------------------


def read_adapter(model: Qwen, folder: Path) -> Adapter:
    """Return the adapter in a folder, checked against the model. Every rank must call this.

    Raises UserError if the adapter is missing, damaged or not supported, if a value is not finite,
    or if the adapter belongs to another base: it records a different hash of the base's norms, or
    its matrices do not match the model's in name or size.
    """
    settings = read_settings(folder)
    path = folder / ADAPTER
    if not path.is_file():
        refuse_pickle(folder)
        raise UserError(
            tr(
                "{folder} has no {adapter}. Copy the adapter again from its source",
                folder=folder,
                adapter=ADAPTER,
            ),
            2,
        )
    metadata, tensors = _read_tensors(path)
    base_mark = metadata.get("base")
    other_base = tr(
        "the adapter in {folder} belongs to another base, {base}", folder=folder, base=settings.base
    )
    if base_mark is not None and base_mark != facts(model)["base"]:
        raise UserError(
            tr(
                "{other_base}: its base has other norms than this model. Name the model "
                "that it was trained on",
                other_base=other_base,
            ),
            2,
        )
    problem = _fit_problem(model, settings, tensors)
    if problem:
        raise UserError(
            tr(
                "{other_base}: {problem}. Name the model that it was trained on",
                other_base=other_base,
                problem=problem,
            ),
            2,
        )
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(
                tr(
                    "{path} has values that are NaN or infinite, the first in {name}, so "
                    "it would give no answers, and break the answers beside it. Use "
                    "another step of its training",
                    path=path,
                    name=name,
                ),
                exit_code=2,
            )
    if metadata.get(BASE_BITS_FACT) == str(BITS):
        tell_base_bits(BITS, model, folder)
    configs = {
        module: settings.config_of(stack_of(module) or module)
        for module in _adapted_modules(tensors)
    }
    return Adapter(settings.config, tensors, configs, settings.modules_to_save)


def _read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata of an adapter's file, and the tensors under our names."""
    metadata: dict[str, str] = {}
    tensors = {}
    refuse_pointer(path)
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
            tr(
                "{path} is not a whole safetensors file ({failure}). Copy the adapter again",
                path=path,
                failure=in_words(failure),
            ),
            2,
        ) from failure
    return metadata, tensors


def _adapted_modules(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the sorted names of the modules that an adapter's factors belong to."""
    return sorted({name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name})


def _whole_parameters(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name of a tensor that replaces a parameter to the name of that parameter."""
    names = [name for name in tensors if ".lora_" not in name]
    return {name: name.replace(BASE_LAYER, ".", 1) for name in names}


def _fit_problem(model: Qwen, settings: PeftSettings, tensors: Mapping[str, Tensor]) -> str:
    """Return why an adapter's tensors do not fit the model, or "" if they do.

    Each tensor must have the right shape for its module. Unless the adapter is partial, every
    matrix that matches its targets must have tensors.
    """
    expected = _expected_shapes(model, settings, tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted({*shapes, *expected}):
        shape = shapes.get(name, tr("missing"))
        expected_shape = expected.get(name, tr("nothing"))
        if shape != expected_shape:
            return tr(
                "{name} is {shape} instead of {expected_shape}",
                name=name,
                shape=shape,
                expected_shape=expected_shape,
            )
    if settings.is_partial and tensors:
        return ""
    lacking = _lacking_targets(model, settings, tensors)
    if lacking or not tensors:
        return tr("it has nothing for {target}", target=(lacking or settings.config.targets)[0])
    return ""


def _expected_shapes(
    model: Qwen, settings: PeftSettings, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that an adapter's tensors must have, for each module that has one of them."""
    parameter_shapes = _parameter_shapes(model)
    layers: dict[str, nn.Module] = {**dict(model.named_modules()), HEAD: model.head}
    expected: dict[str, tuple[int, ...]] = {}
    for name in _adapted_modules(tensors):
        stack = stack_of(name)
        if stack is not None and stack in parameter_shapes:
            expected |= _stack_factor_shapes(settings, name, stack, parameter_shapes[stack])
        elif name == EMBEDDING or isinstance(layers.get(name), Linear | Vocabulary):
            expected |= _factor_shapes(settings, name, parameter_shapes[f"{name}.weight"])
    for name, parameter_name in _whole_parameters(tensors).items():
        if parameter_name in parameter_shapes:
            expected[name] = parameter_shapes[parameter_name]
    return expected


def _lacking_targets(
    model: Qwen, settings: PeftSettings, tensors: Mapping[str, Tensor]
) -> list[str]:
    """Return the matrices and stacks that match an adapter's targets, and have no factors in it."""
    adapted_stacks = {stack_of(module) for module in _adapted_modules(tensors)}
    targets = []
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            stacks = [f"{name}.{stack}" for stack in STACKS]
            targets += [stack for stack in stacks if matches(stack, settings.target_parameters)]
        elif isinstance(module, Linear) and matches(name, settings.config.targets):
            targets.append(name)
    return [
        target
        for target in targets
        if target not in adapted_stacks and f"{target}.lora_A.weight" not in tensors
    ]


def _parameter_shapes(model: Qwen) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its name, and that of the head, which may be tied.

    The weights that are empty while a model is served count with the shapes of their matrices.
    """
    shapes = model.parameter_shapes()
    for name, module in model.named_modules():
        if isinstance(module, Vocabulary):
            shapes[f"{name}.weight"] = module.shape
    shapes.setdefault(f"{HEAD}.weight", model.head.shape)
    return shapes


def _stack_factor_shapes(
    settings: PeftSettings, module: str, stack: str, weight: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's factors for a stack of experts' matrices, by name.

    `weight` is the stack's shape: experts, outputs and inputs.
    """
    rank = settings.config_of(stack).rank
    experts, outputs, inputs = weight
    return {
        f"{module}.lora_A.weight": (experts * rank, inputs),
        f"{module}.lora_B.weight": (outputs, rank * experts),
    }


def _factor_shapes(
    settings: PeftSettings, module: str, weight: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's factors for a module with a `weight` of that shape, by name."""
    rank = settings.config_of(module).rank
    outputs, inputs = weight
    shapes: dict[str, tuple[int, ...]]
    if module == EMBEDDING:
        # the weight has a row for each token, so that its factors stand the other way round
        shapes = {"lora_embedding_A": (rank, outputs), "lora_embedding_B": (inputs, rank)}
        magnitudes = inputs
    else:
        shapes = {"lora_A.weight": (rank, inputs), "lora_B.weight": (outputs, rank)}
        magnitudes = outputs
        if settings.lora_bias:
            shapes["lora_B.bias"] = (outputs,)
    if settings.dora:
        shapes["lora_magnitude_vector"] = (magnitudes,)
    return {f"{module}.{name}": shape for name, shape in shapes.items()}


# --- adding to a model ---------------------------------------------------------------------------


@torch.no_grad()
def attach_adapter(model: Qwen, folder: Path) -> None:
    """Add the adapter in a folder to the products of an unsharded model, which keeps its weights.

    A base in 4 bits cannot take up the values of an adapter, as merge_adapter() lets it. Raises
    UserError as read_adapter() does, and (exit code 2) if the adapter can only be merged.
    """
    adapter = read_adapter(model, folder)
    part = part_to_merge(adapter)
    if part:
        raise UserError(
            tr(
                "the adapter in {folder} has {part}, and beside a base in 4 bits an adapter adds "
                "only low-rank products to the matrices inside layers. Leave --weights out",
                folder=folder,
                part=part,
            ),
            exit_code=2,
        )
    for name in adapter.configs:
        low_rank = LowRank(cast(Linear, model.get_submodule(name)), adapter.config_of(name))
        low_rank.first.weight.copy_(adapter.values[f"{name}.lora_A.weight"])
        low_rank.second.weight.copy_(adapter.values[f"{name}.lora_B.weight"])


# --- merging -------------------------------------------------------------------------------------


@torch.no_grad()
def merge_adapter(model: Qwen, folder: Path, compute: Compute) -> None:
    """Merge the adapter in a folder into an unsharded model, computing in fp32.

    If the adapter changes one of two tied tables, the head gets a table of its own. Raises
    UserError as read_adapter() does, and if a matrix would need a bias that it does not have.
    """
    adapter = read_adapter(model, folder)
    tables = {EMBEDDING, HEAD}
    parameters = dict(model.named_parameters())
    parameters.setdefault(f"{HEAD}.weight", model.head.weight)
    changed = set(adapter.configs)
    table_values = {}  # parameter -> the value that replaces it once tables are no longer tied
    for name, parameter_name in _whole_parameters(adapter.values).items():
        module = parameter_name.rpartition(".")[0]
        if module in tables and matches(module, adapter.modules_to_save) and BASE_LAYER not in name:
            changed.add(module)
            table_values[parameter_name] = name
        else:  # a tied table changes in both of its uses
            parameters[parameter_name].copy_(adapter.values[name])
    if model.config.tied and changed & tables:
        _untie(model, compute)
    parameters = dict(model.named_parameters())
    for parameter_name, name in table_values.items():
        parameters[parameter_name].copy_(adapter.values[name])
    for module in adapter.configs:
        _merge_module(parameters, adapter, module, folder)


def _untie(model: Qwen, compute: Compute) -> None:
    """Give the head of a model a table of its own, with the values of the embedding."""
    model.config = replace(model.config, tied=0)
    table = model.model.embed_tokens.weight
    model.lm_head = Vocabulary(model.config)
    model.lm_head.weight = nn.Parameter(table.clone())
    accelerate(model, compute.operations)


def _merge_module(
    parameters: Mapping[str, Tensor], adapter: Adapter, module: str, folder: Path
) -> None:
    """Merge an adapter's factors for one module into its parameters."""
    weight = parameters[stack_of(module) or f"{module}.weight"]
    merged = weight.float() + delta(adapter, module, weight.device)
    magnitude = adapter.values.get(f"{module}.lora_magnitude_vector")
    if magnitude is not None:
        # A magnitude belongs to an output, which is a row of a matrix and a column of a table.
        dim = 0 if module == EMBEDDING else 1
        norms = torch.linalg.norm(merged, dim=dim, keepdim=True)
        merged *= magnitude.float().to(weight.device).view_as(norms) / norms
    weight.copy_(merged)
    bias = adapter.values.get(f"{module}.lora_B.bias")
    if bias is None:
        return
    if f"{module}.bias" not in parameters:
        raise UserError(
            tr(
                "{path} asks for lora_bias=True, and {module} has no bias to merge that "
                "into. Use another adapter, or train this one without that setting",
                path=folder / SETTINGS,
                module=module,
            ),
            exit_code=2,
        )
    base_bias = parameters[f"{module}.bias"]
    scale = adapter.config_of(module).scale
    base_bias.copy_(base_bias.float() + bias.float().to(base_bias.device) * scale)


def part_to_merge(adapter: Adapter) -> str:
    """Return the name of a value that an adapter can only add by being merged, or "".

    A server that answers with several adapters adds B A x to the products of the matrices inside
    layers, and cannot change anything else.
    """
    for name in adapter.values:
        is_factor = name.endswith((".lora_A.weight", ".lora_B.weight"))
        is_of_experts = stack_of(name.rpartition(".lora_")[0]) is not None
        if not is_factor or is_of_experts or not name.startswith("model.layers."):
            return name
    return ""
