"""Checkpoints written by some number of ranks and read by another: nothing is lost, nothing is rounded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager.resume import resume_stage
from nanochat.device import Compute
from tests.support.ranks import run_ranks
from tests.support.tiny_model import tiny_tokenizer
from tests.support.tiny_training import CPU, WANTED, equal, everything, make, parameters, save, state, train

pytestmark = pytest.mark.ranks


def train_and_save(compute: Compute, folder: Path) -> dict[str, Any]:
    """Three steps, a save, three more."""
    pair = make(1, compute)
    train(*pair, 0, 3, compute)
    save(folder, 3, *pair, tiny_tokenizer(), compute=compute)
    then = {"parameters": parameters(pair[0]), "state": state(pair[1])}
    train(*pair, 3, 6, compute)
    return {"then": then, "end": {"parameters": parameters(pair[0]), "state": state(pair[1])}}


def go_on(compute: Compute, folders: list[Path]) -> list[dict[str, Any]]:
    """From each folder: what was restored, and what it is after three more steps."""
    found = []
    for folder in folders:
        pair = make(2, compute)
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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[dict[str, Any]]]]:
    """Folders written by one and by two ranks, and what each rank held."""
    one, two = (tmp_path_factory.mktemp("run") for _ in range(2))
    return {1: (one, [train_and_save(CPU, one)]), 2: (two, run_ranks(2, train_and_save, two))}


def test_every_rank_writes_its_part(written: dict[int, Any]) -> None:
    folder, _ = written[2]
    names = sorted(path.name for path in (folder / "step_000003").iterdir())
    assert names == [
        "meta.json", "model.safetensors", "optim-00-of-02.safetensors", "optim-01-of-02.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert step_files.verify(folder / "step_000003") == ""
    assert step_files.read_meta(folder, 3)["world_size"] == 2
    (folder / "step_000003" / "optim-01-of-02.safetensors").rename(folder / "kept")
    assert step_files.verify(folder / "step_000003") == "optim-01-of-02.safetensors is missing"
    (folder / "kept").rename(folder / "step_000003" / "optim-01-of-02.safetensors")


def test_one_rank_reads_what_two_wrote(written: dict[int, Any]) -> None:
    folder, held = written[2]
    (found,) = go_on(CPU, [folder])
    assert equal(whole([found["then"]]), whole([rank["then"] for rank in held]))
    close(whole([found["end"]]), whole([rank["end"] for rank in held]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_what_one_and_two_wrote(written: dict[int, Any], ranks: int) -> None:
    found = run_ranks(ranks, go_on, [written[1][0], written[2][0]])
    for number, wrote in enumerate((1, 2)):
        held = written[wrote][1]
        assert equal(whole([rank[number]["then"] for rank in found]), whole([rank["then"] for rank in held]))
        ends = whole([rank[number]["end"] for rank in found]), whole([rank["end"] for rank in held])
        close(*ends)
        if ranks == wrote:
            assert equal(*ends)  # six steps at once or three and three


def test_one_rank_goes_on_bit_equal(written: dict[int, Any]) -> None:
    folder, (held,) = written[1]
    pair = make(2)
    resume_stage(folder, *pair, WANTED, CPU)
    train(*pair, 3, 6)
    assert equal(everything(*pair), whole([held["end"]]))
