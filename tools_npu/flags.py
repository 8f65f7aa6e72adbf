"""Command lines for Ascend hosts, with help and errors in English and Chinese."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any, Iterable, NoReturn

from tools_npu.lines import language_of

# argparse's own errors, as regular expressions, and what they are in Chinese.
CHINESE_ERRORS = (
    (r"the following arguments are required: (.*)", r"缺少必须给出的选项：\1"),
    (r"unrecognized arguments: (.*)", r"不认识的选项：\1"),
    (r"argument (\S+): expected one argument", r"\1 后面要写一个值"),
    (r"argument (\S+): expected at least one argument", r"\1 后面至少要写一个值"),
    (r"argument (\S+): invalid int value: (.*)", r"\1 后面要写整数，不能写 \2"),
    (
        r"argument (\S+): invalid choice: (\S+) \(choose from (.*)\)",
        r"\1 后面不能写 \2，可选的值：\3",
    ),
    (r"argument (\S+): ignored explicit argument (.*)", r"\1 后面不写值，得到的是 \2"),
)


def in_chinese(error: str) -> str:
    """Return an error of argparse in Chinese; an unknown one stays English."""
    for pattern, chinese in CHINESE_ERRORS:
        match = re.fullmatch(pattern, error, re.DOTALL)
        if match:
            return match.expand(chinese)
    return error


class _ChineseFormatter(argparse.RawDescriptionHelpFormatter):
    """Writes the word before the usage in Chinese, which argparse itself has in English only."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        super().add_usage(usage, actions, groups, prefix or "用法：")


class Parser(argparse.ArgumentParser):
    """argparse's parser, which speaks the language that NANOCHAT_LANG or the locale chooses."""

    def __init__(self, program: str, description: str | None):
        self.is_chinese = language_of(os.environ) == "zh"
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(
            program,
            description=description,
            formatter_class=_ChineseFormatter if self.is_chinese else formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.flags = self.add_argument_group("选项" if self.is_chinese else "options")
        about_help = "显示本说明并退出" if self.is_chinese else "show this help and exit"
        self.flags.add_argument("-h", "--help", help=about_help, action="help")

    def error(self, message: str) -> NoReturn:
        """Print an error with the usage, and end with code 2."""
        self.print_usage(sys.stderr)
        text = f"error: {message}; {self.prog} --help lists the flags"
        if self.is_chinese:
            text = f"错误：{in_chinese(message)}；{self.prog} --help 列出全部选项"
        self.exit(2, f"{text}\n")


class Flags:
    """A parser whose flags have their help in English and in Chinese."""

    def __init__(self, program: str, english: str | None, chinese: str):
        self.parser = Parser(program, english)
        if self.parser.is_chinese:
            self.parser.description = chinese

    def add(self, *words: str, **settings: Any) -> None:
        """Add a flag: its names, then its help in English and in Chinese, and argparse's settings."""
        *names, english, chinese = words
        text = chinese if self.parser.is_chinese else english
        self.parser.flags.add_argument(*names, help=text, **settings)
