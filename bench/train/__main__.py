"""Measures training on one CPU thread: tokens per CPU second, and peak memory, beside upstream nanochat.

python -m bench.train --quick            # ours alone, uncompiled and compiled; 50 seconds
python -m bench.train --upstream DIR     # DIR: a checkout of karpathy/nanochat

What is compared: our step eager and compiled, upstream's step in fp32 eager (its default) and at its best, and the bare
matrix products of a step, which bound its speed. How: 4 layers, 256 channels, 4,096 tokens a step; every variant is a
process with one thread, and they take turns of a few steps, so that a busy machine slows them equally. The median step
counts, in CPU seconds. bench.multiplier compares what both sides learn, and bench.train.ranks measures several ranks.
"""

import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.processes import check_at_least, check_checkout
from bench.text import make_rows, standard_library
from bench.train.variants import Plan, Variant, flops_per_token, training
from bench.training import D4
from nanochat import device
from nanochat.common import UserError, base_dir, log, run
from nanochat.platforms import host
from nanochat.train import sizes

STEP_TOKENS = 4096
STEPS_PER_TURN = 2
QUICK_TEXT = 2_000_000  # characters: enough for a vocabulary of 4,096, and trained on in a second
LONG_LENGTH, LONG_ROWS = 2048, 32  # the pass whose memory is compared: upstream's defaults


@dataclass(frozen=True)
class Config:
    """Print training speed on one CPU thread as a table, and one JSON object on the last line."""

    quick: bool = False
    """measure ours alone in its default format for a few rounds, so that it ends within 50 seconds.
    The first time, compiling takes about a minute more"""
    upstream: Path | None = None
    """folder of a checkout of karpathy/nanochat to measure beside ours; default: ours alone"""
    rounds: int = 8
    """turns of each variant, two timed steps per turn; more rounds give steadier medians"""


@dataclass
class Measured:
    """What was measured of a variant."""

    parameters: int
    losses: list[float]
    compile_seconds: float = 0.0  # CPU seconds
    seconds: list[float] = field(default_factory=list)  # CPU seconds of each step
    peak_bytes: int = 0

    @property
    def step_seconds(self) -> float:
        """The CPU seconds of the median step."""
        return median(self.seconds)


Results = Mapping[Variant, Measured]


# --- measuring -------------------------------------------------------------------------------------


def variants(cfg: Config, compiler_missing: str, dtype: str) -> list[Variant]:
    """Return the variants to measure; `dtype` is this CPU's own format."""
    if compiler_missing:
        log(f"no variant is compiled: {compiler_missing}")
    compiles = not compiler_missing
    chosen = [Variant("matmuls", dtype), Variant("ours", dtype)]
    if compiles:
        chosen.append(Variant("ours", dtype, compiled=True))
    if cfg.upstream is not None:
        chosen.append(Variant("upstream", "float32"))
        chosen.append(Variant("upstream", dtype, compiled=compiles))
    return list(dict.fromkeys(chosen))


def measure(
    chosen: Sequence[Variant], plan: Plan, rounds: int, upstream: Path | None = None
) -> dict[Variant, Measured]:
    """Let the variants take turns of a few steps."""
    results: dict[Variant, Measured] = {}
    with contextlib.ExitStack() as stack:
        processes = {
            variant: stack.enter_context(training(variant, plan, upstream)) for variant in chosen
        }
        for variant, process in processes.items():
            results[variant] = Measured(**process.answer())
            log(f"ready: {variant.name}")
        for _ in range(rounds):
            for variant, process in processes.items():
                answer = process.ask({"name": "steps", "count": STEPS_PER_TURN})
                result = results[variant]
                result.seconds += answer["seconds"]
                result.losses += answer["losses"]
                result.peak_bytes = answer["peak_bytes"]
    return results


def memory(ours: Variant, theirs: Variant, plan: Plan, upstream: Path) -> dict[str, Any]:
    """Compare the peak memory of a step on long rows; return shares of upstream's.

    Both sides compute the step in one pass, as upstream's base_train does by default. Ours is measured once more in
    the passes that our base_train takes by default on a CPU.
    """
    compute = device.compute_init("cpu")
    batch = sizes.batch(plan.tokens_per_step, "auto", plan.shape, 0, None, "", compute)
    peaks = []
    for variant, pass_rows in (
        (ours, None),
        (ours, batch.device_batch_size),
        (theirs, None),
    ):
        single = replace(plan, warmup=1, pass_rows=pass_rows)
        peaks.append(measure([variant], single, 1, upstream)[variant].peak_bytes)
    one_pass, default_passes, theirs_peak = peaks
    rows = f"{plan.rows_per_step} rows of {plan.shape.sequence_len:,} tokens"
    log(
        f"peak memory of a step of {rows}: ours in one pass {one_pass / 1e6:,.0f} MB, in passes of "
        f"{batch.device_batch_size} rows {default_passes / 1e6:,.0f} MB; upstream {theirs_peak / 1e6:,.0f} MB"
    )
    return {
        "memory_rows": rows,
        "memory_vs_upstream": round(one_pass / theirs_peak, 3),
        "memory_by_default_vs_upstream": round(default_passes / theirs_peak, 3),
    }


# --- figures ---------------------------------------------------------------------------------------


def fastest(results: Results, side: str) -> Variant:
    """Return the variant of a side that needs the fewest CPU seconds per step."""
    candidates = [variant for variant in results if variant.side == side]
    return min(candidates, key=lambda variant: results[variant].step_seconds)


def matmul_speed(results: Results, plan: Plan) -> float:
    """Return the FLOP/s of matrix products in the shapes of this model."""
    products = results[fastest(results, "matmuls")]
    return 6 * products.parameters * plan.tokens_per_step / products.step_seconds


def figures(results: Results, plan: Plan) -> dict[str, Any]:
    """Return the JSON object: our fastest variant beside the bare products and beside upstream.

    The `vs_` figures are ratios of tokens per CPU second. Upstream's default is eager fp32; its best is its fastest
    variant.
    """
    best = fastest(results, "ours")
    ours = results[best]
    speed = plan.tokens_per_step / ours.step_seconds
    peak = matmul_speed(results, plan)
    eager = {variant: result for variant, result in results.items() if not variant.compiled}
    own_eager = eager[fastest(eager, "ours")]
    summary: dict[str, Any] = {
        "benchmark": "train",
        "variant": best.name,
        "tokens_per_cpu_second": round(speed, 1),
        "share_of_matmul_peak": round(speed * flops_per_token(plan.shape) / peak, 4),
        "matmul_gflops": round(peak / 1e9, 1),
        "eager_tokens_per_cpu_second": round(plan.tokens_per_step / own_eager.step_seconds, 1),
    }
    default = results.get(Variant("upstream", "float32"))
    if default is not None:
        theirs = results[fastest(results, "upstream")]
        summary["vs_upstream_default"] = round(default.step_seconds / ours.step_seconds, 3)
        summary["vs_upstream_best"] = round(theirs.step_seconds / ours.step_seconds, 3)
    return summary


def table(results: Results, plan: Plan) -> str:
    """Return one line per variant."""
    peak = matmul_speed(results, plan)
    titles = ("CPU s/step", "tokens/CPU s", "of matmuls", "peak MB", "compile s")
    lines = [f"{'variant':<28}" + "".join(f"{title:>14}" for title in titles)]
    for variant, result in results.items():
        speed = plan.tokens_per_step / result.step_seconds
        share = speed * flops_per_token(plan.shape) / peak
        if variant.side == "matmuls":
            share = 1.0
        losses = f"  loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}"
        lines.append(
            f"{variant.name:<28}{result.step_seconds:>14.3f}{speed:>14,.0f}{share:>14.1%}"
            f"{result.peak_bytes / 1e6:>14.0f}{result.compile_seconds:>14.1f}{losses}"
        )
    return "\n".join(lines)


# --- command line ----------------------------------------------------------------------------------


def check(cfg: Config) -> None:
    """Raise UserError for flags that cannot be measured."""
    if cfg.quick and cfg.upstream is not None:
        raise UserError(
            "--quick measures ours alone, so it cannot be used with --upstream; leave out --quick or --upstream",
            exit_code=2,
        )
    check_at_least(1, rounds=cfg.rounds)
    if cfg.upstream is not None:
        check_checkout("--upstream", cfg.upstream)


def main(cfg: Config) -> None:
    """Make the rows, measure and print."""
    check(cfg)
    host.use_compile_cache(base_dir())  # both sides compile into this folder
    compute = device.compute_init("cpu")
    dtype = str(compute.platform.best_dtype()[0]).removeprefix("torch.")
    chosen = variants(cfg, device.compiler_missing(compute), dtype)
    with tempfile.TemporaryDirectory() as folder:
        text = standard_library(QUICK_TEXT if cfg.quick else None)
        rows = Path(folder) / "rows"
        make_rows(rows, D4.vocab_size, D4.sequence_len, text)
        plan = Plan(D4, rows, STEP_TOKENS // D4.sequence_len, warmup=1 if cfg.quick else 3)
        rounds = 3 if cfg.quick else cfg.rounds
        results = measure(chosen, plan, rounds, cfg.upstream)
        log(f"rows of {text.about}; the median of {rounds * STEPS_PER_TURN} steps")
        log(table(results, plan))
        result = figures(results, plan)
        if cfg.upstream is not None:
            long_shape = replace(D4, sequence_len=LONG_LENGTH)
            make_rows(rows, D4.vocab_size, LONG_LENGTH, text)
            long = replace(plan, shape=long_shape, rows_per_step=LONG_ROWS)
            ours, theirs = fastest(results, "ours"), fastest(results, "upstream")
            result |= memory(ours, theirs, long, cfg.upstream)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)
