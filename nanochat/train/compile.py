"""Compiles a model if torch.compile works and saves time; otherwise, logs why not."""

import contextlib
import hashlib
import inspect
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from nanochat import device
from nanochat.common import UserError, log, read_json, tr, warn, write_json
from nanochat.device import Compute
from nanochat.gpt import GPT
from nanochat.linear import Linear
from nanochat.platforms.layers import operations_of
from nanochat.runtime import parallel, signals
from nanochat.train.fit import memory

# The share of an uncompiled step's time that compiling saves, unless matrix products take more than
# the rest (dev/LOG.md)
SAVED = 0.3
TIMED_STEPS = 10  # fewer steps are not worth an uncompiled pass to time them
# Estimated seconds of a compilation that this machine has not measured yet, on two idle cores
MODEL_SECONDS = 10.0  # for any model
LAYER_SECONDS = 4.0  # in addition, for each layer
PUBLISHED_LAYERS = 12  # a published model's layer, compiled by itself, takes as long as this many
CACHED_SHARE = 0.2  # the share of these seconds that remains if all code is in the cache


@dataclass(frozen=True)
class Ahead:
    """The training that is left in this run, which decides whether compiling is worthwhile."""

    steps: int
    passes: int  # per step, on each rank
    least_seconds: float  # per step, if the device computed at its peak speed
    as_before: bool = False  # earlier steps were compiled, and later ones must round as they did


OnePass = Callable[[nn.Module], Tensor]  # runs one pass of a model, and returns the loss

# --- what compiling costs -------------------------------------------------------------------------


class Costs:
    """Records how long compiling has taken on this machine, in a file next to the compiled code."""

    def __init__(self, key: str, parts: int):
        """Read the records of earlier compilations.

        `key` identifies what is compiled, and `parts` is the number of layers to compile. If layers
        are compiled by themselves, those with the same shapes count only once.
        """
        self.key = key
        self.parts = parts
        self.file = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.devnull) / "costs.json"
        self.records: dict[str, dict[str, float]] = {}
        with contextlib.suppress(OSError, ValueError):  # no record yet, or a damaged one
            self.records = read_json(self.file)

    def estimate(self) -> tuple[float, str]:
        """Return the estimated seconds to compile, and a phrase saying whether code is cached."""
        record = self.records.get(self.key, {})
        if "again" in record:
            return record["again"], tr("from the cache")
        if "first" in record:
            return CACHED_SHARE * record["first"], tr("from the cache")
        paces = [
            other["first"] / _usual_seconds(other["parts"])
            for other in self.records.values()
            if "first" in other
        ]
        pace = min(paces, default=1.0)  # the pace of this machine when it was least busy
        return pace * _usual_seconds(self.parts), tr("for the first time")

    def measured(self, seconds: float, first: bool) -> None:
        """Save the seconds that a compilation has taken, unless an earlier one was faster.

        The fastest time counts, because the machine may have been busy. A `first` compilation,
        without cached code, is recorded separately.
        """
        name = "first" if first else "again"
        record = self.records.get(self.key, {})
        fastest = min(round(seconds, 1), record.get(name, seconds))
        record |= {"parts": self.parts, name: fastest}
        with contextlib.suppress(OSError):  # a read-only cache works without a record
            write_json(self.file, {**self.records, self.key: record})


def _usual_seconds(parts: float) -> float:
    return MODEL_SECONDS + LAYER_SECONDS * parts


def _costs(
    model: nn.Module, shape: tuple[int, int], compute: Compute, blocks: Sequence[nn.Module]
) -> Costs:
    """Return the recorded costs of compiling this model.

    They are recorded under a hash of what affects compiling, such as the model's sizes and code,
    the shape of a pass, the device and the version of torch.
    """
    classes = (*type(model).__mro__[:-2], *type(compute.operations).__mro__[:-1])
    code = [Path(inspect.getfile(kind)).read_bytes() for kind in classes]
    sizes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    own_products = any(
        isinstance(module, Linear) and module.multiply is not None for module in model.modules()
    )
    by_layers = _by_layers(model, compute)
    facts = (sizes, shape, str(compute.dtype), own_products, by_layers)
    host = (device.describe(compute), torch.get_num_threads(), torch.__version__)
    key = hashlib.sha256(repr((*host, *facts)).encode() + b"".join(code)).hexdigest()[:16]
    if not by_layers:
        return Costs(key, len(blocks))
    kinds = {tuple(tuple(p.shape) for p in block.parameters()) for block in blocks}
    return Costs(key, len(kinds) if isinstance(model, GPT) else PUBLISHED_LAYERS * len(kinds))


# --- whether it pays ------------------------------------------------------------------------------


def _pays(ahead: Ahead, cost: float, time_pass: Callable[[], float], compute: Compute) -> bool:
    """Return whether compiling should save more time in the remaining steps than it takes.

    Rank 0 decides for all ranks. A step's time is first estimated from the device's peak speed,
    which is a lower bound. If that does not show that compiling pays, a pass is timed, unless fewer
    than 10 steps remain (TIMED_STEPS). Where the peak is the measured speed of matrix products, as
    on a CPU, a step can come close to it; compiling saves only time that the products do not take.
    """
    products_measured = compute.platform.peak_flops() is None
    least_saved = 0.0 if products_measured else SAVED * ahead.least_seconds
    if parallel.agree(int(ahead.steps * least_saved > cost), compute):
        return True
    if ahead.steps < TIMED_STEPS:
        return False
    step_seconds = ahead.passes * time_pass()
    saved = SAVED * step_seconds
    if products_measured:
        saved = min(saved, step_seconds - ahead.least_seconds)
    return bool(parallel.agree(int(ahead.steps * saved > cost), compute))


def sum_of_losses(shape: tuple[int, int], compute: Compute) -> OnePass:
    """Return a function that runs a model on zeros of `shape` (B, T), and returns the summed loss.

    The targets are a clone of the inputs, since aliased arguments would compile to another graph.
    """
    tokens = torch.zeros(shape, dtype=torch.long, device=compute.device)
    return lambda model: model(tokens, tokens.clone(), "sum")


def _timed_pass(model: nn.Module, one_pass: OnePass, compute: Compute) -> float:
    """Return the seconds of an uncompiled forward and backward pass, the faster of two.

    Every rank must call this.
    """
    seconds = []
    for _ in range(2):  # the first pass includes setup
        device.synchronize(compute)
        start = time.monotonic()
        one_pass(model).backward()
        device.synchronize(compute)
        seconds.append(time.monotonic() - start)
        model.zero_grad()
    return min(seconds)


# --- compiling ------------------------------------------------------------------------------------


def missing(requested: bool | None, compute: Compute, model: nn.Module | None = None) -> str:
    """Return the reason why nothing can be compiled, or "" on every rank if all ranks can compile.

    `requested` is the value of --compile; False is a reason, too. If a model is given, it must be
    compilable. Raises UserError if `requested` is True but compiling is not possible.
    """
    if requested is False:
        why_not = tr("switched off")
    else:
        why_not = device.compiler_missing(compute) or _untraceable(model)
    if not parallel.least(int(not why_not), compute):  # the first pass needs all ranks
        why_not = why_not or tr("another rank has no compiler")
    if why_not and requested:
        raise UserError(
            tr(
                "--compile was asked for, but cannot be used: {why}. Leave --compile out.",
                why=why_not,
            )
        )
    return why_not


def _untraceable(model: nn.Module | None) -> str:
    """Return why the compiler cannot trace a model's matrix products, or "" if it can."""
    if model is None:
        return ""
    for module in model.modules():
        why = getattr(getattr(module, "multiply", None), "untraceable", "")
        if why:
            return why
    return ""


def _unneeded(model: nn.Module, compute: Compute) -> str:
    """Return the reason why compiling would not make a step faster, or "" if it might.

    If it might on any rank, the result is "" on every rank.
    """
    why = ""
    if isinstance(model, GPT):
        why = operations_of(model).needs_no_compiler(model.config.head_dim, model.dtype)
    return why if parallel.least(int(bool(why)), compute) else ""


def compiled(
    model: nn.Module,
    requested: bool | None,
    shape: tuple[int, int],
    compute: Compute,
    blocks: Sequence[nn.Module],
    ahead: Ahead | None = None,
    one_pass: OnePass | None = None,
) -> nn.Module:
    """Return the model to train with, compiled if possible and worthwhile, and log the decision.

    If `requested` is None, the model is compiled if the device has a compiler, compiled steps are
    faster, and the steps in `ahead`, if known, repay the time to compile; `ahead.as_before` skips
    all but the first condition.

    A compiled model runs its first pass of `shape` (B, T) here, so that a compiler fails before any
    state is changed. `one_pass` must call the model just as training will, since other arguments
    would compile to another graph; by default it sums the losses of a (B, T) batch. With several
    ranks, and in a published model on platforms that compile layers, each of `blocks` is compiled
    by itself.

    If the compiler fails, a warning is logged and the model stays uncompiled; its error is raised
    only if `requested` is True. Raises UserError if a pass runs out of memory, or if `requested` is
    True but compiling is not possible, and signals.Stopped as soon as a signal arrives.
    """
    if why_not := missing(requested, compute, model):
        log(tr("not compiled: {why}", why=why_not))
        return model
    if (
        requested is None
        and not (ahead and ahead.as_before)
        and (why_not := _unneeded(model, compute))
    ):
        log(tr("not compiled: {why_not} (--compile overrides)", why_not=why_not))
        return model
    one_pass = one_pass or sum_of_losses(shape, compute)
    with signals.at_once(compute.pulse):
        with torch.no_grad():  # builds tables now: if built while tracing, they would be retraced
            model(torch.zeros((1, shape[1]), dtype=torch.long, device=compute.device))
        costs = _costs(model, shape, compute, blocks)
        cost, how = costs.estimate()
        if requested is None and ahead is not None and not ahead.as_before:
            with memory.advising(shape[0], shape[0]):
                pays = _pays(ahead, cost, lambda: _timed_pass(model, one_pass, compute), compute)
            if not pays:
                log(
                    tr(
                        "not compiled: {steps:,} steps left would not repay about {cost:.0f} "
                        "s (--compile overrides)",
                        steps=ahead.steps,
                        cost=cost,
                    )
                )
                return model
        log(tr("compiling {how}, about {cost:.0f} s ...", how=how, cost=cost))
        return _compile(model, requested, shape, compute, blocks, costs, one_pass)


def _compile(
    model: nn.Module,
    requested: bool | None,
    shape: tuple[int, int],
    compute: Compute,
    blocks: Sequence[nn.Module],
    costs: Costs,
    one_pass: OnePass,
) -> nn.Module:
    start = time.monotonic()
    rows = shape[0]
    compute.platform.prepare_compiling()
    operations_of(model).prepare_compiling()
    from torch._dynamo.utils import counters

    missed = counters["inductor"]["fxgraph_cache_miss"]
    try:
        if compute.world_size > 1:
            for block in blocks:
                block.compile(dynamic=False)
            fast: Any = model
        elif _by_layers(model, compute):
            for block in blocks:
                _compile_with_gradients(block)
            fast = model
        else:
            fast = torch.compile(model, dynamic=False)
        with compute.platform.saving_memory(shape[0] * shape[1]):
            loss = one_pass(fast)
            compute.platform.finish_compiling()  # before the gradients, at which memory peaks
            loss.backward()
    # A compiler is foreign code that may raise anything, and uncompiled passes always work.
    except Exception as failure:
        if compute.pulse.stop_reason:  # the signal ended the compiler's processes or another rank
            raise signals.Stopped from failure
        if memory.ran_out(failure):
            raise memory.advice(rows, rows) from failure
        if requested:
            raise
        warn(
            tr(
                "torch.compile failed, and training continues uncompiled: {splitlines}",
                splitlines=str(failure).splitlines()[0],
            )
        )
        fast = _uncompiled(model, blocks)
    else:
        seconds = time.monotonic() - start
        first = counters["inductor"]["fxgraph_cache_miss"] > missed
        if first:
            log(tr("torch.compile: {seconds:.1f} s", seconds=seconds))
        else:
            log(tr("torch.compile: {seconds:.1f} s, from the cache", seconds=seconds))
        if compute.main:
            costs.measured(seconds, first)
    model.zero_grad()
    compute.platform.finish_compiling()
    return fast


def _by_layers(model: nn.Module, compute: Compute) -> bool:
    """Return whether layers are compiled by themselves instead of the whole model.

    Ranks must, because a sharded model gathers parameters before each layer. The layers of a GPT
    differ, so only those of a published model can share one code; Platform.compiles_layers says
    where that is worth it.
    """
    alike = not isinstance(model, GPT)
    return compute.world_size > 1 or (alike and compute.platform.compiles_layers)


def _compile_with_gradients(block: nn.Module) -> None:
    """Compile a layer for passes with gradients; others, as in validation, stay uncompiled.

    These have other shapes, and each would be compiled anew.
    """
    fast = torch.compile(block._call_impl, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = fast if torch.is_grad_enabled() else block._call_impl
        return chosen(*args, **kwargs)

    block._compiled_call_impl = call


def is_compiled(fast: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Return whether `fast`, a model that compiled() returned, was actually compiled."""
    return hasattr(fast, "_orig_mod") or any(
        block._compiled_call_impl is not None for block in blocks
    )


def _uncompiled(model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
    for block in blocks:
        block._compiled_call_impl = None
    return model
