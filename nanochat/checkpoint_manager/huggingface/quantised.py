"""Reads the FP8 weights that Qwen and DeepSeek publish, and refuses other quantised formats.

A matrix is in float8_e4m3fn, and X.weight_scale_inv has a factor for each block of 128 x 128.
"""

import reprlib
from pathlib import Path
from typing import Any

from torch import Tensor

from nanochat.common import UserError, read_json, tr, write_json

SETTING = "quantization_config"  # in config.json
SCALE = "_scale_inv"  # ends the name of a matrix's factors
BLOCK = 128  # rows and columns that share a factor
FP8 = "F8_E4M3"  # in the header of a safetensors file
SCALE_FORMATS = ("F32", "BF16")
# Settings of quant_method fp8 -> the only supported value.
FP8_SETTINGS = {
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
}


def _instead(method: str) -> str:
    """Return which model to use instead of one that is quantised by a method."""
    source = tr("the model that it was made from")
    return {
        "awq": tr("the model without -AWQ in its name, or with -FP8"),
        "gptq": tr("the model without -GPTQ-Int4 or -GPTQ-Int8 in its name, or with -FP8"),
        "bitsandbytes": source,
        "compressed-tensors": source,
        "fp8": tr("the model in bf16, or one with blocks of {block} x {block}", block=BLOCK),
    }.get(method, tr("the model in bf16, fp16, fp32 or FP8"))


def check_quantisation(setting: Any) -> None:
    """Raise UserError if config.json's quantization_config names another format than our FP8."""
    if setting is None:
        return
    if not isinstance(setting, dict):
        raise UserError(
            tr(
                "{setting} is {value}, expected an object",
                setting=SETTING,
                value=reprlib.repr(setting),
            )
        )
    method = setting.get("quant_method")
    if method == "fp8":
        wrong = [
            f"{name}={reprlib.repr(setting.get(name, value))}"
            for name, value in FP8_SETTINGS.items()
            if setting.get(name, value) != value
        ]
        if "weight_block_size" not in setting:
            wrong.append("weight_block_size=None")
        if not wrong:
            return
        method_and_settings = tr("fp8 with {settings}", settings=", ".join(wrong))
    else:
        method_and_settings = reprlib.repr(method)
    instead = _instead(str(method))
    raise UserError(
        tr(
            "the model has quantised weights of method {method_and_settings}; supported "
            "are bf16, fp16, fp32, and fp8 in blocks of {block} x {block}. Use {instead}",
            method_and_settings=method_and_settings,
            block=BLOCK,
            instead=instead,
        )
    )


def drop_setting(config: Path) -> None:
    """Remove quantization_config from a config.json, for weights that are not quantised any more."""
    content = read_json(config)
    if content.pop(SETTING, None) is not None:
        write_json(config, content)


def scale_problem(weight: Any, scale: Any | None) -> str:
    """Return what is wrong with the factors of a matrix, or "".

    `weight` and `scale` are slices of safetensors files. `scale` is None if there are none.
    """
    is_fp8 = weight.get_dtype() == FP8
    if scale is None:
        return tr("has no factors") if is_fp8 else ""
    if not is_fp8:
        return tr("has factors, but is in {dtype}", dtype=weight.get_dtype())
    blocks = [-(-size // BLOCK) for size in weight.get_shape()]
    if list(scale.get_shape()) != blocks or scale.get_dtype() not in SCALE_FORMATS:
        return tr(
            "needs {blocks} factors in F32 or BF16, got {shape} in {dtype}",
            blocks=blocks,
            shape=list(scale.get_shape()),
            dtype=scale.get_dtype(),
        )
    return ""


def dequantised_rows(weight: Any, scale: Any, first: int, count: int) -> Tensor:
    """Return `count` rows of an FP8 matrix in fp32, starting at row `first`.

    `weight` and `scale` are slices of safetensors files, of which only these rows are read.
    """
    values = weight[first : first + count].float()
    first_block = first // BLOCK
    last_block = (first + count - 1) // BLOCK
    factors = scale[first_block : last_block + 1].float()
    columns = factors.repeat_interleave(BLOCK, dim=1)[:, : values.size(1)]
    for number, block_factors in enumerate(columns):
        begin = max((first_block + number) * BLOCK - first, 0)
        end = (first_block + number + 1) * BLOCK - first
        values[begin:end] *= block_factors
    return values
