"""How long, how large and how fast to train, as pure functions of sizes and steps.

The constants are upstream's, tuned for a 12-layer model at 2^19 tokens a step. dev/LOG.md describes
the ones that were fitted here.
"""

import math
from dataclasses import dataclass

from nanochat.common import UserError, tr

REFERENCE_BATCH = 2**19  # tokens per step at which the learning rates were tuned
# parameters in the matrices and the head of the 12-layer reference at vocabulary 32,768
REFERENCE_SCALING_PARAMETERS = 110_100_480

# The meaning of `auto` in fine-tuning
EPOCH_STEPS = 30  # least steps in an epoch, if the data has enough conversations
READINGS = 2400  # conversations to read in a run; less data is read more than once
MOST_EPOCHS = 8.0  # but no more times than this
LONGEST_ROW = 2048  # tokens
SHORTEST_ROW = 128  # tokens
ROW_CONVERSATIONS = 4  # that a row holds, if they have the average length
STEP_ROWS = 4  # rows in a step on little data
MOST_STEP_ROWS = 32  # rows in a step on much data
# Conversations or pairs in a step; fewer say more about themselves than about the data.
LEAST_CONVERSATIONS = 4
# Change this together with tuning_rate(), so that no run resumes under a different rule.
TUNING_RATE_RULE = "by width and steps, beside own words"


@dataclass(frozen=True)
class Horizon:
    """The length of a run in steps, and the reason for it."""

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
    """Return the number of steps to train, and the reason for it.

    It is `num_iterations` if that is given. Otherwise it follows from `target_flops`, or else from
    `target_param_data_ratio`, the number of tokens per scaling parameter, and is at least 1. Raises
    UserError (exit code 2) if `num_iterations` is below 1.
    """
    if num_iterations is not None:
        if num_iterations < 1:
            raise UserError(
                tr(
                    "num_iterations must be at least 1, got {num_iterations}",
                    num_iterations=num_iterations,
                ),
                exit_code=2,
            )
        return Horizon(num_iterations, tr("given"))
    if target_flops is not None:
        steps = round(target_flops / (flops_per_token * tokens_per_step))
        reason = tr(
            "{target_flops:.3g} FLOPs at {flops_per_token:,} a token",
            target_flops=target_flops,
            flops_per_token=flops_per_token,
        )
    else:
        steps = int(target_param_data_ratio * scaling_parameters // tokens_per_step)
        reason = tr("{ratio:g} tokens per scaling parameter", ratio=target_param_data_ratio)
    return Horizon(max(steps, 1), reason)


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


def weight_decay(
    base: float, tokens_per_step: int, tokens: float, reference_tokens: float
) -> float:
    """Return the weight decay for a run of `tokens` tokens, at most twice `base`.

    Up to that limit, tokens_per_step / (rate x decay x tokens) is constant (arXiv 2405.13698), so
    that the weights are averaged over the same share of every run.
    """
    ratio = (tokens_per_step / REFERENCE_BATCH) / rate_scale(tokens_per_step)
    return min(base * ratio * reference_tokens / tokens, 2 * base)


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


def tuning_row_tokens(tokens: int, conversations: int, longest: int, limit: int) -> int:
    """Return the number of tokens in a fine-tuning row, a power of two unless `limit` caps it.

    Small data sets get shorter rows, so that an epoch still has about EPOCH_STEPS steps (30) of
    STEP_ROWS rows (4). Rows are never shorter than the longest conversation, nor than the largest
    power of two below ROW_CONVERSATIONS (4) conversations of average length or SHORTEST_ROW (128
    tokens), except that LONGEST_ROW (2,048 tokens) and `limit` cap them. `tokens` is the length of
    all conversations together, and `longest` that of the longest one.
    """
    fitting = _power_below(max(tokens // (EPOCH_STEPS * STEP_ROWS), 1))
    holding_longest = _power_above(max(longest, 1))
    # A row of 128 tokens holds one conversation of 85, and a third of it is padding.
    holding_several = _power_below(max(ROW_CONVERSATIONS * tokens // conversations, 1))
    length = max(fitting, holding_longest, holding_several, SHORTEST_ROW)
    return min(length, LONGEST_ROW, limit)


def _power_below(value: int) -> int:
    """Return the largest power of two that is at most `value`, which is at least 1."""
    return 2 ** (value.bit_length() - 1)


def _power_above(value: int) -> int:
    """Return the smallest power of two that is at least `value`, which is at least 1."""
    return 2 ** (value - 1).bit_length()


def tuning_step_rows(rows: int, conversations: int) -> int:
    """Return the number of rows in a fine-tuning step, a power of two.

    It is at most 32 (MOST_STEP_ROWS), and leaves at least 30 steps to an epoch (EPOCH_STEPS) if the
    data has that many rows. But a step always has enough rows to hold about four conversations
    (LEAST_CONVERSATIONS) on average.
    """
    fitting = min(max(rows // EPOCH_STEPS, 1), MOST_STEP_ROWS)
    least = max(round(LEAST_CONVERSATIONS * rows / conversations), 1)
    return max(_power_below(fitting), _power_above(least))


def tuning_epochs(conversations: int) -> float:
    """Return how many times a fine-tuning run reads its data, which may be a fraction.

    It is the number of times that makes 2,400 readings of conversations (READINGS), but at least 1
    and at most 8 (MOST_EPOCHS).
    """
    return min(max(READINGS / conversations, 1.0), MOST_EPOCHS)


def first_tuning_rate(adapter: bool, preferences: bool) -> float:
    """Return the learning rate that earlier versions used, for resuming their runs."""
    rate = 1e-4 if adapter else 1e-5
    return 0.05 * rate if preferences else rate


def tuning_rate(
    width: int, steps: int, adapter: bool, preferences: bool, own_words: bool = True
) -> float:
    """Return the peak learning rate of AdamW for fine-tuning a model of `width` channels.

    At 576 channels and up to 400 steps it is 2e-3 for an adapter and 1e-4 when every parameter is
    trained. Wider models take smaller rates: a step changes the output of a matrix in proportion to
    its width, and the output of an adapter less so. Longer runs take smaller rates, down to half at
    1,600 steps, because each step needs to move less. DPO (`preferences`) takes a twentieth: its
    loss has no floor, and large steps move far away from the reference model. At 4,096 channels the
    rates are 1.7e-4 and 1.4e-5, as is usual for models of 7 billion parameters.

    The rates were fitted at 192 and 576 channels, on 300 conversations beside the model's own words
    (train/replay.py), which allow higher rates than the data alone; dev/LOG.md has the figures.
    Without `own_words`, an adapter takes a quarter of its rate, and every parameter half.
    """
    if adapter:
        rate = 2e-3 * (576 / width) ** 1.25
    else:
        rate = 1e-4 * (576 / width) ** (1 if width > 576 else 2)
    for_length = (400 / max(steps, 1)) ** 0.5
    rate *= min(max(for_length, 0.5), 1.0)
    if preferences:
        return 0.05 * rate
    if not own_words:
        return rate / 4 if adapter else rate / 2
    return rate


def expected_seconds(tokens: float, flops_per_token: int, peak: float, mfu: float) -> float:
    """Return the seconds that training on `tokens` tokens takes.

    `peak` is the FLOP/s of all ranks together, and `mfu` is the share of it that training reaches.
    """
    return tokens * flops_per_token / (mfu * peak)
