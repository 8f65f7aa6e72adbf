"""What `auto` means in fine-tuning: the length of rows, rows in a step, passes, learning rate.

The rules are pure functions of sizes; dev/LOG.md describes the experiments that they were fitted
in.
"""

EPOCH_STEPS = 30  # least steps in an epoch, if the data has enough conversations
READINGS = 2400  # conversations to read in a run; less data is read more than once
MOST_EPOCHS = 8.0  # but no more times than this
FITTED_WIDTH = 576  # channels of the model that the rules were fitted to
MOST_REPEATS = 3.0  # how many times as much a narrower model reads, at most
NOISE = 0.35  # on the embeddings of a model that reads twice as much, as a share of their size
LONGEST_ROW = 2048  # tokens
SHORTEST_ROW = 128  # tokens
ROW_CONVERSATIONS = 4  # that a row holds, if they have the average length
STEP_ROWS = 4  # rows in a step on little data
MOST_STEP_ROWS = 32  # rows in a step on much data
# Conversations or pairs in a step; fewer say more about themselves than about the data.
LEAST_CONVERSATIONS = 4


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


def tuning_epochs(conversations: int, width: int) -> float:
    """Return how many times a fine-tuning run reads its data, which may be a fraction.

    It is the number of times that makes 2,400 readings of conversations (READINGS), but at least 1
    and at most 8 (MOST_EPOCHS). These numbers are larger for a narrow model; see tuning_repeats().
    """
    repeats = tuning_repeats(width)
    return min(max(READINGS * repeats / conversations, 1.0), MOST_EPOCHS * repeats)


def tuning_repeats(width: int) -> float:
    """Return how many times as often a model of `width` channels reads as a wider one does.

    It is 1 from 576 channels (FITTED_WIDTH) up. A narrower model learns less from a reading: at 288
    channels it reads twice as often, and from 192 channels down three times (MOST_REPEATS).
    """
    return min(max(FITTED_WIDTH / width, 1.0), MOST_REPEATS)


def tuning_noise(width: int) -> float:
    """Return the noise on embeddings, as a share of their size, for a model of `width` channels.

    It is 0.7 up to 192 channels, 0.35 at 288, and 0 from 576 channels up. A narrow model, which reads
    its data up to three times as often as others, knows the wordings by heart; with noise, an
    adapter of 192 channels answered twice as many questions about one data set in other wordings,
    and as many about another. At 576 channels, where the wordings are no difficulty, noise only
    blurs the facts (dev/LOG.md).
    """
    return NOISE * (tuning_repeats(width) - 1)


def tuning_rate(
    width: int, steps: int, adapter: bool, preferences: bool, own_words: bool = True
) -> float:
    """Return the peak learning rate of AdamW for fine-tuning a model of `width` channels.

    At 576 channels and up to 400 steps it is 1.4e-3 for an adapter and 1e-4 when every parameter is
    trained. Wider models take smaller rates: a step changes the output of a matrix in proportion to
    its width, and the output of an adapter less so. Narrower models take larger rates. Longer runs
    take smaller rates, down to half at 1,600 steps, because each step needs to move less. At 4,096
    channels the rates are 1.2e-4 and 1.4e-5, as is usual for models of 7 billion parameters.

    DPO (`preferences`) takes a thirtieth of an adapter's rate and a twentieth of the other: its
    loss has no floor, and large steps move far away from the reference model and what it knows.

    The rates were fitted at 192 and 576 channels, on 300 conversations beside the model's own words
    (train/replay.py), which allow higher rates than the data alone; dev/LOG.md has the figures.
    Without `own_words`, an adapter takes a third of its rate, and every parameter half.
    """
    is_wide = width > FITTED_WIDTH
    if adapter:
        rate = 1.4e-3 * (FITTED_WIDTH / width) ** (1.25 if is_wide else 1.075)
    else:
        rate = 1e-4 * (FITTED_WIDTH / width) ** (1 if is_wide else 2)
    for_length = (400 / max(steps, 1)) ** 0.5
    rate *= min(max(for_length, 0.5), 1.0)
    if preferences:
        return rate / 30 if adapter else rate / 20
    if not own_words:
        return rate / 3 if adapter else rate / 2
    return rate


def rl_rate(width: int, steps: int, adapter: bool) -> float:
    """Return the learning rate of AdamW for RL on a published model of `width` channels.

    It is a fifteenth of what conversations take for an adapter (9.3e-5 at 576 channels), and a
    twentieth where every parameter is trained (5e-6).
    """
    rate = tuning_rate(width, steps, adapter, preferences=False)
    return rate / 15 if adapter else rate / 20
