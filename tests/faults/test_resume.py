"""Faults T1, T2, T3, T19 and T20: runs that stop and resume, and runs that must not resume."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanochat.checkpoint_manager.files import read_meta
from nanochat.checkpoint_manager.resume import restore
from nanochat.common import read_json
from nanochat.device import Compute
from nanochat.runtime import fingerprint
from nanochat.runtime.tracking import read_metrics
from tests.support.faults import STEPS, base_stage, corpus, digests, stage
from tests.support.rank_pool import Pool
from tests.support.small_world import files, stage_folder
from tests.support.tiny_model import on_cpu

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> dict[int, Path]:
    """Base folders with twenty steps that were never stopped, by number of ranks."""
    bare = corpus(tmp_path_factory.mktemp("bare"))
    found = {}
    for ranks in (1, 2):
        found[ranks] = bare.with_name(f"straight-{ranks}")
        shutil.copytree(bare, found[ranks])
        pool.run(ranks, base_stage, {}, NANOCHAT_BASE_DIR=str(found[ranks]))
    return found


@pytest.fixture
def fresh(straight: dict[int, Path], base_folder: Path) -> Path:
    """A base folder with the corpus only."""
    shutil.copytree(straight[1], base_folder, dirs_exist_ok=True)
    shutil.rmtree(stage_folder(base_folder, "base"))
    shutil.rmtree(base_folder / "report")
    os.environ["NANOCHAT_BASE_DIR"] = str(base_folder)
    return base_folder


def ten_and_ten(pool: Pool, ranks: int, base: Path) -> None:
    pool.run(ranks, base_stage, {"stop_at": 10})
    assert read_json(stage_folder(base, "base") / "step_000010" / "meta.json")["world_size"] == ranks
    pool.run(ranks, base_stage, {})


def figures(base: Path) -> list[Any]:
    return [(line["step"], line["loss"], line["grad_norm"], line.get("val_bpb"))
            for line in read_metrics(stage_folder(base, "base"))]  # fmt: skip


def test_ten_steps_and_ten_more_are_twenty_on_one_rank(straight: dict[int, Path], fresh: Path, pool: Pool) -> None:
    """T1. Injects: a stop after 10 of 20 steps, one rank. Must follow: parameters, optimizer state and figures are
    those of a run without a stop, bit for bit.

    注入：单个进程在 20 步中的第 10 步停止，再继续。必须：参数、优化器状态和指标与不停止的训练逐位相同。
    """
    ten_and_ten(pool, 1, fresh)
    assert digests(fresh) == digests(straight[1]) and len(digests(fresh)) == 2
    assert figures(fresh) == figures(straight[1])


def test_ten_steps_and_ten_more_are_twenty_on_two_ranks(straight: dict[int, Path], fresh: Path, pool: Pool) -> None:
    """T2. Injects: a stop after 10 of 20 steps, two ranks. Must follow: parameters, each rank's optimizer state and
    figures are those of a run without a stop, bit for bit.

    注入：两个进程在 20 步中的第 10 步停止，再继续。必须：参数、各进程的优化器状态和指标与不停止的训练逐位相同。
    """
    ten_and_ten(pool, 2, fresh)
    assert digests(fresh) == digests(straight[2]) and len(digests(fresh)) == 3
    assert figures(fresh) == figures(straight[2])


def whole_state(base: Path, step: int) -> dict[str, Tensor]:
    """Model and optimizer state of a step, put together from the files of all ranks."""
    from safetensors import safe_open

    folder = stage_folder(base, "base") / f"step_{step:06d}"
    whole = load_file(folder / "model.safetensors")
    for path in sorted(folder.glob("optim-*")):
        with safe_open(path, "pt") as part:
            for name, (shape, first) in json.loads(part.metadata()["layout"]).items():
                held = part.get_tensor(name)
                whole.setdefault(name, torch.full(shape, torch.nan))[first : first + held.shape[0]] = held
    assert not any(value.isnan().any() for value in whole.values())
    return whole


@pytest.mark.parametrize("ranks", [1, 4])
def test_another_number_of_ranks_goes_on(straight: dict[int, Path], fresh: Path, pool: Pool, ranks: int) -> None:
    """T3. Injects: a run of two ranks resumes with one, and with four. Must follow: the state loaded is the state
    saved, bit for bit; the losses of the next ten steps are those of two ranks to 1e-4.

    注入：两个进程的训练改用一个或四个进程继续。必须：读入的状态与保存的逐位相同；其后十步的损失与两个进程
    的相差不超过 1e-4。
    """
    pool.run(2, base_stage, {"stop_at": 10})
    before = whole_state(fresh, 10)
    loaded = pool.run(ranks, everything_loaded, str(stage_folder(fresh, "base")))
    for rank in loaded:
        for name, (value, first) in rank.items():
            assert torch.equal(value, before[name][first : first + value.shape[0]]), name
    covered = {name for rank in loaded for name in rank}
    assert covered == set(before)
    pool.run(ranks, base_stage, {})
    losses = [[line["loss"] for line in read_metrics(stage_folder(base, "base"))] for base in (fresh, straight[2])]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def everything_loaded(compute: Compute, folder: str) -> dict[str, tuple[Tensor, int]]:
    """Restore step 10 on this rank: every tensor it holds then, and its first row."""
    from nanochat.gpt import GPT, GPTConfig
    from nanochat.optim import Optimizers, Rates
    from nanochat.runtime import parallel

    meta = read_meta(Path(folder), 10)
    model = GPT(GPTConfig(**meta["model"]))
    model.init_weights(7)
    parallel.shard(model, model.shard_groups(), compute)
    optimizers = Optimizers(model, model.parameter_roles(), model.config.n_embd, Rates(), 1.0, torch.float32)
    restore(Path(folder), 10, model, optimizers)
    whole = {name: (value.clone(), 0) for name, value in parallel.whole_parameters(model)}
    return {**whole, **{name: (value, first) for name, (value, _, first) in optimizers.state().items()}}


# --- what must not resume ---------------------------------------------------------------------------


def other_vocabulary(base: Path) -> dict[str, Any]:
    from tests.support.small_world import make_corpus

    make_corpus(base, 400)
    return {}


WRONG = {
    "tokenizer": (other_vocabulary, r"tokenizer: \w{16} before, \w{16} now"),
    "config": (lambda base: {"model_dim": 96}, "--model_dim: 64 before, 96 now"),
    "seed": (lambda base: {"seed": 7}, "--seed: 42 before, 7 now"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_start_is_refused_with_the_difference(fresh: Path, pool: Pool, what: str) -> None:
    """T19. Injects: a run resumes with another tokenizer, another shape of the model, another seed. Must follow: every
    rank refuses before the first step and names the difference; no file of the run changes.

    注入：换了分词器、模型形状或种子之后继续训练。必须：每个进程都在第一步之前拒绝并说明差别；训练留下的文件一个也不变。
    """
    change, says = WRONG[what]
    pool.run(2, base_stage, {"stop_at": 2})
    before = files(stage_folder(fresh, "base"))
    outcomes = pool.outcomes(2, base_stage, change(fresh))
    for outcome in outcomes:
        assert "UserError" in outcome.error and re.search(says, outcome.error)
    assert files(stage_folder(fresh, "base")) == before


def with_other_code(compute: Compute, changes: dict[str, Any]) -> None:
    """The base stage, with one file of the project changed since it was begun."""
    with pytest.MonkeyPatch.context() as patch:
        code = {**fingerprint.loaded(), "nanochat/gpt.py": "0badc0de"}
        patch.setattr(fingerprint, "loaded", lambda: code)
        stage(compute, **changes)


def test_changed_code_is_refused_unless_accepted(fresh: Path, pool: Pool) -> None:
    """T19. Injects: a file of the program is changed between two starts. Must follow: every rank refuses and names the
    file and both hashes; with --other_code the run resumes, and says that it is not the same.

    注入：两次启动之间改了程序的一个文件。必须：每个进程都拒绝，
    说明是哪个文件以及前后的哈希；给出 --other_code 则继续，并说明已不是同一次训练。
    """
    pool.run(2, base_stage, {"stop_at": 2})
    before = files(stage_folder(fresh, "base"))
    for outcome in pool.outcomes(2, with_other_code, {"stop_at": 3}):
        assert "the code has changed since" in outcome.error
        assert "nanochat/gpt.py " in outcome.error and "before, 0badc0de now" in outcome.error
    assert files(stage_folder(fresh, "base")) == before
    pool.run(2, with_other_code, {"stop_at": 3, "other_code": True})
    assert (stage_folder(fresh, "base") / "step_000003").exists()


def differing(compute: Compute, kind: str) -> None:
    """The base stage, where the last rank is started otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        changes: dict[str, Any] = {}
        if compute.rank == 1:
            if kind == "seed":
                changes["seed"] = 7
            elif kind == "code":
                code = {**fingerprint.code(), "nanochat/gpt.py": "0badc0de"}
                patch.setattr(fingerprint, "code", lambda: code)
            else:
                patch.setattr("nanochat.prepare.token_files.TokenSet.key", "other rows")
        stage(compute, **changes)


DIFFERENT = {"seed": "setting seed is 7 on rank 1, 42 on rank 0", "code": "nanochat/gpt.py is 0badc0de on rank 1",
             "data": "the data is"}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(DIFFERENT))
def test_ranks_that_differ_are_refused(fresh: Path, pool: Pool, kind: str) -> None:
    """T20. Injects: one rank with another seed, another file of the program, other rows of data. Must follow: every
    rank refuses before the first step and names the rank and the difference; nothing is saved.

    注入：某个进程的种子、程序文件或数据行与其他进程不同。必须：每个进程都在第一步
    之前拒绝，并说明是哪个进程、差别在哪里；什么也不保存。
    """
    for outcome in pool.outcomes(2, differing, kind):
        assert "the ranks were not started alike" in outcome.error and DIFFERENT[kind] in outcome.error
    assert not list(fresh.rglob("*.safetensors"))


def test_one_rank_needs_no_pool(straight: dict[int, Path], fresh: Path) -> None:
    """The steps of a pooled rank are those of this process."""
    stage(on_cpu(), num_iterations=STEPS)
    assert digests(fresh) == digests(straight[1])
