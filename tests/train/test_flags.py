"""Under which name a stage keeps what it learned, how many steps it makes, and which numbers its flags refuse."""

import math
import typing
from pathlib import Path
from typing import Any

import pytest

from nanochat.common import UserError, flags_of, parse
from nanochat.train.flags import ABOVE_ZERO, LEAST, WHY, ChatFlags, Epochs, StageFlags
from scripts import base_train, chat_rl, chat_sft, finetune, mid_train
from tests.support.flags import configured

SCRIPTS = {"base": base_train, "mid": mid_train, "sft": chat_sft, "rl": chat_rl, "tune": finetune}
# Checked where they are used: by sizes.model_config(), PolicyFlags, Start, PreferenceLoss and LoraConfig.
ELSEWHERE = """depth model_dim head_dim max_seq_len bigram_rows offset_layers updates_per_rollout clip_low clip_high kl
    oversample overlong_tokens start_share dpo_beta dpo_label_smoothing dpo_sft_weight lora_rank lora_dropout""".split()


def made(stage: str, **flags: Any) -> Any:
    needed = {"model": Path("m"), "data": ("a.jsonl",)} if stage == "tune" else {}
    return configured(SCRIPTS[stage].Config, **needed, **flags)


def numbers(stage: str) -> set[str]:
    """The flags of a script that may be numbers."""
    return {flag.name for flag in flags_of(SCRIPTS[stage].Config) if {int, float} & kinds(flag.annotation)}


def kinds(annotation: Any) -> set[Any]:
    """A type and the types that it is made of."""
    return {annotation}.union(*map(kinds, typing.get_args(annotation)))


@pytest.mark.parametrize(
    ("flags", "file", "parent", "tag"),
    [
        (StageFlags(), None, "d4", "d4"),
        (StageFlags(out_tag="mine"), None, "d4", "mine"),
        (StageFlags(out_tag=""), None, "d4", ""),  # which is no name, and is refused where it is used
        (StageFlags(), "~/chats/my-chats.jsonl", "d4", "d4-my-chats"),
        (StageFlags(), "my-chats.jsonl", "d4-my-chats", "d4-my-chats"),  # SFT after such a midtraining
        (StageFlags(out_tag="mine"), "my-chats.jsonl", "d4", "mine"),
        (StageFlags(out_tag=""), "my-chats.jsonl", "d4", ""),
        (StageFlags(), "/tmp/我的 对话 (2).jsonl", "d4", "d4-我的-对话-2"),
    ],
)
def test_your_own_conversations_make_a_model_of_another_name(
    flags: StageFlags, file: str | None, parent: str, tag: str
) -> None:
    assert flags.own_tag(parent, file) == tag
    assert ChatFlags(conversations="a").own_file == ChatFlags(mix="a").own_file == "a"


@pytest.mark.parametrize(
    ("flags", "rows", "steps", "says"),
    [
        (Epochs(), 2, 1, "a smaller --x, or --num_epochs=640"),  # 40 steps of 32 rows
        (Epochs(), 640, 20, ""),
        (Epochs(num_epochs=3), 100, 9, "--num_epochs=13"),
        (Epochs(num_iterations=3), 2, 3, ""),  # asked for
    ],
)
def test_data_for_few_steps_gets_a_warning_with_a_number_of_epochs(
    flags: Epochs, rows: int, steps: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flags.steps(rows, 32, "a smaller --x") == steps
    said = capsys.readouterr().err
    assert (says in said) if says else not said


@pytest.mark.parametrize("stage", ["mid", "sft", "tune"])
def test_the_warning_of_few_steps_names_a_flag_of_the_script(stage: str) -> None:
    flag = made(stage).batch.smaller_steps.rpartition("--")[2]
    assert flag in {flag.name for flag in flags_of(SCRIPTS[stage].Config)}


def test_every_number_has_a_least_value() -> None:
    found = set.union(*map(numbers, SCRIPTS))
    assert found == {*LEAST, *ABOVE_ZERO, *ELSEWHERE} and WHY.keys() <= {*LEAST, *ABOVE_ZERO}


@pytest.mark.parametrize("stage", SCRIPTS)
def test_numbers_below_the_least_are_refused_and_the_least_is_not(stage: str) -> None:
    for name in sorted(numbers(stage) - {*ELSEWHERE}):
        wrong = [LEAST[name] - 1, -3, math.nan] if name in LEAST else [0, -1.0, math.nan, math.inf]
        for value in wrong:
            with pytest.raises(UserError, match=f"--{name} must be .*got {value}: change it") as refused:
                made(stage, **{name: value})
            assert refused.value.exit_code == 2
        made(stage, **{name: LEAST.get(name, 1e-3)})


@pytest.mark.parametrize("line", ["--num_iterations=0", "--num_samples=1", "--temperature=0", "--top_k=1"])
def test_a_command_line_with_such_a_number_ends_with_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(chat_rl.Config, [line])
    assert ended.value.code == 2
    assert f"{line.partition('=')[0]} must be" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [{"compile": True}, {"graphs": True}])
def test_rl_refuses_flags_that_it_would_ignore(flags: dict[str, bool]) -> None:
    with pytest.raises(UserError, match=f"RL neither compiles nor captures its passes.* got --{next(iter(flags))}: "):
        made("rl", **flags)
    for stage in ("base", "mid", "sft", "tune"):
        made(stage, **flags)
    assert parse(chat_rl.Config, ["--no_compile", "--no-graphs"]).run.compile is False


def test_a_seed_that_generators_cannot_take_is_refused() -> None:
    for stage in SCRIPTS:
        assert made(stage, seed=2**63 - 1).run.seed == 2**63 - 1
        with pytest.raises(
            UserError, match=r"--seed must be below 9223372036854775808, got 9223372036854775808"
        ) as refused:
            made(stage, seed=2**63)
        assert refused.value.exit_code == 2


def test_a_corpus_of_documents_of_which_no_row_would_be_taken_is_refused() -> None:
    nothing: list[dict[str, Any]] = [{}, {"documents_every": 0}]
    for given in nothing:
        with pytest.raises(UserError, match=r"--documents needs --documents_every=N.*got --documents=web") as refused:
            ChatFlags(documents="web", **given).documents_of(0)
        assert refused.value.exit_code == 2
    assert ChatFlags(documents="web").documents_of(4) == 4 and ChatFlags().documents_of(0) == 0
    assert ChatFlags(documents="web", documents_every=3).documents_of(0) == 3
