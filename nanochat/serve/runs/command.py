"""Composes the command of a run from the fields of a form; it never passes through a shell."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nanochat.checkpoint_manager.locate import MADE_BY, parent_tag
from nanochat.checkpoint_manager.same_run import RENAMED, REPLACED
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.runs.script import LIST, SWITCH, written

LAUNCHER = "nanochat.runtime.launch"
LONGEST_VALUE = 4096  # characters of a value, or of an item of a list
MOST_ITEMS = 256  # items of a list
FORECAST = "forecast"
# Flags of a single start, which a resumed run does not repeat.
ONCE = {"resume", "stop_at", "profile", "other_code", FORECAST}
# Flags that a form does not have: they say which run it is, or what the page does itself.
NAMING = {"out_tag", "model_tag"}

Field = Mapping[str, Any]
Values = Mapping[str, Any]


def _refusal(name: str, rule: str) -> ApiError:
    return ApiError(400, "invalid_value", f"{name} {rule}", name)


def _text(name: str, value: Any) -> str:
    """Return a text that can be an argument of a program; raises ApiError (400) for others."""
    if not isinstance(value, str):
        raise _refusal(name, f"must be a text, got {type(value).__name__}")
    if len(value) > LONGEST_VALUE:
        raise _refusal(name, f"must have {LONGEST_VALUE:,} characters at most, got {len(value):,}")
    if "\0" in value:
        raise _refusal(name, "must not hold the character NUL, which no argument can hold")
    if not value.isascii() and value.encode(errors="replace").decode() != value:
        raise _refusal(name, "must be Unicode, without halves of surrogate pairs")
    return value


def _items(name: str, value: Any) -> list[str]:
    """Return the items of a list; raises ApiError (400) if one cannot be an argument."""
    if not isinstance(value, list):
        raise _refusal(name, f"must be a list of texts, got {type(value).__name__}")
    if len(value) > MOST_ITEMS:
        raise _refusal(name, f"must have {MOST_ITEMS} items at most, got {len(value)}")
    items = [_text(name, item) for item in value]
    for item in items:
        if item.startswith("-"):
            raise _refusal(name, f"has {item[:80]!r}, which looks like a flag: write ./{item[:80]}")
    return [item for item in items if item]


def arguments(fields: Sequence[Field], values: Values) -> list[str]:
    """Return the command-line words that set flags to values; defaults are left out.

    Raises ApiError (400), which names the field, for a value that no flag can take, for an unknown
    name, and if a required flag is missing.
    """
    unknown = sorted(set(values) - {field["name"] for field in fields})
    if unknown:
        raise _refusal(_text("name", unknown[0])[:80], "is not a field of this form")
    words: list[str] = []
    for field in fields:
        name = field["name"]
        value = values.get(name, field["default"])
        flag = f"--{name}"
        if field["kind"] == SWITCH:
            if not isinstance(value, bool):
                raise _refusal(name, f"must be true or false, got {type(value).__name__}")
            flag_words = [f"{flag}={value}"]
        elif field["kind"] == LIST:
            value = _items(name, value)
            flag_words = [flag, *value] if value else []
        else:
            flag_words = [f"{flag}={_text(name, value)}"] if value != "" else []
        if field["required"] and not flag_words:
            raise _refusal(name, "must be given")
        if value != field["default"]:
            words += flag_words
    return words


def command(script: str, words: Sequence[str], processes: int) -> list[str]:
    """Return the argument list that runs a script in `processes` processes, one for each device."""
    if processes == 1:
        return [sys.executable, "-m", script, *words]
    launcher = [sys.executable, "-m", LAUNCHER, f"--nproc_per_node={processes}"]
    return [*launcher, "-m", script, "--", *words]


def shown(argv: Sequence[str]) -> str:
    """Return an argument list as a line to type in a shell."""
    return shlex.join(["python", *argv[1:]])


def form_fields(fields: Sequence[Field], resumes: bool) -> list[Field]:
    """Return the fields that a reader may fill in.

    A resumed run keeps its name, and every flag that decides what it learns.
    """
    if not resumes:
        return [field for field in fields if field["name"] != FORECAST]
    hidden = NAMING | {FORECAST}
    return [field for field in fields if field["free"] and field["name"] not in hidden]


def saved_values(
    fields: Sequence[Field], stage: str, tag: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of the flags that resume a run, from the `config` of its checkpoint."""
    saved = {RENAMED.get(name, name): value for name, value in config.items()}
    for switch, (name, value) in REPLACED.items():
        if saved.get(switch):
            saved[name] = value
    values: dict[str, Any] = {}
    for field in fields:
        name = field["name"]
        if name not in saved or name in ONCE:
            continue
        value = written(saved[name])
        values[name] = value if field["kind"] in (SWITCH, LIST) else str(value)
    if stage == "base":
        return {**values, "model_tag": tag}
    parent = parent_tag(str(config.get("parent", "")))
    if "model_tag" in values and not values["model_tag"] and parent:
        values["model_tag"] = parent  # the newest model may be another one by now
    return {**values, "out_tag": tag}


def script_of(stage: str) -> str:
    """Return the module that trains a stage."""
    return MADE_BY[stage]
