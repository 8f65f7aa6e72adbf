"""config.json as publishers, transformers and we write it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.families import families, family_of
from nanochat.checkpoint_manager.huggingface.config import published, read_config
from nanochat.models.qwen.config import QwenConfig
from nanochat.planner.published_tuning import SHAPES
from tests.support.qwens import EVERY, oracle, tiny_qwen


def config_of(architecture: str, layers: int, width: int, hidden: int, heads: tuple[int, int], **more: Any) -> Any:
    """What publishers write, with the fields that they leave out left out."""
    return {
        "architectures": [architecture], "num_hidden_layers": layers, "hidden_size": width, "rms_norm_eps": 1e-6,
        "intermediate_size": hidden, "num_attention_heads": heads[0], "num_key_value_heads": heads[1], **more,
    }  # fmt: skip


LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
WINDOWLESS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 21}
# Published models: their config.json, and the number of parameters that their publishers' cards and files have.
NAMED = {
    "Llama-2-7b": (config_of(
        "LlamaForCausalLM", 32, 4096, 11_008, (32, 32), vocab_size=32_000, max_position_embeddings=4096,
        rope_scaling=None), 6_738_415_616),
    "TinyLlama-1.1B": (config_of(
        "LlamaForCausalLM", 22, 2048, 5632, (32, 4), vocab_size=32_000, max_position_embeddings=2048), 1_100_048_384),
    "Llama-3.2-1B": (config_of(
        "LlamaForCausalLM", 16, 2048, 8192, (32, 8), vocab_size=128_256, max_position_embeddings=131_072, head_dim=64,
        tie_word_embeddings=True, rope_theta=500_000.0, rope_scaling=LLAMA3_ROPE, mlp_bias=False), 1_235_814_400),
    "SmolLM2-135M": (config_of(
        "LlamaForCausalLM", 30, 576, 1536, (9, 3), vocab_size=49_152, max_position_embeddings=8192,
        tie_word_embeddings=True, rope_theta=100_000, rope_interleaved=False), 134_515_008),
    "Mistral-7B-v0.1": (config_of(
        "MistralForCausalLM", 32, 4096, 14_336, (32, 8), vocab_size=32_000, max_position_embeddings=32_768,
        sliding_window=4096), 7_241_732_096),
    "Qwen2.5-0.5B": (config_of(
        "Qwen2ForCausalLM", 24, 896, 4864, (14, 2), vocab_size=151_936, max_position_embeddings=32_768,
        tie_word_embeddings=True, rope_theta=1e6, **WINDOWLESS), 494_032_768),
    "DeepSeek-R1-Distill-Qwen-1.5B": (config_of(
        "Qwen2ForCausalLM", 28, 1536, 8960, (12, 2), vocab_size=151_936, max_position_embeddings=131_072,
        rope_theta=10_000, use_mrope=False, **WINDOWLESS), 1_777_088_000),
    "SmolLM3-3B": (config_of(
        "SmolLM3ForCausalLM", 36, 2048, 11_008, (16, 4), vocab_size=128_256, max_position_embeddings=65_536,
        rope_theta=5_000_000.0, rope_scaling=None, no_rope_layers=[1, 1, 1, 0] * 9,
        no_rope_layer_interval=4, layer_types=["full_attention"] * 36, **WINDOWLESS), 3_075_098_624),
    "DeepSeek-R1-Distill-Llama-8B": (config_of(
        "LlamaForCausalLM", 32, 4096, 14_336, (32, 8), vocab_size=128_256, max_position_embeddings=131_072,
        rope_theta=500_000.0, rope_scaling={**LLAMA3_ROPE, "factor": 8.0}, attention_bias=False), 8_030_261_248),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_published_model_has_the_parameters_that_its_publisher_names(name: str, tmp_path: Path) -> None:
    content, parameters = NAMED[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_config(tmp_path)
    with torch.device("meta"):
        model = families()[family_of(config)].model(config)
    assert model.parameter_counts()["total"] == parameters


def test_qwen_3_6_and_3_8_have_the_shape_of_qwen_3_5(tmp_path: Path) -> None:
    """Qwen3.6-27B and Qwen3.8-27B name the model_type qwen3_5 and the sizes of Qwen3.5-27B."""
    rope = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
    text = config_of(
        "", 64, 5120, 17_408, (24, 4), model_type="qwen3_5_text", vocab_size=248_320, head_dim=256,
        max_position_embeddings=262_144, rope_parameters={**rope, "mrope_section": [11, 11, 10]},
        linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, full_attention_interval=4, mtp_num_hidden_layers=1, attn_output_gate=True,
    )  # fmt: skip
    names = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    (tmp_path / "config.json").write_text(json.dumps({**names, "text_config": text, "tie_word_embeddings": False}))
    config = read_config(tmp_path)
    known = SHAPES["Qwen3.5-27B"]
    assert config.kinds == known.kinds and config.rope_theta == 1e7
    assert replace(config, layers="DDDA", sequence_len=known.sequence_len, rope_theta=known.rope_theta) == known


def by_layer(config: QwenConfig) -> QwenConfig:
    """The same shape, with patterns that name every layer; without usual MLPs their size means nothing."""
    has_mlps = "M" in config.mlp_kinds
    n_hidden = config.n_hidden if has_mlps else config.n_expert_hidden
    return replace(config, layers=config.kinds, mlps=config.mlp_kinds, n_hidden=n_hidden)


@pytest.mark.parametrize("family", EVERY)
def test_a_config_is_read_as_we_and_as_transformers_write_it(family: str, tmp_path: Path) -> None:
    """The files differ: transformers writes `rope_parameters` and fills in what was left out."""
    config = EVERY[family]
    if config.rope == "dynamic":  # whose default is the context of pretraining
        config = replace(config, sequence_len=config.rope_original)
    model = tiny_qwen(family)
    for content in (
        published(config),
        {**oracle(model).config.to_dict(), "architectures": published(config)["architectures"]},
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert by_layer(read_config(tmp_path)) == by_layer(config)


def test_yarn_stretches_the_context_and_dynamic_scaling_if_asked(tmp_path: Path) -> None:
    for option, default in (("llama dynamic", 64), ("qwen3 yarn", 256)):
        content = {**published(EVERY[option]), "max_position_embeddings": 64}
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert read_config(tmp_path).sequence_len == default
        assert read_config(tmp_path, 256).sequence_len == 256


def test_vllms_factor_beside_the_usual_scale_of_yarn_is_read_and_written(tmp_path: Path) -> None:
    """DeepSeek-R1-0528-Qwen3-8B cancels the usual scale with it; transformers knows attention_factor only."""
    factor = 0.8782488562869419
    content = published(replace(EVERY["qwen3 yarn"], rope_scale=1.0))
    assert content["rope_scaling"]["attn_factor"] == pytest.approx(factor)
    del content["rope_scaling"]["attention_factor"]
    content["rope_scaling"]["attn_factor"] = factor
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_config(tmp_path).rope_scale == pytest.approx(1.0)
