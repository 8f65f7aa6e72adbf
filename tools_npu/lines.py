"""The lines that check_npu.py prints: a status, a finding and a remedy, in English and Chinese."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, Mapping, NamedTuple, Sequence

PASS = "PASS"
WARN = "WARN"
FAIL = "FAIL"
SKIP = "SKIP"
STATUSES = (PASS, WARN, FAIL, SKIP)
# The first of these that is set chooses the language of messages.
LANGUAGE_VARIABLES = ("NANOCHAT_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
COLORS = {PASS: "32", WARN: "33", FAIL: "31", SKIP: "90"}


class Line(NamedTuple):
    """The result of one check: its name, status and finding, and the remedy for a WARN or FAIL."""

    name: str
    status: str
    english: str
    chinese: str
    remedy: str | Sequence[str] = ""  # a command, or what to do in English and Chinese
    data: dict[str, Any] = {}  # noqa: RUF012 - never changed; figures for the JSON

    def text(self, language: str) -> str:
        """Return the finding in English or Chinese."""
        return self.chinese if language == "zh" else self.english

    def remedy_in(self, language: str) -> str:
        """Return the remedy in English or Chinese."""
        if isinstance(self.remedy, str):
            return self.remedy
        return self.remedy[1] if language == "zh" else self.remedy[0]


def _wanted_locale(environment: Mapping[str, str]) -> str:
    """Return NANOCHAT_LANG or the locale of messages, or an empty text if neither is set."""
    for name in LANGUAGE_VARIABLES:
        value = environment.get(name)
        if value:
            return value
    return ""


def language_of(environment: Mapping[str, str]) -> str:
    """Return the language of messages, zh or en, according to NANOCHAT_LANG or the locale."""
    return "zh" if _wanted_locale(environment).lower().startswith("zh") else "en"


def languages_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the language of messages, or both languages where nothing says which one to use.

    The locales C and POSIX say no language.
    """
    locale = _wanted_locale(environment)
    if locale in ("", "C", "POSIX") or locale.startswith("C."):
        return ("en", "zh")
    return (language_of(environment),)


def render(line: Line, language: str, color: bool) -> str:
    """Return a result as text for the terminal, with the remedy, if needed, on a second line."""
    mark = f"\033[{COLORS[line.status]}m{line.status}\033[0m" if color else line.status
    text = f"{mark}  {line.name}"
    finding = line.text(language)
    if finding:
        text += f": {finding}"
    if line.remedy and line.status in (WARN, FAIL):
        label = "处理：" if language == "zh" else "do: "
        text += f"\n      {label}{line.remedy_in(language)}"
    return text


# The checks that training needs, by the beginnings of their names. check_npu says "ready" only if
# all of them passed.
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


def unproven(lines: Sequence[Line]) -> list[str]:
    """Return the names of the checks that training needs and that did not pass.

    They failed, were skipped or never ran.
    """
    return [name for name in NEEDED if not has_line(lines, name, (PASS, WARN))]


def has_line(lines: Sequence[Line], name: str, statuses: Sequence[str]) -> bool:
    """Return whether a check whose name begins with these words has one of the statuses."""
    names = [line.name for line in lines if line.status in statuses]
    return any(f"{line_name} ".startswith(f"{name} ") for line_name in names)


def inference_only(lines: Sequence[Line]) -> bool:
    """Return whether the first card is for inference only.

    That is so if it cannot train, and if all checks that did not pass were skipped.
    """
    if not all(has_line(lines, name, (SKIP,)) for name in unproven(lines)):
        return False
    cards = [line for line in lines if line.name == "npu:0"]
    return any(card.data.get("trains") is False for card in cards)


def summary(lines: Sequence[Line], language: str) -> str:
    """Return the last line: how many checks have each status, and whether this host can train."""
    counts = count(lines)
    figures = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    failed = ", ".join(line.name for line in lines if line.status == FAIL)
    missing = ", ".join(unproven(lines))
    if failed:
        english = f"; failed: {failed}"
        chinese = f"；未通过：{failed}"
    elif inference_only(lines):
        english = (
            "; an inference card: chat_cli, chat_web and chat_eval work here, training does not"
        )
        chinese = "；这是推理卡：可以运行 chat_cli、chat_web 和 chat_eval，不能训练"
    elif missing:
        english = f"; not ready to train, not shown to work: {missing}"
        chinese = f"；不能训练，以下项目未通过验证：{missing}"
    else:
        english = "; ready to train"
        chinese = "；可以训练"
    return f"check_npu: {figures}" + (chinese if language == "zh" else english)


def count(lines: Sequence[Line]) -> dict[str, int]:
    """Return the number of lines with each status."""
    return {status: sum(line.status == status for line in lines) for status in STATUSES}


def as_json(lines: Sequence[Line]) -> dict[str, Any]:
    """Return all results as a JSON object for programs.

    `causes` holds the failed checks with their remedies.
    """
    checks = []
    causes = []
    for line in lines:
        remedies = {"remedy": line.remedy_in("en"), "remedy_zh": line.remedy_in("zh")}
        check = {
            "name": line.name,
            "status": line.status,
            "text": line.english,
            "text_zh": line.chinese,
            **remedies,
            "data": line.data,
        }
        checks.append(check)
        if line.status == FAIL:
            causes.append({"name": line.name, "text": line.english, **remedies})
    return {
        "ok": not causes,
        "ready": not causes and not unproven(lines),
        "counts": count(lines),
        "causes": causes,
        "checks": checks,
    }


def escape_unprintable() -> None:
    """Make standard output and error escape the characters that they cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def on_terminal(stream: Any) -> bool:
    """Return whether to print colours.

    They need a terminal, and NO_COLOR must not be set.
    """
    return bool(stream.isatty()) and "NO_COLOR" not in os.environ
