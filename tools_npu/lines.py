"""The lines that check_npu.py prints: a status, a finding and a remedy, in English and Chinese."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, Mapping, NamedTuple, Sequence

PASS, WARN, FAIL, SKIP = "PASS", "WARN", "FAIL", "SKIP"
STATUSES = (PASS, WARN, FAIL, SKIP)
COLORS = {PASS: "32", WARN: "33", FAIL: "31", SKIP: "90"}


class Line(NamedTuple):
    """The result of one check: name, status, finding, and the remedy for a WARN or FAIL."""

    name: str
    status: str
    english: str
    chinese: str
    remedy: str | Sequence[str] = ""  # a command, or what to do in English and Chinese
    data: dict[str, Any] = {}  # noqa: RUF012 - never changed; figures for the JSON

    def text(self, language: str) -> str:
        """The finding in a language."""
        return self.chinese if language == "zh" else self.english

    def do(self, language: str) -> str:
        """The remedy in a language."""
        if isinstance(self.remedy, str):
            return self.remedy
        return self.remedy[1] if language == "zh" else self.remedy[0]


def language_of(environment: Mapping[str, str]) -> str:
    """The language of messages, by NANOCHAT_LANG or the locale: zh or en."""
    for name in ("NANOCHAT_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        if environment.get(name):
            return "zh" if environment[name].lower().startswith("zh") else "en"
    return "en"


def shown(line: Line, language: str, color: bool) -> str:
    """A line for a terminal: status, name and finding, and the remedy on the next line."""
    mark = f"\033[{COLORS[line.status]}m{line.status}\033[0m" if color else line.status
    text = (
        f"{mark}  {line.name}: {line.text(language)}"
        if line.text(language)
        else f"{mark}  {line.name}"
    )
    if line.remedy and line.status in (WARN, FAIL):
        text += ("\n      处理：" if language == "zh" else "\n      do: ") + line.do(language)
    return text


# What training needs: each of these checks, by the beginning of its name, must have passed before check_npu says so.
NEEDED = (
    "cards",
    "torch",
    "torch_npu",
    "npu:0",
    "pinned copy",
    "stacked matmul",
    "attention causal",
    "attention band",
    "rms norm",
    "rotary",
    "chunked loss",
    "fused AdamW",
)


def not_shown(lines: Sequence[Line]) -> list[str]:
    """What training needs and no check has shown to work: checks that failed, were skipped or never ran."""
    good = [line.name for line in lines if line.status in (PASS, WARN)]
    return [
        name
        for name in NEEDED
        if not any(one == name or one.startswith(f"{name} ") for one in good)
    ]


def inference_only(lines: Sequence[Line]) -> bool:
    """Whether the first card cannot train, and all that was not shown to work is what such a card lacks."""
    skipped = [line.name for line in lines if line.status == SKIP]
    lacking = all(
        any(one == name or one.startswith(f"{name} ") for one in skipped)
        for name in not_shown(lines)
    )
    return lacking and any(
        line.name == "npu:0" and line.data.get("trains") is False for line in lines
    )


def summary(lines: list[Line], language: str) -> str:
    """The last line: how many checks have each status, which failed, and whether this host is ready to train."""
    counts = count(lines)
    figures = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    failed = ", ".join(line.name for line in lines if line.status == FAIL)
    unknown = ", ".join(not_shown(lines))
    if failed:
        end = ("; failed: {}", "；未通过：{}")
    elif inference_only(lines):
        end = (
            "; an inference card: chat_cli, chat_web and chat_eval work here, training does not",
            "；这是推理卡：可以运行 chat_cli、chat_web 和 chat_eval，不能训练",
        )
    else:
        end = (
            ("; not ready to train, not shown to work: {}", "；不能训练，以下项目未通过验证：{}")
            if unknown
            else ("; ready to train", "；可以训练")
        )
    return f"check_npu: {figures}" + end[language == "zh"].format(failed or unknown)


def count(lines: list[Line]) -> dict[str, int]:
    """How many lines have each status."""
    return {status: sum(line.status == status for line in lines) for status in STATUSES}


def as_json(lines: list[Line]) -> dict[str, Any]:
    """Every line for programs; `causes` holds the failed checks with their remedies."""
    failed = [line for line in lines if line.status == FAIL]
    return {
        "ok": not failed,
        "ready": not failed and not not_shown(lines),
        "counts": count(lines),
        "causes": [
            {
                "name": line.name,
                "text": line.english,
                "remedy": line.do("en"),
                "remedy_zh": line.do("zh"),
            }
            for line in failed
        ],
        "checks": [
            {
                "name": line.name,
                "status": line.status,
                "text": line.english,
                "text_zh": line.chinese,
                "remedy": line.do("en"),
                "remedy_zh": line.do("zh"),
                "data": line.data,
            }
            for line in lines
        ],
    }


def show_what_cannot_be_shown() -> None:
    """Print characters that standard output lacks, such as Chinese in ASCII, as escape sequences instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def on_terminal(stream: Any) -> bool:
    """Whether to print colours: the stream is a terminal, and NO_COLOR is not set."""
    return bool(stream.isatty()) and "NO_COLOR" not in os.environ
