"""What a run does between its steps: when it saves and measures, what it owes after a stop, and how it ends."""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanochat import device
from nanochat.checkpoint_manager import resume
from nanochat.checkpoint_manager.files import read_meta, step_dir, steps, write_meta
from nanochat.checkpoint_manager.resume import begun_sizes
from nanochat.checkpoint_manager.same_run import free_flags
from nanochat.common import UserError
from nanochat.optim import Rates
from nanochat.planner import expected
from nanochat.platforms.ascend import chips as ascend_chips
from nanochat.platforms.cpu.platform import Cpu
from nanochat.report.sections import has_training_section
from nanochat.run import AlreadyDone, Plan, Run, open_folder
from nanochat.runtime.progress import duration
from nanochat.runtime.tracking import read_metrics
from nanochat.step import Outcome
from nanochat.train.flags import RunFlags
from nanochat.train.setup import set_up
from nanochat.train.sizes import Batch
from scripts import base_train, chat_rl, chat_sft, mid_train
from tests.support.tiny_model import on_cpu, tiny_gpt, tiny_tokenizer
from tests.support.tiny_training import Batches

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = tiny_tokenizer()


def begun(total: int = 100, items: int = 4, about: Any = None, **flags: Any) -> Run:
    """A run of a tiny model, ready for its next step."""
    compute = on_cpu()
    cfg = RunFlags(**flags)
    folder = open_folder("base", "d2", cfg, cfg, compute, corpus="cats")
    model = tiny_gpt(TOKENIZER.vocab_size, 16)
    optimizers = set_up(model, Rates(), 0.1, folder.path, cfg, compute)
    plan = Plan(total, 64, items, "rows")
    return Run(folder, plan, model, TOKENIZER, optimizers, cfg, compute, about=about)


def test_the_announced_time_is_the_planners(
    base_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another computation told another time than the planner and the preflight."""
    monkeypatch.setattr(Cpu, "chip", next(chip for chip in ascend_chips.CHIPS if chip.name == "910B3"))
    monkeypatch.setattr("nanochat.dataloader.make_step", lambda *arguments: None)
    monkeypatch.setattr("nanochat.run.compiled", lambda model, *arguments: model)
    total = 10**6
    run = begun(total)
    run.prepare(SimpleNamespace(row_tokens=17), Batch(64, 4, 2, 2))
    seconds = expected.of_model(run.model, 2, 2, run.compute)
    assert seconds is not None and duration(total * seconds) in capsys.readouterr().out
    run.prepare(SimpleNamespace(row_tokens=17), Batch(64, 4, 2, 2), step_seconds=86_400)
    assert duration(total * 86_400) in capsys.readouterr().out


def go(run: Run, count: int = 1000, every: int = 0, ends: bool = False) -> list[int]:
    """Train at most `count` steps, measuring `accuracy`; return which ones. At its end the run is closed."""
    done: list[int] = []
    for step in run.steps():
        with run.between_steps(every, ends) as due:
            if due:
                run.record(accuracy=0.5)
        if run.ended:
            run.__exit__(None, None, None)
            break
        if len(done) == count:
            break
        run.optimizers.schedule(0.5, 0.95, 1.0)
        data = Batches(step, run.compute)
        with run.update(data.num_targets) as update:
            for idx, targets in update.passes(data.micro_batches):
                loss = run.model(idx, targets, reduction="sum")
                update.add(loss)
                (loss * update.factor).backward()
            outcome = update.step()
        run.finish(outcome, 0.5)
        done.append(run.step)
    run._saver.wait()  # a thread may still be writing
    return done


def test_a_stage_saves_at_its_end_by_step_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stage = begun(8, save_every=2, keep=0, stop_at=5)
    assert go(stage, 3) == [1, 2, 3] and steps(stage.folder.path) == [2]
    now += 61
    assert go(stage) == [4, 5] and steps(stage.folder.path) == [2, 4, 5]
    stage = begun(8, save_seconds=0, keep=0)
    assert stage.step == 5
    now += 1e6
    assert go(stage) == [6, 7, 8] and steps(stage.folder.path) == [2, 4, 5, 8]


def test_a_stage_measures_its_steps_and_keeps_their_figures(base_folder: Path) -> None:
    stage = begun(5, stop_at=500)  # beyond its end
    go(stage, every=2)
    lines = read_metrics(stage.folder.path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "accuracy" in line] == [2, 4, 5]
    assert all(0 < line["seconds"] < 60 and line["lrm"] == 0.5 for line in lines)
    assert has_training_section("base", "d2")
    assert read_meta(stage.folder.path, 5)["family"] == "gpt"


def test_a_stage_that_measures_at_its_ends_does_so_whatever_the_interval_is() -> None:
    stage = begun(3)
    go(stage, every=0, ends=True)
    assert [line["step"] for line in read_metrics(stage.folder.path) if "accuracy" in line] == [0, 3]


def test_figures_of_the_script_join_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = begun(1)
    with run.between_steps(0):
        pass
    run.finish(Outcome(1.0, 1.0, False, figures={"margin": 0.5}), 1.0, {"reward": 0.25}, "reward: 0.250")
    with run.between_steps(0):
        pass
    (line,) = read_metrics(run.folder.path)
    assert list(line)[-3:] == ["memory_gb", "margin", "reward"] and line["loss"] == 1.0
    assert "step 00001 | reward: 0.250 | margin: 0.5000" in capsys.readouterr().out


def test_figures_of_another_version_are_refused() -> None:
    stage = begun(8, stop_at=2)
    go(stage)
    meta = read_meta(stage.folder.path, 2)
    del meta["sha256"]
    meta["state"]["meter"]["bits_saved"] = 1
    write_meta(step_dir(stage.folder.path, 2), meta)
    with pytest.raises(UserError, match=r"bits_saved.*--resume=none"):
        begun(8)


def test_a_run_resumes_only_with_as_many_steps_and_rows_as_it_began_with(base_folder: Path) -> None:
    stage = begun(8, stop_at=2)
    go(stage)
    before = sorted(base_folder.rglob("*"))
    assert begun_sizes(stage.folder.path, "auto", on_cpu())[0] == begun_sizes(stage.folder.path, 2, on_cpu())[0] == 4
    assert begun_sizes(stage.folder.path, "none", on_cpu())[0] is begun_sizes(stage.folder.path, 1, on_cpu())[0] is None
    kept = begun_sizes(stage.folder.path, "auto", on_cpu())[1]
    assert kept is not None and kept["sequence_len"] == stage.model.config.sequence_len
    assert begun_sizes(stage.folder.path, "none", on_cpu())[1] is None
    with pytest.raises(UserError, match=r"begun with 8 steps of 4 rows .* would make 9 steps of 4"):
        begun(9)
    with pytest.raises(UserError, match=r"begun with 8 steps of 4 rows .* would make 8 steps of 6"):
        begun(8, items=6)
    assert sorted(base_folder.rglob("*")) == before
    meta = read_meta(stage.folder.path, 2)
    del meta["sha256"], meta["state"]["row"]  # as early versions wrote it
    write_meta(step_dir(stage.folder.path, 2), meta)
    assert begun_sizes(stage.folder.path, "auto", on_cpu())[0] is None
    assert begun(8, items=6).step == 2


def test_the_end_says_where_the_checkpoints_are_and_how_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    stage = begun(3, stop_at=2)
    go(stage)
    assert f"{stage.folder.path} (stopped at step 2; leave --stop_at out" in capsys.readouterr().out
    assert not has_training_section("base", "d2")
    go(begun(3, stop_at=1, resume="none"))  # the same command would begin again
    assert "leave --stop_at and --resume=none out" in capsys.readouterr().out
    go(begun(3))
    assert f"checkpoints: {stage.folder.path}" in capsys.readouterr().out.splitlines()


def test_a_finished_stage_says_so_and_is_not_begun_again(capsys: pytest.CaptureFixture[str]) -> None:
    go(begun(2))
    with pytest.raises(AlreadyDone):
        begun(2)
    assert "already done" in capsys.readouterr().out
    with pytest.raises(UserError, match="--seed: 42 before, 7 now"):
        begun(2, seed=7)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"compile": True}, "--compile"),
        ({"graphs": True}, "is a CPU"),
        ({"graphs": True, "compile": True}, "both"),
        ({"checkpoint_files": "per_rank"}, "--checkpoint_files=per_rank"),
        ({"run": "mine"}, "--run mine needs wandb"),
        ({"profile": True}, "--profile needs .* 3 left"),
    ],
)
def test_what_cannot_be_done_is_refused_before_an_earlier_run_is_moved_aside(
    base_folder: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], named: str
) -> None:
    go(begun(2))
    before = sorted(base_folder.rglob("*"))
    monkeypatch.setattr(device, "compiler_missing", lambda compute: "no C++ compiler")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=named):
        begun(3, resume="none", about={"lora": {}}, **flags)
    assert sorted(base_folder.rglob("*")) == before


HOLDS = """
import sys, time
from pathlib import Path
from nanochat.checkpoint_manager.resume import hold
from tests.support.tiny_model import on_cpu
compute = on_cpu()
hold(Path(sys.argv[1]), compute)
print("held", flush=True)
time.sleep(600)
"""


def test_no_rank_hangs_before_the_first_step(base_folder: Path) -> None:
    """Ranks that waited for rank 0 to verify a large checkpoint for longer than --hang_seconds ended all others."""
    stage = begun(4)
    assert stage.compute.pulse.moments == 0
    next(stage.steps())
    assert stage.compute.pulse.moments > 0


def test_two_commands_cannot_train_a_stage_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = begun(4, stop_at=2)
    go(stage)
    stage.compute.ending.close()  # as at the end of launch()
    monkeypatch.setattr(resume, "LOCK_SECONDS", 0.2)
    half_saved = stage.folder.path / ".tmp-step_000003"
    half_saved.mkdir()
    words = [sys.executable, "-c", HOLDS, str(stage.folder.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="d2 is training already"):
            begun(4)
        assert half_saved.exists(), "it is the other command's"
        other.kill()
        monkeypatch.setattr(resume, "LOCK_SECONDS", 10)
        assert begun(4).step == 2, "a lock ends with its process"
    assert not half_saved.exists()


FREE = """
    run device_type save_every save_seconds stop_at compile kernels device_batch_size gradient_accumulation_steps
    eval_every eval_tokens eval_examples data model_tag source source_step base_step shard profile keep resume
    other_code hang_seconds
"""


def test_the_flags_that_old_runs_may_change_are_still_free() -> None:
    """Those of the list that same_run.py once had."""
    scripts = (base_train, mid_train, chat_sft, chat_rl)
    assert set.union(*(set(free_flags(script.Config)) for script in scripts)) >= set(FREE.split())
