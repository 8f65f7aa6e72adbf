"""Models as GGUF files: names, layout, formats, and what is refused. test_llama_cpp.py runs the files in llama.cpp."""

import dataclasses
from pathlib import Path

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
from tests.support.qwens import CONFIGS, tiny_qwen
from tests.support.tiny_model import TEXT, on_cpu, tiny_checkpoint

WORDS = " ".join(
    ["one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"] * 3
)
SAME_HEADS = dataclasses.replace(CONFIGS["qwen3.5"], delta_key_dim=16)


def loaded(model: Qwen) -> Loaded:
    return Loaded(model, Tokenizer.train([TEXT + WORDS] * 4, 320, "qwen2"), {}, "sft", "d2", 3)


def exported(model: Qwen, tmp_path: Path, dtype: str = "float32") -> Reader:
    llama.export(loaded(model), tmp_path / "x.gguf", dtype)
    return Reader(tmp_path / "x.gguf")


@pytest.mark.parametrize("family", ["qwen2", "qwen2.5-tied", "qwen3"])
def test_parameters_have_llama_cpp_s_names(family: str, tmp_path: Path) -> None:
    model = tiny_qwen(family)
    read = exported(model, tmp_path)
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
             "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
             "output.weight": "lm_head.weight"}  # fmt: skip
    expected = {}
    for name, value in read.tensors.items():
        if name not in outer:
            _, layer, inner, kind = name.split(".")
            expected[f"model.layers.{layer}.{names[inner]}.{kind}"] = value
        else:
            expected[outer[name]] = value
    parameters = dict(model.named_parameters())
    assert expected.keys() == parameters.keys()
    for name, value in expected.items():
        assert value.dtype == torch.float32 and torch.equal(value, parameters[name]), name


def test_the_metadata_says_the_shape(tmp_path: Path) -> None:
    about = exported(tiny_qwen("qwen3"), tmp_path).metadata
    shape = {name: value for name, value in about.items() if name.startswith("qwen3.")}
    assert shape.pop("qwen3.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert shape == {
        "qwen3.context_length": 256, "qwen3.embedding_length": 48, "qwen3.block_count": 2, "qwen3.vocab_size": 320,
        "qwen3.feed_forward_length": 80, "qwen3.attention.head_count": 4, "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 16, "qwen3.attention.value_length": 16, "qwen3.rope.freq_base": 1e6,
        "qwen3.rope.dimension_count": 16,
    }  # fmt: skip
    assert about["general.architecture"] == "qwen3" and about["general.file_type"] == 0
    assert len(about["tokenizer.ggml.tokens"]) == 320


@pytest.mark.parametrize(("dtype", "number"), [("bfloat16", 32), ("float16", 1)])
def test_matrices_are_halved_and_norms_are_not(dtype: str, number: int, tmp_path: Path) -> None:
    model = tiny_qwen("qwen3")
    read = exported(model, tmp_path, dtype)
    assert read.metadata["general.file_type"] == number
    table = read.tensors["token_embd.weight"]
    assert table.dtype == getattr(torch, dtype) and torch.equal(table, model.head.weight.to(table.dtype))
    assert {value.dtype for name, value in read.tensors.items() if "norm" in name} == {torch.float32}


def test_a_deltanet_has_llama_cpp_s_layout(tmp_path: Path) -> None:
    """Two key heads of 16 channels with two value heads each: llama.cpp has the value heads in the order 0, 2, 1, 3."""
    model = Qwen(SAME_HEADS)
    model.init_weights(3)
    read, c = exported(model, tmp_path), model.config
    given = {name.removeprefix("model.layers.0.linear_attn."): value for name, value in model.state_dict().items()
             if ".layers.0.linear_attn." in name}  # fmt: skip

    def heads(x: torch.Tensor, size: int) -> torch.Tensor:
        return torch.cat([x[head * size : head * size + size] for head in (0, 2, 1, 3)])

    keys = 2 * 2 * 16
    expected = {
        "attn_qkv.weight": torch.cat(
            (given["in_proj_qkv.weight"][:keys], heads(given["in_proj_qkv.weight"][keys:], 16))
        ),
        "attn_gate.weight": heads(given["in_proj_z.weight"], 16),
        "ssm_alpha.weight": heads(given["in_proj_a.weight"], 1),
        "ssm_beta.weight": heads(given["in_proj_b.weight"], 1),
        "ssm_conv1d.weight": torch.cat((given["conv1d.weight"][:keys, 0], heads(given["conv1d.weight"][keys:, 0], 16))),
        "ssm_dt.bias": heads(given["dt_bias"], 1),
        "ssm_a": heads(-given["A_log"].exp(), 1),
        "ssm_norm.weight": given["norm.weight"],
        "ssm_out.weight": heads(given["out_proj.weight"].T, 16).T,
    }
    for name, value in expected.items():
        assert torch.equal(read.tensors[f"blk.0.{name}"], value), name
    gates = dict(model.named_parameters())["model.layers.3.self_attn.q_proj.weight"]
    assert torch.equal(read.tensors["blk.3.attn_q.weight"], gates)
    assert (read.tensors["blk.0.post_attention_norm.weight"] == 1).all()  # 1 + 0: the norms are centred on zero
    about = {name.removeprefix("qwen35."): value for name, value in read.metadata.items()}
    assert about["attention.recurrent_layers"] == [True, True, True, False]
    assert about["ssm.inner_size"] == 64 and about["ssm.time_step_rank"] == 4 and about["ssm.group_count"] == 2
    assert about["rope.dimension_count"] == c.rotary_dim and about["rope.dimension_sections"] == [2, 1, 1, 0]


def test_what_llama_cpp_cannot_compute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="12 and 16"):
        exported(tiny_qwen("qwen3.5"), tmp_path)
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
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError, match="exists already"):
        main(Config(tmp_path / "x"))
