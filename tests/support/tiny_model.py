"""Small models and tokenizers for tests of inference."""

import random
from typing import Any

import torch

from nanochat.checkpoint_manager.locate import checkpoint_dir, make_meta
from nanochat.checkpoint_manager.save import save_checkpoint
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import Optimizers, Rates
from nanochat.platforms.base import Platform
from nanochat.platforms.layers import accelerate
from nanochat.platforms.operations import Operations
from nanochat.tokenizer import ROLES, Tokenizer

TEXT = "the cat sat on the mat 猫坐在垫子上 strawberry 12 34 56 78 90 + - * / ( ) ' . count\n"


TINY = 290  # tokens of tiny_tokenizer(), unless another number is asked for


def tiny_tokenizer(vocab_size: int = TINY) -> Tokenizer:
    """A tokenizer with the bytes, a few merges and the special tokens."""
    return Tokenizer.train([TEXT] * 4, vocab_size)


def tiny_gpt(
    vocab_size: int, sequence_len: int = 160, seed: int = 1, dtype: torch.dtype = torch.float32,
    operations: Operations | None = None, bigram_rows: int = 0, offset_layers: int = 0,
) -> GPT:  # fmt: skip
    """A GPT with windows of 128, grouped heads and value embeddings; weights that start at zero are made random."""
    config = GPTConfig(
        sequence_len=sequence_len, vocab_size=vocab_size, n_layer=4, n_head=4, n_kv_head=2, n_embd=32,
        window_pattern="SL", bigram_rows=bigram_rows, offset_layers=offset_layers, exclusive_layers=offset_layers,
    )  # fmt: skip
    model = GPT(config, dtype)
    if operations is not None:
        accelerate(model, operations)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(1000 + seed)  # not the embedding's seed, or the head would equal it

    def scatter(weight: torch.Tensor, size: float) -> None:
        weight.copy_(torch.randn(weight.shape, generator=generator) * size)

    with torch.no_grad():
        scatter(model.lm_head.weight, 0.3)
        if model.bigrams:
            scatter(model.bigrams.weight, 0.3)
        for block in model.h:
            scatter(block.attn.c_proj.weight, 0.2)
            scatter(block.mlp.c_proj.weight, 1.0)
        scatter(model.smear_lambda, 1.0)
        scatter(model.smear_gate.weight, 0.2)
    return model.eval()


def words(count: int, seed: int) -> list[int]:
    """Random tokens of tiny_tokenizer(), without special ones."""
    rng = random.Random(seed)
    return [rng.randrange(TINY - len(ROLES)) for _ in range(count)]


def on_cpu(rank: int = 0, world_size: int = 1) -> Compute:
    """A Compute for this rank on the CPU, in fp32."""
    return Compute(torch.device("cpu"), "cpu", "gloo", rank, rank, world_size, torch.float32, "test")


def pretend(platform: Platform, **fields: Any) -> Compute:
    """A Compute of another platform, for code that asks the platform and computes nothing."""
    given: dict[str, Any] = {
        "device": torch.device("cpu"), "rank": 0, "local_rank": 0, "world_size": 1, "dtype": torch.float32,
        "dtype_reason": "test", **fields,
    }  # fmt: skip
    return Compute(device_type=platform.name, backend=platform.backend, platform=platform, **given)


def tiny_checkpoint(
    stage: str = "sft", step: int = 3, corpus: str = "tinyworld", sequence_len: int = 160, tag: str = "d2",
    bigram_rows: int = 0, offset_layers: int = 0,
) -> None:  # fmt: skip
    """Save a checkpoint of the tiny model in the base folder."""
    tokenizer = tiny_tokenizer()
    model = tiny_gpt(tokenizer.vocab_size, sequence_len, bigram_rows=bigram_rows, offset_layers=offset_layers)
    optimizers = Optimizers(model, model.parameter_roles(), model.config.n_embd, Rates(), 1.0, torch.float32)
    meta = make_meta(stage, model.config, {"corpus": corpus}, step, {})
    save_checkpoint(checkpoint_dir(stage, tag), step, model, optimizers, tokenizer, meta, on_cpu())
