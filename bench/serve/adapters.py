"""Several adapters on one base: the speed of a batch in which they are mixed, beside batches of one and of none."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.serve.engine import GREEDY, cpu_seconds, prompts, tokenizer
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.generate.adapters import Adapters
from nanochat.models.lora import Adapter, LoraConfig, add_adapters, first_values
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen
from nanochat.platforms.layers import accelerate
from nanochat.tokenizer import Tokenizer

VOCAB = 4096
ROWS = 8
BATCHES = {"base": [""], "one": ["a"], "four": ["a", "b", "c", "d"]}


def base(layers: int, channels: int, compute: Compute) -> Qwen:
    """A Qwen3 with random weights, held in the compute dtype."""
    config = QwenConfig(
        sequence_len=1024,
        vocab_size=VOCAB,
        n_layer=layers,
        n_head=channels // 64,
        n_kv_head=channels // 128,
        n_embd=channels,
        n_hidden=3 * channels,
        head_dim=64,
    )
    model = Qwen(config, compute.dtype)
    accelerate(model, compute.platform.operations("auto"))
    model.init_weights()
    return model.to(compute.dtype).eval()


def with_adapters(model: Qwen, rank: int) -> Adapters:
    """The model with four adapters on all its matrices, with random values."""
    shape, config = LoraConfig(rank), model.config
    with torch.device("meta"):
        like = Qwen(config)
    add_adapters(like, shape)
    given = {}
    for seed, name in enumerate(BATCHES["four"]):
        values = first_values(like, seed)
        generator = torch.Generator().manual_seed(seed)
        for key in values:
            if "lora_B" in key:
                values[key] = torch.randn(values[key].shape, generator=generator) * 0.02
        given[name] = Adapter(shape, values)
    return Adapters(model, given, model.dtype, model.device)


def step_seconds(
    model: Qwen, adapters: Adapters | None, words: Tokenizer, names: Sequence[str], steps: int
) -> float:
    """CPU seconds of a decoding step with ROWS rows, whose adapters are the names in turn."""
    engine = Engine(model, words, ROWS, prefill_tokens=1 << 14, adapters=adapters)
    for number, prompt in enumerate(prompts(ROWS, 32, words.vocab_size)):
        engine.submit(
            prompt, replace(GREEDY, max_tokens=steps + 8, adapter=names[number % len(names)])
        )
    for _ in range(3):
        engine.step()
    return cpu_seconds(lambda: [engine.step() for _ in range(steps)]) / steps


def compare(
    layers: int, channels: int, rank: int, steps: int, rounds: int, compute: Compute
) -> dict[str, float]:
    """Tokens per CPU second of ROWS rows: of the base, of one adapter, of four adapters in turn. The best rounds."""
    words, model = tokenizer(VOCAB), base(layers, channels, compute)
    bare = base(layers, channels, compute)
    adapters, best = with_adapters(model, rank), {}
    for _ in range(rounds):
        for name, names in BATCHES.items():
            held = (bare, None) if name == "base" else (model, adapters)
            seconds = step_seconds(*held, words, names, steps)
            best[name] = min(best.get(name, seconds), seconds)
    return {name: ROWS / seconds for name, seconds in best.items()}
