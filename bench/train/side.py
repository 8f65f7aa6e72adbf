"""Trains one model in a process of its own: ours or upstream's.

Only bench.train and bench.multiplier start this file, with the task of bench/train/variants.py. It
answers each request: a number of steps, or "held_out" for the bits per byte of held-out rows.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import child
from bench.batches import Passes, inputs_and_targets

Task = dict[str, Any]
Batch = tuple[int, Tensor, Tensor]  # number of the step; inputs and targets, int64 (B, T) each
SHORT_DECAY = 0.05  # Muon's weight decay where only speed is measured, the same for both sides
DEFAULT_SEED = 42


@dataclass(frozen=True)
class Side:
    """How one side trains."""

    train: Callable[[Passes], float]  # makes a step, and returns its loss in nats
    set_rates: Callable[[int, int], None]  # for step N of so many
    losses: Callable[[Tensor, Tensor], Tensor]  # of each target, (B, T), without gradients
    parameters: int


def ours(task: Task) -> Side:
    """Return this repository's training step, with the calls that base_train makes.

    If the task has a horizon, rates, momentum and decay follow base_train's rules for a run
    of that length, with the flags of the task.
    """
    from bench.training import Trainer, random_model
    from nanochat import device, schedule
    from nanochat.data.command_line import parse
    from nanochat.optim import Rates
    from scripts.base_train import Config

    compute = device.compute_init("cpu")
    flags = parse(Config, task["flags"])
    shape = our_shape(task, flags)
    steps = task["horizon"]
    model = random_model(shape, compute, seed_of(task))
    compute.platform.use_matmul(model, flags.shape.matmul, compute.operations)
    if steps is None:
        trainer = Trainer(model, compute, Rates(weight_decay=SHORT_DECAY))
    else:
        batch_tokens = task["rows_per_step"] * shape.sequence_len
        scaling_parameters = model.parameter_counts()["scaling"]
        data_ratio = flags.schedule.target_param_data_ratio
        is_short = schedule.is_short(steps * batch_tokens, scaling_parameters)
        rates = flags.rates.for_run(batch_tokens, steps, data_ratio, is_short)
        rate_factor = schedule.rate_scale(batch_tokens)
        momentum = schedule.table_momentum(steps)
        trainer = Trainer(model, compute, rates, rate_factor, momentum)
    if task["compiled"]:
        trainer.compile(task["rows_per_step"], shape.sequence_len)

    def set_rates(number: int, steps: int) -> None:
        warmup = schedule.warmup_steps(flags.schedule.warmup_steps, steps)
        warmdown_ratio = flags.schedule.warmdown_ratio
        final_lr_frac = flags.schedule.final_lr_frac
        lr = schedule.trapezoid(number, steps, warmup, warmdown_ratio, final_lr_frac)
        momentum = schedule.momentum(number, steps, warmdown_ratio)
        decay_factor = schedule.decay_factor(number, steps)
        trainer.optimizers.schedule(lr, momentum, decay_factor)

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return model(inputs, targets, "none")

    return Side(trainer.step, set_rates, losses, trainer.parameters)


def our_shape(task: Task, flags: Any) -> Any:
    """Return the GPTConfig that base_train would train: with its pairs and all that its layers do."""
    from nanochat.gpt import GPTConfig
    from nanochat.train import sizes

    shape = task["shape"]
    requested_rows = flags.shape.bigram_rows
    bigram_rows = sizes.table_rows(requested_rows, shape["vocab_size"])
    fields = {**shape, "bigram_rows": bigram_rows}
    for name in ("offset_layers", "exclusive_layers"):
        layers = getattr(flags.shape, name)
        fields[name] = shape["n_layer"] if layers == "auto" else layers
    return sizes.keep_bigrams(GPTConfig(**fields), requested_rows, task["epochs"])


def seed_of(task: Task) -> int:
    """Return the seed of the initial weights: the task's, or 42."""
    return DEFAULT_SEED if task["seed"] is None else task["seed"]


def upstream(task: Task) -> Side:
    """Return karpathy/nanochat's training step, with the calls that its base_train makes.

    If the task has a horizon, the run follows upstream's schedules and weight decay. Its
    learning rates are multiplied by `scale` instead of by upstream's own factor for the batch,
    which is 0.088 at 4,096 tokens: far too low.
    """
    from bench.upstream import RATES, Upstream

    shape = task["shape"]
    steps = task["horizon"]
    decay = SHORT_DECAY
    if steps is not None:
        batch_tokens = task["rows_per_step"] * shape["sequence_len"]
        decay = upstream_decay(shape, batch_tokens)
    rates = {name: task["scale"] * rate for name, rate in RATES.items()}
    trainer = Upstream(shape, torch.device("cpu"), weight_decay=decay, **rates)
    model = trainer.model
    if task["compiled"]:
        trainer.compile()
    if steps is not None:  # the first step compiles, which is no part of a run's cost
        weights = copy.deepcopy(model.state_dict())
        moments = copy.deepcopy(trainer.optimizer.state_dict())
        rows = np.load(task["rows"], mmap_mode="r")[: task["rows_per_step"]]
        trainer.step([inputs_and_targets(tokens_of(rows))])
        model.load_state_dict(weights)
        trainer.optimizer.load_state_dict(moments)  # which makes new groups
    groups = trainer.optimizer.param_groups
    base_rates = [group["lr"] for group in groups]

    def set_rates(number: int, steps: int) -> None:
        lr_factor, momentum, decay_factor = upstream_factors(number, steps)
        for group, base_rate in zip(groups, base_rates, strict=True):
            group["lr"] = lr_factor * base_rate
            if group.get("kind") == "muon":
                group["momentum"] = momentum
                group["weight_decay"] = decay_factor * decay

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return model(inputs, targets, loss_reduction="none")

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Side(trainer.step, set_rates, losses, parameters)


def upstream_decay(shape: dict[str, Any], tokens_per_step: int) -> float:
    """Return upstream's weight decay: 0.28 sqrt(B / 2^19) D_ref / D.

    The horizon D is 12 tokens per parameter of the matrices and the head.
    """
    width = shape["n_embd"]
    vocab_size = shape["vocab_size"]
    scaling = 12 * shape["n_layer"] * width**2 + vocab_size * width
    reference = 12 * 12 * 768**2 + vocab_size * 768
    batch_factor = math.sqrt(tokens_per_step / 2**19)
    return 0.28 * batch_factor * reference / scaling


def upstream_factors(step: int, steps: int) -> tuple[float, float, float]:
    """Return upstream's schedules: the factor on the rates, Muon's momentum, that on the decay."""
    warmdown = round(0.65 * steps)
    remaining = min((steps - step) / warmdown, 1.0)  # of the warmdown, from 1 to 0
    lr = 0.05 + 0.95 * remaining
    momentum = 0.90 + 0.07 * remaining
    if step < 40:
        lr = (step + 1) / 40
    if step < 400:
        momentum = 0.85 + 0.12 * step / 400
    decay_factor = 0.5 * (1 + math.cos(math.pi * step / steps))
    return lr, momentum, decay_factor


def tokens_of(rows: np.ndarray) -> Tensor:
    """Return rows of a file, uint16, as int64."""
    return torch.from_numpy(rows.astype(np.int64))


def batches(rows: np.ndarray, size: int) -> Iterator[Batch]:
    """Yield batches of `size` rows in their order, without end, with the number of their step."""
    for number in itertools.count():
        first = number * size
        row_numbers = np.arange(first, first + size) % len(rows)
        inputs, targets = inputs_and_targets(tokens_of(rows[row_numbers]))
        yield number, inputs, targets


@torch.no_grad()
def bits_per_byte(side: Side, rows: np.ndarray, token_bytes: np.ndarray, size: int) -> float:
    """Return the bits per byte of the targets that stand for text, in passes of `size` rows."""
    lengths = torch.from_numpy(token_bytes.astype(np.int64))
    nats = 0.0
    text_bytes = 0
    for first in range(0, len(rows), size):
        inputs, targets = inputs_and_targets(tokens_of(rows[first : first + size]))
        target_bytes = lengths[targets]
        losses = side.losses(inputs, targets).view_as(target_bytes).double()
        is_text = target_bytes > 0
        nats += float((losses * is_text).sum())
        text_bytes += int(target_bytes.sum())
    bits = nats / math.log(2)
    return bits / text_bytes


def main() -> None:
    """Make the side, warm it up, and answer requests until the input ends."""
    answer = child.answers()
    task = child.task()
    torch.set_num_threads(1)
    torch.manual_seed(seed_of(task))
    make = {"ours": ours, "upstream": upstream}[task["side"]]
    side = make(task)
    rows = np.load(task["rows"], mmap_mode="r")
    train_rows = rows[: len(rows) - task["held_out"]]
    held_out_rows = rows[len(train_rows) :]
    token_bytes = np.load(task["token_bytes"])
    size = task["rows_per_step"]
    if task["seed"] is not None:  # every side draws the same order from a seed
        order = np.random.default_rng(task["seed"]).permutation(len(train_rows))
        train_rows = train_rows[order]
    stream = batches(train_rows, size)

    def step(number: int, inputs: Tensor, targets: Tensor) -> float:
        if task["horizon"] is not None:
            side.set_rates(number, task["horizon"])
        return side.train([(inputs, targets)])

    warmup = child.time_steps(step, itertools.islice(stream, task["warmup"]))
    answer({"parameters": side.parameters, "losses": warmup["losses"]})
    for request in child.requests():
        if request == "held_out":
            answer(bits_per_byte(side, held_out_rows, token_bytes, size))
        else:
            answer(child.time_steps(step, itertools.islice(stream, request)))


if __name__ == "__main__":
    main()
