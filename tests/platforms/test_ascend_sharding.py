"""Every --shard mode on emulated NPUs: CPU ranks have the same losses, and the host waits only for the log."""

from typing import Any

import pytest

from bench.updates import update
from nanochat import device
from nanochat.device import Compute
from nanochat.gpt import GPT
from nanochat.optim import Optimizers, Rates
from nanochat.platforms.layers import accelerate
from nanochat.runtime import parallel
from nanochat.step import LossScale
from tests.emulated_npu import log, worker
from tests.support import ranks
from tests.support.rank_training import CONFIG, batches

MODES = ("none", "grad", "full")

pytestmark = [pytest.mark.ranks, pytest.mark.npu]


def train(compute: Compute, mode: Any, steps: int) -> dict[str, Any]:
    """The losses of some steps of two passes each; on an NPU also what the last step waited for and copied."""
    model = GPT(CONFIG, compute.dtype)
    accelerate(model, compute.operations)
    model.init_weights(3)
    model.to(compute.device)
    parallel.shard(model, model.shard_groups(), compute, mode)
    optimizers = Optimizers(model, model.parameter_roles(), CONFIG.n_embd, Rates(), 0.1, compute.dtype)
    losses: list[float] = []

    def take(step: int) -> None:
        work = batches(step, 2, compute)
        work.micro_batches = [
            tuple(device.pin(x.contiguous(), compute) for x in columns) for columns in work.micro_batches
        ]
        device.synchronize(compute)
        losses.append(update(model, optimizers, work, LossScale(), compute).loss)

    for step in range(steps - 1):
        take(step)
    if compute.device_type == "cpu":
        take(steps - 1)
        return {"losses": losses}
    with log.record() as seen:
        take(steps - 1)
    waits = {
        why: times for why, times in seen.synchronisations.items() if why != "synchronize"
    }  # take() synchronizes once
    return {"losses": losses, "waits": waits, "copies": dict(seen.copies)}


def all_modes(compute: Compute, steps: int) -> dict[str, Any]:
    return {mode: train(compute, mode, steps) for mode in MODES}


def test_two_npus_learn_what_two_cpu_ranks_do_and_wait_for_the_log_alone() -> None:
    ran, reference = worker.run_ranks(2, all_modes, 4), ranks.run_ranks(2, all_modes, 4)
    for mine, theirs in zip(ran, reference, strict=True):
        for mode in MODES:
            assert mine[mode]["losses"] == pytest.approx(theirs[mode]["losses"], abs=1e-4), mode
            assert mine[mode]["waits"] == {"copy to host": 1}, mode
            assert mine[mode]["copies"] == {"host to device": 6, "device to host": 1}, mode  # three tensors a pass
