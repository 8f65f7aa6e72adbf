"""Reads adapter_config.json, in which peft describes an adapter, by a list of allowed settings.

Every setting of peft is honoured, known to be harmless, or refused by its name and value.
"""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.huggingface.folders import ADAPTER as SETTINGS
from nanochat.common import UserError, read_json, tr
from nanochat.models.lora import STACKS, LoraConfig

# Settings that are honoured -> the types that their values may have. Settings of which the tensors
# in the file show the effect, such as layers_to_transform, may have any value.
HONOURED: dict[str, type | tuple[type, ...]] = {
    "r": int,
    "lora_alpha": (int, float),
    "lora_dropout": (int, float),
    "use_rslora": bool,
    "target_modules": (list, str),
    "target_parameters": list,  # only stacks of experts' matrices
    "layers_to_transform": object,
    "layers_pattern": object,
    "exclude_modules": object,
    "rank_pattern": dict,
    "alpha_pattern": dict,
    "modules_to_save": list,
    "ensure_weight_tying": bool,
    "use_dora": bool,
    "lora_bias": bool,
}
# Settings that do not change what a trained adapter computes. Those that end in _config belong to
# values of init_lora_weights, which are checked themselves.
HARMLESS = {
    *("peft_type", "base_model_name_or_path", "revision", "peft_version", "task_type"),
    *("auto_mapping", "inference_mode", "runtime_config", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
# Settings that may have only some values -> these values.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "bias": ("none", "all", "lora_only"),
    # Starts of training that leave the base's weights unchanged.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica"),
}
# Starts of training that change the base's weights -> how. A name with a suffix, such as
# pissa_niter_4, belongs to the name that it begins with.
CHANGED_BASES = ("pissa", "olora", "corda", "lora_ga", "loftq")
# A pattern with a repeated group or with many repetitions may take for ever to match.
REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
MOST_REPETITIONS = 4
# Settings that exclude layers or modules from training although they match the targets.
PARTIAL = ("layers_to_transform", "exclude_modules", "modules_to_save")


@dataclass(frozen=True)
class PeftSettings:
    """What adapter_config.json says about an adapter."""

    config: LoraConfig  # for modules that no pattern matches
    base: str  # the name or folder of the base model
    rank_pattern: Mapping[str, int]  # regular expression for the end of a name -> rank
    alpha_pattern: Mapping[str, float]
    modules_to_save: tuple[str, ...]  # modules that were trained as a whole
    is_partial: bool  # training left out layers or modules that match the targets
    target_parameters: tuple[str, ...]  # stacks of experts' matrices
    dora: bool  # modules have a magnitude for each output (DoRA, arXiv 2402.09353)
    lora_bias: bool  # the B of a module has a bias

    def config_of(self, module: str) -> LoraConfig:
        """Return the settings for the module with a dotted name, with its own rank and alpha."""
        rank = _first_match(self.rank_pattern, module, self.config.rank)
        alpha = _first_match(self.alpha_pattern, module, self.config.alpha)
        return replace(self.config, rank=int(rank), alpha=alpha)


def _first_match(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first key of a pattern that matches a module's name, as in peft."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def read_settings(folder: Path) -> PeftSettings:
    """Return the settings of the adapter in a folder.

    Raises UserError (exit code 2) if the folder has no adapter, or a damaged or unsupported one.
    """
    path = folder / SETTINGS
    if not path.is_file():
        raise UserError(
            tr(
                "{folder} is not an adapter: it has no {settings}. Name the folder that peft or "
                "nanochat wrote",
                folder=folder,
                settings=SETTINGS,
            ),
            2,
        )
    content = read_json(path)
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        raise UserError(
            tr(
                "{path} is not of a LoRA adapter, and no other kind is known. Use a LoRA adapter",
                path=path,
            ),
            2,
        )
    _refuse_unsupported(content, path)
    _refuse_slow_patterns(content, path)
    # A setting that is null is the same as one that is missing.
    values = {name: value for name, value in content.items() if value is not None}
    # An adapter of experts alone has no target modules, and "None" matches no module.
    targets = values.get("target_modules") or "None"
    try:
        settings = PeftSettings(
            config=LoraConfig(
                rank=values["r"],
                alpha=float(values["lora_alpha"]),
                dropout=float(values.get("lora_dropout", 0.0)),
                targets=(targets,) if isinstance(targets, str) else tuple(map(str, targets)),
                stabilised=values.get("use_rslora", False),
            ),
            base=str(values.get("base_model_name_or_path")),
            rank_pattern={key: int(r) for key, r in values.get("rank_pattern", {}).items()},
            alpha_pattern={key: float(a) for key, a in values.get("alpha_pattern", {}).items()},
            modules_to_save=tuple(map(str, values.get("modules_to_save", ()))),
            is_partial=any(values.get(name, []) != [] for name in PARTIAL),
            target_parameters=tuple(map(str, values.get("target_parameters", ()))),
            dora=values.get("use_dora", False),
            lora_bias=values.get("lora_bias", False),
        )
        settings.config_of("")  # a pattern that cannot be read fails here
    except (KeyError, TypeError, ValueError, re.error) as failure:
        raise UserError(
            tr(
                "{path} is damaged: {failure!r}. Copy the adapter again from its source",
                path=path,
                failure=failure,
            ),
            2,
        ) from failure
    return settings


def _refuse_unsupported(content: Mapping[str, Any], path: Path) -> None:
    """Raise UserError (exit code 2) for the first setting that may change what the adapter computes.

    Unknown settings are refused too, unless they are null, false, 0 or an empty list or object, and
    therefore off. Each version of peft writes a few new ones.
    """
    for name, value in content.items():
        is_off = value is None or value is False or value in (0, [], {}, "")
        if is_off or name in HARMLESS:
            continue
        is_honoured = name in HONOURED and isinstance(value, HONOURED[name])
        if name == "target_parameters":
            is_honoured = _names_stacks(value)
        if is_honoured or value in ALLOWED.get(name, ()):
            continue
        advice = tr("Use another adapter, or train this one without that setting")
        reason = tr("which is not supported")
        if name == "init_lora_weights":
            reason, advice = _start_reason(value)
        raise UserError(
            tr(
                "{path} asks for {name}={value}, {reason}. {advice}",
                path=path,
                name=name[:100],
                value=reprlib.repr(value),
                reason=reason,
                advice=advice,
            ),
            exit_code=2,
        )


def _names_stacks(names: Any) -> bool:
    """Return whether a list of parameters names only stacks of experts' matrices."""
    return isinstance(names, list) and all(str(name).rpartition(".")[2] in STACKS for name in names)


def _refuse_slow_patterns(content: Mapping[str, Any], path: Path) -> None:
    """Raise UserError (exit code 2) if a key of a pattern might take very long to match a name."""
    for name in ("rank_pattern", "alpha_pattern"):
        for key in content.get(name) or {}:
            repetitions = sum(key.count(mark) for mark in "*+{")
            if REPEATED_GROUP.search(key) or repetitions > MOST_REPETITIONS:
                raise UserError(
                    tr(
                        "{path} has the {name} {pattern}, and a pattern may have at most "
                        "{most_repetitions} repetitions and no repeated group. Write the "
                        "names out",
                        path=path,
                        name=name,
                        pattern=reprlib.repr(key),
                        most_repetitions=MOST_REPETITIONS,
                    ),
                    exit_code=2,
                )


def _start_reason(value: Any) -> tuple[str, str]:
    """Return why an adapter with this value of init_lora_weights is refused, and the way out."""
    save_again = tr("Save it again with peft's path_initial_model_for_weight_conversion")
    for name in CHANGED_BASES:
        if str(value).lower().startswith(name):
            reason = tr(
                "which means that {change}, so it does not fit the published base",
                change=_change(name),
            )
            train_again = tr("Train it again without that setting")
            return reason, train_again if name == "loftq" else save_again
    reason = tr("which may have changed the base's own weights")
    return reason, tr("{save_again}, or use another adapter", save_again=save_again)


def _change(start: str) -> str:
    """Return how training from a kind of start has changed the base's matrices."""
    if start == "pissa":
        return tr("its training moved the largest singular values of the base's matrices into it")
    if start == "loftq":
        return tr("its training rounded the base's matrices")
    return tr("its training moved a part of the base's matrices into it")
