"""Makes the model that servers and evaluations are compared on, as its publisher would."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.text import standard_library
from bench.training import QWEN3, random_model
from nanochat import device
from nanochat.checkpoint_manager.huggingface.config import published
from nanochat.checkpoint_manager.huggingface.template import CHATML
from nanochat.checkpoint_manager.load import load_published
from nanochat.checkpoint_manager.tensors import write_tensors
from nanochat.common import write_json
from nanochat.data import bpe
from nanochat.export import llama
from nanochat.models.qwen.config import QwenConfig
from nanochat.tokenizer import PATTERNS

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
UNUSED = 13  # rows of the embedding without a token, as published models have some
TEXT = 10_000_000  # characters that the vocabulary is trained on: all of the standard library


@dataclass(frozen=True)
class Files:
    """One model in the forms that servers read."""

    folder: Path  # of transformers and of ours, in bf16
    gguf: Path  # of llama.cpp
    parameters: int

    def log(self, name: str) -> Path:
        """Return the file for the output of the server of this name."""
        return self.folder.parent / f"{name}.log"


def make(
    folder: Path, shape: QwenConfig = QWEN3, gguf: str | None = None, text: int = TEXT
) -> Files:
    """Write a model with random weights into a folder, and a GGUF file of it if given a format."""
    model_folder = folder / "model"
    model_folder.mkdir(parents=True)
    write_tokenizer(model_folder, shape, text)
    compute = device.compute_init("cpu")
    model = random_model(shape, compute)
    tensors = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    write_tensors(tensors, model_folder / "model.safetensors", {"format": "pt"})
    return published_files(model_folder, folder, gguf)


def published_files(model_folder: Path, folder: Path, gguf: str | None) -> Files:
    """Return the files of a published model, after writing a GGUF file of that format to `folder`."""
    compute = device.compute_init("cpu")
    loaded = load_published(model_folder, None, compute, torch.float32)
    path = folder / "model.gguf"
    if gguf is not None:
        llama.export(loaded, path, gguf)
    return Files(model_folder, path, loaded.model.parameter_counts()["total"])


def write_tokenizer(folder: Path, shape: QwenConfig, text: int) -> None:
    """Write the configuration, and a tokenizer whose vocabulary is trained on `text` characters."""
    pattern = PATTERNS["qwen2"]
    vocab_size = shape.vocab_size - len(MARKS) - UNUSED
    ranks = bpe.train(standard_library(text).documents, vocab_size, pattern)
    marks = {mark: len(ranks) + number for number, mark in enumerate(MARKS)}
    end, pad = marks["<|im_end|>"], marks["<|endoftext|>"]
    contents = {
        "config.json": {**published(shape), "eos_token_id": end, "torch_dtype": "bfloat16"},
        "generation_config.json": {"eos_token_id": [end, pad], "pad_token_id": pad},
        "tokenizer.json": json.loads(bpe.huggingface_json(ranks, pattern, marks)),
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
        write_json(folder / name, content)
