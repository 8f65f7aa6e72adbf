"""Measures training on one CPU thread beside upstream: tokens per CPU second.

python -m bench.train --quick            # ours alone, uncompiled and compiled; 50 seconds
python -m bench.train --upstream DIR     # DIR: a checkout of karpathy/nanochat

What is compared: our step eager and compiled, and upstream's step in fp32 eager (its default) and
at its best. How: 4 layers, 256 channels, 4,096 tokens a step; every variant is a process with one
thread, and they take turns of a few steps, so that a busy machine slows them equally. The median
step counts, in CPU seconds. bench.multiplier compares what both sides learn, and bench.train.ranks
measures several ranks.
"""

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import tables
from bench.processes import (
    STEP_TITLES,
    Steps,
    check_at_least,
    check_peers,
    own_dtype,
    train_in_turns,
)
from bench.text import make_rows, standard_library
from bench.train.variants import Plan, Variant, training
from bench.training import D4
from nanochat import device
from nanochat.common import base_dir, log
from nanochat.data.command_line import run
from nanochat.platforms import host

STEP_TOKENS = 4096
STEPS_PER_TURN = 2
QUICK_TEXT = 2_000_000  # characters: enough for a vocabulary of 4,096, and trained on in a second


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


Results = Mapping[Variant, Steps]


def variants(cfg: Config, compiler_missing: str, dtype: str) -> list[Variant]:
    """Return the variants to measure; `dtype` is this CPU's own format."""
    if compiler_missing:
        log(f"no variant is compiled: {compiler_missing}")
    compiles = not compiler_missing
    chosen = [Variant("ours", dtype)]
    if compiles:
        chosen.append(Variant("ours", dtype, compiled=True))
    if cfg.upstream is not None:
        chosen.append(Variant("upstream", "float32"))
        chosen.append(Variant("upstream", dtype, compiled=compiles))
    return list(dict.fromkeys(chosen))


def measure(
    chosen: Sequence[Variant], plan: Plan, rounds: int, upstream: Path | None = None
) -> dict[Variant, Steps]:
    """Let the variants take turns of a few steps."""
    with contextlib.ExitStack() as stack:
        processes = {
            variant: stack.enter_context(training(variant, plan, upstream)) for variant in chosen
        }
        return train_in_turns(processes, STEPS_PER_TURN, rounds)


def fastest(results: Results, side: str) -> Variant:
    """Return the variant of a side that needs the fewest CPU seconds per step."""
    candidates = [variant for variant in results if variant.side == side]
    return min(candidates, key=lambda variant: results[variant].step_seconds)


def figures(results: Results, plan: Plan) -> dict[str, Any]:
    """Return the JSON object: our fastest variant, and its speed beside upstream's.

    The `vs_` figures are ratios of tokens per CPU second. Upstream's default is eager fp32; its
    best is its fastest variant.
    """
    best = fastest(results, "ours")
    ours = results[best]
    eager = {variant: result for variant, result in results.items() if not variant.compiled}
    own_eager = eager[fastest(eager, "ours")]
    summary: dict[str, Any] = {
        "variant": best.name,
        "tokens_per_cpu_second": ours.speed(plan.tokens_per_step),
        "eager_tokens_per_cpu_second": own_eager.speed(plan.tokens_per_step),
    }
    default = results.get(Variant("upstream", "float32"))
    if default is not None:
        theirs = results[fastest(results, "upstream")]
        summary["vs_upstream_default"] = default.step_seconds / ours.step_seconds
        summary["vs_upstream_best"] = theirs.step_seconds / ours.step_seconds
    return summary


def main(cfg: Config) -> None:
    """Make the rows, measure and print."""
    check_peers(cfg.quick, upstream=cfg.upstream)
    check_at_least(1, rounds=cfg.rounds)
    host.use_compile_cache(base_dir())  # both sides compile into this folder
    compute = device.compute_init("cpu")
    dtype = own_dtype()
    chosen = variants(cfg, device.compiler_missing(compute), dtype)
    rounds = 3 if cfg.quick else cfg.rounds
    with tempfile.TemporaryDirectory() as folder:
        text = standard_library(QUICK_TEXT if cfg.quick else None)
        make_rows(Path(folder), D4.vocab_size, D4.sequence_len, text)
        plan = Plan(D4, Path(folder), STEP_TOKENS // D4.sequence_len, warmup=1 if cfg.quick else 3)
        results = measure(chosen, plan, rounds, cfg.upstream)
    log(f"rows of {text.about}; the median of {rounds * STEPS_PER_TURN} steps")
    tokens = plan.tokens_per_step
    rows = [[variant.name, *steps.cells(tokens)] for variant, steps in results.items()]
    tables.show(("variant", *STEP_TITLES), rows)
    tables.finish("train", figures(results, plan))


if __name__ == "__main__":
    run(main, Config, __doc__)
