"""A tiny model and its training steps on any number of ranks, for tests that compare many ranks with one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import Optimizers, Rates
from nanochat.platforms.layers import accelerate
from nanochat.runtime import parallel
from nanochat.runtime.parallel import Sharding

CPU = Compute(torch.device("cpu"), "cpu", "gloo", 0, 0, 1, torch.float32, "test")
# Numbers of rows that ranks cannot divide evenly: gates have 3, matrices 54 and 216, scalars 1 and 3.
CONFIG = GPTConfig(sequence_len=16, vocab_size=70, n_layer=3, n_head=3, n_kv_head=3, n_embd=54, bigram_rows=41)
ROWS = 8


@dataclass
class Batches:
    """The micro-batches of one step."""

    num_targets: int
    micro_batches: list[tuple[Tensor, ...]]
    extras: tuple[str, ...] = ("weights",)


def make(compute: Compute, mode: Sharding = "grad", rates: Rates = Rates()) -> tuple[GPT, Optimizers]:
    """A model whose first gradients exceed rounding errors, since AdamW makes a full step of any gradient."""
    model, generator = GPT(CONFIG, compute.dtype), torch.Generator().manual_seed(4)
    accelerate(model, compute.operations)
    model.init_weights(3)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.c_proj.weight.normal_(0, 0.1, generator=generator)
            block.mlp.c_proj.weight.normal_(0, 0.1, generator=generator)
        model.lm_head.weight.normal_(0, 0.1, generator=generator)
        model.smear_lambda.fill_(0.3)
    parallel.shard(model, model.shard_groups(), compute, mode)
    return model, Optimizers(model, model.parameter_roles(), CONFIG.n_embd, rates, 0.1, compute.dtype)


def batches(step: int, passes: int, compute: Compute) -> Batches:
    """This rank's share of the 8 rows of a step. Rows have different numbers of targets, and token weights."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(0, 70, (ROWS, 16), generator=generator)
    targets = (3 * inputs + 1) % 70
    for row in range(ROWS):
        targets[row, : (row + step) % 8] = -1
    weights = 1 + 0.1 * torch.randn(ROWS, 16, generator=generator)
    columns = [x[compute.rank :: compute.world_size].chunk(passes) for x in (inputs, targets, weights)]
    return Batches(int((targets >= 0).sum()), list(zip(*columns, strict=True)))
