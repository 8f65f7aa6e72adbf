"""Faults T13 to T16: steps that are not finite or not like the others, on one rank of two."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.updates import update
from nanochat.checkpoint_manager import files as step_files
from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.gpt import GPT
from nanochat.optim import Optimizers
from nanochat.run import Run
from nanochat.runtime import parallel
from nanochat.step import WINDOW, LossScale, Spikes, Update
from tests.support.faults import corpus, stage
from tests.support.rank_training import batches, make
from tests.support.ranks import Pool
from tests.support.small_world import stage_folder

pytestmark = pytest.mark.ranks


def snapshot(model: GPT, optimizers: Optimizers) -> list[torch.Tensor]:
    """Copies of the parameters and the state that this rank holds."""
    held = [value.clone() for _, value in parallel.whole_parameters(model)]
    return held + [value.clone() for value, _, _ in optimizers.state().values()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def spoiled(compute: Compute, step: int, factor: float, rank: int = 1) -> Any:
    """A step of which one rank's loss is multiplied, by its token weights."""
    batch = batches(step, 2, compute)
    if compute.rank == rank:
        batch.micro_batches = [(x, y, factor * weights) for x, y, weights in batch.micro_batches]
    return batch


def one_bad_step(compute: Compute, factor: float, window: bool) -> dict[str, Any]:
    """Three good steps, one of which one rank's part is spoiled, and a good one; what each did."""
    model, optimizers = make(compute)
    scale, spikes = LossScale.start(compute, {}), Spikes()
    good = [update(model, optimizers, batches(i, 2, compute), scale, compute, spikes) for i in range(3)]
    if window:  # as if 128 such steps had been taken
        norm = good[-1].grad_norm
        spikes = Spikes([norm * (1 + 0.01 * (i % 5)) for i in range(WINDOW)])
    before, value = snapshot(model, optimizers), scale.value
    bad = update(model, optimizers, spoiled(compute, 3, factor), scale, compute, spikes)
    untouched, halved = same(before, snapshot(model, optimizers)), scale.value / value
    after = update(model, optimizers, batches(4, 2, compute), scale, compute, spikes)
    moved = not same(before, snapshot(model, optimizers))
    return {"good": not any(outcome.skipped for outcome in good), "skipped": bad.skipped, "reason": bad.reason,
            "untouched": untouched, "halved": halved, "next": not after.skipped and moved, "norm": bad.grad_norm,
            "loss": after.loss}  # fmt: skip


def test_a_nan_on_one_rank_is_skipped_on_all(pool: Pool) -> None:
    """T13. Injects: the loss of one rank of two is NaN in one step. Must follow: both ranks skip the step before any
    parameter or optimizer state changes, and both take the next step in the same way.

    注入：两个进程之一在某一步的损失为 NaN。必须：两个进程都跳过这一步，参数和优化器状态都不变，并照常进行下一步。
    """
    one, two = pool.run(2, one_bad_step, float("nan"), False)
    for rank in (one, two):
        assert rank["good"] and rank["skipped"] and rank["untouched"] and rank["next"]
        assert rank["reason"] == "not finite"
    assert one["loss"] == two["loss"]


def test_a_spike_on_one_rank_is_skipped_on_all(pool: Pool) -> None:
    """T15. Injects: the gradients of one rank of two are 1,000 times too large in one step. Must follow: both ranks
    skip the step before anything changes, because its gradient norm is more than six sigma above the norms of the last
    128 steps, and both take the next step in the same way.

    注入：两个进程之一在某一步的梯度大了 1,000 倍。必须：两个进程都因为它高出最近 128 步六个标准差以上而跳过这一步，
    什么都不改变，并照常进行下一步。
    """
    one, two = pool.run(2, one_bad_step, 1000.0, True)
    for rank in (one, two):
        assert rank["good"] and rank["skipped"] and rank["untouched"] and rank["next"]
        assert "six sigma" in rank["reason"] and rank["norm"] > 0
    assert one["loss"] == two["loss"] and one["norm"] == two["norm"]
    unguarded = pool.run(2, one_bad_step, 1000.0, False)  # before 128 steps nothing is called a spike
    assert not any(rank["skipped"] for rank in unguarded)


def test_an_overflow_on_one_rank_halves_the_scale_on_all(pool: Pool) -> None:
    """T16. Injects: the fp16 gradients of one rank of two overflow in one step. Must follow: both ranks skip the step
    before anything changes, and both halve their loss scale; both take the next step in the same way.

    注入：两个进程之一的 fp16 梯度在某一步溢出。必须：两个进程都跳过这一步，什么都不改变，
    并且都把损失缩放减半；下一步照常进行。
    """
    one, two = pool.run(2, one_bad_step, 1e4, False, NANOCHAT_DTYPE="float16")
    for rank in (one, two):
        assert rank["good"] and rank["skipped"] and rank["untouched"] and rank["halved"] == 0.5 and rank["next"]
    assert one["loss"] == two["loss"]


class SpoiltUpdate(Update):
    """An update whose gradients are NaN."""

    factor = float("nan")  # type: ignore[assignment]


def never_again(compute: Compute, after: int) -> dict[str, Any]:
    """The base stage, whose loss is NaN on rank 1 in every step after the first ones; what it says, and all that is
    saved then."""
    real_update = Run.update
    count = 0

    def spoiling(run: Run, *arguments: Any) -> Update:
        nonlocal count
        count += 1
        update = real_update(run, *arguments)
        if count > after and compute.rank == 1:
            update.__class__ = SpoiltUpdate
        return update

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "update", spoiling)
        with pytest.raises(UserError) as stopped:
            stage(compute, save_every=1, keep=0, eval_every=0)
    return {"says": str(stopped.value), "steps": count}


def test_ten_nans_in_a_row_stop_the_run(base_folder: Path, pool: Pool) -> None:
    """T14. Injects: the loss of one rank of two is NaN from step 5 on, with a save after every step. Must follow: both
    ranks stop at the tenth such step and say so; every save holds the finite parameters of step 4.

    注入：两个进程之一从第 5 步起损失都是 NaN，每步都保存。必须：两个进程都在第十个这样的步停止并说明原因；
    其间每次保存的都是第 4 步的有限参数。
    """
    corpus(base_folder)
    for rank in pool.run(2, never_again, 4):
        assert "10 updates in a row were skipped, the last at step 14 (not finite)" in rank["says"]
        assert rank["steps"] == 14
    folder = stage_folder(base_folder, "base")
    assert step_files.steps(folder) == list(range(1, 14))
    last = load_file(folder / "step_000004" / "model.safetensors")
    for step in range(5, 14):
        saved = load_file(folder / f"step_{step:06d}" / "model.safetensors")
        assert all(torch.equal(saved[name], last[name]) and saved[name].isfinite().all() for name in last)
