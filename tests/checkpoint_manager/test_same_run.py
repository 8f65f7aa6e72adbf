"""A run resumes with the settings and the code it started with; what counts as the same."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.same_run import (
    BASE_FACT,
    CONTENT,
    RunSettings,
    check_code,
    check_settings,
    free_flags,
    warn_of_unknown_matmul,
)
from nanochat.common import UserError
from nanochat.data.command_line import Free
from nanochat.runtime import fingerprint
from tests.support.tiny_model import on_cpu


@dataclass(frozen=True)
class Old:
    """The flags of a script when a run started."""

    depth: int = 20
    save_every: Free[int] = 0


@dataclass(frozen=True)
class New(Old):
    """The flags of the same script today."""

    window: str = "L"  # what older runs did without the flag
    rewards: tuple[str, ...] = ()
    color: Free[str | None] = None


def meta(config: dict[str, Any], **made_with: Any) -> dict[str, Any]:
    return {"config": config, "stage": "base", "step": 5, "steps": 9, "made_with": made_with}


@pytest.fixture
def one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has loaded a.py; there is b.py too."""
    monkeypatch.setattr(fingerprint, "loaded", lambda: {"nanochat/a.py": "1"})
    monkeypatch.setattr(fingerprint, "not_loaded", lambda: {"nanochat/b.py": "2"})


def test_a_flag_says_itself_whether_it_is_free() -> None:
    assert free_flags(Old) == {"save_every"} and free_flags(New) == {"save_every", "color"}


def test_a_new_flag_at_its_default_lets_old_runs_resume() -> None:
    saved = RunSettings.of(Old(depth=4), corpus="cats").values
    check_settings(Path("run"), meta(saved), RunSettings.of(New(depth=4), corpus="cats"))
    with pytest.raises(UserError, match=r"\(--window: L before, S now\)"):
        check_settings(Path("run"), meta(saved), RunSettings.of(New(depth=4, window="S"), corpus="cats"))


def test_of_the_facts_that_a_checkpoint_lacks_only_the_newest_do_not_matter() -> None:
    saved = RunSettings.of(Old())
    assert not RunSettings.of(Old(), **{BASE_FACT: "1", CONTENT: "1"}).changes(saved.values)
    (change,) = RunSettings.of(Old(), **{CONTENT: "2"}).changes({**saved.values, CONTENT: "1"})
    assert change == "the content of your files: 1 before, 2 now"
    assert RunSettings.of(Old(), reward_code="1").changes(saved.values) == ["reward_code: None before, 1 now"]
    assert RunSettings.of(Old(), **{BASE_FACT: "2"}).changes({**saved.values, BASE_FACT: "1"})


def test_a_shorter_mark_of_the_same_model_is_the_same_parent() -> None:
    now = RunSettings.of(Old(), parent="qwen3 0123abcd")
    assert not now.changes({**now.values, "parent": "qwen3 0123"})
    for other in ("qwen3 0124", "qwen3 0123abcde", None, ""):
        assert now.changes({**now.values, "parent": other})


def test_facts_that_are_no_longer_recorded_do_not_matter() -> None:
    saved = {**RunSettings.of(Old(depth=4)).values, "held out": "one in 10"}
    check_settings(Path("run"), meta(saved), RunSettings.of(Old(depth=4)))


@dataclass(frozen=True)
class WithMatmul(Old):
    """The flags of the same script since there is --matmul, which replaces --fp8."""

    matmul: str = "auto"


def test_a_run_that_began_with_fp8_resumes_with_matmul_fp8() -> None:
    saved = {**RunSettings.of(Old(depth=4)).values, "fp8": True}
    check_settings(Path("run"), meta(saved), RunSettings.of(WithMatmul(4, matmul="fp8")))
    for made_with in ({}, {"device": "cpu", "number format": "bfloat16"}):
        with pytest.raises(UserError, match=r"\(--matmul: fp8 before, auto now\)"):
            check_settings(Path("run"), meta(saved, **made_with), RunSettings.of(WithMatmul(4)))
    saved["fp8"] = False
    check_settings(Path("run"), meta(saved), RunSettings.of(WithMatmul(4)))
    with pytest.raises(UserError, match=r"\(--matmul: auto before, fp8 now\)"):
        check_settings(Path("run"), meta(saved), RunSettings.of(WithMatmul(4, matmul="fp8")))


@pytest.mark.parametrize("matmul", ["auto", "int8"])
def test_a_run_that_may_have_begun_in_int8_resumes_as_it_is_asked_to_with_a_warning(
    matmul: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = {**RunSettings.of(Old(depth=4)).values, "fp8": False}
    now = RunSettings.of(WithMatmul(4, matmul=matmul))
    begun = meta(saved, **{"device": "cpu", "number format": "bfloat16"})
    check_settings(Path("run"), begun, now)
    warn_of_unknown_matmul(Path("run"), begun, now)
    warning = capsys.readouterr().err
    assert f"resumes with --matmul={matmul};" in warning and "run does not say" in warning
    with pytest.raises(UserError, match="--depth: 4 before, 5 now"):
        check_settings(Path("run"), begun, RunSettings.of(WithMatmul(5, matmul=matmul)))
    warn_of_unknown_matmul(Path("run"), {**begun, "state": {"compiled": True}}, now)
    warn_of_unknown_matmul(Path("run"), {**begun, "step": 9}, now)
    assert capsys.readouterr().err == "", "compiled runs were in bf16, and finished ones need no format"


@pytest.mark.parametrize(
    ("changes", "made_with"),
    [
        ({"matmul": "auto"}, {"device": "cpu", "number format": "bfloat16"}),  # it says so
        ({}, {"device": "cpu", "number format": "float32"}),  # which never used int8
        ({}, {"device": "npu", "number format": "bfloat16"}),
    ],
)
def test_a_run_that_cannot_have_begun_in_int8_does_not_resume_in_it(
    changes: dict[str, str], made_with: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    begun = meta({**RunSettings.of(Old(depth=4)).values, **changes}, **made_with)
    warn_of_unknown_matmul(Path("run"), begun, RunSettings.of(WithMatmul(4)))
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="--matmul: auto before, int8 now"):
        check_settings(Path("run"), begun, RunSettings.of(WithMatmul(4, matmul="int8")))


def test_free_flags_may_differ_and_others_and_facts_may_not() -> None:
    saved = RunSettings.of(New(depth=4), corpus="cats").values
    check_settings(Path("run"), meta(saved), RunSettings.of(New(4, 7, color="red"), corpus="cats"))
    with pytest.raises(UserError, match=r"\(corpus: cats before, dogs now; --depth: 4 before, 8 now\)"):
        check_settings(Path("run"), meta(saved), RunSettings.of(New(depth=8), corpus="dogs"))


@pytest.mark.parametrize(
    ("code", "others", "said"),
    [
        ({"nanochat/a.py": "1", "nanochat/c.py": "3"}, {}, "nanochat/c.py 3 before, missing now"),  # removed
        ({"nanochat/b.py": "2"}, {}, "nanochat/a.py missing before, 1 now"),  # added
        ({"nanochat/old.py": "1"}, {}, "nanochat/a.py missing before, 1 now; nanochat/old.py 1 before, missing now"),
        ({"nanochat/a.py": "3"}, {}, "nanochat/a.py 3 before, 1 now"),
        ({"nanochat/b.py": "2"}, {"nanochat/a.py": "3"}, "nanochat/a.py 3 before, 1 now"),  # was there, but not loaded
        ({"nanochat/a.py": "1", "nanochat/b.py": "7"}, {}, "nanochat/b.py 7 before, 2 now"),  # is there, but not loaded
    ],
)
def test_a_file_that_was_changed_added_removed_or_renamed_is_other_code(
    one_file: None, capsys: pytest.CaptureFixture[str], code: dict[str, str], others: dict[str, str], said: str
) -> None:
    made = meta({}, code=code, other_code=others)
    with pytest.raises(UserError) as refused:
        check_code(Path("run"), made, False, on_cpu())
    assert said in str(refused.value) and "--other_code" in str(refused.value)
    check_code(Path("run"), made, True, on_cpu())
    assert "will not repeat bit for bit" in capsys.readouterr().err


@pytest.mark.parametrize("loaded", [{"nanochat/a.py": "1"}, {"nanochat/a.py": "1", "nanochat/b.py": "2"}, {}])
def test_the_same_files_are_the_same_run_whatever_was_loaded(
    one_file: None, capsys: pytest.CaptureFixture[str], loaded: dict[str, str]
) -> None:
    files = {"nanochat/a.py": "1", "nanochat/b.py": "2"}
    others = {name: digest for name, digest in files.items() if name not in loaded}
    check_code(Path("run"), meta({}, code=loaded, other_code=others), False, on_cpu())
    assert capsys.readouterr().err == ""
