"""Faults T2, T3, T19 and T20: runs that stop and resume, and runs that must not resume."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from nanochat.device import Compute
from nanochat.runtime import fingerprint
from nanochat.runtime.tracking import read_metrics
from tests.support.faults import STEPS, base_stage, corpus, digests, stage
from tests.support.ranks import Pool
from tests.support.small_world import files, make_corpus, stage_folder, up_to

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """A base folder in which two ranks took twenty steps and were never stopped."""
    base = corpus(tmp_path_factory.mktemp("straight"))
    pool.run(2, base_stage, {}, NANOCHAT_BASE_DIR=str(base))
    return base


@pytest.fixture
def fresh(straight: Path, base_folder: Path) -> Path:
    """A base folder with the corpus only."""
    up_to("base", straight, base_folder)
    os.environ["NANOCHAT_BASE_DIR"] = str(base_folder)
    return base_folder


def figures(base: Path) -> list[Any]:
    return [(line["step"], line["loss"], line["grad_norm"], line.get("val_bpb"))
            for line in read_metrics(stage_folder(base, "base"))]  # fmt: skip


def test_ten_steps_and_ten_more_are_twenty_on_two_ranks(straight: Path, fresh: Path, pool: Pool) -> None:
    """T2. Injects: a run of two ranks stops after 10 of 20 steps, and resumes. Must follow: the parameters, each rank's
    optimizer state and the figures are the same as in an uninterrupted run, bit for bit.

    注入：两个进程在 20 步中的第 10 步停止，再继续。必须：参数、各进程的优化器状态和指标与不停止的训练逐位相同。
    """
    pool.run(2, base_stage, {"stop_at": 10})
    pool.run(2, base_stage, {})
    assert digests(fresh) == digests(straight) and len(digests(fresh)) == 3
    assert figures(fresh) == figures(straight)


def test_other_numbers_of_ranks_and_another_sharding_go_on(straight: Path, fresh: Path, pool: Pool) -> None:
    """T3. Injects: a run of two ranks resumes on four ranks that also shard the parameters, and then on one. Must
    follow: every step is taken once, and the losses differ from the losses of two ranks by at most 1e-4.

    注入：两个进程的训练改由四个进程继续，并且连参数也分片，随后再改由一个进程继续。必须：每一步恰好进行一次，
    损失与两个进程的相差不超过 1e-4。
    """
    pool.run(2, base_stage, {"shard": "none", "stop_at": 6})
    pool.run(4, base_stage, {"shard": "full", "stop_at": 13})
    pool.run(1, base_stage, {"shard": "grad"})
    steps, losses, *_ = zip(*figures(fresh), strict=True)
    assert steps == tuple(range(1, STEPS + 1))
    assert losses == pytest.approx([loss for _, loss, *_ in figures(straight)], abs=1e-4)


# --- what must not resume ---------------------------------------------------------------------------


def other_vocabulary(base: Path) -> dict[str, Any]:
    make_corpus(base, 400)
    return {}


WRONG = {
    "tokenizer": (other_vocabulary, r"tokenizer: \w{16} before, \w{16} now"),
    "seed": (lambda base: {"seed": 7}, "--seed: 42 before, 7 now"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_start_is_refused_with_the_difference(fresh: Path, pool: Pool, what: str) -> None:
    """T19. Injects: a run resumes with another tokenizer, or with another seed. Must follow: every rank refuses before
    the first step and names the difference; no file of the run changes.

    注入：换了分词器或种子之后继续训练。必须：每个进程都在第一步之前拒绝并说明差别；训练留下的文件一个也不变。
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
    file and both hashes; with --other_code the run resumes, and says that the code is different.

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
    """T20. Injects: one rank starts with another seed, another file of the program, or other rows of data. Must follow:
    every rank refuses before the first step and names the rank and the difference; nothing is saved.

    注入：某个进程的种子、程序文件或数据行与其他进程不同。必须：每个进程都在第一步
    之前拒绝，并说明是哪个进程、差别在哪里；什么也不保存。
    """
    for outcome in pool.outcomes(2, differing, kind):
        assert "the ranks were not started alike" in outcome.error and DIFFERENT[kind] in outcome.error
    assert not list(fresh.rglob("*.safetensors"))
