"""How long, how large and how fast to train: pure functions of sizes and steps.

The constants are upstream's, tuned for a 12-layer model at 2^19 tokens a step. dev/LOG.md has those fitted here.
"""

import math
from dataclasses import dataclass

from nanochat.common import UserError

REFERENCE_BATCH = 2**19  # tokens a step at which the learning rates were tuned
REFERENCE_SCALING_PARAMETERS = 110_100_480  # matrices and head of the 12-layer reference at vocabulary 32,768


@dataclass(frozen=True)
class Horizon:
    """How long a run is."""

    steps: int
    reason: str


def horizon(
    num_iterations: int | None,
    target_flops: float | None,
    target_param_data_ratio: float,
    flops_per_token: int,
    scaling_parameters: int,
    tokens_per_step: int,
) -> Horizon:
    """The number of steps to train: the given one, else from a FLOP budget, else from tokens per scaling parameter."""
    if num_iterations is not None and num_iterations < 1:
        raise UserError(f"num_iterations must be at least 1, got {num_iterations}", exit_code=2)
    if num_iterations is not None:
        return Horizon(num_iterations, "given")
    if target_flops is not None:
        steps = round(target_flops / (flops_per_token * tokens_per_step))
        return Horizon(max(steps, 1), f"{target_flops:.3g} FLOPs at {flops_per_token:,} a token")
    tokens = target_param_data_ratio * scaling_parameters
    return Horizon(max(int(tokens // tokens_per_step), 1), f"{target_param_data_ratio:g} tokens per scaling parameter")


def batch_tokens(tokens: float, reference_tokens: float) -> int:
    """Tokens per step for a horizon, a power of two that grows as the horizon to the power 0.383.

    Source: Power Lines, arXiv 2505.13738.
    """
    if tokens <= 0:
        raise UserError(f"target_param_data_ratio must be above 0, got a horizon of {tokens:g} tokens", exit_code=2)
    return 2 ** round(math.log2(REFERENCE_BATCH * (tokens / reference_tokens) ** 0.383))


def rate_scale(tokens_per_step: int) -> float:
    """The factor on all learning rates for a batch.

    Above the reference batch the factor is the square root, as usual. Below it the factor stays 1: upstream's square
    root starves small batches (4 layers, 200 steps of 4,096 tokens: 2.076 bits per byte with it, 1.549 without).
    """
    return max(1.0, math.sqrt(tokens_per_step / REFERENCE_BATCH))


def scalar_scale(tokens_per_step: int) -> float:
    """An additional factor on the rate of the scalars: below the reference batch, upstream's square root.

    Without this factor the scalars overshoot: x0 turns negative and the gradient norm jumps within ten steps (2 layers,
    60 steps of 4,096 tokens: 0.906 bits per byte at a rate of 0.5, 0.863 at 0.1 and at 0.02). The backout passes 1
    within 64 steps, and the loss rises from 5 to 15 (2 layers, value embeddings at half their rate).
    """
    return min(1.0, math.sqrt(tokens_per_step / REFERENCE_BATCH))


def matrix_scale(steps: int) -> float:
    """An additional factor on Muon's rate: 2 up to 200 steps (where it was fitted), falling to 1 at 400 steps.

    The size of a Muon update does not depend on the size of the gradient, so in a short run each step must move
    further. At 600 steps a factor of 1.3 was already worse than 1.
    """
    return min(2.0, max(1.0, 400 / steps))


def table_momentum(steps: int) -> float:
    """AdamW's first beta for embeddings and head: 0.8, or lower in runs of less than 1,000 steps, and 0 at 200 steps.

    Beta averages over 1 / (1 - beta) steps; here the average spans at most a 200th of the run (fitted at 200 steps).
    """
    return min(0.8, max(0.0, 1 - 200 / steps))


def weight_decay(base: float, tokens_per_step: int, tokens: float, reference_tokens: float) -> float:
    """Weight decay for a horizon, so that the averaging time of the weights keeps its share of the run.

    B / (rate x decay x D) is held constant (arXiv 2405.13698). The result is at most twice `base`.
    """
    ratio = (tokens_per_step / REFERENCE_BATCH) / rate_scale(tokens_per_step)
    return min(base * ratio * reference_tokens / tokens, 2 * base)


def warmup_steps(asked: int | None, steps: int) -> int:
    """Steps of linear warmup: the given number, else 40 but at most a twentieth of the run (fitted at 200 steps)."""
    return asked if asked is not None else min(40, max(steps // 20, 1))


def trapezoid(step: int, steps: int, warmup: int, warmdown_ratio: float, final: float) -> float:
    """Learning-rate factor of a step (0-based): linear up, flat, linear down to `final` over the last part."""
    if step < warmup:
        return (step + 1) / warmup
    down = round(warmdown_ratio * steps)
    left = steps - step
    if left >= down or down == 0:
        return 1.0
    return final + (1 - final) * left / down


def cosine(step: int, steps: int, warmup_ratio: float) -> float:
    """The factor on the learning rates at `step`: rising in a line over a share of the run, then half a cosine to 0."""
    warmup = warmup_ratio * steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def momentum(step: int, steps: int, warmdown_ratio: float) -> float:
    """Muon's momentum: rises from 0.85 to 0.97 over 400 steps (or a quarter of a short run), falls to 0.90 in warmdown.

    In runs of less than 667 steps the peak is lower: the momentum then averages over a twentieth of the run, 10 steps
    of 200 (fitted there), and ends 0.05 below its peak if that is below 0.90.
    """
    high = min(0.97, max(0.85, 1 - 20 / steps))
    low = max(0.85, min(0.90, high - 0.05))
    rise = min(400, max(steps // 4, 1))
    down = round(warmdown_ratio * steps)
    peak = 0.85 + (high - 0.85) * min(step / rise, 1.0)
    left = steps - step
    if left >= down or down == 0:
        return peak
    return low + (peak - low) * left / down


def decay_factor(step: int, steps: int) -> float:
    """Factor on the weight decay: a half cosine from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def micro_batches(tokens_per_step: int, row_tokens: int, device_batch_size: int, world_size: int) -> tuple[int, int]:
    """(rows per rank and pass, passes per step) for a step of `tokens_per_step`.

    `device_batch_size` is an upper bound: it is lowered where all ranks together would exceed the step, and to a
    divisor of a rank's share. Only a remainder is an error.
    """
    if device_batch_size < 1:
        raise UserError(f"device_batch_size must be at least 1, got {device_batch_size}", exit_code=2)
    if tokens_per_step < 1 or tokens_per_step % (row_tokens * world_size):
        raise UserError(
            f"total_batch_size must be a multiple of {row_tokens * world_size:,} (one row of {row_tokens:,} tokens on "
            f"each of {world_size} rank(s)), got {tokens_per_step:,}",
            exit_code=2,
        )
    rows = tokens_per_step // (row_tokens * world_size)
    per_pass = next(size for size in range(min(device_batch_size, rows), 0, -1) if rows % size == 0)
    return per_pass, rows // per_pass
