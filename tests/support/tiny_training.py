"""Trains a tiny model for tests of checkpoints: each step depends only on its number, whatever the number of ranks."""

from pathlib import Path

import torch
from torch import Tensor

from bench.updates import update
from nanochat.checkpoint_manager.locate import make_meta
from nanochat.checkpoint_manager.parts.model import Files
from nanochat.checkpoint_manager.same_run import RunSettings
from nanochat.checkpoint_manager.save import save_checkpoint
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import Optimizers, Rates
from nanochat.platforms.layers import accelerate
from nanochat.runtime import parallel
from nanochat.runtime.parallel import Sharding
from nanochat.step import LossScale
from nanochat.tokenizer import Tokenizer
from tests.support.tiny_model import on_cpu

CPU = on_cpu()
VOCAB = 290
SETTINGS = {"depth": 2, "seed": 42, "run": "dummy", "corpus": "tinyworld"}
WANTED = RunSettings(SETTINGS, frozenset({"run"}), {"depth": 20, "seed": 42, "run": "dummy"})


class Batches:
    """This rank's share of a step of four rows."""

    num_targets = 4 * 16
    extras: tuple[str, ...] = ()

    def __init__(self, step: int, compute: Compute):
        idx = torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(step))
        idx = idx[compute.rank :: compute.world_size]
        self.micro_batches = [(idx, idx.roll(-1, 1))]


def make(
    seed: int = 1, compute: Compute = CPU, vocab_size: int = VOCAB, mode: Sharding = "grad"
) -> tuple[GPT, Optimizers]:
    """A model with three heads of 18 channels: two or four ranks cannot divide its rows evenly."""
    config = GPTConfig(sequence_len=16, vocab_size=vocab_size, n_layer=2, n_head=3, n_kv_head=3, n_embd=54)
    model = GPT(config, compute.dtype)
    accelerate(model, compute.operations)
    model.init_weights(seed)
    model.to(compute.device)
    parallel.shard(model, model.shard_groups(), compute, mode)
    return model, Optimizers(model, model.parameter_roles(), 54, Rates(), 0.1, compute.dtype)


def train(model: GPT, optimizers: Optimizers, first: int, last: int, compute: Compute = CPU) -> None:
    """Take the updates first + 1 to last."""
    for step in range(first, last):
        optimizers.schedule(1 / (1 + step), 0.85 + 0.1 / (1 + step), 1.0)
        update(model, optimizers, Batches(step, compute), LossScale(), compute)


def parameters(model: GPT) -> dict[str, Tensor]:
    """Copies of all parameters, each whole."""
    return {name: value.cpu().clone() for name, value in parallel.whole_parameters(model)}


def state(optimizers: Optimizers) -> dict[str, tuple[Tensor, tuple[int, ...], int]]:
    """Copies of this rank's optimizer state, each with its whole shape and its first row."""
    return {name: (value.cpu().clone(), shape, first) for name, (value, shape, first) in optimizers.state().items()}


def everything(model: GPT, optimizers: Optimizers) -> dict[str, Tensor]:
    """All parameters and all optimizer state, for a single rank."""
    return {**parameters(model), **{name: value for name, (value, _, _) in state(optimizers).items()}}


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def save(
    folder: Path, step: int, model: GPT, optimizers: Optimizers, tokenizer: Tokenizer, stage: str = "base",
    steps: int = 100, compute: Compute = CPU, files: Files = "auto",
) -> float:  # fmt: skip
    """Save a checkpoint of a run of `steps` steps with SETTINGS."""
    meta = make_meta(stage, model.config, SETTINGS, steps, {"row": 4 * step})
    return save_checkpoint(folder, step, model, optimizers, tokenizer, meta, compute, files=files)


def flip_a_bit(path: Path) -> None:
    """Damage a file as a failing disk would."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
