"""How long, how large and how fast to train, as pure functions of sizes and steps.

The constants are upstream's, tuned for a 12-layer model at 2^19 tokens a step. dev/LOG.md describes
the ones that were fitted here.
"""

import math

from nanochat.common import UserError, tr

REFERENCE_BATCH = 2**19  # tokens per step at which the learning rates were tuned
# parameters in the matrices and the head of the 12-layer reference at vocabulary 32,768
REFERENCE_SCALING_PARAMETERS = 110_100_480
SHORT_RATIO = 2  # tokens per scaling parameter below which a run is short


def steps_for_flops(flops: float, flops_per_token: int, tokens_per_step: int) -> int:
    """Return the number of steps, at least 1, in which a run takes about `flops` FLOPs."""
    return max(round(flops / (flops_per_token * tokens_per_step)), 1)


def steps_for_ratio(ratio: float, scaling_parameters: int, tokens_per_step: int) -> int:
    """Return the number of steps, at least 1, that read `ratio` tokens per scaling parameter."""
    return max(int(ratio * scaling_parameters // tokens_per_step), 1)


def batch_tokens(tokens: float, reference_tokens: float) -> int:
    """Return the number of tokens per step, a power of two, for a run of `tokens` tokens.

    It grows as tokens^0.383, and is 2^19 (REFERENCE_BATCH) at `reference_tokens`. Source: Power
    Lines, arXiv 2505.13738. Raises UserError (exit code 2) if `tokens` is not positive.
    """
    if tokens <= 0:
        raise UserError(
            tr(
                "target_param_data_ratio must be above 0, got a horizon of {tokens:g} tokens",
                tokens=tokens,
            ),
            exit_code=2,
        )
    fitting = REFERENCE_BATCH * (tokens / reference_tokens) ** 0.383
    return 2 ** round(math.log2(fitting))


def shared_tokens(tokens: int, unit: int) -> int:
    """Return a number of tokens per step near `tokens`, a multiple of `unit`: a row on every rank.

    From 16 rows on, a rank has a multiple of eight. On seven ranks, the nearest number may be a
    prime number of rows, which only passes of one row divide. runs/sizes.sh has the same rule.
    """
    rows = max(round(tokens / unit), 1)
    if rows >= 16:
        rows = (rows + 4) // 8 * 8
    return rows * unit


def rate_scale(tokens_per_step: int) -> float:
    """Return the factor on all learning rates for steps of `tokens_per_step` tokens.

    Above the reference batch, it is the square root of the ratio of the batch sizes, as usual.
    Below, it stays 1: upstream's square root starves small batches (4 layers, 200 steps of 4,096
    tokens: 2.076 bits per byte with the square root, 1.549 without).
    """
    return max(1.0, math.sqrt(tokens_per_step / REFERENCE_BATCH))


def scalar_scale(tokens_per_step: int) -> float:
    """Return an additional factor on the learning rate of the scalars.

    Below the reference batch this is upstream's square root; above it, the factor is 1.

    Without this factor the scalars overshoot: x0 turns negative and the gradient norm jumps within
    ten steps (2 layers, 60 steps of 4,096 tokens: 0.906 bits per byte at a rate of 0.5, 0.863 at
    0.1 and at 0.02). The backout passes 1 within 64 steps, and the loss rises from 5 to 15 (2
    layers, value embeddings at half their rate).
    """
    return min(1.0, math.sqrt(tokens_per_step / REFERENCE_BATCH))


def matrix_scale(steps: int) -> float:
    """Return an additional factor on Muon's learning rate, which is higher in short runs.

    It is 2 up to 200 steps, where it was fitted, and falls to 1 at 400 steps.

    The size of a Muon update does not depend on the size of the gradient, so in a short run each
    step must move further. At 600 steps a factor of 1.3 was already worse than 1.
    """
    return min(2.0, max(1.0, 400 / steps))


def table_momentum(steps: int) -> float:
    """Return AdamW's first beta for the embeddings and the head.

    It is 0.8, but lower in runs of fewer than 1,000 steps, and 0 up to 200 steps.

    Beta averages over 1 / (1 - beta) steps; here the average spans at most a 200th of the run, or
    one step (fitted at 200 steps).
    """
    return min(0.8, max(0.0, 1 - 200 / steps))


def is_short(tokens: float, scaling_parameters: int) -> bool:
    """Return whether a run reads fewer than two tokens per scaling parameter of its model."""
    return tokens < SHORT_RATIO * scaling_parameters


def weight_decay(
    base: float, tokens_per_step: int, tokens: float, reference_tokens: float, short: bool = False
) -> float:
    """Return the weight decay for a run of `tokens` tokens, at most twice `base`.

    Up to that limit, tokens_per_step / (rate x decay x tokens) is constant (arXiv 2405.13698), so
    that the weights are averaged over the same share of every run. In a short run, whose weights
    still grow, the limit is two thirds of `base` (fitted at 3, 4 and 6 layers).
    """
    ratio = (tokens_per_step / REFERENCE_BATCH) / rate_scale(tokens_per_step)
    return base * min(ratio * reference_tokens / tokens, 2 / 3 if short else 2)


def warmup_steps(requested: int | None, steps: int) -> int:
    """Return the number of steps of linear warmup: `requested`, if it is given.

    By default there are 40, but at most a twentieth of the run (fitted at 200 steps) and at least
    1.
    """
    if requested is not None:
        return requested
    return min(40, max(steps // 20, 1))


def trapezoid(step: int, steps: int, warmup: int, warmdown_ratio: float, final: float) -> float:
    """Return the learning-rate factor of a step (0-based), for a trapezoidal schedule.

    The factor rises linearly over `warmup` steps, stays at 1, and falls linearly toward `final`
    over the last `warmdown_ratio` of the run.
    """
    if step < warmup:
        return (step + 1) / warmup
    warmdown_steps = round(warmdown_ratio * steps)
    steps_left = steps - step
    if steps_left >= warmdown_steps or warmdown_steps == 0:
        return 1.0
    return final + (1 - final) * steps_left / warmdown_steps


def cosine(step: int, steps: int, warmup_ratio: float) -> float:
    """Return the learning-rate factor of a step (0-based), for a cosine schedule.

    The factor rises linearly over the first `warmup_ratio` of the run, then falls toward 0 as half
    a cosine.
    """
    warmup = warmup_ratio * steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    decaying_steps = max(steps - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / decaying_steps))


def momentum(step: int, steps: int, warmdown_ratio: float) -> float:
    """Return Muon's momentum at a step.

    It rises from 0.85 to 0.97 over 400 steps, or over a quarter of a run of fewer than 1,600 steps,
    and falls toward 0.90 in the warmdown.

    In runs of fewer than 667 steps the peak is lower: the momentum then averages over a twentieth
    of the run, 10 steps of 200 (fitted there). If the peak is below 0.95, the end is 0.05 below it.
    Neither is ever below 0.85.
    """
    high = min(0.97, max(0.85, 1 - 20 / steps))
    low = max(0.85, min(0.90, high - 0.05))
    rise_steps = min(400, max(steps // 4, 1))
    warmdown_steps = round(warmdown_ratio * steps)
    peak = 0.85 + (high - 0.85) * min(step / rise_steps, 1.0)
    steps_left = steps - step
    if steps_left >= warmdown_steps or warmdown_steps == 0:
        return peak
    return low + (peak - low) * steps_left / warmdown_steps


def decay_factor(step: int, steps: int) -> float:
    """Return the factor on the weight decay at a step: half a cosine from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def micro_batches(
    tokens_per_step: int, row_tokens: int, device_batch_size: int, world_size: int
) -> tuple[int, int]:
    """Return the number of rows in each pass on a rank, and the number of passes in a step.

    A pass has the most rows, up to `device_batch_size`, that divide a rank's share of the step
    evenly. Raises UserError (exit code 2) if `device_batch_size` is below 1, or if the step cannot
    be divided into whole rows on all ranks.
    """
    if device_batch_size < 1:
        raise UserError(
            tr(
                "device_batch_size must be at least 1, got {device_batch_size}",
                device_batch_size=device_batch_size,
            ),
            exit_code=2,
        )
    if tokens_per_step < 1 or tokens_per_step % (row_tokens * world_size):
        raise UserError(
            tr(
                "total_batch_size must be a multiple of {row_tokens:,} (one row of "
                "{row_tokens_2:,} tokens on each of {world_size} rank(s)), got "
                "{tokens_per_step:,}",
                row_tokens=row_tokens * world_size,
                row_tokens_2=row_tokens,
                world_size=world_size,
                tokens_per_step=tokens_per_step,
            ),
            exit_code=2,
        )
    rows = tokens_per_step // (row_tokens * world_size)
    per_pass = next(size for size in range(min(device_batch_size, rows), 0, -1) if rows % size == 0)
    return per_pass, rows // per_pass


def expected_seconds(tokens: float, flops_per_token: int, peak: float, mfu: float) -> float:
    """Return the seconds that training on `tokens` tokens takes.

    `peak` is the FLOP/s of all ranks together, and `mfu` is the share of it that training reaches.
    """
    return tokens * flops_per_token / (mfu * peak)
