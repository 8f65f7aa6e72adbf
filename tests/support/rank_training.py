"""A tiny model and its steps, sharded over any number of ranks, for tests of many ranks against one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.runtime import parallel
from nanochat.runtime.parallel import Sharding
from nanochat.train.optim import Optimizers, Rates

CPU = Compute(torch.device("cpu"), "cpu", "gloo", 0, 0, 1, torch.float32, "test")
# Rows that no number of ranks divides: gates of 3, matrices of 54 and 216, scalars of 1 and 3.
CONFIG = GPTConfig(sequence_len=16, vocab_size=70, n_layer=3, n_head=3, n_kv_head=3, n_embd=54)
ROWS = 8


@dataclass
class Batches:
    """A step's micro-batches."""

    num_targets: int
    micro_batches: list[tuple[Tensor, ...]]


def make(compute: Compute, mode: Sharding = "grad", rates: Rates = Rates()) -> tuple[GPT, Optimizers]:  # noqa: B008
    """A model without gradients that start at zero or at rounding errors, which AdamW would turn into full steps."""
    model, generator = GPT(CONFIG, compute.dtype, compute.operations), torch.Generator().manual_seed(4)
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
    """This rank's share of a step's 8 rows, whose numbers of targets differ from row to row, with token weights."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(0, 70, (ROWS, 16), generator=generator)
    targets = (3 * inputs + 1) % 70
    for row in range(ROWS):
        targets[row, : (row + step) % 8] = -1
    weights = 1 + 0.1 * torch.randn(ROWS, 16, generator=generator)
    columns = [x[compute.rank :: compute.world_size].chunk(passes) for x in (inputs, targets, weights)]
    return Batches(int((targets >= 0).sum()), list(zip(*columns, strict=True)))
