"""Compares what short runs learn, how soon, and in how much memory: the half of bench.train that is not about speed.

Every run is a process. The runs take turns, a few steps each, so that their CPU seconds can be compared. Our run
follows base_train's rules for the batch and the horizon. Upstream's rule for the batch would make the learning rates
of so small a batch far too low, so upstream runs once at each of several scales of its rates, and its best run counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.train.worker import Plan, Variant, measure, workers
from nanochat import device
from nanochat.common import log
from nanochat.train import sizes

TURNS = 20  # per run; in the second half, our run measures the held-out rows after each turn


@dataclass
class Learned:
    """The learning curve of one run: (CPU seconds of the steps so far, bits per byte of the held-out rows)."""

    curve: list[tuple[float, float]] = field(default_factory=list)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte at the end of the run."""
        return self.curve[-1][1]

    @property
    def seconds(self) -> float:
        """CPU seconds of all steps."""
        return self.curve[-1][0]


def runs(ours: Variant, upstream: Variant | None, scales: Sequence[float]) -> list[Variant]:
    """The runs to compare: ours, and upstream's at each scale of its learning rates."""
    return [ours, *(replace(upstream, scale=scale) for scale in scales if upstream is not None)]


def learn(variants: Sequence[Variant], plan: Plan, peer: Path | None) -> dict[Variant, Learned]:
    """Train all variants for `plan.horizon` steps, taking turns."""
    assert plan.horizon is not None and plan.warmup == 0
    per_turn = -(-plan.horizon // TURNS)
    learned = {variant: Learned() for variant in variants}
    seconds = dict.fromkeys(variants, 0.0)
    with workers(variants, plan, peer) as started:
        for worker in started:
            worker.answer()
        for first in range(0, plan.horizon, per_turn):
            steps = min(per_turn, plan.horizon - first)
            for worker in started:
                run = worker.variant
                seconds[run] += sum(worker.ask(steps)["seconds"])
                done = first + steps
                # In the first half, a measurement would cost time and decide nothing.
                if done == plan.horizon or (run.side == "ours" and 2 * done >= plan.horizon):
                    learned[run].curve.append((seconds[run], worker.bits_per_byte()))
            log(f"learning: step {first + steps} of {plan.horizon}")
    return learned


def seconds_to(run: Learned, goal: float) -> float | None:
    """CPU seconds until a run reaches `goal` bits per byte, interpolated between measurements; None if never."""
    if run.curve[0][1] <= goal:
        return run.curve[0][0]
    for (before, high), (after, low) in pairwise(run.curve):
        if low <= goal:
            return before + (after - before) * (high - goal) / (high - low)
    return None


def figures(learned: Mapping[Variant, Learned]) -> dict[str, Any]:
    """Our final bits per byte beside upstream's best run, and the share of that run's CPU seconds ours needs for it."""
    own = next(run for variant, run in learned.items() if variant.side == "ours")
    result: dict[str, Any] = {"bpb": round(own.bits_per_byte, 4)}
    theirs = [run for variant, run in learned.items() if variant.side == "upstream"]
    if theirs:
        best = min(theirs, key=lambda run: run.bits_per_byte)
        needed = seconds_to(own, best.bits_per_byte)
        result["bpb_minus_upstream_best"] = round(own.bits_per_byte - best.bits_per_byte, 4)
        result["time_to_bpb_vs_upstream_best"] = (
            None if needed is None else round(needed / best.seconds, 3)
        )
    return result


def table(learned: Mapping[Variant, Learned]) -> str:
    """One line per run."""
    lines = [f"{'run':<44}{'CPU s':>9}{'bits per byte':>15}"]
    lines += [
        f"{v.name:<44}{run.seconds:>9.1f}{run.bits_per_byte:>15.4f}" for v, run in learned.items()
    ]
    return "\n".join(lines)


def memory(ours: Variant, upstream: Variant, plan: Plan, peer: Path | None) -> dict[str, Any]:
    """The peak memory of each side's process over two steps of `plan`; the processes run one after the other.

    Both sides compute the step in one pass, as upstream's base_train does by default. Ours is measured once more in
    the passes that our base_train takes by default on a CPU."""
    tokens, compute = plan.rows_per_step * plan.shape.sequence_len, device.compute_init("cpu")
    few = sizes.batch(tokens, "auto", plan.shape, 0, None, "", compute).device_batch_size
    short = replace(plan, rounds=1, steps=1, warmup=1)
    own, split, theirs = (
        measure([variant], replace(short, pass_rows=rows), peer)[variant].peak_bytes
        for variant, rows in ((ours, None), (ours, few), (upstream, None))
    )
    rows = f"{plan.rows_per_step} rows of {plan.shape.sequence_len:,} tokens"
    log(
        f"peak memory of a step of {rows}: ours in one pass {own / 1e6:,.0f} MB, in passes of {few} rows "
        f"{split / 1e6:,.0f} MB; upstream in one pass {theirs / 1e6:,.0f} MB"
    )
    return {
        "memory_rows": rows,
        "memory_vs_upstream": round(own / theirs, 3),
        "memory_by_default_vs_upstream": round(split / theirs, 3),
    }
