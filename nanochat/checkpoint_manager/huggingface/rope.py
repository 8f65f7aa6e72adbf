"""Translates what config.json says about rotary embeddings to a model's shape and back."""

import reprlib
from collections.abc import Mapping
from typing import Any

from nanochat.common import UserError, tr
from nanochat.models.qwen.config import ROPES, QwenConfig
from nanochat.models.rope import yarn_scale

STRETCHED = ("dynamic", "yarn")  # rules that hold for more tokens than max_position_embeddings


def _rules(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rules for rotary embeddings, under the newer or the older name.

    Of two, the older name has precedence, as in transformers: people add `rope_scaling` to a file.
    Raises UserError if different kinds of layers have different rules.
    """
    rules = text.get("rope_scaling") or text.get("rope_parameters") or {}
    nested = [value for value in rules.values() if isinstance(value, Mapping)]
    if not nested:
        return rules
    if any(rules_of_kind != nested[0] for rules_of_kind in nested):
        raise UserError(
            tr(
                "its rotary embeddings follow one rule for each kind of layer, and only one rule "
                "for all layers is supported. Use another model"
            )
        )
    return nested[0]


def rope_settings(
    text: Mapping[str, Any],  # the text part of config.json
    head_dim: int,
    default_share: float,  # share of a head's channels that are rotated
) -> dict[str, Any]:
    """Return the fields of a configuration that describe rotary embeddings.

    Raises UserError if their type is unknown.
    """
    rules = _rules(text)
    rope = rules.get("rope_type") or rules.get("type") or "default"
    if rope not in ROPES:
        raise UserError(
            tr(
                "its rotary embeddings are of type {rope}, and the known ones are {known}. Use "
                "another model",
                rope=reprlib.repr(rope),
                known=", ".join(ROPES),
            )
        )
    parameters = text.get("rope_parameters") or {}
    theta = rules.get("rope_theta") or parameters.get("rope_theta") or text.get("rope_theta")
    share = rules.get("partial_rotary_factor") or text.get("partial_rotary_factor")
    rotated = int(head_dim * (share or default_share))
    settings: dict[str, Any] = {
        "rope_theta": float(theta or 10_000.0),
        "rotary_dim": 0 if rotated == head_dim else rotated,
    }
    if rope == "default":
        return settings
    longest = text["max_position_embeddings"]
    original = longest
    if rope in ("llama3", "yarn"):
        original = text.get("original_max_position_embeddings") or rules.get(
            "original_max_position_embeddings", longest
        )
    factor = rules["factor"] if rope != "yarn" else rules.get("factor") or longest / original
    settings |= {"rope": rope, "rope_factor": float(factor), "rope_original": original}
    if rope == "llama3":
        settings["rope_low"] = float(rules["low_freq_factor"])
        settings["rope_high"] = float(rules["high_freq_factor"])
    if rope == "yarn":
        settings |= _yarn_settings(rules, float(factor))
    return settings


def _yarn_settings(rules: Mapping[str, Any], factor: float) -> dict[str, float]:
    """Return the fields that only YaRN has.

    Raises UserError if the channels of its steps are not rounded.
    """
    if not rules.get("truncate", True):
        raise UserError(
            tr("truncate is false in its YaRN, and only true is supported. Use another model")
        )
    scale = rules.get("attention_factor")
    if scale is None:
        scale = yarn_scale(factor, rules.get("mscale") or 0.0, rules.get("mscale_all_dim") or 0.0)
        # vLLM's name for a factor beside the usual scale; DeepSeek-R1-0528-Qwen3-8B has it.
        scale *= rules.get("attn_factor") or 1.0
    return {
        "rope_low": float(rules.get("beta_slow") or 1.0),
        "rope_high": float(rules.get("beta_fast") or 32.0),
        "rope_scale": float(scale),
    }


def longest_context(shape: Mapping[str, Any]) -> int:
    """Return how many tokens a model with these fields is made for.

    It can be more than the context that config.json names.
    """
    longest = shape["sequence_len"]
    if shape.get("rope") in STRETCHED:
        longest = max(longest, int(shape["rope_original"] * shape["rope_factor"]))
    return longest


def published_rope(shape: QwenConfig, in_parameters: bool) -> dict[str, Any]:
    """Return what config.json says about positions.

    If `in_parameters` is true, all is under `rope_parameters`, as in transformers 5, else under the
    names that older readers know too.
    """
    rules: dict[str, Any] = {"rope_type": shape.rope}
    if shape.rope != "default":
        rules["factor"] = shape.rope_factor
    if shape.rope in ("llama3", "yarn"):
        rules["original_max_position_embeddings"] = shape.rope_original
    if shape.rope == "llama3":
        rules |= {"low_freq_factor": shape.rope_low, "high_freq_factor": shape.rope_high}
    if shape.rope == "yarn":
        rules |= {
            "beta_slow": shape.rope_low,
            "beta_fast": shape.rope_high,
            "attention_factor": shape.rope_scale,
        }
        beside_usual = shape.rope_scale / yarn_scale(shape.rope_factor)
        if beside_usual != 1:
            rules["attn_factor"] = beside_usual  # what vLLM reads
    # The rule "dynamic" has no other place for the context of pretraining.
    longest = shape.rope_original if shape.rope == "dynamic" else shape.sequence_len
    content: dict[str, Any] = {"max_position_embeddings": longest}
    if in_parameters:
        rules |= {
            "rope_theta": shape.rope_theta,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": shape.rotated / shape.head_dim,
        }
        return {**content, "rope_parameters": rules}
    content["rope_theta"] = shape.rope_theta
    if shape.rope != "default":
        content["rope_scaling"] = rules
    return content
