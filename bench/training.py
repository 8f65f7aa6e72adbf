"""What our side of several benchmarks trains: a model with random weights, and its optimizers.

The other modules of `bench` build no GPT and no optimizers of their own, so that a change of those
changes this file.
"""

import math
from typing import Any

import torch
import torch.nn as nn

from bench.batches import Passes
from bench.updates import update
from nanochat import dataloader
from nanochat.checkpoint_manager.families import on_meta
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.optim import OneRate, Optimizers, Rates
from nanochat.runtime import parallel
from nanochat.runtime.parallel import Sharding
from nanochat.step import Safeguards
from nanochat.tokenizer import DEFAULT_PATTERN, PATTERNS, ROLES, Tokenizer
from nanochat.train.compile import OnePass, compiled

DEFAULT_RATES = Rates()

# The model that several benchmarks train: 4 layers, 256 channels. A step is 4,096 tokens.
D4 = GPTConfig(
    sequence_len=512,
    vocab_size=4096,
    n_layer=4,
    n_head=4,
    n_kv_head=4,
    n_embd=256,
    window_pattern="L",
)

# A small model in the shape of Qwen3.
QWEN3 = QwenConfig(
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


def random_model(
    shape: GPTConfig | QwenConfig, compute: Compute, seed: int = 42, fp8: bool = False
) -> Any:
    """Return a model as pretraining begins with it: fp32 masters, random weights, on the device."""
    model = on_meta(shape, compute)
    compute.platform.use_matmul(model, "fp8" if fp8 else "auto", compute.operations)
    model.to_empty(device=compute.device)
    model.init_weights(seed)
    return model


@torch.no_grad()
def spread_logits(model: GPT, sharpness: float = 1.0) -> None:
    """Draw the weights that begin at zero, so that an untrained model prefers some tokens.

    `sharpness` is the standard deviation of the logits.
    """
    generator = torch.Generator().manual_seed(1)
    deviation = model.config.n_embd**-0.5
    for name, weight in model.named_parameters():
        values = torch.empty(weight.shape)
        if name.endswith("c_proj.weight"):
            weight.copy_(values.normal_(0.0, deviation, generator=generator))
        elif name.startswith("lm_head"):
            weight.copy_(values.normal_(0.0, sharpness * deviation, generator=generator))


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of this size, whose tokens are single bytes and pairs of bytes."""
    singles = [bytes([byte]) for byte in range(256)]
    pairs = [first + second for first in singles for second in singles]
    ranks = [*singles, *pairs][: vocab_size - len(ROLES)]
    return Tokenizer(ranks, DEFAULT_PATTERN, PATTERNS[DEFAULT_PATTERN])


class Trainer:
    """A model, its optimizers, and the update that the training scripts make with them."""

    def __init__(
        self,
        model: Any,
        compute: Compute,
        rates: Rates | OneRate = DEFAULT_RATES,
        rate_factor: float = 1.0,
        table_momentum: float = 0.8,
        mode: Sharding = "none",
    ):
        """Shard the model over the ranks and make its optimizers."""
        self.model = model
        self.compute = compute
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        parallel.shard(model, model.shard_groups(), compute, mode)
        self.optimizers = Optimizers(
            model,
            model.parameter_roles(),
            model.config.n_embd,
            rates,
            rate_factor,
            compute.dtype,
            table_momentum,
        )
        self.safeguards = Safeguards.start(compute, {})
        self.passes: nn.Module = model  # what computes a pass: the model, compiled or captured

    def compile(
        self, rows: int, tokens: int, requested: bool | None = True, one_pass: OnePass | None = None
    ) -> None:
        """Compile passes of this shape; requested=None: only where the training scripts compile."""
        self.passes = compiled(
            self.model,
            requested,
            (rows, tokens),
            self.compute,
            self.model.compile_groups(),
            one_pass=one_pass,
        )

    def step(self, passes: Passes) -> float:
        """Make one update and return the mean loss of its targets in nats."""
        targets = sum(targets.numel() for _, targets in passes) * self.compute.world_size
        return self.update(dataloader.Step(0, targets, passes))

    def update(self, data: Any) -> float:
        """Make one update with a dataloader.Step or its like; return the mean loss of its targets.

        A spike of the gradient norm is skipped, as in training. A step that is not finite would
        measure nothing: RuntimeError.
        """
        outcome = update(
            self.passes,
            self.optimizers,
            data,
            self.safeguards.scale,
            self.compute,
            self.safeguards.spikes,
        )
        if not (math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)):
            raise RuntimeError(
                f"a step was not finite: loss {outcome.loss}, gradient norm {outcome.grad_norm}"
            )
        return outcome.loss
