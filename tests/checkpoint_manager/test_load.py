"""Loading a checkpoint by stage and tag: the right step, undamaged, with its own tokenizer."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager.files import read_meta, step_dir
from nanochat.checkpoint_manager.load import load_model, load_published
from nanochat.checkpoint_manager.locate import checkpoint_dir, find, find_parent, trained
from nanochat.checkpoint_manager.resume import restore
from nanochat.common import UserError
from nanochat.tokenizer import Tokenizer
from tests.support.qwens import write_folder
from tests.support.tiny_model import TEXT, on_cpu, tiny_tokenizer
from tests.support.tiny_training import CPU, VOCAB, flip_a_bit, make, save, train


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def test_the_files_of_ranks_load_as_one_model(base_folder: Path, tokenizer: Tokenizer) -> None:
    """What chats, evaluations and exports load, and the next stage as its parent."""
    pair = make()
    train(*pair, 0, 1)
    save(checkpoint_dir("base", "parts"), 1, *pair, tokenizer, files="per_rank")
    assert (step_dir(checkpoint_dir("base", "parts"), 1) / "model-00001-of-00001.safetensors").exists()
    loaded = load_model("base", "parts", None, CPU)
    idx = torch.arange(16)[None]
    assert torch.equal(loaded.model(idx), pair[0](idx))
    parent = find_parent("base", "parts", 1)
    assert parent.identity.endswith(loaded.weights[:16])
    train(*pair, 1, 2)
    save(checkpoint_dir("base", "parts"), 1, *pair, tokenizer, files="per_rank")
    assert find_parent("base", "parts", 1).identity != parent.identity  # other parameters, another identity


# --- finding one ---------------------------------------------------------------------------------


def put(stage: str, tag: str, step: int, tokenizer: Tokenizer) -> None:
    save(checkpoint_dir(stage, tag), step, *make(), tokenizer, stage)


def test_the_latest_stage_is_found_first_and_in_it_the_newest_tag(base_folder: Path, tokenizer: Tokenizer) -> None:
    for stage, folder in (("base", "base"), ("mid", "mid"), ("sft", "chatsft"), ("rl", "chatrl")):
        for tag in ("d9", "d4"):  # the newest tag wins, not the first or last by name
            put(stage, tag, 1, tokenizer)
            assert find(None, None) == (stage, base_folder / f"{folder}_checkpoints" / tag)
    put("mid", "d9", 2, tokenizer)
    assert find(None, None)[0] == "rl"
    assert find("mid", None)[1].name == "d9"
    assert find("mid", "d4")[1].name == "d4"
    assert find(None, "d9") == ("rl", base_folder / "chatrl_checkpoints" / "d9")


@pytest.mark.parametrize("trial", ["smoke", "test"])
def test_a_trial_is_found_only_where_nothing_else_is(tokenizer: Tokenizer, trial: str) -> None:
    put("rl", trial, 1, tokenizer)
    assert find(None, None) == ("rl", checkpoint_dir("rl", trial))
    put("mid", "d4", 1, tokenizer)
    put("mid", trial, 9, tokenizer)  # later, and of a later stage above
    assert find(None, None) == ("mid", checkpoint_dir("mid", "d4"))
    assert find("mid", None)[1].name == "d4" and find("mid", trial)[1].name == trial
    assert find("rl", None)[1].name == trial


def test_a_stage_without_a_complete_step_is_passed_over(tokenizer: Tokenizer) -> None:
    put("base", "d4", 1, tokenizer)
    (checkpoint_dir("sft", "d4") / ".tmp-step_000001").mkdir(parents=True)
    assert find(None, None)[0] == "base"


def test_a_chat_is_offered_what_was_trained_last(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for stage, tag in (("base", "old"), ("rl", "old"), ("base", "new"), ("sft", "new")):
        put(stage, tag, 1, tokenizer)
    assert [(one.stage, one.tag) for one in trained()] == [
        ("sft", "new"), ("base", "new"), ("rl", "old"), ("base", "old")
    ]  # fmt: skip
    assert [one.stage for one in trained(tag="old")] == ["rl", "base"]
    assert [one.tag for one in trained("base")] == ["new", "old"]
    assert trained()[0].alternatives() == ["-i base -g new", "-i rl -g old", "-i base -g old"]
    assert trained()[0].alternatives(limit=1) == ["-i base -g new", "+2"]
    # A copy is not newer than what it was copied from: meta.json says when the step was saved.
    shutil.copytree(checkpoint_dir("rl", "old"), checkpoint_dir("rl", "a copy"))
    assert trained()[0].tag == "new" and "-i rl -g 'a copy'" in trained()[0].alternatives()
    put("base", "old", 2, tokenizer)
    assert (trained()[0].stage, trained()[0].tag, trained()[0].step) == ("base", "old", 2)


@pytest.mark.parametrize("state", [(5, 10), (0, 0)])
def test_a_chat_takes_an_unfinished_run_or_a_trial_only_if_nothing_else_is_there(
    tokenizer: Tokenizer, state: tuple[int, int]
) -> None:
    """A run that crashed, was stopped or still trains was the newest, and became the chat."""
    step, steps = state

    def put_run(stage: str, tag: str, step: int, steps: int) -> None:
        put(stage, tag, step, tokenizer)
        path = step_dir(checkpoint_dir(stage, tag), step) / "meta.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "steps": steps}))

    put_run("sft", "crashed", step, steps)
    assert [model.tag for model in trained()] == ["crashed"] and trained()[0].unfinished
    put_run("base", "d4", 3, 3)
    put_run("sft", "smoke", 3, 3)
    put_run("sft", "crashed", step, steps)
    assert [model.tag for model in trained()] == ["d4", "smoke", "crashed"]
    assert [model.unfinished for model in trained(tag="crashed")] == [True]
    assert f"{step} of {steps}" in trained(tag="crashed")[0].state and not trained()[0].state


def test_a_damaged_meta_does_not_keep_a_chat_from_being_offered(tokenizer: Tokenizer) -> None:
    for tag in ("whole", "torn"):
        put("sft", tag, 1, tokenizer)
    (step_dir(checkpoint_dir("sft", "torn"), 1) / "meta.json").write_text("{")
    assert {one.tag for one in trained()} == {"whole", "torn"}
    with pytest.raises(UserError, match="no checkpoint of stage mid"):
        trained("mid")


@pytest.mark.parametrize(
    ("stage", "tag", "says"),
    [
        (None, None, r"no checkpoint of any stage in .*`python -m scripts.base_train`.*`bash speedrun.sh`"),
        ("sft", None, r"no checkpoint of stage sft in .*`python -m scripts.chat_sft`"),
        ("mid", "d4", r"no checkpoint of stage mid with tag d4 in .*`python -m scripts.mid_train`"),
        ("chat", None, "the stage must be one of base, mid, sft, rl, tune, got 'chat'"),
    ],
)
def test_a_missing_stage_is_a_wrong_command_and_the_maker_is_named(stage: str, tag: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        load_model(stage, tag, None, CPU)
    assert refused.value.exit_code == 2


def test_a_tag_that_is_not_there_is_answered_with_those_that_are(tokenizer: Tokenizer) -> None:
    put("mid", "speedrun-small", 1, tokenizer)
    put("sft", "speedrun-small-persona", 1, tokenizer)
    with pytest.raises(UserError, match=r"holds sft speedrun-small-persona, mid speedrun-small\. Make one with"):
        load_model("sft", "speedrun-persona", None, CPU)


@pytest.mark.parametrize(
    "tag",
    ["", "..", "../x", "/etc", "a\\b", "a\n", "a\u2028b", "\x1b[2J", "x" * 300, "猫" * 100],
)
def test_a_tag_is_the_name_of_a_folder(tag: str, base_folder: Path, tokenizer: Tokenizer) -> None:
    put("sft", "d4", 1, tokenizer)
    for uses in (
        lambda: checkpoint_dir("base", tag),
        lambda: find("sft", tag),
        lambda: find_parent("sft", tag, None),
        lambda: trained(None, tag),
        lambda: load_model("sft", tag, None, CPU),
    ):
        with pytest.raises(UserError, match="--model_tag") as refused:
            uses()
        assert refused.value.exit_code == 2 and len(str(refused.value)) < 400


@pytest.mark.parametrize("tag", ["d20", "d4-x", "qwen3_lora.1", "我的模型", "a b", "x" * 200, "猫" * 66])
def test_a_tag_may_have_any_letters(tag: str, base_folder: Path) -> None:
    assert checkpoint_dir("base", tag) == base_folder / "base_checkpoints" / tag


def test_a_parent_is_the_finished_stage_before(tokenizer: Tokenizer) -> None:
    put("base", "d4", 50, tokenizer)
    with pytest.raises(
        UserError, match=r"is at step 50 of 100: finish it with `python -m scripts.base_train`"
    ) as refused:
        find_parent("base", None, None)
    assert refused.value.exit_code == 2
    put("base", "d4", 100, tokenizer)
    parent = find_parent("base", None, None)
    assert (parent.tag, parent.step, parent.corpus) == ("d4", 100, "tinyworld")
    assert find_parent("base", "d4", 50).step == 50
    assert find_parent("base", "d4", 100).identity == parent.identity
    with pytest.raises(UserError, match="has steps 50, 100, not 7"):
        find_parent("base", "d4", 7)


def test_the_identity_of_a_parent_changes_with_its_parameters(tokenizer: Tokenizer) -> None:
    put("base", "d4", 100, tokenizer)
    before = find_parent("base", None, None).identity
    pair = make()
    train(*pair, 0, 1)
    save(checkpoint_dir("base", "d4"), 100, *pair, tokenizer)
    assert find_parent("base", None, None).identity != before


# --- loading one ---------------------------------------------------------------------------------


def test_a_loaded_model_computes_what_the_saved_one_did(tokenizer: Tokenizer) -> None:
    pair = make()
    train(*pair, 0, 3)
    save(checkpoint_dir("sft", "d4"), 3, *pair, tokenizer, "sft")
    loaded = load_model(None, None, None, CPU)
    assert (loaded.stage, loaded.tag, loaded.step, loaded.meta["stage"]) == ("sft", "d4", 3, "sft")
    assert loaded.tokenizer.encode("the cat") == tokenizer.encode("the cat")
    assert not loaded.model.training
    idx = torch.arange(16)[None]
    assert torch.equal(loaded.model(idx), pair[0](idx))


def test_the_format_of_a_loaded_model(tokenizer: Tokenizer) -> None:
    put("base", "d4", 1, tokenizer)
    half = load_model("base", None, None, replace(CPU, dtype=torch.bfloat16)).model
    assert half.dtype == half.lm_head.weight.dtype == half.wte.weight.dtype == torch.bfloat16
    assert half.x0_lambdas.dtype == torch.float32
    masters = load_model("base", None, None, replace(CPU, dtype=torch.bfloat16), torch.float32).model
    assert {p.dtype for p in masters.parameters()} == {torch.float32}
    assert masters.dtype == torch.bfloat16


def test_a_damaged_newest_step_falls_back_when_loaded(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    put("base", "d4", 1, tokenizer)
    put("base", "d4", 2, tokenizer)
    where = checkpoint_dir("base", "d4")
    flip_a_bit(where / "step_000002" / "model.safetensors")
    assert load_model("base", "d4", None, CPU).step == 1
    assert "step_000002 is damaged: model.safetensors has a wrong SHA-256" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"step_000002 is damaged: model.safetensors has a wrong SHA-256.*base_train"):
        load_model("base", "d4", 2, CPU)
    with pytest.raises(UserError, match="has steps 1, 2, not 3"):
        load_model("base", "d4", 3, CPU)
    flip_a_bit(where / "step_000001" / "model.safetensors")
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged; train stage base again"):
        load_model("base", "d4", None, CPU)


def test_a_tokenizer_that_is_not_the_model_s_is_refused(tokenizer: Tokenizer) -> None:
    """The other tokenizer has a matching file hash in meta.json, so only its content shows the change."""
    put("base", "d4", 1, tokenizer)
    where = checkpoint_dir("base", "d4") / "step_000001"
    Tokenizer.train([TEXT.upper()] * 4, VOCAB).save(where)
    meta = read_meta(where.parent, 1)
    meta["files"]["tokenizer.json"] = step_files.seal(where / "tokenizer.json")
    step_files.write_meta(where, {name: value for name, value in meta.items() if name != "sha256"})
    with pytest.raises(UserError, match="the folder was changed"):
        load_model("base", "d4", None, CPU)


def test_a_model_of_another_shape_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save(tmp_path / "run", 1, *make(), tokenizer)
    with pytest.raises(UserError, match=r"the parameters do not fit the model: lm_head.weight"):
        restore(tmp_path / "run", 1, *make(vocab_size=400))


def test_a_published_model_is_another_one_with_another_config_or_chat_template(tmp_path: Path) -> None:
    """Answers that were kept for it are then asked again."""
    write_folder(tmp_path, "qwen3")

    def weights() -> str:
        return load_published(tmp_path, None, on_cpu()).weights[:16]

    found = {weights()}
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    found.add(weights())
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "rope_theta": 500.0, "rope_parameters": None}))
    found.add(weights())
    assert len(found) == 3


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.model", "pieces", "only as tokenizer.model"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("README.md", "", "Copy the model again, with its tokenizer"),
    ],
)
def test_a_published_model_without_a_readable_vocabulary_says_what_to_copy(
    name: str, content: str, words: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, "qwen3")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        load_published(tmp_path, None, on_cpu())
