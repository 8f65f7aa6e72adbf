"""The engine alone, without HTTP: its speed beside the memory's, what it reads again, and whether batches are exact."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from nanochat.device import Compute
from nanochat.engine import Completion, Engine
from nanochat.generate.sampling import Sampling
from nanochat.gpt import GPT, GPTConfig
from nanochat.model import Model
from nanochat.platforms.layers import accelerate
from nanochat.tokenizer import DEFAULT_PATTERN, PATTERNS, ROLES, Tokenizer

VOCAB = 32_768
GREEDY = Sampling(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Exact:
    """How many fp32 replies were the same alone and in a batch, and cold and after a prefix hit."""

    rows: int
    batched: int
    reused: int


@dataclass(frozen=True)
class Turn:
    """The second turn of a chat: prompt tokens in all and read, CPU seconds to its first token, and the same cold."""

    tokens: int
    read: int
    seconds: float
    cold_seconds: float


def tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer of single bytes and pairs of bytes: the engine only needs one of the model's size."""
    pairs = (bytes([a, b]) for a in range(256) for b in range(256))
    singles = [bytes([byte]) for byte in range(256)]
    ranks = [
        *singles,
        *(pair for pair, _ in zip(pairs, range(vocab - len(ROLES) - 256), strict=False)),
    ]
    return Tokenizer(ranks, DEFAULT_PATTERN, PATTERNS[DEFAULT_PATTERN])


def untrained(depth: int, compute: Compute, dtype: torch.dtype, vocab: int) -> GPT:
    """A model of a depth with the widths of base_train, held in a number format; its weights are random."""
    heads = max(depth // 2, 1)
    config = GPTConfig(
        sequence_len=1024,
        vocab_size=vocab,
        n_layer=depth,
        n_head=heads,
        n_kv_head=heads,
        n_embd=128 * heads,
    )
    model = GPT(config, dtype)
    accelerate(model, compute.platform.operations("auto"))
    model.init_weights()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("c_proj.weight") or name.startswith(
                "lm_head"
            ):  # or every token would be equally likely
                weight.copy_(torch.randn(weight.shape, generator=generator) * config.n_embd**-0.5)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.to(dtype)
    return model.to(compute.device).eval()


def weight_bytes(model: GPT) -> int:
    """Bytes of the matrices that one decoding pass reads: all but the tables of embeddings."""
    tables = ("wte", "value_embeds")
    return sum(
        p.numel() * p.element_size()
        for name, p in model.named_parameters()
        if not name.startswith(tables)
    )


def bandwidth() -> float:
    """Bytes per CPU second that one thread reads from memory: a sum over 256 MB."""
    values = torch.ones(1 << 26)
    return values.nbytes / cpu_seconds(lambda: values.sum())


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process that some work takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Random prompts, each a few tokens longer than the one before."""
    rng = random.Random(seed)
    return [
        [rng.randrange(vocab - len(ROLES)) for _ in range(length + i % 7)] for i in range(count)
    ]


def decoding(model: Model, words: Tokenizer, chats: int, steps: int, sampling: Sampling) -> float:
    """CPU seconds of a decoding step with so many chats, their prompts left out."""
    engine = Engine(model, words, slots=chats, prefill_tokens=1 << 14)
    for number, prompt in enumerate(prompts(chats, 32, words.vocab_size)):
        engine.submit(prompt, replace(sampling, seed=number, max_tokens=steps + 8))
    for _ in range(3):
        engine.step()
    return cpu_seconds(lambda: [engine.step() for _ in range(steps)]) / steps


def replies(engine: Engine, asked: list[list[int]], sampling: Sampling) -> list[Completion]:
    """The replies to prompts that are submitted one step after the other."""
    found: dict[int, Completion] = {}
    waiting = list(asked)
    while waiting or engine.busy:
        if waiting:
            found[engine.submit(waiting.pop(0), sampling)] = Completion()
        for event in engine.step():
            found[event.request].add(event)
    return list(found.values())


def exact(model: Model, words: Tokenizer, rows: int, tokens: int) -> Exact:
    """Compare greedy replies of staggered neighbours, of each prompt alone, and of prompts whose beginning was kept."""
    sampling = replace(GREEDY, max_tokens=tokens)
    common, *asked = prompts(rows + 1, 24, words.vocab_size, seed=2)
    asked = [[*common, *prompt] for prompt in asked]
    together = replies(Engine(model, words, slots=rows), asked, sampling)
    hot = Engine(model, words, slots=4)
    hot.generate([common], replace(sampling, max_tokens=1))
    warm = [hot.generate([prompt], sampling)[0] for prompt in asked]
    alone = [Engine(model, words, slots=1).generate([prompt], sampling)[0] for prompt in asked]
    assert all(reply.reused for reply in warm)
    return Exact(
        rows,
        sum(a.tokens == b.tokens for a, b in zip(alone, together, strict=True)),
        sum(a.tokens == b.tokens for a, b in zip(alone, warm, strict=True)),
    )


def second_turn(model: Model, words: Tokenizer, history: int, question: int) -> Turn:
    """Answer a chat of `history` tokens, then its next question; compare with a cold engine."""
    sampling = replace(GREEDY, max_tokens=8)
    engine = Engine(model, words, slots=4)
    first, more = (
        prompts(1, length, words.vocab_size, seed)[0]
        for seed, length in ((3, history), (4, question))
    )
    (reply,) = engine.generate([first], sampling)
    prompt, one = [*first, *reply.tokens, *more], replace(sampling, max_tokens=1)
    before = engine.prompt_tokens_read
    seconds = cpu_seconds(lambda: engine.generate([prompt], one))
    fresh = Engine(model, words, slots=4)
    return Turn(
        len(prompt),
        engine.prompt_tokens_read - before,
        seconds,
        cpu_seconds(lambda: fresh.generate([prompt], one)),
    )
