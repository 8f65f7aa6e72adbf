"""The training stages: they learn, finish only once, and refuse what they cannot resume or start from."""

import errno
import json
import math
import os
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanochat.checkpoint_manager import save as saving
from nanochat.checkpoint_manager.files import latest_step, read_meta
from nanochat.common import UserError, read_json
from nanochat.prepare.token_files import TokenSet
from nanochat.runtime.tracking import read_metrics
from tests.support.small_world import (
    SCRIPTS,
    STAGES,
    files,
    in_bf16,
    make_corpus,
    run_stage,
    small_chain,
    stage_folder,
    tensors,
    up_to,
    words,
)

pytestmark = pytest.mark.slow  # whole stages


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base folder in which each of the four stages was trained for twenty steps without a stop."""
    with small_chain(tmp_path_factory.mktemp("chain")) as base:
        yield base


@pytest.fixture
def ready(chain: Path, base_folder: Path) -> Path:
    """A copy of the chain that a test may change."""
    up_to("rl", chain, base_folder)
    return base_folder


def stage_learned(stage: str, base: Path, largest_sampler_gap: float) -> None:
    lines = [line for line in read_metrics(stage_folder(base, stage)) if "loss" in line]
    assert not any(line["skipped"] for line in lines)
    if stage == "rl":
        assert sum(line["grad_norm"] > 0 for line in lines) > len(lines) / 2
        assert max(line["sampler_gap"] for line in lines) <= largest_sampler_gap
    else:
        assert len([line for line in lines if "val_bpb" in line]) == 2
        losses = [line["loss"] for line in lines]  # a few tiny steps of SFT do not yet show in the validation
        assert sum(losses[-5:]) < sum(losses[:5]), losses


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_learns_something(stage: str, chain: Path) -> None:
    stage_learned(stage, chain, 1e-4)


@pytest.mark.smoke
def test_every_stage_learns_something_in_bf16(tmp_path: Path) -> None:
    with small_chain(tmp_path / "bf16", in_bf16(), num_iterations=10, eval_every=5) as base:
        for stage in STAGES:
            stage_learned(stage, base, math.inf)


def test_rl_is_measured_before_its_first_step_too(chain: Path) -> None:
    lines = read_metrics(stage_folder(chain, "rl"))
    assert [line["step"] for line in lines if "accuracy" in line] == [0, 10, 20]
    section = read_json(chain / "report" / "sections" / "rl_train.json")
    assert [step for step, _ in section["accuracy"]] == [0, 10, 20]
    assert section["first_loss"] == lines[1]["loss"]


def test_a_finished_stage_called_again_changes_no_file(chain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(chain)
    os.environ["NANOCHAT_BASE_DIR"] = str(chain)
    for stage in STAGES:
        run_stage(stage, run="other", eval_every=3)  # flags that change nothing learned
        assert "already done" in capsys.readouterr().out
    assert files(chain) == before


@pytest.mark.parametrize(
    ("stage", "flag", "before", "now"),
    [
        ("base", "depth", 2, 3),
        ("mid", "init_lr_frac", 1.0, 0.5),
        ("sft", "target_examples_per_step", 8, 16),
        ("rl", "num_samples", 4, 8),
    ],
)
def test_other_settings_are_refused_with_the_difference_named(
    stage: str, flag: str, before: float, now: float, chain: Path
) -> None:
    os.environ["NANOCHAT_BASE_DIR"] = str(chain)
    there = files(chain)
    with pytest.raises(UserError, match=f"--{flag}: {before} before, {now} now"):
        run_stage(stage, **{flag: now})
    assert files(chain) == there


def test_a_section_of_the_report_that_is_gone_is_made_again(ready: Path) -> None:
    for stage in ("base", "mid", "sft"):
        path = ready / "report" / "sections" / f"{stage}_train.json"
        section = read_json(path)
        weights = tensors(ready, stage)
        path.unlink()
        run_stage(stage)
        assert tensors(ready, stage) == weights
        again = read_json(path)
        assert again.keys() == section.keys()
        assert again["loss"] == section["loss"] and again["val_bpb"] == section["val_bpb"]


def test_later_stages_take_the_tokenizer_of_the_checkpoint(ready: Path) -> None:
    make_corpus(ready, 400)
    run_stage("rl", num_iterations=1)


def test_a_corpus_made_anew_is_noticed(chain: Path, base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    up_to("base", chain, base_folder)
    run_stage("base", stop_at=2)
    make = TokenSet.key.func
    monkeypatch.setattr(TokenSet, "key", property(lambda token_set: f"other{make(token_set)}"))
    with pytest.raises(UserError, match=r"other data: the rows of corpus tinyworld .* step 2"):
        run_stage("base", stop_at=4)


RATIOS = {"num_iterations": 4, "updates_per_rollout": 2, "oversample": 2, "average": "reply",
          "advantage": "normalized", "init_lr_frac": 0.5}  # fmt: skip


@pytest.mark.parametrize(("loss", "kl"), [("ppo", 0.1), ("cispo", 0.0), ("gspo", 0.0)])
def test_rl_with_ratios_takes_several_updates(loss: str, kl: float, ready: Path) -> None:
    run_stage("rl", loss=loss, kl=kl, **RATIOS)
    lines = [line for line in read_metrics(stage_folder(ready, "rl")) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    lines = [line for line in lines if "clipped" in line]  # a step of equal rewards has nothing to train
    assert lines and all(0 <= line["clipped"] <= 1 and line["policy_shift"] >= 0 for line in lines)
    assert any(line["policy_shift"] > 1e-6 for line in lines)  # the second update sees that the first one moved it
    assert all(("kl" in line) == bool(kl) for line in lines)
    assert not kl or lines[-1]["kl"] > lines[0]["kl"]  # the reference stays where RL started


def test_rl_that_resumes_is_still_pulled_to_where_it_started(ready: Path) -> None:
    run_stage("rl", loss="ppo", kl=0.1, **RATIOS)
    whole = tensors(ready, "rl", 4)
    shutil.rmtree(stage_folder(ready, "rl"))
    run_stage("rl", loss="ppo", kl=0.1, stop_at=2, **RATIOS)
    run_stage("rl", loss="ppo", kl=0.1, **RATIOS)
    assert tensors(ready, "rl", 4) == whole


def test_rl_on_your_own_problems_is_kept_beside_what_is_there(ready: Path, tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    lines = [json.dumps({"question": f"{n} + 1?", "answer": n + 1}) + "\n" for n in range(40)]
    file.write_text("".join(lines), encoding="utf-8")
    run_stage("rl", num_iterations=2, stop_at=1, problems=str(file))
    own = stage_folder(ready, "rl").with_name("d2-sums")
    assert latest_step(own) == 1 and not stage_folder(ready, "rl").exists()
    assert read_meta(own, 1)["config"]["problems"] == str(file)
    file.write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(UserError, match="the content of your files: "):
        run_stage("rl", num_iterations=2, problems=str(file))


@pytest.mark.parametrize(("stage", "maker"), [("mid", "base_train"), ("sft", "mid_train"), ("rl", "chat_sft")])
def test_an_earlier_stage_that_is_missing_or_unfinished_is_named_with_its_command(
    stage: str, maker: str, chain: Path, base_folder: Path
) -> None:
    parent = STAGES[STAGES.index(stage) - 1]
    up_to(parent, chain, base_folder)
    with pytest.raises(UserError, match=f"python -m scripts.{maker}") as refused:
        run_stage(stage)
    assert refused.value.exit_code == 2 and not stage_folder(base_folder, stage).exists()
    run_stage(parent, stop_at=3)
    with pytest.raises(UserError, match=f"step 3 of 20.*scripts.{maker}") as refused:
        run_stage(stage)
    assert refused.value.exit_code == 2


def test_sft_may_start_from_base(ready: Path) -> None:
    with pytest.raises(UserError, match=r"starts from: mid d2.* before, base d2.* now"):
        run_stage("sft", source="base")
    up_to("sft", ready, ready.with_name("other"))
    os.environ["NANOCHAT_BASE_DIR"] = str(ready.with_name("other"))
    run_stage("sft", source="base", num_iterations=2)


def test_sft_mixes_its_end_with_its_start(ready: Path) -> None:
    def weights(stage: str) -> dict[str, torch.Tensor]:
        return load_file(stage_folder(ready, stage) / "step_000020" / "model.safetensors")

    start, end = weights("mid"), weights("sft")
    run_stage("sft", resume="none", start_share=0.5, stop_at=12)
    run_stage("sft", start_share=0.5)  # resumed, it still knows its start
    mixed = weights("sft")
    assert mixed.keys() == end.keys() and not torch.equal(mixed["wte.weight"], end["wte.weight"])
    for name, weight in mixed.items():
        torch.testing.assert_close(weight, (start[name] + end[name]) / 2)


def command(monkeypatch: pytest.MonkeyPatch, stage: str, *flags: str) -> int:
    """The exit code of a script, run as a command in this process."""
    name = SCRIPTS[stage].__name__
    monkeypatch.setattr(sys, "argv", [name, *flags])
    monkeypatch.delitem(sys.modules, name)  # so that it runs again; it comes back after the test
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_full_disk_keeps_the_old_checkpoint_and_says_so(
    chain: Path, base_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    up_to("base", chain, base_folder)
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    flags = words("base", save_every=5)
    write, count = saving.write_tensors, 0

    def fills(tensors_: Any, path: Path, *others: Any) -> Any:
        nonlocal count
        count += 1
        sealed = write(tensors_, path, *others)
        if count == 2:  # of the second save
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return sealed

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_tensors", fills)
        assert command(patch, "base", *flags) == 1
    assert "the disk is full" in capsys.readouterr().err
    folder = stage_folder(base_folder, "base")
    assert [path.name for path in folder.glob("*step*")] == ["step_000005"]
    assert read_metrics(folder)[-1]["step"] < 15  # it ends before the save that would have followed
    assert command(monkeypatch, "base", *flags) == 0
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, 21))


def test_your_own_conversations_are_learned_beside_what_is_there(ready: Path) -> None:
    chats = ready / "pirates.jsonl"
    line = '{"messages": [{"role": "user", "content": "%d?"}, {"role": "assistant", "content": "Arr, %d."}]}'
    chats.write_text("\n".join(line % (i, i) for i in range(300)), encoding="utf-8")
    before = {stage: tensors(ready, stage) for stage in ("mid", "sft")}
    for stage in ("mid", "sft"):
        run_stage(stage, model_tag=None, conversations=str(chats))
    assert {stage: tensors(ready, stage) for stage in ("mid", "sft")} == before
    for stage in ("mid", "sft"):
        folder = stage_folder(ready, stage)
        assert latest_step(folder.with_name(f"{folder.name}-pirates")) == 20
    meta = read_meta(stage_folder(ready, "sft").with_name("d2-pirates"), 20)
    assert meta["config"]["parent"].startswith("mid d2-pirates step 20")
    chats.write_text("\n".join(line % (i, i + 1) for i in range(300)), encoding="utf-8")
    for stage in ("mid", "sft"):  # what was trained on the file as it was is not done
        with pytest.raises(UserError, match="the content of your files: "):
            run_stage(stage, model_tag=None, conversations=str(chats))
