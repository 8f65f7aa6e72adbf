"""Our side of bench.finetune and of bench.ranks: a Qwen with random weights, trained as scripts.finetune trains."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.finetune.side import ALPHA, RATE
from bench.updates import update
from nanochat import dataloader
from nanochat.checkpoint_manager.families import held_in
from nanochat.context import Packed
from nanochat.device import Compute
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen
from nanochat.nn.lora import LoraConfig, add_adapters, init_adapters
from nanochat.runtime import parallel
from nanochat.runtime.parallel import Sharding
from nanochat.step import Safeguards
from nanochat.train.compile import compiled
from nanochat.train.optim import OneRate, Optimizers


class Tuned:
    """A model with an adapter of this rank, or trained in full if `rank` is 0, and what its steps need."""

    def __init__(
        self,
        config: QwenConfig,
        rank: int,
        targets: Sequence[str],
        compute: Compute,
        mode: Sharding = "none",
    ) -> None:
        """Make the model, sharded over the ranks in this mode."""
        self.compute, self.model = compute, Qwen(config, compute.dtype, compute.operations)
        self.model.init_weights()
        if rank:
            held_in(self.model, compute.dtype)
            add_adapters(self.model, LoraConfig(rank, ALPHA, targets=tuple(targets)))
            init_adapters(self.model)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        parallel.shard(self.model, self.model.shard_groups(), compute, mode)
        roles = self.model.parameter_roles()
        self._optimizers = Optimizers(
            self.model, roles, config.n_embd, OneRate(RATE), 1.0, compute.dtype
        )
        self._safeguards = Safeguards.start(compute, {})
        self._fast: torch.nn.Module = self.model
        self.model.train()

    def compile(self, rows: int, tokens: int) -> None:
        """Compile the passes to come, of this shape."""
        zeros = torch.zeros((rows, tokens), dtype=torch.long)
        trial = self._work([(zeros, zeros.clone())])

        def one_pass(module: torch.nn.Module) -> Tensor:
            idx, targets, documents = trial.micro_batches[0]
            return module(idx, targets, reduction="sum", context=Packed(documents))

        self._fast = compiled(
            self.model,
            True,
            (rows, tokens),
            self.compute,
            self.model.compile_groups(),
            one_pass=one_pass,
        )

    def step(self, passes: Sequence[tuple[Tensor, Tensor]]) -> float:
        """The loss of one step; each pass has inputs and targets, int64 (B, T) each, one document a row."""
        return update(
            self._fast,
            self._optimizers,
            self._work(passes),
            self._safeguards,
            self.compute,
        ).loss

    def _work(self, passes: Sequence[tuple[Tensor, Tensor]]) -> dataloader.Step:
        tokens = sum(targets.numel() for _, targets in passes) * self.compute.world_size
        batches = [(inputs, targets, torch.zeros_like(inputs)) for inputs, targets in passes]
        return dataloader.Step(0, tokens, batches, ("documents",))
