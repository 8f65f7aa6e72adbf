"""The messages of the first day are complete in Chinese, and a user gets them in the language of the locale."""

import sys
from dataclasses import dataclass
from pathlib import Path

import polib
import pytest

from dev.messages import CATALOGUE, names, problems, templates, update
from nanochat.common import UserError, language, run, tr
from nanochat.data.corpora import resolve


def test_every_message_is_in_chinese_with_the_same_values_and_compiled() -> None:
    catalogue = polib.pofile(str(CATALOGUE))
    assert not problems(catalogue, templates()), "python -m dev.messages"
    assert catalogue.to_binary() == CATALOGUE.with_suffix(".mo").read_bytes(), "python -m dev.messages"


def test_what_a_catalogue_lacks_is_found(tmp_path: Path) -> None:
    wanted = {"{count:,} files": "a.py", "one {name}": "a.py", "old": "b.py"}
    catalogue = update(tmp_path / "zh" / "nanochat.po", wanted)
    assert len(problems(catalogue, wanted)) == 3  # no Chinese yet
    for entry, chinese in zip(catalogue, ("{count:,} 个文件", "一个", "旧"), strict=True):
        entry.msgstr = chinese
    catalogue.save(str(tmp_path / "zh" / "nanochat.po"))
    del wanted["old"]
    found = problems(catalogue, {**wanted, "new": "c.py"})
    assert {text.split(" ")[0] for text in found} == {"c.py:", "no", "the"} and len(found) == 3
    kept = update(tmp_path / "zh" / "nanochat.po", wanted)
    assert [entry.msgstr for entry in kept] == ["{count:,} 个文件", "一个"]


def test_only_plain_strings_are_templates(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "a.py").write_text('tr("a {b} "\n   "c", b=1)\n')
    assert templates(tmp_path) == {"a {b} c": "scripts/a.py"} and names("a {b:,} {c!r}") == {"b", "c"}
    (tmp_path / "scripts" / "a.py").write_text('tr(f"a {b}")\n')
    with pytest.raises(ValueError, match="malformed"):
        templates(tmp_path)


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


def test_a_refusal_is_in_the_users_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    with pytest.raises(UserError, match="没有名为 'web' 的语料或目录；目前还没有语料。准备语料的命令：python -m"):
        resolve("web")
    assert tr("resuming from step {step:,} of {folder}", step=1234, folder="d4") == "从 d4 的第 1,234 步继续训练"
    monkeypatch.setenv("NANOCHAT_LANG", "en")
    with pytest.raises(UserError, match="there is no corpus or folder 'web'; there is no corpus yet"):
        resolve("web")


@dataclass(frozen=True)
class NoFlags:
    """A script without flags."""


def test_a_script_ends_in_the_users_language(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: NoFlags) -> None:
        resolve("web")

    monkeypatch.setattr(sys, "argv", ["script"])
    for chosen, start in (("zh", "错误：没有名为"), ("en", "error: there is no corpus")):
        monkeypatch.setenv("NANOCHAT_LANG", chosen)
        with pytest.raises(SystemExit):
            run(refuse, NoFlags)
        assert capsys.readouterr().err.startswith(start)
