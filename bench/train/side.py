"""Trains one model in a process of its own: ours, upstream's, or only the matrix products of a step.

Only bench.train and bench.multiplier start this file, with the `task` of bench/train/variants.py. It answers the
requests that `Loop.request` lists.
"""

import copy
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import child

Task = dict[str, Any]
Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 (B, T) each
SHORT_DECAY = 0.05  # Muon's weight decay where only speed is measured, the same for both sides
# Upstream's default learning rates.
UPSTREAM_RATES = {
    "unembedding_lr": 0.008,
    "embedding_lr": 0.3,
    "matrix_lr": 0.02,
    "scalar_lr": 0.5,
}


@dataclass(frozen=True)
class Side:
    """How one side trains."""

    step: Callable[[int, Batch], float]  # trains on a batch as step N; the loss in nats
    losses: Callable[[Batch], Tensor]  # the loss of each target, (B, T), without gradients
    parameters: int
    state: Callable[[], dict[str, Any]]  # everything that a later step depends on
    restore: Callable[[dict[str, Any]], None]
    compile_seconds: float = 0.0  # CPU seconds, with those of the compiler's processes


# --- ours ------------------------------------------------------------------------------------------


def ours(task: Task) -> Side:
    """Return this repository's training step, with the calls that base_train makes.

    If the task has a number of steps, rates, momentum and decay follow base_train's rules for a run of that length,
    with the flags of the task.
    """
    from bench.training import Trainer, random_model, split
    from nanochat import device, schedule
    from nanochat.common import parse
    from nanochat.optim import Rates
    from scripts.base_train import Config

    compute = device.compute_init("cpu")
    flags = parse(Config, task["flags"])
    shape = our_shape(task, flags)
    steps = task["steps"]
    tokens_per_step = task["rows_per_step"] * shape.sequence_len
    model = random_model(shape, compute, seed_of(task))
    compute.platform.use_matmul(model, flags.shape.matmul, compute.operations)
    if steps is None:
        trainer = Trainer(model, compute, Rates(weight_decay=SHORT_DECAY))
    else:
        rates = flags.rates.for_run(tokens_per_step, steps, flags.schedule.target_param_data_ratio)
        rate_factor = schedule.rate_scale(tokens_per_step)
        trainer = Trainer(
            model,
            compute,
            rates,
            rate_factor,
            schedule.table_momentum(steps),
        )
    compile_seconds = 0.0
    if task["compiled"]:
        start = child.cpu_seconds()
        trainer.compile(task["pass_rows"], shape.sequence_len)
        compile_seconds = child.cpu_seconds() - start

    def set_rates(number: int, steps: int) -> None:
        warmup = schedule.warmup_steps(flags.schedule.warmup_steps, steps)
        lr = schedule.trapezoid(
            number,
            steps,
            warmup,
            flags.schedule.warmdown_ratio,
            flags.schedule.final_lr_frac,
        )
        momentum = schedule.momentum(number, steps, flags.schedule.warmdown_ratio)
        trainer.optimizers.schedule(lr, momentum, schedule.decay_factor(number, steps))

    def step(number: int, batch: Batch) -> float:
        if steps is not None:
            set_rates(number, steps)
        return trainer.step(list(split(batch, task["pass_rows"])))

    def optimizer_state() -> dict[str, Tensor]:
        return {name: tensor for name, (tensor, _, _) in trainer.optimizers.state().items()}

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizers": optimizer_state()}

    @torch.no_grad()
    def restore(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        for name, tensor in optimizer_state().items():
            tensor.copy_(saved["optimizers"][name])
        trainer.optimizers.restored()

    def losses(batch: Batch) -> Tensor:
        return model(*batch, "none")

    return Side(
        step,
        losses,
        trainer.parameters,
        state,
        restore,
        compile_seconds,
    )


def our_shape(task: Task, flags: Any) -> Any:
    """Return the GPTConfig that base_train would train: with its table of pairs and its offset of keys."""
    from nanochat.gpt import GPTConfig
    from nanochat.train import sizes

    bigram_rows = sizes.table_rows(flags.shape.bigram_rows, task["shape"]["vocab_size"])
    offset_layers = flags.shape.offset_layers
    if offset_layers == "auto":
        offset_layers = task["shape"]["n_layer"]
    fields = {
        **task["shape"],
        "bigram_rows": bigram_rows,
        "offset_layers": offset_layers,
    }
    return sizes.keep_bigrams(GPTConfig(**fields), flags.shape.bigram_rows, task["epochs"])


def seed_of(task: Task) -> int:
    """Return the seed of the initial weights: the task's, or 42."""
    return 42 if task["seed"] is None else task["seed"]


# --- upstream --------------------------------------------------------------------------------------


def upstream(task: Task) -> Side:
    """Return karpathy/nanochat's training step, with the calls that its base_train makes.

    If the task has a number of steps, the run follows upstream's schedules and weight decay. Its learning rates are
    multiplied by `scale` instead of by upstream's own factor for the batch, which is 0.088 at 4,096 tokens: far too low.
    """
    from nanochat.gpt import GPT, GPTConfig

    if not hasattr(GPT, "setup_optimizer"):
        raise SystemExit(
            "the GPT of this nanochat has no setup_optimizer; give a checkout of 2026, such as the newest"
        )
    shape, steps = task["shape"], task["steps"]
    model: Any = GPT(GPTConfig(**shape))  # upstream's class, which the type checker cannot see
    model.init_weights()
    decay = SHORT_DECAY
    if steps is not None:
        decay = upstream_decay(shape, task["rows_per_step"] * shape["sequence_len"])
    rates = {name: task["scale"] * rate for name, rate in UPSTREAM_RATES.items()}
    optimizer = model.setup_optimizer(**rates, weight_decay=decay)
    base_rates = [group["lr"] for group in optimizer.param_groups]
    compiled = torch.compile(model, dynamic=False) if task["compiled"] else model

    def set_rates(number: int, steps: int) -> None:
        lr_factor, momentum, decay_factor = upstream_factors(number, steps)
        for group, base_rate in zip(optimizer.param_groups, base_rates, strict=True):
            group["lr"] = lr_factor * base_rate
            if group.get("kind") == "muon":
                group["momentum"] = momentum
                group["weight_decay"] = decay_factor * decay

    def step(number: int, batch: Batch) -> float:
        loss = compiled(*batch)
        loss.backward()
        if steps is not None:
            set_rates(number, steps)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.item()

    def losses(batch: Batch) -> Tensor:
        return model(*batch, loss_reduction="none")

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def restore(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    if steps is not None:  # the first step compiles, which is no part of a run's cost
        saved = copy.deepcopy(state())
        step(0, batch_of(np.load(task["rows"], mmap_mode="r")[: task["rows_per_step"]]))
        restore(saved)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Side(
        step,
        losses,
        parameters,
        state,
        restore,
    )


def upstream_decay(shape: dict[str, Any], tokens_per_step: int) -> float:
    """Return upstream's weight decay: 0.28 sqrt(B / 2^19) D_ref / D.

    The horizon D is 12 tokens per parameter of the matrices and the head.
    """
    head = shape["vocab_size"] * shape["n_embd"]
    scaling = 12 * shape["n_layer"] * shape["n_embd"] ** 2 + head
    reference = 12 * 12 * 768**2 + shape["vocab_size"] * 768
    return 0.28 * math.sqrt(tokens_per_step / 2**19) * reference / scaling


def upstream_factors(step: int, steps: int) -> tuple[float, float, float]:
    """Return upstream's schedules: the factor on the rates, Muon's momentum, the factor on the decay."""
    warmdown = round(0.65 * steps)
    remaining = min((steps - step) / warmdown, 1.0)  # of the warmdown, from 1 to 0
    lr = 0.05 + 0.95 * remaining
    momentum = 0.90 + 0.07 * remaining
    if step < 40:
        lr = (step + 1) / 40
    if step < 400:
        momentum = 0.85 + 0.12 * step / 400
    return lr, momentum, 0.5 * (1 + math.cos(math.pi * step / steps))


# --- the bound -------------------------------------------------------------------------------------


def matmuls(task: Task) -> Side:
    """Return a step of nothing but the large matrix products, forward and backward."""
    dtype = getattr(torch, os.environ["NANOCHAT_DTYPE"])
    shape = task["shape"]
    tokens = task["rows_per_step"] * shape["sequence_len"]
    width, layers = shape["n_embd"], shape["n_layer"]
    sizes = [  # inputs, outputs, how many matrices
        (width, width, 4 * layers),
        (width, 4 * width, layers),
        (4 * width, width, layers),
        (width, shape["vocab_size"], 1),
    ]
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    work = [
        (random(tokens, inputs), random(outputs, inputs), random(tokens, outputs), count)
        for inputs, outputs, count in sizes
    ]

    def step(number: int, batch: Batch) -> float:
        for x, weight, gradient, count in work:
            for _ in range(count):  # the product, and the gradients of both factors
                torch.mm(x, weight.mT)
                torch.mm(gradient, weight)
                torch.mm(gradient.mT, x)
        return 0.0

    def losses(batch: Batch) -> Tensor:
        return torch.zeros(batch[1].shape)

    parameters = sum(inputs * outputs * count for inputs, outputs, count in sizes)
    return Side(
        step,
        losses,
        parameters,
        dict,
        lambda saved: None,
    )


# --- the loop --------------------------------------------------------------------------------------


def batch_of(rows: np.ndarray) -> Batch:
    """Split rows (B, T + 1) into inputs and targets."""
    cells = torch.from_numpy(rows.astype(np.int64))
    return cells[:, :-1].contiguous(), cells[:, 1:].contiguous()


def batches(rows: np.ndarray, size: int, first_row: int) -> Iterator[Batch]:
    """Yield batches of `size` rows in their order from a row on, without end."""
    for row in itertools.count(first_row, size):
        yield batch_of(rows[np.arange(row, row + size) % len(rows)])


@torch.no_grad()
def bits_per_byte(
    side: Side,
    rows: np.ndarray,
    token_bytes: np.ndarray,
    size: int,
) -> float:
    """Return the bits per byte of the targets that stand for text, computed in passes of `size` rows."""
    lengths = torch.from_numpy(token_bytes.astype(np.int64))
    nats, text_bytes = 0.0, 0
    for first in range(0, len(rows), size):
        inputs, targets = batch_of(rows[first : first + size])
        target_bytes = lengths[targets]
        losses = side.losses((inputs, targets)).view_as(target_bytes).double()
        nats += float((losses * (target_bytes > 0)).sum())
        text_bytes += int(target_bytes.sum())
    return nats / math.log(2) / text_bytes


class Loop:
    """A side, the rows it reads, and how many steps it has made."""

    def __init__(self, side: Side, task: Task):
        rows = np.load(task["rows"], mmap_mode="r")
        self.side, self.rows_per_step = side, task["rows_per_step"]
        self.train_rows = rows[: len(rows) - task["held_out"]]
        self.held_out_rows = rows[len(rows) - task["held_out"] :]
        self.token_bytes = np.load(task["token_bytes"])
        if task["seed"] is not None:  # every side draws the same order from a seed
            order = np.random.default_rng(task["seed"]).permutation(len(self.train_rows))
            self.train_rows = self.train_rows[order]
        self.go_to(0)

    def go_to(self, step: int) -> None:
        """Continue with this step."""
        self.number = step
        self.batches = batches(self.train_rows, self.rows_per_step, step * self.rows_per_step)

    def steps(self, count: int) -> dict[str, Any]:
        """Make `count` steps; return the CPU seconds and the loss of each, and the peak memory."""
        seconds, losses = [], []
        for _ in range(count):
            batch = next(self.batches)
            start = time.process_time()
            losses.append(self.side.step(self.number, batch))
            seconds.append(time.process_time() - start)
            self.number += 1
        return {
            "seconds": seconds,
            "losses": losses,
            "peak_bytes": child.peak_bytes(),
        }

    def held_out(self) -> float:
        """Return the bits per byte of the held-out rows."""
        return bits_per_byte(
            self.side,
            self.held_out_rows,
            self.token_bytes,
            self.rows_per_step,
        )

    def save(self, path: str, about: Any) -> None:
        """Save the training in a file, with a note for the parent."""
        content = {
            "about": about,
            "number": self.number,
            "state": self.side.state(),
        }
        torch.save(content, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)

    def load(self, path: str) -> Any:
        """Continue from a saved training and return its note."""
        saved = torch.load(path, weights_only=True)
        self.side.restore(saved["state"])
        self.go_to(saved["number"])
        return saved["about"]

    def request(self, name: str, **arguments: Any) -> Any:
        """Answer `steps`, `held_out`, `save` or `load`."""
        calls = {"steps": self.steps, "held_out": self.held_out}
        return {
            **calls,
            "save": self.save,
            "load": self.load,
        }[name](**arguments)


def main() -> None:
    """Make the side, warm it up, and answer requests until the input ends."""
    answer = child.answers()
    task = child.task()
    torch.set_num_threads(1)
    torch.manual_seed(seed_of(task))
    side = {
        "ours": ours,
        "upstream": upstream,
        "matmuls": matmuls,
    }[task["side"]](task)
    loop = Loop(side, task)
    losses = loop.steps(task["warmup"])["losses"]
    answer(
        {
            "parameters": side.parameters,
            "losses": losses,
            "compile_seconds": side.compile_seconds,
        }
    )
    for request in child.requests():
        answer(loop.request(**request))


if __name__ == "__main__":
    main()
