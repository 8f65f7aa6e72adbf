"""Checkpoints written by some number of ranks and read by another: nothing is lost, nothing is rounded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager.parts.index import INDEX
from nanochat.checkpoint_manager.parts.model import Files
from nanochat.checkpoint_manager.resume import resume_stage
from nanochat.device import Compute, local
from nanochat.runtime import parallel
from nanochat.runtime.parallel import Sharding
from tests.support.ranks import run_ranks
from tests.support.tiny_model import tiny_tokenizer
from tests.support.tiny_training import CPU, WANTED, equal, make, parameters, save, state, train

pytestmark = pytest.mark.ranks


def train_and_save(compute: Compute, folders: dict[Files, Path], mode: Sharding = "grad") -> dict[str, Any]:
    """Three steps, a save in each form, three more steps."""
    pair = make(1, compute, mode=mode)
    train(*pair, 0, 3, compute)
    for files, folder in folders.items():
        save(folder, 3, *pair, tiny_tokenizer(), compute=compute, files=files)
    then = {"parameters": parameters(pair[0]), "state": state(pair[1])}
    train(*pair, 3, 6, compute)
    return {"then": then, "end": {"parameters": parameters(pair[0]), "state": state(pair[1])}}


def go_on(compute: Compute, folders: list[Path], mode: Sharding = "grad") -> list[dict[str, Any]]:
    """From each folder: what was restored, and what it is after three more steps."""
    found = []
    for folder in folders:
        pair = make(2, compute, mode=mode)
        assert resume_stage(folder, *pair, WANTED, compute).step == 3
        then = {"parameters": parameters(pair[0]), "state": state(pair[1])}
        train(*pair, 3, 6, compute)
        found.append({"then": then, "end": {"parameters": parameters(pair[0]), "state": state(pair[1])}})
    return found


def whole(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Parameters and state put together from all ranks; where ranks hold the same rows they agree."""
    together = dict(ranks[0]["parameters"])
    for rank in ranks:
        assert equal(rank["parameters"], ranks[0]["parameters"])
        for name, (value, shape, first) in rank["state"].items():
            target = together.setdefault(name, torch.full(shape, float("nan")))
            held = target[first : first + value.shape[0]]
            assert held.isnan().all() or torch.equal(held, value)
            target[first : first + value.shape[0]] = value
    assert not any(value.isnan().any() for value in together.values())
    return together


def close(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert (one[name] - two[name]).norm() <= 1e-4 * two[name].norm() + 1e-7, name


@dataclass(frozen=True)
class Written:
    """A step in both forms, and what each rank held."""

    folders: dict[Files, Path]
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Written]:
    """What one and what two ranks wrote."""
    places: list[dict[Files, Path]] = [
        {files: tmp_path_factory.mktemp("run") for files in ("one", "per_rank")} for _ in range(2)
    ]
    return {1: Written(places[0], [train_and_save(CPU, places[0])]),
            2: Written(places[1], run_ranks(2, train_and_save, places[1], "full"))}  # fmt: skip


BOTH = ["meta.json", "optim-00-of-02.safetensors", "optim-01-of-02.safetensors", "tokenizer.json"]
PARAMETERS: dict[Files, list[str]] = {
    "one": ["model.safetensors"],
    "per_rank": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                 "model.safetensors.index.json"],
}  # fmt: skip


@pytest.mark.parametrize("files", PARAMETERS)
def test_every_rank_writes_its_part(written: dict[int, Written], files: Files) -> None:
    folder = written[2].folders[files]
    assert sorted(path.name for path in (folder / "step_000003").iterdir()) == sorted(BOTH + PARAMETERS[files])
    assert step_files.verify(folder / "step_000003") == ""
    assert step_files.read_meta(folder, 3)["world_size"] == 2


def test_the_files_of_two_ranks_are_the_rows_of_one_file(written: dict[int, Written]) -> None:
    """Slow oracle: the rows that the index names, read with safetensors and put together by hand."""
    one, two = (written[2].folders[files] / "step_000003" for files in PARAMETERS)
    whole, index = load_file(one / "model.safetensors"), json.loads((two / INDEX).read_text())
    held = {path.name: load_file(path) for path in two.glob("model-*.safetensors")}
    split = index["metadata"]["rows"]
    assert set(index["weight_map"]) == set(whole) and "wte.weight" in split
    for name, file in index["weight_map"].items():
        found = torch.full_like(whole[name], float("nan"))
        for piece, (first, end) in split.get(name, {file: [0, len(whole[name])]}).items():
            found[first:end] = held[piece][name]
        assert torch.equal(found, whole[name]), name
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    for path in two.glob("model-*.safetensors"):  # a rank writes its own rows and no others
        assert path.stat().st_size < 0.6 * (one / "model.safetensors").stat().st_size


@pytest.mark.parametrize(("ranks", "mode"), [(2, "full"), (3, "full"), (4, "grad")])
def test_ranks_read_what_one_and_two_wrote(written: dict[int, Written], ranks: int, mode: Sharding) -> None:
    cases: list[tuple[int, Files]] = [(wrote, files) for wrote in (1, 2) for files in written[wrote].folders]
    found = run_ranks(ranks, go_on, [written[wrote].folders[files] for wrote, files in cases], mode)
    for number, (wrote, _) in enumerate(cases):
        held = written[wrote].ranks
        assert equal(whole([rank[number]["then"] for rank in found]), whole([rank["then"] for rank in held]))
        ends = whole([rank[number]["end"] for rank in found]), whole([rank["end"] for rank in held])
        close(*ends)
        if ranks == wrote and mode == "full":
            assert equal(*ends)  # six steps at once or three and three


def test_hosts_with_a_copy_each_write_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of two ranks: the ranks of the first write the parameters, all four the optimizer state."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    folders: dict[Files, Path] = {files: tmp_path / files for files in PARAMETERS}
    held = run_ranks(4, train_and_save, folders)
    for files, folder in folders.items():
        names = {path.name for path in (folder / "step_000003").glob("*model*")}
        assert names == set(PARAMETERS[files]) and len(list(folder.glob("*/optim-*"))) == 4
    for found in go_on(CPU, list(folders.values())):
        assert equal(whole([found["then"]]), whole([rank["then"] for rank in held]))


class Taken(TorchDispatchMode):
    """Counts the bytes of memory that torch operators take inside the block: the largest, and all together."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.all = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = {place for place, _ in _memory((args, kwargs))}
        found = function(*args, **(kwargs or {}))
        for place, size in _memory(found):
            if place not in there:
                self.largest, self.all = max(self.largest, size), self.all + size
        return found


def _memory(values: Any) -> list[tuple[int, int]]:
    """The address and the bytes of every tensor; a sharded one counts with the rows held here."""
    held = [local(value) for value in tree_leaves(values) if isinstance(value, Tensor)]
    held = [getattr(value, "elem", value) for value in held]  # of a collective that is under way
    return [(value.untyped_storage().data_ptr(), value.nbytes) for value in held]


def bytes_of_a_save(compute: Compute, folder: Path, files: Files) -> dict[str, int]:
    """What a save takes at once and in all, beside the largest parameter, this rank's rows, and a gathered model."""
    model, optimizers = make(1, compute, mode="full")
    train(model, optimizers, 0, 1, compute)
    parts = parallel.parameter_shards(model).values()
    with Taken() as taken:
        save(folder, 1, model, optimizers, tiny_tokenizer(), compute=compute, files=files)
    with Taken() as gathered:
        list(parallel.whole_parameters(model))
    return {"at once": taken.largest, "in all": taken.all, "largest parameter": max(part.size for part in parts),
            "mine": sum(part.rows.nbytes for part in parts), "gathered": gathered.all}  # fmt: skip


def test_no_rank_gathers_the_model(tmp_path: Path) -> None:
    for took in run_ranks(2, bytes_of_a_save, tmp_path / "per_rank", "per_rank"):
        assert took["in all"] < 0.1 * took["mine"]  # every rank writes from its own memory
        assert took["gathered"] >= 2 * took["mine"]  # what the measure says of a model that is gathered
    for took in run_ranks(
        2, bytes_of_a_save, tmp_path / "one", "one"
    ):  # the other rank's rows, one parameter at a time
        assert took["at once"] <= took["largest parameter"] / 2 + 64 and took["in all"] <= 1.1 * took["mine"]
