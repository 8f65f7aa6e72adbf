"""Runs one side of bench.train in its own process; PYTHONPATH decides whose `nanochat` it imports.

The first argument is the task as JSON. The process prints a line when it is ready, and then answers each line of its
input with a line; all lines are JSON. A number N asks for N steps: the answer has the CPU seconds and loss of each
step, and the peak memory. "bpb" asks for the bits per byte of the held-out rows. {"keep": FILE, "about": A} saves the
training in a file, and {"resume": FILE} continues from there and answers with A. Only bench.train and bench.multiplier
start this file.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # inputs, targets, int64 (B, T) each
SHORT_DECAY = (
    0.05  # Muon's weight decay where only speed is measured: about a short run's, the same for both
)


@dataclass(frozen=True)
class Side:
    """What is measured. `step(number, batch)` trains on a batch as step `number` and returns the loss in nats.
    `losses(batch)` gives the loss of each target, (B, T), without gradients. `state()` is everything that a later step
    depends on, and `restore(state)` takes it."""

    step: Callable[[int, Batch], float]
    losses: Callable[[Batch], Tensor]
    parameters: int
    state: Callable[[], dict[str, Any]]
    restore: Callable[[dict[str, Any]], None]
    compile_seconds: float = 0.0


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended, such as C++ compilers."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def seed_of(task: dict[str, Any]) -> int:
    """The seed of the initial weights: the task's, or 42."""
    return 42 if task["seed"] is None else task["seed"]


def batch_of(rows: np.ndarray) -> Batch:
    """Split rows (B, T + 1) into inputs and targets."""
    cells = torch.from_numpy(rows.astype(np.int64))
    return cells[:, :-1].contiguous(), cells[:, 1:].contiguous()


def batches(rows: np.ndarray, size: int, first: int) -> Iterator[Batch]:
    """Batches of `size` rows in their order from row `first` on, repeated without end."""
    while True:
        yield batch_of(rows[np.arange(first, first + size) % len(rows)])
        first += size


@torch.no_grad()
def bits_per_byte(side: Side, rows: np.ndarray, token_bytes: np.ndarray, size: int) -> float:
    """Bits per byte of the targets that stand for text, `size` rows per pass; both sides use this arithmetic."""
    lengths = torch.from_numpy(token_bytes.astype(np.int64))
    nats, text = 0.0, 0
    for first in range(0, len(rows), size):
        batch = batch_of(rows[first : first + size])
        of_target = lengths[batch[1]]
        nats += float((side.losses(batch).view_as(of_target).double() * (of_target > 0)).sum())
        text += int(of_target.sum())
    return nats / math.log(2) / text


def ours(task: dict[str, Any]) -> Side:
    """This repository's training step, with the calls that the scripts make.

    If the task has a number of steps, rates, momentum and decay follow base_train's rules for a run of that length,
    with the task's flags of base_train."""
    from bench.updates import update
    from nanochat import dataloader, device, schedule
    from nanochat.common import parse
    from nanochat.gpt import GPT, GPTConfig
    from nanochat.step import Safeguards
    from nanochat.train import compile as compiling
    from nanochat.train import sizes
    from nanochat.train.optim import Optimizers, Rates
    from scripts.base_train import Config

    compute, cfg = device.compute_init("cpu"), parse(Config, task["flags"])
    offset = (
        task["shape"]["n_layer"] if cfg.shape.offset_layers == "auto" else cfg.shape.offset_layers
    )
    pairs = sizes.table_rows(cfg.shape.bigram_rows, task["shape"]["vocab_size"])
    config = GPTConfig(**{**task["shape"], "bigram_rows": pairs, "offset_layers": offset})
    config = sizes.keep_bigrams(config, cfg.shape.bigram_rows, task["epochs"])
    model = GPT(config, compute.dtype, operations=compute.operations)
    model.init_weights(seed_of(task))
    shape, steps = (task["pass_rows"], config.sequence_len), task["steps"]
    tokens, factor = task["rows_per_step"] * config.sequence_len, 1.0
    rates, first_beta = Rates(weight_decay=SHORT_DECAY), 0.8
    if steps is not None:
        rates, factor = (
            cfg.rates.for_run(tokens, steps, cfg.schedule.target_param_data_ratio),
            schedule.rate_scale(tokens),
        )
        first_beta = schedule.table_momentum(steps)
    optimizers = Optimizers(
        model, model.parameter_roles(), config.n_embd, rates, factor, compute.dtype, first_beta
    )
    start = cpu_seconds()
    fast = compiling.compiled(model, task["compiled"], shape, compute, model.compile_groups())
    compile_seconds = cpu_seconds() - start if task["compiled"] else 0.0
    safeguards = Safeguards(spikes=None)

    def step(number: int, batch: Batch) -> float:
        if steps is not None:
            warmup = schedule.warmup_steps(cfg.schedule.warmup_steps, steps)
            lr = schedule.trapezoid(
                number, steps, warmup, cfg.schedule.warmdown_ratio, cfg.schedule.final_lr_frac
            )
            momentum = schedule.momentum(number, steps, cfg.schedule.warmdown_ratio)
            optimizers.schedule(lr, momentum, schedule.decay_factor(number, steps))
        passes = zip(*(part.split(task["pass_rows"]) for part in batch), strict=True)
        work = dataloader.Step(0, batch[1].numel(), list(passes))
        return update(fast, optimizers, work, safeguards, compute).loss

    def state() -> dict[str, Any]:
        held = {name: tensor for name, (tensor, _, _) in optimizers.state().items()}
        return {"model": model.state_dict(), "optimizers": held}

    @torch.no_grad()
    def restore(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        for name, (tensor, _, _) in optimizers.state().items():
            tensor.copy_(saved["optimizers"][name])
        optimizers.restored()

    parameters = sum(p.numel() for p in model.parameters())
    return Side(
        step, lambda batch: model(*batch, "none"), parameters, state, restore, compile_seconds
    )


def upstream(task: dict[str, Any]) -> Side:
    """karpathy/nanochat's training step, with the calls that its base_train makes.

    If the task has a number of steps, the run follows upstream's schedules and weight decay. Its learning rates are
    multiplied by `scale` instead of upstream's own factor for the batch, which is 0.088 at 4,096 tokens: far too low.
    """
    from nanochat.gpt import GPT, GPTConfig

    if not hasattr(GPT, "setup_optimizer"):
        raise SystemExit(
            "the GPT of this nanochat has no setup_optimizer; give a checkout of 2026, such as the newest"
        )
    shape, steps, scale = task["shape"], task["steps"], task["scale"]
    model: Any = GPT(GPTConfig(**shape))  # upstream's class, which the type checker cannot see
    model.init_weights()
    decay = (
        SHORT_DECAY
        if steps is None
        else upstream_decay(shape, task["rows_per_step"] * shape["sequence_len"])
    )
    rates = {
        "unembedding_lr": 0.008,
        "embedding_lr": 0.3,
        "matrix_lr": 0.02,
        "scalar_lr": 0.5,
    }  # its defaults
    optimizer = model.setup_optimizer(
        **{k: scale * rate for k, rate in rates.items()}, weight_decay=decay
    )
    base = [group["lr"] for group in optimizer.param_groups]
    fast = torch.compile(model, dynamic=False) if task["compiled"] else model

    def step(number: int, batch: Batch) -> float:
        loss = fast(*batch)
        loss.backward()
        if steps is not None:
            lr, momentum, part = upstream_factors(number, steps)
            for group, rate in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * rate
                if group.get("kind") == "muon":
                    group["momentum"], group["weight_decay"] = momentum, part * decay
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

    return Side(step, losses, sum(p.numel() for p in model.parameters()), state, restore)


def upstream_decay(shape: dict[str, Any], tokens_per_step: int) -> float:
    """Upstream's weight decay: 0.28 sqrt(B / 2^19) D_ref / D, where the horizon D is 12 tokens per parameter of the
    matrices and the head."""
    scaling = 12 * shape["n_layer"] * shape["n_embd"] ** 2 + shape["vocab_size"] * shape["n_embd"]
    reference = 12 * 12 * 768**2 + shape["vocab_size"] * 768
    return 0.28 * math.sqrt(tokens_per_step / 2**19) * reference / scaling


def upstream_factors(step: int, steps: int) -> tuple[float, float, float]:
    """Upstream's schedules: the factor on the learning rates, Muon's momentum, the factor on the weight decay."""
    down = round(0.65 * steps)
    left = steps - step
    lr = (step + 1) / 40 if step < 40 else 1.0 if left >= down else 0.05 + 0.95 * left / down
    late = 0.97 if left >= down else 0.90 + 0.07 * left / down
    momentum = 0.85 + 0.12 * step / 400 if step < 400 else late
    return lr, momentum, 0.5 * (1 + math.cos(math.pi * step / steps))


def matmuls(task: dict[str, Any]) -> Side:
    """The bare matrix products of a training step, forward and backward."""
    dtype = getattr(torch, os.environ["NANOCHAT_DTYPE"])
    shape, tokens = task["shape"], task["rows_per_step"] * task["shape"]["sequence_len"]
    width, layers = shape["n_embd"], shape["n_layer"]
    generator = torch.Generator().manual_seed(1)

    def filled(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    sizes = [
        (width, width, 4 * layers),
        (width, 4 * width, layers),
        (4 * width, width, layers),
        (width, shape["vocab_size"], 1),
    ]
    work = [(filled(tokens, i), filled(o, i), filled(tokens, o), count) for i, o, count in sizes]

    def step(number: int, batch: Batch) -> float:
        for x, weight, gradient, count in work:
            for _ in range(count):  # the product, and the gradients of both factors
                torch.mm(x, weight.mT)
                torch.mm(gradient, weight)
                torch.mm(gradient.mT, x)
        return 0.0

    parameters = sum(w.numel() * count for _, w, _, count in work)
    return Side(
        step, lambda batch: torch.zeros(batch[1].shape), parameters, dict, lambda saved: None
    )


def serve(task: dict[str, Any], requests: TextIO, reply: Callable[[dict[str, Any]], None]) -> None:
    """Make the side, warm it up, and answer requests until the input ends."""
    torch.set_num_threads(1)
    torch.manual_seed(seed_of(task))
    side = {"ours": ours, "upstream": upstream, "matmuls": matmuls}[task["side"]](task)
    rows = np.load(task["rows"], mmap_mode="r")
    token_bytes = np.load(task["token_bytes"])
    train, held_out = rows[: len(rows) - task["held_out"]], rows[len(rows) - task["held_out"] :]
    if task["seed"] is not None:  # every side draws the same order from a seed
        train = train[np.random.default_rng(task["seed"]).permutation(len(train))]
    coming, number = batches(train, task["rows_per_step"], 0), 0

    def keep(path: str, about: Any) -> None:
        torch.save({"about": about, "number": number, "state": side.state()}, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)

    def resume(path: str) -> Any:
        nonlocal coming, number
        saved = torch.load(path, weights_only=True)
        side.restore(saved["state"])
        number = saved["number"]
        coming = batches(train, task["rows_per_step"], number * task["rows_per_step"])
        return saved["about"]

    def take(steps: int) -> tuple[list[float], list[float]]:
        nonlocal number
        seconds, losses = [], []
        for _ in range(steps):
            batch, start = next(coming), time.process_time()
            losses.append(side.step(number, batch))
            seconds.append(time.process_time() - start)
            number += 1
        return seconds, losses

    _, first = take(task["warmup"])
    reply(
        {
            "ready": True,
            "parameters": side.parameters,
            "losses": first,
            "compile_seconds": side.compile_seconds,
        }
    )
    for line in requests:
        request = json.loads(line)
        if request == "bpb":
            reply({"bpb": bits_per_byte(side, held_out, token_bytes, task["rows_per_step"])})
            continue
        if isinstance(request, dict):
            about = (
                keep(request["keep"], request["about"])
                if "keep" in request
                else resume(request["resume"])
            )
            reply({"about": about})
            continue
        seconds, losses = take(request)
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        reply({"seconds": seconds, "losses": losses, "peak_bytes": peak})


def main() -> None:
    """Print answers to standard output; whatever either nanochat prints is sent to standard error instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(
        json.loads(sys.argv[1]),
        sys.stdin,
        lambda answer: print(json.dumps(answer), file=answers, flush=True),
    )


if __name__ == "__main__":
    main()
