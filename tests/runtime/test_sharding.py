"""Every --shard mode: the losses of one process, the collectives of a step, checkpoints across modes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.updates import update
from nanochat.checkpoint_manager.resume import resume_stage
from nanochat.device import Compute
from nanochat.optim import Rates
from nanochat.runtime import parallel
from nanochat.runtime.parallel import place_of
from nanochat.step import LossScale
from tests.support.rank_training import CPU, batches, make
from tests.support.ranks import run_ranks
from tests.support.tiny_model import on_cpu, tiny_tokenizer
from tests.support.tiny_training import WANTED, save
from tests.support.wire import Wire

MODES = ("none", "grad", "full")
STEPS = 50
GROUPS = 2 + 1 + 3 + 1 + 1  # value embeddings, embedding, layers, head, the rest
TABLE = 3  # how many rows of the table of bigrams each rank met, which, and their gradients

pytestmark = pytest.mark.ranks


def curve(compute: Compute, mode: Any, matrix: Any, steps: int = STEPS) -> dict[str, Any]:
    """Losses and gradient norms, and the parameters after the last step; steps of Muon have two passes."""
    model, optimizers = make(compute, mode, Rates(matrix_optimizer=matrix))
    outcomes = []
    for step in range(steps):
        optimizers.schedule(1 - 0.01 * step, 0.85 + 0.001 * step, 1 - 0.02 * step)
        passes = 2 if matrix == "muon" else 1
        outcomes.append(update(model, optimizers, batches(step, passes, compute), LossScale(), compute))
    parameters = {name: value.clone() for name, value in parallel.whole_parameters(model)}
    return {"losses": [x.loss for x in outcomes], "norms": [x.grad_norm for x in outcomes], "parameters": parameters}


def curves(compute: Compute) -> dict[Any, Any]:
    """The curves of every mode with both optimizers of the matrices; one rank has one mode."""
    modes = MODES if compute.world_size > 1 else ("grad",)
    return {(mode, matrix): curve(compute, mode, matrix) for mode in modes for matrix in ("muon", "adamw")}


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    return curves(CPU)


def check(ran: dict[Any, Any], alone: dict[Any, Any]) -> None:
    for (mode, matrix), curve in ran.items():
        reference = alone["grad", matrix]
        steps = len(curve["losses"])
        assert reference["losses"][-1] < 0.5 * reference["losses"][0]
        assert curve["losses"] == pytest.approx(reference["losses"][:steps], abs=1e-4), (mode, matrix)
        assert curve["norms"] == pytest.approx(reference["norms"][:steps], rel=1e-2), (mode, matrix)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fifty_steps_of_every_mode_and_optimizer_are_those_of_one_process(ranks: int, alone: dict[Any, Any]) -> None:
    for ran in run_ranks(ranks, curves):
        assert len(ran) == 6
        check(ran, alone)


# --- hosts -----------------------------------------------------------------------------------------


def on_two_hosts(compute: Compute) -> dict[str, Any]:
    """Two copies of the model, each over two ranks; what lies where, and what is sent in a step."""
    model, optimizers = make(compute)
    place = place_of(model.wte.weight)
    held = parallel.local(model.wte.weight).clone()
    update(model, optimizers, batches(0, 2, compute), LossScale(), compute)
    with Wire() as wire:
        update(model, optimizers, batches(1, 2, compute), LossScale(), compute)
    return {
        "place": (place.shards, place.shard, place.replicas, place.replica), "held": held, "calls": wire.calls,
        "curve": curve(compute, "grad", "muon", 10), "full": curve(compute, "full", "muon", 10),
    }  # fmt: skip


def test_each_host_holds_a_copy(monkeypatch: pytest.MonkeyPatch, alone: dict[Any, Any]) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = run_ranks(4, on_two_hosts)
    assert [ran["place"] for ran in found] == [(2, 0, 2, 0), (2, 1, 2, 0), (2, 0, 2, 1), (2, 1, 2, 1)]
    for ran in found:
        assert ran["held"].shape == (64, 54)
        check({("grad", "muon"): ran["curve"], ("full", "muon"): ran["full"]}, alone)
        assert ran["calls"]["_allgather_base_"] == ran["calls"]["_reduce_scatter_base_"] == GROUPS
        assert ran["calls"]["allreduce_"] == GROUPS + 1  # between the hosts, and one sum of figures
        for name, value in found[0]["curve"]["parameters"].items():
            assert torch.equal(ran["curve"]["parameters"][name], value)  # copies stay the same to the last bit


@pytest.mark.parametrize(
    ("mode", "hosts", "expected"),
    [("none", "4", (4, 1)), ("none", "2", (4, 1)), ("grad", "4", (1, 4)), ("grad", "2", (2, 2)), ("full", "2", (2, 2)),
     ("grad", "1", (1, 4)), ("grad", "3", (1, 4))],
)  # fmt: skip
def test_copies_follow_the_hosts(
    mode: Any, hosts: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one rank on each host, or with unequal hosts, one copy is sharded over all ranks."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", hosts)
    assert parallel.mesh_shape(mode, on_cpu(0, 4)) == expected


# --- collectives -----------------------------------------------------------------------------------


def collectives(compute: Compute, passes: int) -> dict[str, dict[str, int]]:
    """Calls in the second step of each mode."""
    counted = {}
    for mode in MODES:
        model, optimizers = make(compute, mode)
        for step in range(2):
            with Wire() as wire:
                update(model, optimizers, batches(step, passes, compute), LossScale(), compute)
        counted[mode] = dict(wire.calls)
    return counted


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_a_group_is_gathered_once_and_reduced_once_a_step(passes: int) -> None:
    """The number of passes does not matter; Muon exchanges each shape there and back, and figures take one sum."""
    shapes = 4
    for counted in run_ranks(2, collectives, passes):
        assert counted["grad"] == {
            "_allgather_base_": GROUPS, "_reduce_scatter_base_": GROUPS, "alltoall_base_": 2 * shapes, "allreduce_": 1,
            "allgather_": TABLE,
        }  # fmt: skip
        assert counted["none"] == {"allreduce_": GROUPS + 1, "allgather_": shapes + TABLE}
        assert counted["full"]["_reduce_scatter_base_"] == GROUPS * passes
        # For each direction; torch 2.7 keeps the outermost group from the one to the other.
        kept = 1 if torch.__version__.startswith("2.7.") else 0
        assert counted["full"]["_allgather_base_"] == (2 * GROUPS - kept) * passes


def order(compute: Compute) -> list[str]:
    """What happens in the backward pass of a step: gradients that reach a layer, and reductions that begin."""
    model, optimizers = make(compute)
    happened: list[str] = []
    for number, block in enumerate(model.blocks):
        block.register_full_backward_pre_hook(lambda *_, number=number: happened.append(f"layer {number}"))

    class Ordered(Wire):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "reduce_scatter" in str(func):
                happened.append("reduce")
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Ordered():
        update(model, optimizers, batches(0, 1, compute), LossScale(), compute)
    return happened


def test_a_layer_is_reduced_while_the_backward_pass_goes_on() -> None:
    """The head's gradient before the last layer but one is reached, a layer's before the next but one."""
    for happened in run_ranks(2, order):
        layers = [happened.index(f"layer {number}") for number in (2, 1, 0)]
        assert layers == sorted(layers)
        before = [happened[:place].count("reduce") for place in layers]
        assert before[1] >= 1 and before[2] > before[1] and happened.count("reduce") == GROUPS > before[2]


# --- checkpoints -----------------------------------------------------------------------------------


def go(compute: Compute, folder: Path, mode: Any, first: int, last: int) -> dict[str, Any]:
    """Train steps first + 1 .. last in a mode: load the checkpoint of step `first`, save one of step `last`."""
    model, optimizers = make(compute, mode)
    assert resume_stage(folder, model, optimizers, WANTED, compute).step == first
    for step in range(first, last):
        update(model, optimizers, batches(step, 1, compute), LossScale(), compute)
    save(folder, last, model, optimizers, tiny_tokenizer(), compute=compute)
    return {name: value.clone() for name, value in parallel.whole_parameters(model)}


def relay(compute: Compute, folder: Path, modes: list[str]) -> dict[str, Any]:
    """Two steps in each mode, each from the checkpoint of the one before."""
    for number, mode in enumerate(modes):
        found = go(compute, folder, mode, 2 * number, 2 * number + 2)
    return found


@pytest.mark.parametrize(("ranks", "hosts"), [(2, "2"), (4, "2")])
def test_a_checkpoint_of_one_mode_goes_on_in_another(
    ranks: int, hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint passes through all modes and to one process, and nothing is written twice."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", hosts)
    order = ["none", "grad", "full", "none"]
    together = run_ranks(ranks, relay, tmp_path / "many", order)
    reference = relay(CPU, tmp_path / "one", ["none"] * 4)
    for found in together:
        for name, value in reference.items():
            assert (found[name] - value).norm() <= 1e-4 * value.norm() + 1e-7, name
    after = go(CPU, tmp_path / "many", "grad", 8, 9)
    for name, value in go(CPU, tmp_path / "one", "grad", 8, 9).items():
        assert (after[name] - value).norm() <= 1e-4 * value.norm() + 1e-7, name
    sizes = [sum(path.stat().st_size for path in (tmp_path / name / "step_000008").glob("optim*"))
             for name in ("one", "many")]  # fmt: skip
    assert sizes[1] < 1.3 * sizes[0]
