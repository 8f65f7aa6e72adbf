"""What our side of several benchmarks trains: a model with random weights, and the update of the training scripts.

The other modules of `bench` build no GPT and no optimizers of their own, so that a change of those changes this file.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from nanochat import dataloader
from nanochat.checkpoint_manager.families import cast_matrices, on_meta
from nanochat.context import model_arguments
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.optim import OneRate, Optimizers, Rates
from nanochat.runtime import parallel
from nanochat.runtime.parallel import Sharding
from nanochat.step import Outcome, Safeguards, Update, unmarked
from nanochat.tokenizer import DEFAULT_PATTERN, PATTERNS, ROLES, Tokenizer
from nanochat.train.compile import OnePass, compiled

DEFAULT_RATES = Rates()
Passes = Sequence[tuple[Tensor, Tensor]]  # inputs and targets of each pass, int64 (B, T) each

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


# --- models ----------------------------------------------------------------------------------------


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
    """Draw the weights that begin at zero, so that an untrained model's tokens are not all equally likely.

    `sharpness` is the standard deviation of the logits.
    """
    generator = torch.Generator().manual_seed(1)
    deviation = model.config.n_embd**-0.5
    for name, weight in model.named_parameters():
        drawn = torch.empty(weight.shape)
        if name.endswith("c_proj.weight"):
            weight.copy_(drawn.normal_(0.0, deviation, generator=generator))
        elif name.startswith("lm_head"):
            weight.copy_(drawn.normal_(0.0, sharpness * deviation, generator=generator))


def serving_model(shape: GPTConfig, compute: Compute) -> GPT:
    """Return a GPT with random weights as a server holds it: in the compute format, laid out for the device."""
    model = random_model(shape, compute)
    spread_logits(model)
    cast_matrices(model, compute.dtype)
    compute.operations.serve(model)
    return model.eval()


def needs_no_compiler(head_dim: int, dtype: torch.dtype, compute: Compute) -> bool:
    """Return whether kernels make an uncompiled step the faster one, so that base_train does not compile."""
    return bool(compute.operations.needs_no_compiler(head_dim, dtype))


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of single bytes and pairs of bytes, for models that need one of their size."""
    singles = [bytes([byte]) for byte in range(256)]
    pairs = [first + second for first in singles for second in singles]
    ranks = [*singles, *pairs][: vocab_size - len(ROLES)]
    return Tokenizer(ranks, DEFAULT_PATTERN, PATTERNS[DEFAULT_PATTERN])


# --- updates ---------------------------------------------------------------------------------------


class Data(Protocol):
    """What one rank trains on in a step, such as dataloader.Step."""

    @property
    def num_targets(self) -> int:
        """The targets of all ranks."""
        ...

    @property
    def micro_batches(self) -> Sequence[tuple[Tensor, ...]]:
        """Inputs, targets and the extras of each pass."""
        ...

    @property
    def extras(self) -> tuple[str, ...]:
        """The names of the tensors after inputs and targets."""
        ...


def update(
    model: nn.Module,
    optimizers: Optimizers,
    data: Data,
    safeguards: Safeguards,
    compute: Compute,
    mark: Callable[[str], None] = unmarked,
) -> Outcome:
    """Run forward, backward and one optimizer step over the micro-batches of a step."""
    with Update(model, optimizers, safeguards, data.num_targets, compute, mark=mark) as step:
        for idx, targets, *others in step.passes(data.micro_batches):
            extras = dict(zip(data.extras, others, strict=True))
            loss = model(idx, targets, reduction="sum", **model_arguments(extras))
            step.add(loss)
            (loss * step.factor).backward()
        return step.step()


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
        self.model, self.compute = model, compute
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        parallel.shard(
            model,
            model.shard_groups(),
            compute,
            mode,
        )
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
        """Compile passes of this shape; with `requested` None, only where the training scripts compile."""
        groups = self.model.compile_groups()
        shape = (rows, tokens)
        self.passes = compiled(
            self.model, requested, shape, self.compute, groups, one_pass=one_pass
        )

    def step(self, passes: Passes) -> float:
        """Make one update and return the mean loss of its targets in nats.

        A step that is skipped would measure nothing: RuntimeError.
        """
        targets = sum(targets.numel() for _, targets in passes) * self.compute.world_size
        work = dataloader.Step(0, targets, list(passes))
        outcome = update(self.passes, self.optimizers, work, self.safeguards, self.compute)
        if outcome.skipped:
            raise RuntimeError(
                f"a step was skipped: loss {outcome.loss}, gradient norm {outcome.grad_norm}"
            )
        return outcome.loss


def random_passes(
    vocab_size: int, passes: int, rows: int, tokens: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Return passes of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randint(
        0,
        vocab_size,
        (passes, rows, tokens + 1),
        generator=generator,
    )
    return [inputs_and_targets(row_cells) for row_cells in cells]


def inputs_and_targets(cells: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows of int64 (B, T + 1) into inputs and targets, (B, T) each."""
    return cells[:, :-1].contiguous(), cells[:, 1:].contiguous()


def split(passes: tuple[Tensor, Tensor], rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Split inputs and targets into passes of `rows` rows."""
    inputs, targets = passes
    return zip(inputs.split(rows), targets.split(rows), strict=True)
