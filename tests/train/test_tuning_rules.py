"""The values of `auto` in fine-tuning, against tables computed by hand."""

import pytest

from nanochat.train import tuning_rules


@pytest.mark.parametrize(
    ("tokens", "conversations", "longest", "limit", "length"),
    [
        (18_000, 600, 300, 40_960, 512),  # rows hold the longest
        (18_000, 600, 9_000, 40_960, 2048),  # which is cut
        (24_300, 300, 85, 40_960, 256),  # three of 81 tokens; a row of 128 would hold one
        (300_000, 9_000, 90, 40_960, 2048),
        (10**9, 10**7, 90, 40_960, 2048),
        (10**9, 10**7, 90, 256, 256),  # the model's context
        (1, 1, 1, 40_960, 128),
    ],
)
def test_rows_of_little_data_are_short_and_hold_the_longest_conversation_and_several_others(
    tokens: int, conversations: int, longest: int, limit: int, length: int
) -> None:
    assert tuning_rules.tuning_row_tokens(tokens, conversations, longest, limit) == length


@pytest.mark.parametrize(
    ("rows", "conversations", "step"),
    [
        (140, 270, 4),  # 35 steps
        (60, 300, 2),
        (60, 60, 4),  # four conversations at least
        (8, 300, 1),
        (31, 108, 1),  # about four
        (960, 9_000, 32),
        (10**6, 10**7, 32),
    ],
)
def test_a_step_leaves_thirty_steps_to_an_epoch_or_has_four_conversations(
    rows: int, conversations: int, step: int
) -> None:
    assert tuning_rules.tuning_step_rows(rows, conversations) == step


@pytest.mark.parametrize(
    ("conversations", "width", "epochs"),
    [
        (5, 576, 8),
        (300, 4096, 8),
        (600, 576, 4),
        (1600, 576, 1.5),
        (9_000, 576, 1),
        (300, 288, 16),
        (300, 64, 24),
        (7_200, 64, 1),
    ],
)
def test_few_conversations_are_read_several_times(conversations: int, width: int, epochs: float) -> None:
    assert tuning_rules.tuning_epochs(conversations, width) == epochs


@pytest.mark.parametrize(
    ("width", "steps", "adapter", "full"),
    [
        (576, 400, 1.4e-3, 1e-4),
        (576, 9_000, 7e-4, 5e-5),
        (192, 100, 4.56e-3, 9e-4),
        (4096, 100, 1.2e-4, 1.41e-5),
    ],
)
def test_narrow_models_and_short_runs_are_tuned_at_higher_rates(
    width: int, steps: int, adapter: float, full: float
) -> None:
    for trains_adapter, rate, of_preferences in ((True, adapter, adapter / 30), (False, full, full / 20)):
        assert tuning_rules.tuning_rate(width, steps, trains_adapter, False) == pytest.approx(rate, rel=0.01)
        assert tuning_rules.tuning_rate(width, steps, trains_adapter, True) == pytest.approx(of_preferences, rel=0.01)


def test_rl_takes_a_fraction_of_the_rates_of_conversations() -> None:
    assert tuning_rules.rl_rate(576, 400, adapter=True) == pytest.approx(1.4e-3 / 15)
    assert tuning_rules.rl_rate(576, 1600, adapter=False) == pytest.approx(5e-5 / 20)


def test_without_own_words_rates_are_lower() -> None:
    for adapter, divisor in ((True, 3), (False, 2)):
        with_words, without = (tuning_rules.tuning_rate(576, 400, adapter, False, words) for words in (True, False))
        assert with_words == pytest.approx(divisor * without)


def test_only_models_narrower_than_576_channels_read_noise() -> None:
    shares = [tuning_rules.tuning_noise(width) for width in (64, 192, 288, 576, 4096)]
    assert shares == pytest.approx([0.7, 0.7, 0.35, 0.0, 0.0])
