"""What every training script promises: one set of faults, run through all five of them.

The scripts hold their loops themselves; this contract keeps the copies from diverging.
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat import run as runs
from nanochat.checkpoint_manager.files import steps
from nanochat.device import Compute
from nanochat.evals import loss as loss_eval
from nanochat.run import Run
from nanochat.runtime import signals
from nanochat.runtime.tracking import read_metrics
from nanochat.step import WINDOW, LossScale, Outcome, Spikes, Update
from scripts import chat_rl, finetune
from tests.scripts.test_finetune import models as models  # a fixture: two small models and conversations
from tests.support.flags import configured
from tests.support.ranks import run_ranks
from tests.support.small_world import STAGES, few_own_words, run_stage, shrink, small_chain, stage_folder, up_to
from tests.support.tiny_model import on_cpu

pytestmark = pytest.mark.slow  # whole stages

STEPS, EVERY = 6, 3
SCRIPTS = (*STAGES, "tune")
TIMES = ("seconds", "cpu_seconds", "tokens_per_second", "mfu", "total_seconds", "memory_gb")


@dataclass(frozen=True)
class World:
    """A base folder in which every script has run to its end, and the models that finetune starts from."""

    base: Path
    models: Path


def train(script: str, models: Path, compute: Compute | None = None, **flags: Any) -> None:
    """Run one script in the base folder of the environment."""
    flags = {"num_iterations": STEPS, "eval_every": EVERY, **flags}
    if script != "tune":
        run_stage(script, compute, **flags)
        return
    cfg = configured(
        finetune.Config, model=models / "qwen3", data=(str(models / "chats.jsonl"),), max_length=48,
        target_examples_per_step=4, device_batch_size=2, learning_rate=1e-2, compile=False, save_seconds=0.0,
        out_tag="made", **{"lora_dropout": 0.1, **flags},
    )  # fmt: skip
    compute = compute or on_cpu()
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(runs.AlreadyDone), compute.ending:
        few_own_words(patch)
        finetune.train(cfg, compute)


def folder(base: Path, script: str) -> Path:
    return base / "tuned_checkpoints" / "made" if script == "tune" else stage_folder(base, script)


def section(base: Path, script: str) -> Path:
    return base / "report" / "sections" / f"{script}_train.json"


def lines(base: Path, script: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in order, each with its keys in order, without times."""
    return [{key: line[key] for key in line if key not in TIMES} for line in read_metrics(folder(base, script))]


def weights(base: Path, script: str) -> dict[str, bytes]:
    """The tensor files of the last step."""
    return {path.name: path.read_bytes() for path in (folder(base, script) / f"step_{STEPS:06d}").glob("*.safetensors")}


@pytest.fixture(scope="module")
def world(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    base = tmp_path_factory.mktemp("whole")
    with small_chain(base, num_iterations=STEPS, eval_every=EVERY):
        train("tune", models)
        yield World(base, models)


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest, world: World, base_folder: Path) -> str:
    """A script whose earlier stages lie in the base folder of the environment, as if it had not run."""
    name: str = request.param
    up_to("rl" if name == "tune" else name, world.base, base_folder)
    shutil.rmtree(folder(base_folder, "tune"), ignore_errors=True)
    section(base_folder, "tune").unlink(missing_ok=True)
    return name


def same_as_whole(base: Path, script: str, world: World) -> None:
    assert lines(base, script) == lines(world.base, script)
    assert weights(base, script) == weights(world.base, script)
    assert section(base, script).exists()


# --- bad steps -----------------------------------------------------------------------------------


class NotFinite(Update):
    """An update whose loss is NaN."""

    factor = float("nan")  # type: ignore[assignment]

    def add(self, loss: torch.Tensor, figures: torch.Tensor | None = None) -> None:
        super().add(loss * torch.nan, figures)


def not_finite(run: Run, update: Update) -> None:
    update.__class__ = NotFinite


def spike(run: Run, update: Update) -> None:
    run.safeguards.spikes = Spikes([1e-9] * WINDOW)


def overflow(run: Run, update: Update) -> None:
    run.safeguards.scale = LossScale(1e38, growing=True)


# What makes a step bad is tested with the step (test_step.py): here, what a script does with one, each fault in turn.
FAULTS: tuple[tuple[Callable[[Run, Update], None], str], ...] = (
    (not_finite, "not finite"),
    (spike, "six sigma"),
    (overflow, "fp16 overflowed at a loss scale of 1e+38, "),
)


def test_a_bad_step_is_skipped_and_the_next_one_is_taken(
    script: str, world: World, base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, reason = FAULTS[SCRIPTS.index(script) % len(FAULTS)]
    real_update, real_finish = Run.update, Run.finish
    bad: list[int] = []
    outcomes: dict[int, Outcome] = {}
    before: list[torch.Tensor] = []

    def parameters(run: Run) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in run.model.parameters()]  # type: ignore[attr-defined]

    def update(run: Run, *arguments: Any) -> Update:
        if bad and run.step > bad[0]:
            run.safeguards.scale = LossScale()
            run.safeguards.spikes = Spikes()
        update = real_update(run, *arguments)
        if run.step >= 2 and not bad:  # RL may have nothing to learn in a step
            bad.append(run.step)
            before[:] = parameters(run)
            fault(run, update)
        return update

    def finish(run: Run, outcome: Outcome, *arguments: Any) -> None:
        outcomes[run.step] = outcome
        if bad and run.step == bad[0]:
            changed = [not torch.equal(a, b) for a, b in zip(before, parameters(run), strict=True)]
            assert not any(changed)
        real_finish(run, outcome, *arguments)

    monkeypatch.setattr(Run, "update", update)
    monkeypatch.setattr(Run, "finish", finish)
    train(script, world.models)
    assert [step for step, outcome in outcomes.items() if outcome.skipped] == bad
    assert reason in outcomes[bad[0]].reason
    assert [line["step"] for line in read_metrics(folder(base_folder, script)) if line.get("skipped")] == [bad[0] + 1]


# --- stops ---------------------------------------------------------------------------------------


def measurement(script: str) -> tuple[Any, str]:
    """The module and the function that measure in a script."""
    return (chat_rl, "evaluate") if script == "rl" else (loss_eval, "bits_per_byte")


def at_call(patch: pytest.MonkeyPatch, place: Any, name: str, call: int, action: Callable[[], None]) -> None:
    """Do something at the beginning of a call of a function."""
    real, count = getattr(place, name), 0

    def watched(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            action()
        return real(*arguments, **options)

    patch.setattr(place, name, watched)


def measurements_of(script: str) -> list[int]:
    """The steps at which a script measures."""
    return [0, 3, 6] if script in ("rl", "tune") else [3, 6]


@pytest.mark.parametrize("number", [0, -1])
def test_a_signal_in_a_measurement_leaves_it_to_the_next_start(
    script: str, world: World, base_folder: Path, number: int
) -> None:
    measured = measurements_of(script)
    call = len(measured) if number == -1 else number + 1
    compute = on_cpu()
    with pytest.MonkeyPatch.context() as patch, signals.caught(compute.pulse):
        compute.pulse.beat()
        at_call(patch, *measurement(script), call, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train(script, world.models, compute)
    stopped = measured[call - 1]
    assert steps(folder(base_folder, script)) == ([stopped] if stopped else [])
    assert not section(base_folder, script).exists()
    assert all(line["step"] < stopped for line in lines(base_folder, script))
    train(script, world.models)
    same_as_whole(base_folder, script, world)


def test_a_signal_in_a_step_ends_the_run_after_it(script: str, world: World, base_folder: Path) -> None:
    compute = on_cpu()
    with pytest.MonkeyPatch.context() as patch, signals.caught(compute.pulse):
        compute.pulse.beat()
        at_call(patch, Run, "finish", 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train(script, world.models, compute)
    assert steps(folder(base_folder, script)) == [2]
    assert lines(base_folder, script)[-1]["step"] == 2
    train(script, world.models)
    same_as_whole(base_folder, script, world)


def test_a_measurement_that_failed_is_owed_and_made_up_for(script: str, world: World, base_folder: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the measurement failed")

    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, *measurement(script), len(measurements_of(script)), fail)
        with pytest.raises(RuntimeError, match="the measurement failed"):
            train(script, world.models)
    assert weights(base_folder, script) == weights(world.base, script)  # it was saved before it was measured
    assert lines(base_folder, script)[-1]["step"] == STEPS - 1
    train(script, world.models)
    same_as_whole(base_folder, script, world)


def test_a_run_that_was_stopped_after_a_measurement_ends_with_the_same_bits(
    script: str, world: World, base_folder: Path
) -> None:
    train(script, world.models, stop_at=EVERY)
    assert not section(base_folder, script).exists()
    train(script, world.models)
    same_as_whole(base_folder, script, world)


# --- ranks ---------------------------------------------------------------------------------------


def a_rank(compute: Compute, script: str, models: Path) -> None:
    shrink(pytest.MonkeyPatch())  # the process ends with the stage
    train(script, models, compute, **SAME_ON_RANKS.get(script, {}))
    train(script, models, compute, **SAME_ON_RANKS.get(script, {}))  # done: both ranks see it


# Dropout draws other numbers on each rank
SAME_ON_RANKS = {"tune": {"lora_dropout": 0.0}}


@pytest.mark.ranks
def test_two_ranks_learn_what_one_does(script: str, world: World, base_folder: Path) -> None:
    alone = lines(world.base, script)
    if script in SAME_ON_RANKS:
        train(script, world.models, **SAME_ON_RANKS[script])
        alone = lines(base_folder, script)
        shutil.rmtree(folder(base_folder, script))
    run_ranks(2, a_rank, script, world.models)
    together = lines(base_folder, script)
    assert [list(line) for line in together] == [list(line) for line in alone]
    for name in ("loss", "grad_norm", "val_bpb", "reward", "accuracy"):
        pairs = [(a[name], b[name]) for a, b in zip(alone, together, strict=True) if name in a]
        assert all(b == pytest.approx(a, abs=1e-4, rel=1e-4) for a, b in pairs), (name, pairs)
    assert section(base_folder, script).exists()
