"""FP8 weights in blocks, as Qwen and DeepSeek publish them, against a plain reference; other formats are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanochat.checkpoint_manager.huggingface.config import read_config
from nanochat.checkpoint_manager.huggingface.quantised import dequantised_rows
from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.common import UserError
from tests.support.qwens import VOCABULARY, write_folder
from tests.support.tiny_model import on_cpu

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def quantised(matrix: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An FP8 matrix and the factors of its blocks."""
    rows, columns = matrix.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    values = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    for row in range(scales.size(0)):
        for column in range(scales.size(1)):
            block = matrix[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
            factor = (block.abs().max() / 448).to(scale_dtype).float()
            scales[row, column] = factor
            values[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128] = (block / factor).to(values.dtype)
    return values, scales.to(scale_dtype)


def plain(values: Tensor, scales: Tensor) -> Tensor:
    """The matrix of FP8 values and their factors, each element with that of its block."""
    rows, columns = (torch.arange(size) // 128 for size in values.shape)
    return values.float() * scales.float()[rows[:, None], columns]


class Slice:
    """The slice of a safetensors file."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __getitem__(self, rows: slice) -> Tensor:
        return self.tensor[rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_rows_are_bit_for_bit_those_of_the_plain_reference(dtype: torch.dtype) -> None:
    matrix = torch.randn(300, 140, generator=torch.Generator().manual_seed(1))
    values, scales = quantised(matrix, dtype)
    expected = plain(values, scales)
    assert (expected - matrix).abs().max() < 0.3
    for first, count in ((0, 300), (0, 1), (127, 2), (128, 128), (200, 100), (299, 1)):
        rows = dequantised_rows(Slice(values), Slice(scales), first, count)
        assert torch.equal(rows, expected[first : first + count])


def fp8_folder(folder: Path, **setting: Any) -> dict[str, Tensor]:
    """Write a published model in FP8, and return what its matrices should be."""
    write_folder(folder, "qwen3")
    expected: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        for name, value in load_file(path).items():
            tensors[name] = expected[name] = value
            if "_proj" in name:
                tensors[name], tensors[f"{name}_scale_inv"] = quantised(value, torch.bfloat16)
                expected[name] = plain(tensors[name], tensors[f"{name}_scale_inv"])
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**FP8, **setting}}))
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_folder_is_dequantised_as_it_loads(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = fp8_folder(tmp_path)
    model = load_qwen(tmp_path, on_cpu(), dtype)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name].to(parameter.dtype)), name


def test_a_model_that_was_trained_from_fp8_does_not_claim_to_be_fp8(tmp_path: Path) -> None:
    fp8_folder(tmp_path)
    (tmp_path / "copy").mkdir()
    FolderTokenizer(tmp_path, VOCABULARY).save(tmp_path / "copy")
    assert "quantization_config" not in json.loads((tmp_path / "copy" / "config.json").read_text())


@pytest.mark.parametrize("damage", ["factors are missing", "matrix is missing", "wrong shape", "factors of bf16"])
def test_factors_that_do_not_fit_are_refused(damage: str, tmp_path: Path) -> None:
    fp8_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    if damage == "factors are missing":
        del tensors[f"{name}_scale_inv"]
    elif damage == "matrix is missing":
        tensors["model.layers.7.mlp.down_proj.weight_scale_inv"] = torch.ones(1, 1)
        name = "model.layers.7.mlp.down_proj.weight"
    elif damage == "wrong shape":
        tensors[f"{name}_scale_inv"] = torch.ones(2, 1)
    else:
        tensors[name] = tensors[name].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=name):
        load_qwen(tmp_path, on_cpu())


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "'awq'.*-AWQ"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'.*-GPTQ"),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "of 2031"}, "'of 2031'"),
        ({}, "None"),
        ("int4", "'int4'"),
        ({**FP8, "weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
        ({**FP8, "weight_block_size": None}, "weight_block_size=None"),
        ({"quant_method": "fp8"}, "weight_block_size=None"),
        ({**FP8, "fmt": "e5m2"}, "fmt='e5m2'"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme='static'"),
    ],
)
def test_other_formats_are_refused_by_name(setting: Any, named: str, tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": setting}))
    with pytest.raises(UserError, match=named) as refused:
        read_config(tmp_path)
    assert refused.value.exit_code == 2
