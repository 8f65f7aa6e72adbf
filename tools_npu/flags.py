"""The command lines of check_npu.py and setup_ascend.sh, with help in English and Chinese."""

from __future__ import annotations

import argparse
import os
from typing import Any, Iterable

from tools_npu.lines import language_of


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


class Flags:
    """A parser whose help is in the language that NANOCHAT_LANG or the locale chooses."""

    def __init__(self, program: str, english: str | None, chinese: str):
        self._is_chinese = language_of(os.environ) == "zh"
        formatter = argparse.RawDescriptionHelpFormatter
        self.parser = argparse.ArgumentParser(
            program,
            description=chinese if self._is_chinese else english,
            formatter_class=_ChineseFormatter if self._is_chinese else formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self._group = self.parser.add_argument_group("选项" if self._is_chinese else "options")
        self.add("-h", "--help", "show this help and exit", "显示本说明并退出", action="help")

    def add(self, *words: str, **settings: Any) -> None:
        """Add a flag: its names, then its help in English and in Chinese, and argparse's settings."""
        *names, english, chinese = words
        self._group.add_argument(*names, help=chinese if self._is_chinese else english, **settings)
