"""The messages of the first day are complete in Chinese, and a user gets them in the language of the locale."""

import ast
import re
import sys
from dataclasses import dataclass
from typing import Literal, TypeGuard

import polib
import pytest

from dev.messages import CATALOGUE, ROOT, helps, missing_helps, problems, source_files, templates
from nanochat.common import language
from nanochat.data.command_line import run
from nanochat.data.corpora import resolve


def test_every_message_is_in_chinese_with_the_same_values_and_compiled() -> None:
    catalogue = polib.pofile(str(CATALOGUE))
    assert not problems(catalogue, templates()), "python -m dev.messages"
    assert catalogue.to_binary() == CATALOGUE.with_suffix(".mo").read_bytes(), "python -m dev.messages"


def test_every_help_text_is_in_chinese() -> None:
    assert missing_helps(polib.pofile(str(CATALOGUE)), helps()) == []


# Functions that put a number before their third argument, a unit.
COUNTING = {"Progress", "bars", "progress"}
MEASURE = "[个只张项条段篇行步道对次份名种轮组层处台路遍块枚]"
THINGS = "对话|词元|参数|文件|文档|检查点|分片|设备|进程|字符|样例|消息|题目|回答|张量|请求|示例|主机|适配器|线程|记录"


def is_message(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "tr"


def test_chinese_counts_things_with_a_measure_word() -> None:
    chinese_of = {entry.msgid: entry.msgstr for entry in polib.pofile(str(CATALOGUE)) if not entry.msgctxt}
    units: list[ast.expr] = []
    messages: list[ast.Call] = []
    for path in source_files(ROOT):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in COUNTING and len(node.args) > 2:
                units.append(node.args[2])
            elif is_message(node):
                messages.append(node)
    counted = [ast.literal_eval(unit.args[0]) for unit in units if is_message(unit)]
    others = {unit.value for unit in units if isinstance(unit, ast.Constant)}
    assert len(counted) >= 8 and others == {"B"}, "a unit is in bytes or translated"
    bare = {unit: chinese_of[unit] for unit in counted if not re.match(MEASURE, chinese_of[unit])}
    assert not bare, "the number stands right before these"
    shared = set(counted) & {ast.literal_eval(node.args[0]) for node in messages if node not in units}
    assert not shared, "a noun alone has no measure word, so it needs an English of its own"
    number = rf"\{{\w+:[,\d.]*[df]?\}} ?(?:{THINGS})(?!/)"
    assert [chinese for chinese in chinese_of.values() if re.search(number, chinese)] == []


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


@dataclass(frozen=True)
class Typed:
    """A script with flags of several types."""

    port: int = 8000
    """port"""
    step: int | None = None
    """step"""
    ratio: float | Literal["auto"] = "auto"
    """ratio"""
    source: Literal["sft", "base"] | None = None
    """source"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--port=abc", "--port 必须是整数，现在是 'abc'"),
        ("--step=1.5", "--step 必须是整数，现在是 '1.5'"),
        ("--ratio=x", "--ratio 必须是数或 auto，现在是 'x'"),
        ("--source=foo", "--source 只能是 base, sft 之一，现在是 'foo'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_in_chinese(
    words: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    monkeypatch.setattr(sys, "argv", ["script", words])
    with pytest.raises(SystemExit):
        run(print, Typed)
    assert expected in capsys.readouterr().err


def test_comments_beside_commands_are_in_the_users_language(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    with pytest.raises(SystemExit):
        run(print, Flags, "Text.\n\npython -m script   # two models, which a request names")
    assert re.search("python -m script +# [\u4e00-\u9fff]", capsys.readouterr().out)


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
