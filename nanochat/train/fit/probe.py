"""Implements --device_batch_size=auto on accelerators: tries larger passes until memory is full."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn as nn

from nanochat.common import UserError, log, tr
from nanochat.device import Compute
from nanochat.model import Model
from nanochat.optim import Optimizers
from nanochat.runtime import parallel
from nanochat.train.fit import memory
from nanochat.train.sizes import Batch


def fit(batch: Batch, model: Model, optimizers: Optimizers, length: int, compute: Compute) -> Batch:
    """Return the split of a step into the largest passes that fit into the memory of every rank.

    Every rank must call this. If the user gave the number of rows or passes, or on a CPU, `batch` is
    returned unchanged. The model is left unchanged. Raises
    UserError as largest() does, for example if not even one row fits.
    """
    if not batch.probe:
        return batch
    module = cast(nn.Module, model)
    rows_of_rank = batch.rows_per_step // compute.world_size
    optimizers.state()  # allocates AdamW's moments, so that their memory is taken before the trials

    def attempt(rows: int) -> int:
        """Return the peak memory of a pass of `rows` rows, in bytes.

        If a step has several passes, run two of them, because their gradients add up.
        """
        memory.start_watch(compute)
        passes = min(rows_of_rank // rows, 2)
        tokens = torch.zeros((rows, length), dtype=torch.long, device=compute.device)
        for number in range(passes):
            parallel.sync_gradients(module, number == passes - 1)
            module(tokens, tokens, "sum").backward()
        return memory.peak(compute)

    try:
        rows, why = largest(doublings(rows_of_rank), attempt, memory.budget(compute), compute)
    finally:
        optimizers.zero_grad()
        memory.start_watch(compute)
    passes = rows_of_rank // rows
    log(
        tr(
            "device_batch_size: {rows} rows a pass, {passes} pass(es) a step ({why})",
            rows=rows,
            passes=passes,
            why=why,
        )
    )
    return replace(batch, device_batch_size=rows, passes=passes, probe=False)


def doublings(rows: int) -> list[int]:
    """Return divisors of `rows` to try as pass sizes, each at least twice the one before."""
    sizes = [1]
    for size in range(2, rows + 1):
        if rows % size == 0 and size >= 2 * sizes[-1]:
            sizes.append(size)
    return sizes


def largest(
    sizes: Sequence[int], attempt: Callable[[int], int], budget: int, compute: Compute
) -> tuple[int, str]:
    """Return the largest of `sizes` that fits the budget on every rank, and why none is larger.

    Each `attempt` returns a peak in bytes, on which the ranks then decide together. From the third
    attempt on, the search stops if extrapolating the last two shows that the next size would not
    fit, because no rank may run out of memory alone while the others wait for it. If the second
    size is more than twice the first, twice the first is tried in between, only to extrapolate.
    Raises UserError if one of several ranks still runs out of memory, or if not even the smallest
    size fits.
    """
    budget = parallel.least(budget, compute)
    trials = list(sizes)
    if len(trials) > 1 and trials[1] > 2 * trials[0]:
        trials.insert(1, 2 * trials[0])
    tried: list[tuple[int, int]] = []  # (size, the most bytes that any rank took)
    found = trials[0]
    for size in trials:
        if len(tried) >= 2:
            expected = _expected(tried, size)
            if expected > budget:
                return found, tr(
                    "{size} would take {expected} of {budget}",
                    size=size,
                    expected=_gib(expected),
                    budget=_gib(budget),
                )
        try:
            peak_bytes = attempt(size)
        except RuntimeError as failure:
            if not memory.ran_out(failure):
                raise
            if tried and compute.world_size == 1:
                return found, tr("{size} ran out of memory", size=size)
            raise memory.advice(size, size) from failure
        peak_bytes = -parallel.least(-peak_bytes, compute)
        if peak_bytes > budget and not tried:
            raise UserError(
                tr(
                    "one row takes {taken}, but only {budget} of this device may be taken: "
                    "its memory may be in use by another process. Free it, or take "
                    "--shard=full, more devices, or a smaller model.",
                    taken=_gib(peak_bytes),
                    budget=_gib(budget),
                )
            )
        if peak_bytes > budget:
            return found, tr(
                "{size} took {peak} of {budget}",
                size=size,
                peak=_gib(peak_bytes),
                budget=_gib(budget),
            )
        tried.append((size, peak_bytes))
        if size in sizes:
            found = size
    return found, tr("a rank's rows of a step")


def _expected(tried: Sequence[tuple[int, int]], size: int) -> float:
    """Return the bytes of a pass of `size` rows, extrapolated from the last two passes tried."""
    (small, small_bytes), (large, large_bytes) = tried[-2:]
    slope = (large_bytes - small_bytes) / (large - small)
    return large_bytes + slope * (size - large)


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
