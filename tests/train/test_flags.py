"""Under which name a stage keeps what it learned."""

import pytest

from nanochat.train.flags import ChatFlags, EpochFlags


@pytest.mark.parametrize(
    ("flags", "parent", "tag"),
    [
        (EpochFlags(), "d4", "d4"),
        (EpochFlags(out_tag="mine"), "d4", "mine"),
        (ChatFlags(), "d4", "d4"),
        (ChatFlags(conversations="~/chats/my-chats.jsonl"), "d4", "d4-my-chats"),
        (ChatFlags(conversations="my-chats.jsonl"), "d4-my-chats", "d4-my-chats"),  # SFT after such a midtraining
        (ChatFlags(mix="my-chats.jsonl"), "d4", "d4-my-chats"),
        (ChatFlags(conversations="my-chats.jsonl", out_tag="mine"), "d4", "mine"),
        (ChatFlags(conversations="/tmp/我的 对话 (2).jsonl"), "d4", "d4-我的-对话-2"),
    ],
)
def test_your_own_conversations_make_a_model_of_another_name(flags: EpochFlags, parent: str, tag: str) -> None:
    assert flags.saved_as(parent) == tag


@pytest.mark.parametrize(
    ("flags", "rows", "steps", "says"),
    [
        (EpochFlags(), 2, 1, "--num_epochs=640"),  # 40 steps of 32 rows
        (EpochFlags(), 640, 20, ""),
        (EpochFlags(num_epochs=3), 100, 9, "--num_epochs=13"),
        (EpochFlags(num_iterations=3), 2, 3, ""),  # asked for
    ],
)
def test_data_for_few_steps_gets_a_warning_with_a_number_of_epochs(
    flags: EpochFlags, rows: int, steps: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flags.steps(rows, 32) == steps
    said = capsys.readouterr().err
    assert (says in said) if says else not said
