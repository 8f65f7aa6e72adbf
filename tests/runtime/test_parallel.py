"""Training on several ranks against one process: the same losses, parameters and state."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.updates import update
from nanochat import device
from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.gpt import GPT
from nanochat.runtime import parallel, signals
from nanochat.step import LossScale
from nanochat.train import compile as compiling
from tests.support.rank_training import CONFIG, CPU, ROWS, batches, make
from tests.support.ranks import run_ranks

STEPS = 10


def train_in_bf16(compute: Compute) -> dict[str, Any]:
    """The losses and the formats of the parameters; in fp32, tests/runtime/test_sharding.py compares every mode."""
    compute = replace(compute, dtype=torch.bfloat16)
    model, optimizers = make(compute)
    losses = [update(model, optimizers, batches(step, 1, compute), LossScale(), compute).loss for step in range(STEPS)]
    return {"losses": losses, "dtypes": {value.dtype for _, value in parallel.whole_parameters(model)}}


# --- tables that every rank holds whole ------------------------------------------------------------


def average(compute: Compute, dense: bool) -> dict[str, Any]:
    """The gradient of the table of bigrams on each rank after an exchange; the last rank met no row."""
    model, _ = make(compute)
    assert model.bigrams is not None
    table = model.bigrams.weight
    assert not device.is_sharded(table) and device.is_sharded(model.wte.weight)
    if compute.rank < compute.world_size - 1:
        rows, values = torch.tensor([[5, 2, 5]]), torch.full((3, table.size(1)), compute.rank + 1.0)
        grad = torch.sparse_coo_tensor(rows, values, table.shape)
        table.grad = grad.to_dense() if dense else grad
    parallel.average_rows(model, compute)
    assert table.grad is not None and table.grad.is_sparse
    return {"rows": table.grad.indices().tolist(), "values": table.grad.values()[:, 0].tolist()}


def averages(compute: Compute) -> list[dict[str, Any]]:
    return [average(compute, dense) for dense in (False, True)]


@pytest.mark.ranks
def test_ranks_average_the_rows_that_any_of_them_met() -> None:
    for found in itertools.chain(*run_ranks(3, averages)):
        assert found["rows"] == [[2, 5]]
        assert found["values"] == pytest.approx([1.0, 2.0])  # (1 + 2) / 3, and twice as much


# --- small things --------------------------------------------------------------------------------


def refused(compute: Compute) -> str:
    """What a rank is told about a task that the last rank finds broken, after one that is fine."""
    with parallel.together("fine", compute):
        pass
    with pytest.raises(UserError) as refusal, parallel.together("a task", compute):
        if compute.rank == compute.world_size - 1:
            raise UserError("row 7 has no answer")
    return str(refusal.value)


def stopped(compute: Compute) -> bool:
    """Whether a rank leaves a common block when the last rank alone is asked to stop in it."""
    try:
        with signals.caught(compute.pulse), parallel.together("a task", compute):
            if compute.rank == compute.world_size - 1:
                compute.pulse.ask("a signal")
                signals.check_alone(compute)
    except signals.Stopped:
        return True
    return False


def small_things(compute: Compute) -> dict[str, Any]:
    """Exercise sums, agreement, whole parameters before and after an evaluation, loading, and copies."""
    model, _ = make(compute)
    start = {name: value.clone() for name, value in parallel.whole_parameters(model)}
    with torch.no_grad():
        model(torch.zeros(2, 16, dtype=torch.long))  # an evaluation leaves FSDP's gathered parameters in place
    evaluated = {name: value.clone() for name, value in parallel.whole_parameters(model)}
    generator = torch.Generator().manual_seed(9)
    values = {name: torch.randn(value.shape, generator=generator) for name, value in start.items()}
    parallel.load_whole(model, values)
    loaded = {name: value.clone() for name, value in parallel.whole_parameters(model)}
    replica = GPT(CONFIG).to(torch.bfloat16)
    parallel.refresh(replica, model)
    return {
        "total": parallel.total([1.0 + compute.rank, 0.1], compute), "agree": parallel.agree(5 + compute.rank, compute),
        "refused": refused(compute), "stopped": stopped(compute),
        "start": start, "evaluated": evaluated, "given": values, "loaded": loaded,
        "replica": {name: value.detach().clone() for name, value in replica.named_parameters()},
    }  # fmt: skip


def train_compiled(compute: Compute, fails: bool) -> dict[str, Any]:
    """Three steps through compiling.compiled, with dynamo and autograd but without generated code, which is slow."""
    real, said = torch.compile, []

    def quick(function: Any, **rest: Any) -> Any:
        def broken(*_: Any) -> Any:
            raise RuntimeError("no compiler on this host")

        return broken if fails else real(function, backend="aot_eager", **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", quick)
        patch.setattr(device, "compiler_missing", lambda compute: "")
        patch.setattr(compiling, "_unneeded", lambda model, compute: "")
        patch.setattr(compiling, "warn", said.append)
        model, optimizers = make(compute)
        fast = compiling.compiled(model, None, (ROWS // compute.world_size, 16), compute, model.compile_groups())
        losses = [update(fast, optimizers, batches(i, 1, compute), LossScale(), compute).loss for i in range(3)]
    return {"losses": losses, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"], "said": said}


def everything(compute: Compute) -> dict[str, Any]:
    """Run every check in one start of the processes."""
    return {"bf16": train_in_bf16(compute), "small": small_things(replace(compute, dtype=torch.bfloat16))}


def close(ours: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(ours[name], value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def check_bf16(alone: dict[str, Any], together: list[dict[str, Any]]) -> None:
    losses = alone["bf16"]["losses"]
    assert losses[-1] < 0.6 * losses[0]
    for ran in together:
        assert ran["bf16"]["losses"] == pytest.approx(losses, abs=0.03)
        assert ran["bf16"]["dtypes"] == {torch.float32}


def check_small_things(alone: dict[str, Any], together: list[dict[str, Any]]) -> None:
    """Whole parameters are the fp32 masters, also after an evaluation that left bf16 copies gathered."""
    ranks = len(together)
    for ran in together:
        assert ran["small"]["total"] == pytest.approx([ranks * (ranks + 1) / 2, 0.1 * ranks], abs=1e-12)
        assert ran["small"]["agree"] == 5  # rank 0's number
        assert ran["small"]["stopped"]
    *others, last = [ran["small"]["refused"] for ran in together]
    assert last == alone["small"]["refused"] == "row 7 has no answer"
    assert set(others) == {"a task is broken on another rank, whose message says why"}
    for ran in (alone["small"], *(ran["small"] for ran in together)):
        close(ran["start"], alone["small"]["start"], 0)
        close(ran["evaluated"], alone["small"]["start"], 0)
        close(ran["loaded"], ran["given"], 0)
        close(ran["replica"], {name: value.bfloat16() for name, value in ran["given"].items()}, 0)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_do_what_one_process_does(ranks: int) -> None:
    """One test, since starting the processes takes most of its time."""
    alone, together = everything(CPU), run_ranks(ranks, everything)
    check_bf16(alone, together)
    check_small_things(alone, together)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_compiled_ranks_equal_one_eager_process(fails: bool) -> None:
    """Also where every rank's compiler fails in the middle of the first pass."""
    model, optimizers = make(CPU)
    losses = [update(model, optimizers, batches(i, 1, CPU), LossScale(), CPU).loss for i in range(3)]
    for ran in run_ranks(2, train_compiled, fails):
        assert ran["losses"] == pytest.approx(losses, abs=1e-5)
        assert (ran["graphs"] == 0) == fails
        assert ["training continues uncompiled: no compiler on this host" in text for text in ran["said"]] == [
            True
        ] * fails


# --- one process ---------------------------------------------------------------------------------


def test_values_that_do_not_fit_are_refused() -> None:
    """copy_ would silently broadcast some of these shapes."""
    model, _ = make(CPU)
    good = dict(parallel.whole_parameters(model))
    before = {name: value.clone() for name, value in good.items()}
    wrong = [
        {name: value for name, value in good.items() if name != "wte.weight"},
        {**good, "extra": torch.zeros(1)},
        {**good, "wte.weight": torch.zeros(128, 1)},
        {**good, "resid_lambdas": torch.zeros(1)},
    ]
    for values, says in zip(wrong, ("wte.weight", "extra", "wte.weight", "resid_lambdas"), strict=True):
        with pytest.raises(UserError, match=says):
            parallel.load_whole(model, values)
    close(dict(parallel.whole_parameters(model)), before, 0)
