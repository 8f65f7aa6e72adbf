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
STEPS = 10
GROUPS = 2 + 1 + 3 + 1 + 1  # value embeddings, embedding, layers, head, the rest
PASSES = (1, 4)  # in the steps whose collectives are counted
ORDER = ["none", "grad", "full", "none"]  # of the modes through which a checkpoint passes
TABLE = 3  # how many rows of the table of bigrams each rank met, which, and their gradients

pytestmark = pytest.mark.ranks


def curve(compute: Compute, mode: Any, matrix: Any) -> dict[str, Any]:
    """Losses and gradient norms, and the whole parameters after the last step; steps of Muon have two passes."""
    model, optimizers = make(compute, mode, Rates(matrix_optimizer=matrix))
    outcomes = []
    for step in range(STEPS):
        optimizers.schedule(1 - 0.05 * step, 0.85 + 0.01 * step, 1 - 0.1 * step)
        passes = 2 if matrix == "muon" else 1
        outcomes.append(update(model, optimizers, batches(step, passes, compute), LossScale(), compute))
        if step == 4:  # an evaluation in between leaves the parameters gathered
            with torch.no_grad():
                model(torch.zeros(2, 16, dtype=torch.long))
    parameters = {name: value.clone() for name, value in parallel.whole_parameters(model)}
    return {"losses": [x.loss for x in outcomes], "norms": [x.grad_norm for x in outcomes], "parameters": parameters}


def curves(compute: Compute) -> dict[Any, Any]:
    """The curves of every mode with both optimizers of the matrices; one rank has one mode."""
    modes = MODES if compute.world_size > 1 else ("grad",)
    return {(mode, matrix): curve(compute, mode, matrix) for mode in modes for matrix in ("muon", "adamw")}


def check(ran: dict[Any, Any], alone: dict[Any, Any]) -> None:
    for (mode, matrix), curve in ran.items():
        reference = alone["grad", matrix]
        assert reference["losses"][-1] < 0.6 * reference["losses"][0]
        assert curve["losses"] == pytest.approx(reference["losses"], abs=1e-5), (mode, matrix)
        assert curve["norms"] == pytest.approx(reference["norms"], rel=1e-4), (mode, matrix)
        for name, value in reference["parameters"].items():
            distance = (curve["parameters"][name] - value).norm() / value.norm()
            assert distance < 1e-5, (mode, matrix, name, distance)


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


def everything(compute: Compute) -> dict[str, Any]:
    """Run every check in one start of the processes."""
    counted = {passes: collectives(compute, passes) for passes in PASSES}
    return {"curves": curves(compute), "collectives": counted, "order": order(compute)}


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    return curves(CPU)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


def test_steps_of_every_mode_and_optimizer_are_those_of_one_process(
    alone: dict[Any, Any], two_ranks: list[dict[str, Any]]
) -> None:
    for ran in (*(ran["curves"] for ran in two_ranks), *run_ranks(4, curves)):
        assert len(ran) == 6
        check(ran, alone)


@pytest.mark.parametrize("passes", PASSES)
def test_a_group_is_gathered_once_and_reduced_once_a_step(passes: int, two_ranks: list[dict[str, Any]]) -> None:
    """The number of passes does not matter; Muon exchanges each shape there and back, and figures take one sum."""
    shapes = 4
    for ran in two_ranks:
        counted = ran["collectives"][passes]
        assert counted["grad"] == {
            "_allgather_base_": GROUPS, "_reduce_scatter_base_": GROUPS, "alltoall_base_": 2 * shapes, "allreduce_": 1,
            "allgather_": TABLE,
        }  # fmt: skip
        assert counted["none"] == {"allreduce_": GROUPS + 1, "allgather_": shapes + TABLE}
        assert counted["full"]["_reduce_scatter_base_"] == GROUPS * passes
        # For each direction; torch 2.7 keeps the outermost group from the one to the other.
        kept = 1 if torch.__version__.startswith("2.7.") else 0
        assert counted["full"]["_allgather_base_"] == (2 * GROUPS - kept) * passes


def test_a_layer_is_reduced_while_the_backward_pass_goes_on(two_ranks: list[dict[str, Any]]) -> None:
    """The head's gradient before the last layer but one is reached, a layer's before the next but one."""
    for happened in (ran["order"] for ran in two_ranks):
        layers = [happened.index(f"layer {number}") for number in (2, 1, 0)]
        assert layers == sorted(layers)
        before = [happened[:place].count("reduce") for place in layers]
        assert before[1] >= 1 and before[2] > before[1] and happened.count("reduce") == GROUPS > before[2]


# --- hosts and checkpoints ---------------------------------------------------------------------------


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


def on_two_hosts(compute: Compute, folder: Path) -> dict[str, Any]:
    """Two copies of the model, each over two ranks; what lies where, what is sent in a step, and a relay."""
    model, optimizers = make(compute)
    place = place_of(model.wte.weight)
    held = parallel.local(model.wte.weight).clone()
    update(model, optimizers, batches(0, 2, compute), LossScale(), compute)
    with Wire() as wire:
        update(model, optimizers, batches(1, 2, compute), LossScale(), compute)
    return {
        "place": (place.shards, place.shard, place.replicas, place.replica), "held": held, "calls": wire.calls,
        "curve": curve(compute, "grad", "muon"), "full": curve(compute, "full", "muon"),
        "relay": relay(compute, folder, ORDER),
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("relay")


@pytest.fixture(scope="module")
def two_hosts(folder: Path) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        return run_ranks(4, on_two_hosts, folder / "many")


def test_each_host_holds_a_copy(alone: dict[Any, Any], two_hosts: list[dict[str, Any]]) -> None:
    assert [ran["place"] for ran in two_hosts] == [(2, 0, 2, 0), (2, 1, 2, 0), (2, 0, 2, 1), (2, 1, 2, 1)]
    for ran in two_hosts:
        assert ran["held"].shape == (64, 54)
        check({("grad", "muon"): ran["curve"], ("full", "muon"): ran["full"]}, alone)
        assert ran["calls"]["_allgather_base_"] == ran["calls"]["_reduce_scatter_base_"] == GROUPS
        assert ran["calls"]["allreduce_"] == GROUPS + 1  # between the hosts, and one sum of figures
        for name, value in two_hosts[0]["curve"]["parameters"].items():
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


def test_a_checkpoint_of_one_mode_goes_on_in_another(folder: Path, two_hosts: list[dict[str, Any]]) -> None:
    """A checkpoint passes through all modes, and to one process; nothing is written twice."""
    reference = relay(CPU, folder / "one", ["none"] * len(ORDER))
    for ran in two_hosts:
        for name, value in reference.items():
            assert (ran["relay"][name] - value).norm() <= 1e-4 * value.norm() + 1e-7, name
    after = go(CPU, folder / "many", "grad", 8, 9)
    for name, value in go(CPU, folder / "one", "grad", 8, 9).items():
        assert (after[name] - value).norm() <= 1e-4 * value.norm() + 1e-7, name
    sizes = [sum(path.stat().st_size for path in (folder / name / "step_000008").glob("optim*"))
             for name in ("one", "many")]  # fmt: skip
    assert sizes[1] < 1.3 * sizes[0]
