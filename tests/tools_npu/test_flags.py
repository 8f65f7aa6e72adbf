"""Command lines for Ascend hosts: argparse's own words in the user's language."""

import pytest

from tools_npu.flags import Flags


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], language: str, *words: str) -> str:
    monkeypatch.setenv("NANOCHAT_LANG", language)
    flags = Flags("check.py", "English", "中文")
    flags.add("--card", "a card", "卡", type=int, required=True)
    flags.add("--ids", "ids", "编号", nargs="+")
    flags.add("--lang", "language", "语言", choices=["zh", "en"])
    flags.add("--json", "print JSON", "输出 JSON", action="store_true")
    with pytest.raises(SystemExit, match="2"):
        flags.parser.parse_args(words)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "english", "chinese"),
    [
        ("", "the following arguments are required: --card", "缺少必须给出的选项：--card"),
        ("--card 1 --cadr 2", "unrecognized arguments: --cadr 2", "不认识的选项：--cadr 2"),
        ("--card", "argument --card: expected one argument", "--card 后面要写一个值"),
        ("--card 1 --ids", "argument --ids: expected at least one argument", "--ids 后面至少要写一个值"),
        ("--card x", "argument --card: invalid int value: 'x'", "--card 后面要写整数，不能写 'x'"),
        ("--card 1 --lang de", "argument --lang: invalid choice: 'de'", "--lang 后面不能写 'de'，可选的值："),
        ("--card 1 --json=1", "argument --json: ignored explicit argument '1'", "--json 后面不写值，得到的是 '1'"),
    ],
)
def test_a_command_line_is_refused_in_the_users_language(words, english, chinese, monkeypatch, capsys):
    told = refused(monkeypatch, capsys, "en", *words.split())
    assert told.startswith("usage: check.py") and f"error: {english}" in told and "check.py --help lists" in told
    told = refused(monkeypatch, capsys, "zh", *words.split())
    assert told.startswith("用法：check.py") and f"错误：{chinese}" in told and "check.py --help 列出" in told
    assert "argument" not in told
