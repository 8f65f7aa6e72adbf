"""Makes the model that servers are compared on: a folder as its publisher would give it, with random weights."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.train.rows import standard_library
from nanochat import device
from nanochat.checkpoint_manager.huggingface.config import published
from nanochat.checkpoint_manager.huggingface.template import CHATML
from nanochat.checkpoint_manager.load import load_published
from nanochat.checkpoint_manager.tensors import write_tensors
from nanochat.common import write_json
from nanochat.data import bpe
from nanochat.export import llama
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen
from nanochat.tokenizer import PATTERNS

SHAPE = QwenConfig(
    sequence_len=2048,
    vocab_size=32_768,
    n_layer=8,
    n_embd=512,
    n_hidden=1024,
    tied=1,
    n_head=8,
    n_kv_head=4,
    head_dim=64,
)
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
UNUSED = 13  # rows of the embedding without a token, as published models have some
TEXT = 10_000_000  # characters: all of it


@dataclass(frozen=True)
class Files:
    """One model in the forms that servers read."""

    folder: Path  # of transformers and of ours, in bf16
    gguf: dict[str, Path]  # of llama.cpp, by number format
    parameters: int


def make(
    folder: Path, shape: QwenConfig = SHAPE, formats: tuple[str, ...] = (), text: int = TEXT
) -> Files:
    """Write the model into a folder, and a GGUF file in each of the number formats beside it. The vocabulary
    is trained on `text` characters."""
    here = folder / "model"
    here.mkdir(parents=True)
    ranks = bpe.train(
        standard_library(text).documents, shape.vocab_size - len(MARKS) - UNUSED, PATTERNS["qwen2"]
    )
    marks = {mark: len(ranks) + number for number, mark in enumerate(MARKS)}
    ends = [marks["<|im_end|>"], marks["<|endoftext|>"]]
    contents = {
        "config.json": {**published(shape), "eos_token_id": ends[0], "torch_dtype": "bfloat16"},
        "generation_config.json": {"eos_token_id": ends, "pad_token_id": ends[1]},
        "tokenizer.json": json.loads(bpe.huggingface_json(ranks, PATTERNS["qwen2"], marks)),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": shape.sequence_len,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHATML,
        },
    }
    for name, content in contents.items():
        write_json(here / name, content)
    model = Qwen(shape)
    model.init_weights()
    tensors = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    write_tensors(tensors, here / "model.safetensors", {"format": "pt"})
    compute = device.compute_init("cpu")
    gguf = {name: folder / f"model-{name}.gguf" for name in formats}
    for name, path in gguf.items():
        llama.export(load_published(here, None, compute, torch.float32), path, name)
    return Files(here, gguf, sum(parameter.numel() for parameter in model.parameters()))
