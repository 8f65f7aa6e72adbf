"""Measures training on one CPU thread beside upstream nanochat: speed in CPU seconds, learning, memory.

python -m bench.train --quick            # ours alone, uncompiled and compiled; 50 seconds besides a first compilation
python -m bench.train --upstream DIR     # DIR: a checkout of karpathy/nanochat
python -m bench.train --make-rows DIR    # only write the rows to train on; --rows DIR uses them again

Every variant runs in its own process. The variants take turns, a few steps each, so that a busy machine slows them
equally.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.ranks.group import D4, wire_bytes_per_parameter
from bench.train import quality
from bench.train.rows import check_rows, make_rows, standard_library
from bench.train.worker import Measured, Plan, Variant, flops_per_token, measure
from bench.upstream import check_checkout
from nanochat import device
from nanochat.common import UserError, base_dir, log, run
from nanochat.platforms import host

STEP_TOKENS = 4096
MEMORY_LENGTH, MEMORY_ROWS = (
    2048,
    32,
)  # the pass on which memory is compared; both numbers are upstream's defaults
QUICK_TEXT = 2_000_000  # characters: enough for a vocabulary of 4,096, and trained on in a second


# --- figures ----------------------------------------------------------------------------------------


def fastest(measured: Mapping[Variant, Measured], side: str) -> Variant:
    """The variant of this side that needs the fewest CPU seconds per step."""
    return min((v for v in measured if v.side == side), key=lambda v: measured[v].step_seconds)


def fastest_eager(measured: Mapping[Variant, Measured]) -> Variant:
    """Our uncompiled variant that needs the fewest CPU seconds per step."""
    return fastest({v: m for v, m in measured.items() if not v.compiled}, "ours")


def matmul_speed(measured: Mapping[Variant, Measured], plan: Plan) -> float:
    """FLOP/s of matmuls with the shapes of this model, each weighted by its FLOPs."""
    bare = next(measured[v] for v in measured if v.side == "matmuls")
    return 6 * bare.parameters * plan.rows_per_step * plan.shape.sequence_len / bare.step_seconds


def figures(measured: Mapping[Variant, Measured], plan: Plan) -> dict[str, Any]:
    """The JSON object: our fastest variant beside the matmuls and, if it ran, beside upstream.

    The `vs_` figures are ratios of tokens per CPU second. Upstream's default is eager fp32; its best is its fastest
    variant.
    """
    tokens = plan.rows_per_step * plan.shape.sequence_len
    best = fastest(measured, "ours")
    own = measured[best]
    peak = matmul_speed(measured, plan)
    result: dict[str, Any] = {
        "benchmark": "train",
        "variant": best.name,
        "tokens_per_cpu_second": round(tokens / own.step_seconds, 1),
        "share_of_matmul_peak": round(
            flops_per_token(plan.shape) * tokens / (own.step_seconds * peak), 4
        ),
        "matmul_gflops": round(peak / 1e9, 1),
        "eager_tokens_per_cpu_second": round(
            tokens / measured[fastest_eager(measured)].step_seconds, 1
        ),
    }
    if own.compile_seconds:
        result["compile_cpu_seconds"] = round(own.compile_seconds, 1)
    if any(v.side == "upstream" for v in measured):
        theirs = measured[fastest(measured, "upstream")]
        default = measured[Variant("upstream", "float32")]
        result["vs_upstream_default"] = round(default.step_seconds / own.step_seconds, 3)
        result["vs_upstream_best"] = round(theirs.step_seconds / own.step_seconds, 3)
    return result


def table(measured: Mapping[Variant, Measured], plan: Plan) -> str:
    """One line per variant."""
    tokens = plan.rows_per_step * plan.shape.sequence_len
    peak = matmul_speed(measured, plan)
    lines = [
        f"{'variant':<28}{'CPU s/step':>11}{'tokens/CPU s':>14}{'of matmuls':>12}{'peak MB':>9}{'parameters':>12}  loss"
    ]
    for variant, m in measured.items():
        if variant.side == "matmuls":
            lines.append(
                f"{'matmuls ' + variant.dtype:<28}{m.step_seconds:>11.3f}{peak / 1e9:>20.1f} GFLOP/s"
            )
            continue
        speed = tokens / m.step_seconds
        share = f"{100 * speed * flops_per_token(plan.shape) / peak:.1f} %"
        lines.append(
            f"{variant.name:<28}{m.step_seconds:>11.3f}{speed:>14,.0f}{share:>12}{m.peak_bytes / 1e6:>9.0f}"
            f"{m.parameters:>12,}  {m.losses[0]:.3f} -> {m.losses[-1]:.3f} in {len(m.losses)} steps"
        )
    return "\n".join(lines)


# --- command line -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Print training speed on one CPU thread as a table, and as one JSON object on the last line."""

    quick: bool = False
    """measure ours alone in its default format for a few rounds, so that it ends within 50 seconds.
    The first time, compiling takes about a minute more"""
    upstream: Path | None = None
    """folder of a checkout of karpathy/nanochat to measure beside ours; default: ours alone"""
    make_rows: Path | None = None
    """write the rows to this folder and end, without measuring"""
    rows: Path | None = None
    """folder with rows written by --make-rows; default: make them in a temporary folder"""
    rounds: int = 8
    """turns of each variant, two timed steps per turn; more rounds give steadier medians"""
    steps: int = 200
    """steps of the runs that are compared by what they learn; 0 skips these runs"""
    scales: tuple[float, ...] = (0.35, 1.0, 2.0, 3.0)
    """learning rates of upstream's runs as multiples of its defaults; each is a process of about 1.3 GB"""


def check(cfg: Config) -> None:
    """Raise UserError for flags that cannot be measured."""
    if cfg.quick and cfg.upstream is not None:
        raise UserError(
            "--quick measures ours alone, so it cannot be used with --upstream; leave out --quick or --upstream",
            exit_code=2,
        )
    if cfg.rounds < 1:
        raise UserError(f"--rounds must be at least 1, got {cfg.rounds}", exit_code=2)
    if cfg.steps < 0:
        raise UserError(f"--steps must be at least 0, got {cfg.steps}", exit_code=2)
    if not cfg.scales or min(cfg.scales) <= 0:
        raise UserError(
            f"--scales must be one or more numbers above 0, got {cfg.scales}", exit_code=2
        )
    if cfg.upstream is None:
        return
    check_checkout("--upstream", cfg.upstream)


def variants(cfg: Config, compiler_missing: str, default: str = "bfloat16") -> list[Variant]:
    """The variants to measure: fp32, and `default`, this CPU's own format. Without a compiler none is compiled."""
    if compiler_missing:
        log(f"no variant is compiled: {compiler_missing}")
    compiled = not compiler_missing
    own = [Variant("ours", default)] + ([Variant("ours", default, True)] if compiled else [])
    if cfg.quick:
        return [Variant("matmuls", default), *own]
    chosen = [Variant("matmuls", default), Variant("ours", "float32"), *own]
    if cfg.upstream is not None:
        chosen += [Variant("upstream", "float32"), Variant("upstream", default, compiled)]
    return list(dict.fromkeys(chosen))


def main(cfg: Config) -> None:
    """Make the rows, or measure training on them."""
    check(cfg)
    length, vocab_size = D4.sequence_len, D4.vocab_size
    if cfg.make_rows is not None:
        about = make_rows(cfg.make_rows, vocab_size, length, standard_library())
        log(
            f"{about['rows']:,} rows of {about['row_tokens']} tokens in {cfg.make_rows}: {about['text']}"
        )
        print(json.dumps({"benchmark": "train", **about}))
        return
    torch.set_num_threads(1)
    host.use_compile_cache(base_dir())  # both sides compile into this folder
    compute = device.compute_init("cpu")
    default = str(compute.platform.best_dtype()[0]).removeprefix("torch.")
    chosen = variants(cfg, device.compiler_missing(compute), default)
    with tempfile.TemporaryDirectory() as temporary:
        rows = cfg.rows or Path(temporary)
        if cfg.rows is not None:
            about = check_rows(rows, vocab_size, length)
        else:
            about = make_rows(
                rows, vocab_size, length, standard_library(QUICK_TEXT if cfg.quick else None)
            )
        log(f"{about['rows']:,} rows of {about['row_tokens']} tokens: {about['text']}")
        plan = Plan(D4, rows, STEP_TOKENS // length, cfg.rounds, steps=2)
        if cfg.quick:
            plan = replace(plan, rounds=3, steps=1, warmup=1)
        peer = cfg.upstream.resolve() if cfg.upstream else None
        measured = measure(chosen, plan, peer)
        timed = plan.rounds * plan.steps
        log(
            f"4 layers, 256 channels, one thread each, median of {timed} steps of {STEP_TOKENS:,} tokens each"
        )
        log(table(measured, plan))
        result = figures(measured, plan)
        if peer is not None:
            result |= beside(
                peer, fastest(measured, "ours"), fastest(measured, "upstream"), cfg, plan
            )
    result["wire_bytes_per_parameter"] = round(
        wire_bytes_per_parameter(), 3
    )  # counted on four ranks
    print(json.dumps(result), flush=True)


def beside(peer: Path, ours: Variant, upstream: Variant, cfg: Config, plan: Plan) -> dict[str, Any]:
    """Compare what the fastest variants of both sides learn in the same steps, and their memory on long rows."""
    result = {}
    if cfg.steps:
        chosen = quality.runs(ours, upstream, cfg.scales)
        learned = quality.learn(chosen, replace(plan, horizon=cfg.steps, warmup=0), peer)
        log(
            f"{cfg.steps} steps of {STEP_TOKENS:,} tokens, bits per byte of {plan.held_out} held-out rows"
        )
        log(quality.table(learned))
        result |= quality.figures(learned)
    with tempfile.TemporaryDirectory() as temporary:
        shape = replace(plan.shape, sequence_len=MEMORY_LENGTH)
        make_rows(Path(temporary), shape.vocab_size, MEMORY_LENGTH, standard_library())
        return result | quality.memory(
            ours,
            upstream,
            replace(plan, shape=shape, rows=Path(temporary), rows_per_step=MEMORY_ROWS),
            peer,
        )


if __name__ == "__main__":
    run(main, Config, __doc__)
