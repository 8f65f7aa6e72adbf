"""Small random models of each published family, ours and Hugging Face transformers', with the same weights."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanochat.checkpoint_manager.families import families, family_of
from nanochat.checkpoint_manager.huggingface.config import published
from nanochat.data import bpe
from nanochat.models.llama import LlamaConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen
from nanochat.platforms.layers import accelerate
from nanochat.platforms.operations import Operations
from nanochat.tokenizer import PATTERNS
from tests.support.tiny_model import TEXT

VOCABULARY, CONTEXT = 320, 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "sequence_len": CONTEXT,
    "n_embd": 48,
    "n_head": 4,
    "n_kv_head": 2,
    "n_hidden": 80,
}
SHORT: dict[str, Any] = {**SHAPE, "sequence_len": 150}
CONFIGS = {
    "qwen2": QwenConfig(**SHAPE, n_layer=2, head_dim=12, qkv_bias=1, qk_norm=0, tied=0, rope_theta=10_000.0),
    "qwen2.5-tied": QwenConfig(**SHAPE, n_layer=2, head_dim=12, qkv_bias=1, qk_norm=0, tied=1),
    "qwen3": QwenConfig(**SHAPE, n_layer=2, head_dim=16, tied=1),
    "qwen3.5": QwenConfig(
        **SHAPE, n_layer=4, head_dim=32, rotary_dim=8, layers="DDDA", zero_centred=1, output_gate=1, tied=0,
        delta_key_heads=2, delta_value_heads=4, delta_key_dim=12, delta_value_dim=16, rope_theta=10_000_000.0,
    ),
    "qwen3-moe": QwenConfig(
        **SHAPE, n_layer=3, head_dim=12, tied=0, mlps="EME", n_experts=8, experts_per_token=3, n_expert_hidden=20,
    ),
    "qwen3.5-moe": QwenConfig(
        **SHAPE, n_layer=4, head_dim=32, rotary_dim=8, layers="DDDA", zero_centred=1, output_gate=1, tied=0,
        delta_key_heads=2, delta_value_heads=4, delta_key_dim=12, delta_value_dim=16, rope_theta=10_000_000.0,
        mlps="E", n_experts=6, experts_per_token=2, n_expert_hidden=20, n_shared_hidden=28,
    ),
    "llama3": LlamaConfig(
        **SHAPE, n_layer=2, head_dim=12, tied=0, rope_theta=500_000.0, rope="llama3", rope_factor=8.0, rope_original=64,
    ),
}  # fmt: skip
YARN: dict[str, Any] = {"rope": "yarn", "rope_factor": 4.0, "rope_low": 1.0, "rope_high": 32.0, "rope_original": 64}
# Options beyond those of the families above; positions go beyond the context of pretraining.
OPTIONS = {
    "llama2": LlamaConfig(**SHAPE, n_layer=2, head_dim=12, tied=0, rope_theta=10_000.0),
    "llama biases": LlamaConfig(**SHAPE, n_layer=2, head_dim=16, qkv_bias=1, o_bias=1, mlp_bias=1),
    "llama linear": LlamaConfig(**SHAPE, n_layer=2, head_dim=12, rope="linear", rope_factor=4.0, rope_original=256),
    "llama dynamic": LlamaConfig(
        **SHORT, n_layer=2, head_dim=12, rope="dynamic", rope_factor=4.0, rope_original=64,
    ),
    "llama yarn": LlamaConfig(**SHAPE, n_layer=2, head_dim=12, tied=0, **YARN, rope_scale=0.1 * math.log(4) + 1),
    "mistral windows": LlamaConfig(**SHAPE, n_layer=2, head_dim=16, tied=0, layers="S", window=40),
    "ministral windows": LlamaConfig(**SHAPE, n_layer=3, head_dim=16, tied=0, layers="ASS", window=40),
    "qwen2 wide heads": QwenConfig(**SHAPE, n_layer=2, head_dim=16, qkv_bias=1, qk_norm=0),
    "qwen2 windows": QwenConfig(**SHAPE, n_layer=3, head_dim=12, qkv_bias=1, qk_norm=0, layers="ASS", window=7),
    "qwen3 windows": QwenConfig(**SHAPE, n_layer=3, head_dim=16, layers="SAS", window=33),
    "qwen3 biases": QwenConfig(**SHAPE, n_layer=2, head_dim=16, qkv_bias=1, o_bias=1),
    "qwen3 yarn": QwenConfig(**SHAPE, n_layer=2, head_dim=16, **YARN, rope_scale=1.3),
    "smollm3": LlamaConfig(**SHAPE, n_layer=4, head_dim=12, tied=1, layers="AAAa", rope_theta=5e6),
    "smollm3 windows": LlamaConfig(**SHAPE, n_layer=3, head_dim=12, layers="AsS", window=40),
    "qwen3.5 yarn": replace(CONFIGS["qwen3.5"], **YARN, rope_scale=1.0),
}  # fmt: skip
EVERY = CONFIGS | OPTIONS


def tiny_qwen(
    family: str,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    operations: Operations | None = None,
    rows: int = VOCABULARY,
    **sizes: Any,
) -> Qwen:
    """A model whose weights are large enough that every part of it matters, with norms and biases that are not
    trivial. `sizes` replace those of the family's configuration."""
    config = replace(EVERY[family], vocab_size=rows, **sizes)
    model = families()[family_of(config)].model(config, dtype)
    if operations is not None:
        accelerate(model, operations)
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 or ".experts." in name:
                parameter.mul_(3.0 if "D" in model.config.layers else 6.0)  # a DeltaNet magnifies rounding otherwise
            elif name.endswith("A_log"):  # most heads remember for long, so that what they read is not all rounding
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 4 - 4)
            elif not name.endswith("conv1d.weight"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


@cache
def _transformers() -> Any:
    import transformers  # takes seconds

    transformers.logging.set_verbosity_error()
    return transformers


def oracle(model: Qwen) -> Any:
    """The same model in transformers, in fp32, computed by its plain torch code."""
    library, content = _transformers(), published(model.config)
    config = library.AutoConfig.for_model(**content)
    made = library.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    result = made.load_state_dict(model.state_dict(), strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}, result
    made.tie_weights()
    return made


def write_folder(
    folder: Path, family: str, seed: int = 1, ends: Sequence[int] = (302, 300), rows: int = VOCABULARY
) -> Path:
    """A published model with random weights: config, weights in two files, and a vocabulary with Qwen's marks.

    `ends` are the tokens that end a reply.
    """
    model = tiny_qwen(family, seed, rows=rows)
    names = list(model.state_dict())
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        tensors = {name: model.state_dict()[name].contiguous() for name in part}
        save_file(tensors, folder / f"model-{number:05d}-of-00002.safetensors", metadata={"format": "pt"})
    places = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(names)}
    ranks = bpe.train([TEXT] * 4, 300, PATTERNS["nanochat"])
    marks = {"<|endoftext|>": 300, "<|im_start|>": 301, "<|im_end|>": 302}
    contents: dict[str, Any] = {
        "config.json": published(model.config),
        "model.safetensors.index.json": {"metadata": {}, "weight_map": places},
        "tokenizer.json": json.loads(bpe.huggingface_json(ranks, PATTERNS["nanochat"], marks)),
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
        "generation_config.json": {"eos_token_id": [*ends]},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    return folder
