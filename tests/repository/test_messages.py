"""The messages of the first day are complete in Chinese, and a user gets them in the language of the locale."""

import sys
from dataclasses import dataclass

import polib
import pytest

from dev.messages import CATALOGUE, helps, missing_helps, problems, templates
from nanochat.common import language, run
from nanochat.data.corpora import resolve


def test_every_message_is_in_chinese_with_the_same_values_and_compiled() -> None:
    catalogue = polib.pofile(str(CATALOGUE))
    assert not problems(catalogue, templates()), "python -m dev.messages"
    assert catalogue.to_binary() == CATALOGUE.with_suffix(".mo").read_bytes(), "python -m dev.messages"


def test_every_help_text_is_in_chinese() -> None:
    assert missing_helps(polib.pofile(str(CATALOGUE)), helps()) == []


@dataclass(frozen=True)
class Flags:
    """A script with one flag."""

    num_files: int = 3
    """how many files"""


def test_help_and_an_unknown_flag_are_in_the_users_language(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    for word, expected in (("--help", "（默认：3）"), ("--num_flies=2", "--num_files")):
        monkeypatch.setattr(sys, "argv", ["script", word])
        with pytest.raises(SystemExit) as end:
            run(print, Flags)
        assert end.value.code == (0 if word == "--help" else 2)
        printed = "".join(capsys.readouterr())
        assert expected in printed and "╭─ options" not in printed and "Unrecognized" not in printed


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LC_ALL": "zh_CN.UTF-8"}, "zh"),
        ({"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LC_MESSAGES": "zh_TW", "LANG": "en_US"}, "zh"),
        ({"NANOCHAT_LANG": "en", "LC_ALL": "zh_CN.UTF-8"}, "en"),
        ({"NANOCHAT_LANG": "zh", "LC_ALL": "en_US.UTF-8"}, "zh"),
        ({}, "en"),
    ],
)
def test_the_variable_wins_over_the_locale(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NANOCHAT_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
        if name in environment:
            monkeypatch.setenv(name, environment[name])
    assert language() == expected


@dataclass(frozen=True)
class NoFlags:
    """A script without flags."""


def test_a_script_ends_in_the_users_language(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script"])
    for chosen, start in (("zh", "错误：没有名为"), ("en", "error: there is no corpus")):
        monkeypatch.setenv("NANOCHAT_LANG", chosen)
        with pytest.raises(SystemExit):
            run(lambda _: resolve("web"), NoFlags)
        assert capsys.readouterr().err.startswith(start)
