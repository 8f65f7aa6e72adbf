"""Ranks that were not started alike are refused on every rank, by name; those that were are not."""

from pathlib import Path
from typing import Any

import pytest

from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.runtime import fingerprint
from tests.support.ranks import Pool
from tests.support.tiny_model import on_cpu

SETTINGS = {"depth": 4, "seed": 42, "tokenizer": "0a1b2c", "parent": "base d4 step 20 0123"}


def test_the_code_is_told_file_by_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = fingerprint.code()
    assert {"nanochat/gpt.py", "nanochat/__init__.py", "scripts/base_train.py", "tasks/mixtures.py"} <= here.keys()
    assert not any(name.startswith(("tests/", "bench/")) for name in here)
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "gpt.py").write_text("one")
    monkeypatch.setattr(fingerprint, "ROOT", tmp_path)
    one = fingerprint.code()
    (tmp_path / "nanochat" / "gpt.py").write_text("two")
    assert one.keys() == {"nanochat/gpt.py"} and one != fingerprint.code()


def test_one_rank_has_nothing_to_agree_with(base_folder: Path) -> None:
    fingerprint.check_start(SETTINGS, on_cpu())
    fingerprint.check({"data": "x"}, on_cpu())
    assert not list(base_folder.iterdir())


def said(compute: Compute, **differs: Any) -> str:
    """What check_start says where the last rank differs in one thing."""
    given, patch = dict(SETTINGS), pytest.MonkeyPatch()
    if compute.rank == compute.world_size - 1:
        given |= differs.get("settings", {})
        if "code" in differs:
            code = {**fingerprint.code(), **differs["code"]}
            patch.setattr(fingerprint, "code", lambda: code)
        if "torch" in differs:
            patch.setattr(fingerprint.torch, "__version__", differs["torch"])
        if "on_host" in differs:
            patch.setenv("LOCAL_WORLD_SIZE", differs["on_host"])
        if "folder" in differs:
            patch.setenv("NANOCHAT_BASE_DIR", str(differs["folder"]))
    try:
        fingerprint.check_start(given, compute)
    except UserError as mistake:
        return str(mistake)
    finally:
        patch.undo()
    return ""


def differences(compute: Compute, other_folder: Path) -> list[str]:
    """Of every kind, one after the other in one start of the processes."""
    kinds: list[dict[str, Any]] = [
        {}, {"settings": {"depth": 6}}, {"settings": {"seed": 43}}, {"settings": {"tokenizer": "ffff"}},
        {"code": {"nanochat/gpt.py": "other"}}, {"torch": "2.7.0"}, {"code": {f"{i}.py": "more" for i in range(9)}},
        {"folder": other_folder}, {}, {"on_host": "1"},
    ]  # fmt: skip
    return [said(compute, **kind) for kind in kinds]


@pytest.mark.ranks
def test_every_rank_says_which_rank_differs_in_what(base_folder: Path, tmp_path: Path, pool: Pool) -> None:
    for words in pool.run(3, differences, tmp_path / "other"):
        assert words[0] == words[8] == ""  # the same everywhere, before and after
        assert "not started alike: setting depth is 6 on rank 2, 4 on rank 0. " in words[1]
        assert "setting seed is 43 on rank 2, 42 on rank 0. " in words[2]
        assert "setting tokenizer is ffff on rank 2, 0a1b2c on rank 0" in words[3]
        assert "nanochat/gpt.py is other on rank 2, " in words[4]
        assert "torch is 2.7.0 on rank 2, " in words[5]
        assert "0.py is more on rank 2, missing on rank 0" in words[6] and "; and 5 more" in words[6]
        assert "some start 1 and others 3. Start the command on every host with NPROC_PER_NODE=1 " in words[9]
        assert "rank(s) 2 do not see the base folder of rank 0. Set NANOCHAT_BASE_DIR" in words[7]
    assert not [path for path in base_folder.iterdir() if path.name.startswith(".start")]


def test_every_rank_that_differs_is_named() -> None:
    rows = [{"the data": f"rows-{rank // 2}"} for rank in range(4)]
    named = [f"the data is rows-1 on rank {rank}, rows-0 on rank 0" for rank in (2, 3)]
    assert fingerprint._differences(rows) == named
