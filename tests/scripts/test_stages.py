"""The training stages: exact over a stop, finished only once, refused with other settings."""

import errno
import json
import os
import runpy
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanochat.checkpoint_manager import save as saving
from nanochat.checkpoint_manager.files import latest_step, read_meta
from nanochat.common import UserError, read_json
from nanochat.device import Compute
from nanochat.prepare.token_files import TokenSet
from nanochat.runtime.tracking import read_metrics
from tests.support.small_world import (
    FLAGS,
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
from tests.support.tiny_model import on_cpu


@dataclass(frozen=True)
class Chain:
    """All four stages, each trained for twenty steps without a stop."""

    base: Path
    compute: Compute


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.smoke)])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    compute = on_cpu() if request.param == "float32" else in_bf16()
    with small_chain(tmp_path_factory.mktemp("chain"), compute) as base:
        yield Chain(base, compute)


@pytest.fixture
def ready(chain: Chain, base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    """A copy of the chain that a test may change."""
    up_to("rl", chain.base, base_folder)
    return Chain(base_folder, chain.compute)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_learns_something(stage: str, chain: Chain) -> None:
    lines = [line for line in read_metrics(stage_folder(chain.base, stage)) if "loss" in line]
    assert not any(line["skipped"] for line in lines)
    if stage == "rl":
        assert sum(line["grad_norm"] > 0 for line in lines) > 10
        if chain.compute.dtype == torch.float32:
            assert max(line["sampler_gap"] for line in lines) <= 1e-4
    else:
        assert len([line for line in lines if "val_bpb" in line]) == 2
        losses = [line["loss"] for line in lines]  # twenty tiny steps of SFT do not yet show in the validation
        assert sum(losses[-5:]) < sum(losses[:5]), losses


def test_rl_is_measured_before_its_first_step_too(chain: Chain) -> None:
    lines = read_metrics(stage_folder(chain.base, "rl"))
    assert [line["step"] for line in lines if "accuracy" in line] == [0, 10, 20]
    section = read_json(chain.base / "report" / "sections" / "rl_train.json")
    assert [step for step, _ in section["accuracy"]] == [0, 10, 20]
    assert section["first_loss"] == lines[1]["loss"]


def test_a_finished_stage_called_again_changes_no_file(chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(chain.base)
    os.environ["NANOCHAT_BASE_DIR"] = str(chain.base)
    for stage in STAGES:
        run_stage(stage, chain.compute, run="other", eval_every=3)  # flags that change nothing learned
        assert "already done" in capsys.readouterr().out
    assert files(chain.base) == before


OTHER = {"base": "--depth: 2 before, 3 now", "mid": "--init_lr_frac: 1.0 before, 0.5 now",
         "sft": "--target_examples_per_step: 8 before, 16 now", "rl": "--num_samples: 4 before, 8 now"}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_other_settings_are_refused_with_the_difference_named(stage: str, chain: Chain) -> None:
    os.environ["NANOCHAT_BASE_DIR"] = str(chain.base)
    name, _, values = OTHER[stage].removeprefix("--").partition(": ")
    kind = type(FLAGS[stage].get(name, 1.0))
    before = files(chain.base)
    with pytest.raises(UserError, match=OTHER[stage]):
        run_stage(stage, chain.compute, **{name: kind(values.split()[2])})
    assert files(chain.base) == before


def test_a_section_of_the_report_that_is_gone_is_made_again(ready: Chain) -> None:
    for stage in ("base", "mid", "sft"):
        section = ready.base / "report" / "sections" / f"{stage}_train.json"
        was, weights = read_json(section), tensors(ready.base, stage)
        section.unlink()
        run_stage(stage, ready.compute)
        assert tensors(ready.base, stage) == weights
        now = read_json(section)
        assert now.keys() == was.keys() and now["loss"] == was["loss"] and now["val_bpb"] == was["val_bpb"]


def test_a_tokenizer_trained_anew_is_noticed(ready: Chain) -> None:
    make_corpus(ready.base, 400)
    with pytest.raises(UserError, match=r"begun with other settings \(tokenizer: \w+ before, \w+ now\)"):
        run_stage("base", ready.compute)
    with pytest.raises(UserError, match="tokenizer"):
        run_stage("base", ready.compute, stop_at=10)
    run_stage("rl", ready.compute, num_iterations=1)  # later stages take the tokenizer of the checkpoint


@pytest.mark.parametrize("stage", ["base", "sft"])
def test_a_corpus_made_anew_is_noticed(
    stage: str, chain: Chain, base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up_to(stage, chain.base, base_folder)
    run_stage(stage, chain.compute, stop_at=2)
    make = TokenSet.key.func
    monkeypatch.setattr(TokenSet, "key", property(lambda token_set: f"other{make(token_set)}"))
    with pytest.raises(UserError, match=r"was begun on other data: the rows of corpus tinyworld .* now, so step 2"):
        run_stage(stage, chain.compute, stop_at=4)


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_rl_with_ratios_takes_several_updates_and_resumes_bit_for_bit(loss: str, ready: Chain) -> None:
    flags = {"num_iterations": 4, "loss": loss, "updates_per_rollout": 2, "oversample": 2, "average": "reply",
             "advantage": "normalized", "init_lr_frac": 0.5, "kl": 0.1 if loss == "ppo" else 0.0}  # fmt: skip
    run_stage("rl", ready.compute, **flags)
    whole, folder = tensors(ready.base, "rl", 4), stage_folder(ready.base, "rl")
    lines = [line for line in read_metrics(folder) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    lines = [line for line in lines if "clipped" in line]  # a step of equal rewards has nothing to train
    assert lines and all(0 <= line["clipped"] <= 1 and line["policy_shift"] >= 0 for line in lines)
    assert any(line["policy_shift"] > 1e-6 for line in lines)  # the second update sees that the first one moved it
    assert all(("kl" in line) == (loss == "ppo") for line in lines)
    assert loss != "ppo" or lines[-1]["kl"] > lines[0]["kl"]  # the reference stays where RL started
    shutil.rmtree(folder)
    run_stage("rl", ready.compute, stop_at=2, **flags)
    run_stage("rl", ready.compute, **flags)
    assert tensors(ready.base, "rl", 4) == whole


def test_rl_on_your_own_problems_is_kept_beside_what_is_there(ready: Chain, tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    lines = [json.dumps({"question": f"{n} + 1?", "answer": n + 1}) + "\n" for n in range(40)]
    file.write_text("".join(lines), encoding="utf-8")
    run_stage("rl", ready.compute, num_iterations=2, stop_at=1, problems=str(file))
    own = stage_folder(ready.base, "rl").with_name("d2-sums")
    assert latest_step(own) == 1 and not stage_folder(ready.base, "rl").exists()
    assert read_meta(own, 1)["config"]["problems"] == str(file)
    file.write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(UserError, match="other data"):
        run_stage("rl", ready.compute, num_iterations=2, problems=str(file))


@pytest.mark.parametrize(("stage", "maker"), [("mid", "base_train"), ("sft", "mid_train"), ("rl", "chat_sft")])
def test_a_missing_earlier_stage_is_named_with_its_command(
    stage: str, maker: str, chain: Chain, base_folder: Path
) -> None:
    up_to(STAGES[STAGES.index(stage) - 1], chain.base, base_folder)
    with pytest.raises(UserError, match=f"python -m scripts.{maker}") as refused:
        run_stage(stage, chain.compute)
    assert refused.value.exit_code == 2
    assert not stage_folder(base_folder, stage).exists()


@pytest.mark.parametrize(("stage", "maker"), [("mid", "base_train"), ("sft", "mid_train"), ("rl", "chat_sft")])
def test_an_unfinished_earlier_stage_is_named_with_its_command(
    stage: str, maker: str, chain: Chain, base_folder: Path
) -> None:
    parent = STAGES[STAGES.index(stage) - 1]
    up_to(parent, chain.base, base_folder)
    run_stage(parent, chain.compute, stop_at=3)
    with pytest.raises(UserError, match=f"step 3 of 20.*scripts.{maker}") as refused:
        run_stage(stage, chain.compute)
    assert refused.value.exit_code == 2


def test_sft_may_start_from_base(ready: Chain) -> None:
    with pytest.raises(UserError, match=r"parent: mid d2.* before, base d2.* now"):
        run_stage("sft", ready.compute, source="base")
    up_to("sft", ready.base, ready.base.with_name("other"))
    os.environ["NANOCHAT_BASE_DIR"] = str(ready.base.with_name("other"))
    run_stage("sft", ready.compute, source="base", num_iterations=2)


def test_sft_mixes_its_end_with_its_start(ready: Chain, base_folder: Path) -> None:
    def weights(stage: str) -> dict[str, torch.Tensor]:
        return load_file(stage_folder(base_folder, stage) / "step_000020" / "model.safetensors")

    start, end = weights("mid"), weights("sft")
    run_stage("sft", ready.compute, resume="none", start_share=0.5, stop_at=12)
    run_stage("sft", ready.compute, start_share=0.5)  # resumed, it still knows its start
    mixed = weights("sft")
    assert mixed.keys() == end.keys() and not torch.equal(mixed["wte.weight"], end["wte.weight"])
    for name, weight in mixed.items():
        torch.testing.assert_close(weight, (start[name] + end[name]) / 2)


# --- failures ------------------------------------------------------------------------------------


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


def test_without_data_both_commands_that_make_some_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], base_folder: Path
) -> None:
    assert command(monkeypatch, "base", "--depth=2", "--device_type=cpu") == 2
    said = capsys.readouterr().err
    assert "python -m nanochat.dataset --data tinyworld" in said and "python -m nanochat.dataset -n 8" in said
    assert not list(base_folder.rglob("*.safetensors"))


@pytest.mark.parametrize("stage", STAGES)
def test_an_unknown_flag_is_refused(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, stage, "--num_iteration=3") == 2
    assert "--num-iterations" in capsys.readouterr().err


def test_without_an_earlier_stage_a_command_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "mid", "--device_type=cpu") == 2
    assert "python -m scripts.base_train" in capsys.readouterr().err


def test_a_depth_too_large_for_memory_is_refused_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch, base_folder: Path
) -> None:
    make_corpus(base_folder)
    with pytest.raises(UserError, match=r"depth 128 makes [\d,]+ parameters, which take at least [\d,]+ GiB"):
        run_stage("base", depth=128, model_dim=16384, head_dim=128)
    assert not list(base_folder.rglob("*.safetensors")) and not list(base_folder.rglob("*.bin"))


def test_a_full_disk_keeps_the_old_checkpoint_and_says_so(
    chain: Chain, base_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    up_to("base", chain.base, base_folder)
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    flags = words("base", save_every=5)
    write, count = saving.write_tensors, 0

    def fills(tensors_: Any, path: Path, metadata: Any = None) -> Any:
        nonlocal count
        count += 1
        sealed = write(tensors_, path, metadata)
        if count == 2:  # of the second save
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return sealed

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_tensors", fills)
        assert command(patch, "base", *flags) == 1
    said = capsys.readouterr().err
    assert "the disk is full" in said and "same command again" in said
    folder = stage_folder(base_folder, "base")
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "metrics.jsonl", "run.json", "samples.jsonl", "step_000005"
    ]  # fmt: skip
    assert read_metrics(folder)[-1]["step"] < 15  # it ends before the save that would have followed
    assert command(monkeypatch, "base", *flags) == 0
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, 21))


def test_your_own_conversations_are_learned_beside_what_is_there(ready: Chain, base_folder: Path) -> None:
    chats = base_folder / "pirates.jsonl"
    line = '{"messages": [{"role": "user", "content": "%d?"}, {"role": "assistant", "content": "Arr, %d."}]}'
    chats.write_text("\n".join(line % (i, i) for i in range(300)), encoding="utf-8")
    before = {stage: tensors(base_folder, stage) for stage in ("mid", "sft")}
    for stage in ("mid", "sft"):
        run_stage(stage, ready.compute, model_tag=None, conversations=str(chats))
    assert {stage: tensors(base_folder, stage) for stage in ("mid", "sft")} == before
    for stage in ("mid", "sft"):
        folder = stage_folder(base_folder, stage)
        assert latest_step(folder.with_name(f"{folder.name}-pirates")) == 20
    meta = read_meta(stage_folder(base_folder, "sft").with_name("d2-pirates"), 20)
    assert meta["config"]["parent"].startswith("mid d2-pirates step 20")
