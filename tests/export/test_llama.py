"""Models as GGUF files: formats, merged adapters, and what is refused. test_llama_cpp.py runs files in llama.cpp."""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from nanochat.checkpoint_manager.huggingface.adapter import save_adapter
from nanochat.checkpoint_manager.load import PUBLISHED, Loaded, load_published
from nanochat.common import UserError
from nanochat.export import llama
from nanochat.export.__main__ import Config, main
from nanochat.models.lora import LoraConfig, add_adapters, init_adapters
from nanochat.models.qwen.model import Qwen
from nanochat.tokenizer import Tokenizer
from tests.export.gguf_reader import Reader
from tests.export.test_llama_vocabulary import folder_with
from tests.support.qwens import CONFIGS, OPTIONS, tiny_qwen
from tests.support.tiny_model import TEXT, on_cpu, tiny_checkpoint

WORDS = " ".join(
    ["one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"] * 3
)


def loaded(model: Qwen) -> Loaded:
    return Loaded(model, Tokenizer.train([TEXT + WORDS] * 4, 320, "qwen2"), {}, "sft", "d2", 3)


def exported(model: Qwen, tmp_path: Path, dtype: str = "float32") -> Reader:
    llama.export(loaded(model), tmp_path / "x.gguf", dtype)
    return Reader(tmp_path / "x.gguf")


@pytest.mark.parametrize(("dtype", "number"), [("float32", 0), ("bfloat16", 32), ("float16", 1)])
def test_matrices_are_halved_and_norms_are_not(dtype: str, number: int, tmp_path: Path) -> None:
    model = tiny_qwen("qwen3")
    read = exported(model, tmp_path, dtype)
    assert read.metadata["general.file_type"] == number and read.metadata["qwen3.context_length"] == 256
    table = read.tensors["token_embd.weight"]
    assert table.dtype == getattr(torch, dtype) and torch.equal(table, model.head.weight.to(table.dtype))
    assert {value.dtype for name, value in read.tensors.items() if "norm" in name} == {torch.float32}


def test_rows_that_are_no_blocks_stay_in_fp16(tmp_path: Path) -> None:
    model = tiny_qwen("qwen3")  # 48 channels, 64 of attention, 80 of the MLP
    read = exported(model, tmp_path, "q8_0")
    assert read.metadata["general.file_type"] == 7 and read.metadata["general.quantization_version"] == 2
    weight = model.blocks[0].self_attn.o_proj.weight.detach()
    rows = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(read.tensors["blk.0.attn_output.weight"], torch.from_numpy(rows))
    up = model.blocks[0].mlp.up_proj.weight
    assert torch.equal(read.tensors["blk.0.ffn_up.weight"], up.half())
    assert read.tensors["blk.0.attn_norm.weight"].dtype == torch.float32


def test_what_llama_cpp_cannot_compute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="12 and 16"):
        exported(tiny_qwen("qwen3.5"), tmp_path)
    with pytest.raises(UserError, match="of type llama3"):
        llama.architecture(replace(CONFIGS["qwen3"], rope="llama3"))
    with pytest.raises(UserError, match="of type yarn"):
        llama.architecture(replace(OPTIONS["qwen3 yarn"], rope_high=16.0))
    tiny_checkpoint("sft")
    with pytest.raises(UserError, match=r"not that of nanochat's GPT.*--family qwen3") as failure:
        main(Config(tmp_path / "x.gguf", format="gguf"))
    assert failure.value.exit_code == 2 and not (tmp_path / "x.gguf").exists()


def test_values_that_fp16_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = tiny_qwen("qwen3")
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 5] = 1e5
    with pytest.raises(UserError, match=r"embed_tokens.*float16.*--dtype bfloat16"):
        exported(model, tmp_path, "float16")
    model = tiny_qwen("qwen3")
    with torch.no_grad():
        model.blocks[1].self_attn.o_proj.weight[3, 5] = 1e7  # more than 127 times the largest number in fp16
    with pytest.raises(UserError, match=r"o_proj.*float16.*--dtype bfloat16"):
        exported(model, tmp_path, "q8_0")
    assert not list(tmp_path.glob("*x.gguf*"))


def test_the_command_merges_an_adapter_into_a_published_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder_with(tmp_path / "model")
    model = tiny_qwen("qwen3")
    lora = LoraConfig(rank=2)
    add_adapters(model, lora)
    init_adapters(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    save_adapter(model, lora, "model", tmp_path / "adapter")
    main(Config(tmp_path / "x.gguf", format="gguf", model=tmp_path / "model", adapter=tmp_path / "adapter"))
    merged = load_published(tmp_path / "model", tmp_path / "adapter", on_cpu())
    read = Reader(tmp_path / "x.gguf")
    weight = merged.model.blocks[0].mlp.up_proj.weight
    assert (tmp_path / "x.Modelfile").read_text().startswith("FROM ./x.gguf\n")
    assert torch.equal(read.tensors["blk.0.ffn_up.weight"], weight)
    assert not torch.equal(weight, tiny_qwen("qwen3").blocks[0].mlp.up_proj.weight)
    assert (
        read.metadata["general.description"] == f"trained with nanochat: stage {PUBLISHED}, tag model + adapter, step 0"
    )


def test_flags_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name its folder with --model"):
        main(Config(tmp_path / "x", adapter=tmp_path))
    with pytest.raises(UserError, match="give either"):
        main(Config(tmp_path / "x", model=tmp_path, source="sft"))
    with pytest.raises(UserError, match="--format gguf") as failure:
        main(Config(tmp_path / "x", dtype="q8_0"))
    assert failure.value.exit_code == 2
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError, match="exists already"):
        main(Config(tmp_path / "x"))
    (tmp_path / "y.Modelfile").touch()
    with pytest.raises(UserError, match=r"y\.Modelfile exists already"):
        main(Config(tmp_path / "y.gguf", format="gguf"))
