"""Under which name a stage keeps what it learned, how many steps it makes, and which numbers its flags refuse."""

import math
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.same_run import OLD_FLAGS, RunSettings
from nanochat.common import UserError, write_json
from nanochat.data.command_line import flags_of, parse
from nanochat.data.shards import write_shards
from nanochat.train.flags import ABOVE_ZERO, LEAST, ChatFlags, Epochs, ScheduleFlags, StageFlags
from scripts import base_train, chat_rl, chat_sft, finetune, mid_train
from tests.support.flags import configured

SCRIPTS = {"base": base_train, "mid": mid_train, "sft": chat_sft, "rl": chat_rl, "tune": finetune}
# Checked where they are used: by sizes.model_config(), PolicyFlags, Start, PreferenceLoss and LoraConfig.
ELSEWHERE = """depth model_dim head_dim max_seq_len bigram_rows offset_layers exclusive_layers updates_per_rollout clip_low
    clip_high kl oversample overlong_tokens start_share dpo_beta dpo_label_smoothing dpo_sft_weight lora_rank
    lora_dropout""".split()


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


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (ScheduleFlags(num_iterations=7, target_flops=3e12), 7),
        (ScheduleFlags(target_flops=3e12), 300),  # 3e6 tokens at 1e6 FLOPs
        (ScheduleFlags(), 1200),  # 12 tokens for each of 1e6 parameters
    ],
)
def test_steps_overrule_flops_and_flops_overrule_tokens_per_parameter(flags: ScheduleFlags, steps: int) -> None:
    assert flags.steps(10**6, 10**6, 10_000) == steps


def test_a_run_for_flops_has_the_tokens_of_these_flops() -> None:
    assert ScheduleFlags(target_flops=3e12).tokens(10**6, 10**6) == 3e6
    assert ScheduleFlags(num_iterations=7).tokens(10**6, 10**6) == 12e6


@pytest.mark.parametrize("stage", ["mid", "sft", "tune"])
def test_the_warning_of_few_steps_names_a_flag_of_the_script(stage: str) -> None:
    flag = made(stage).batch.smaller_steps.rpartition("--")[2]
    assert flag in {flag.name for flag in flags_of(SCRIPTS[stage].Config)}


def test_every_number_has_a_least_value() -> None:
    found = set.union(*map(numbers, SCRIPTS))
    assert found == {*LEAST, *ABOVE_ZERO, *ELSEWHERE}


@pytest.mark.parametrize("name", ["eval_every", "save_every", "save_seconds", "hang_seconds", "keep"])
def test_minus_one_which_switches_off_upstream_is_told_zero(name: str) -> None:
    if name not in numbers("base"):
        pytest.fail(f"base_train has no --{name}")
    with pytest.raises(UserError, match=rf"--{name} must be at least 0 \(0 .*got -1"):
        made("base", **{name: -1})


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
    for stage in ("base", "mid", "sft"):
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


def test_a_later_stage_refuses_a_corpus_that_is_not_there(base_folder: Path) -> None:
    """A misspelt tinyworld was taken for web pages, and its stage trained on the conversations published for those."""
    for data in ("TinyWorld", "tinyworld:0.5,mine:0.5", "mine"):
        with pytest.raises(UserError, match="there is no corpus or folder") as refused:
            StageFlags(data=data).corpus("tinyworld")
        assert refused.value.exit_code == 2
    for data in ("tinyworld", "fineweb", "climbmix:0.5,fineweb-zh:0.5"):  # whose conversations need no texts
        assert StageFlags(data=data).corpus("gone") == data
    assert StageFlags().corpus("gone") == "gone"


def test_a_corpus_that_is_named_by_its_source_keeps_its_own_name(
    base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that remembered ./texts was refused by the next stage where it was typed in another folder."""
    (tmp_path / "texts").mkdir()
    folder = base_folder / "base_data" / "mine"
    write_shards(folder, ["a text", "another"])
    write_json(folder / "corpus.json", {"source": str((tmp_path / "texts").resolve())})
    monkeypatch.chdir(tmp_path)
    assert StageFlags(data="./texts").corpus("tinyworld") == "mine"


@pytest.mark.parametrize("flag", ["dpo_beta", "dpo_label_smoothing", "dpo_sft_weight"])
def test_settings_of_dpo_are_refused_with_another_loss(flag: str) -> None:
    made("tune", loss="dpo", **{flag: 0.25})
    with pytest.raises(UserError, match=f"--{flag} is a setting of --loss=dpo") as refused:
        made("tune", **{flag: 0.25})
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(("data", "name"), [("a:v2.jsonl", "a:v2"), ("a.jsonl:2", "a"), ("b/a.jsonl", "a")])
def test_a_colon_in_the_name_of_a_file_is_part_of_the_result_s_name(data: str, name: str) -> None:
    assert configured(finetune.Config, model=Path("m"), data=(data,)).tag == f"m-{name}"


def test_a_corpus_of_documents_of_which_no_row_would_be_taken_is_refused() -> None:
    nothing: list[dict[str, Any]] = [{}, {"documents_every": 0}]
    for given in nothing:
        with pytest.raises(UserError, match=r"--documents needs --documents_every=N.*got --documents=web") as refused:
            ChatFlags(documents="web", **given).documents_of(0)
        assert refused.value.exit_code == 2
    assert ChatFlags(documents="web").documents_of(4) == 4 and ChatFlags().documents_of(0) == 0
    assert ChatFlags(documents="web", documents_every=3).documents_of(0) == 3


# --- help, and flags of earlier versions ---------------------------------------------------------

GUIDES = {
    "base": """depth data model_tag num_iterations resume total_batch_size device_batch_size profile family max_seq_len
        model_dim track graphs head_dim kernels compile stop_at window_pattern matmul shard""",
    "mid": "matmul total_batch_size device_batch_size answers_only conversations model_tag num_iterations warmdown_ratio",
    "sft": """matmul target_examples_per_step device_batch_size init_lr_frac model_tag num_iterations conversations data mix
        source start_share""",
    "rl": """matmul examples_per_step device_batch_size init_lr_frac loss max_new_tokens num_iterations problems
        updates_per_rollout model_tag advantage kl model source reward lora_rank""",
    "tune": """data model loss shard lora_rank lora_alpha lora_dropout lora_targets num_epochs max_length learning_rate
        warmup_ratio weight_decay device_batch_size target_examples_per_step checkpoint_activations
        offload_activations out_tag save_every eval_every""",
}


def shown(stage: str, word: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The flags that a script's --help or --help_all shows."""
    with pytest.raises(SystemExit) as ended:
        parse(SCRIPTS[stage].Config, [word], "What it does.")
    assert ended.value.code == 0
    lines = re.findall(r"^[│ ] {1,2}(-.*)", capsys.readouterr().out, re.M)
    words = {word.replace("-", "_") for line in lines for word in re.findall(r"--([a-z][a-z0-9-]*)", line)}
    return words & {"help", *(flag.name for flag in flags_of(SCRIPTS[stage].Config))}


@pytest.mark.parametrize("stage", SCRIPTS)
def test_help_shows_the_flags_of_the_guides_and_at_most_32(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    short = shown(stage, "--help", capsys)
    assert {*GUIDES[stage].split()} <= short and len(short) <= 32
    assert shown(stage, "--help_all", capsys) == {"help", *(flag.name for flag in flags_of(SCRIPTS[stage].Config))}


@pytest.mark.parametrize("stage", SCRIPTS)
def test_old_names_of_flags_are_no_flags_and_lead_to_flags(stage: str) -> None:
    names = {flag.name for flag in flags_of(SCRIPTS[stage].Config)}
    removed = OLD_FLAGS.removed().keys() - {"gradient_accumulation_steps"}  # base_train and mid_train have it
    assert not names & {*OLD_FLAGS.renamed, *removed, *OLD_FLAGS.replaced}
    everywhere = set().union(*({flag.name for flag in flags_of(script.Config)} for script in SCRIPTS.values()))
    assert everywhere >= {*OLD_FLAGS.renamed.values(), *(flag for flag, _ in OLD_FLAGS.replaced.values())}


def test_a_renamed_flag_works_and_says_its_new_name(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--resume-from-step=3", "--batch_size", "2", "--depth=4"]
    line += ["--core-metric-every=50", "--core-metric-max-per-task=500"]
    cfg = parse(base_train.Config, line, old_flags=OLD_FLAGS)
    assert (cfg.core.core_every, cfg.core.core_examples) == (50, 500)
    assert cfg.run.resume == 3 and cfg.batch.device_batch_size == 2
    assert "--resume-from-step is called --resume now" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "matmul"), [("--fp8", "fp8"), ("--fp8=1", "fp8")])
def test_a_switch_that_another_flag_replaces_works_and_says_its_new_form(
    word: str, matmul: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = parse(base_train.Config, [word, "--depth=4"], old_flags=OLD_FLAGS)
    assert cfg.shape.matmul == matmul and cfg.shape.depth == 4
    assert "is called --matmul=fp8 now" in capsys.readouterr().err


def test_a_flag_that_is_gone_says_what_to_type() -> None:
    with pytest.raises(UserError, match=r"there is no --sample-every here: .*--samples") as refused:
        parse(base_train.Config, ["--sample-every=10"], old_flags=OLD_FLAGS)
    assert refused.value.exit_code == 2
    with pytest.raises(UserError, match=r"there is no --gradient_accumulation_steps here: .*--device_batch_size"):
        parse(chat_sft.Config, ["--gradient_accumulation_steps=4"], old_flags=OLD_FLAGS)


def test_a_saved_run_with_old_names_has_the_same_settings() -> None:
    cfg = made("base", device_batch_size=2, seed=3)
    settings = RunSettings.of(cfg, corpus="x")
    saved = {**settings.values, "batch_size": 2, "aspect_ratio": 64}
    del saved["device_batch_size"]
    assert not settings.changes(saved)
    assert settings.changes({**saved, "seed": 4}) == ["--seed: 4 before, 3 now"]
