"""Describes or checks the command line of a training script, in a process of its own.

python -m nanochat.serve.runs.script scripts.finetune                   # its flags, as JSON
python -m nanochat.serve.runs.script scripts.finetune --check FLAGS...  # the tag of such a run

The server starts this program, so that it does not have to import the scripts itself.
"""

import dataclasses
import importlib
import json
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from nanochat.checkpoint_manager.same_run import OLD_FLAGS
from nanochat.common import own_language, required_appendix, tr_help
from nanochat.data.command_line import FREE, RARE, Flag, flags_of, run

CHECK = "--check"
# The kinds of fields of a form.
SWITCH = "switch"
CHOICE = "choice"
LIST = "list"
TEXT = "text"


def kind_of(annotation: Any) -> tuple[str, list[str]]:
    """Return the kind of field that a flag of this type needs, and what may be chosen in it."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind_of(arguments[0])
    if annotation is bool:
        return SWITCH, []
    if origin is typing.Literal:
        return CHOICE, [str(value) for value in arguments]
    if origin is tuple:
        return LIST, []
    is_union = origin in (typing.Union, types.UnionType)
    if is_union and bool in arguments:  # such as --compile, which may be left out
        return CHOICE, ["True", "False"]
    return TEXT, []


def written(value: Any) -> str | bool | list[str]:
    """Return a flag's value as a form holds it: a switch, a list of texts, or a text.

    The text of None is empty.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    return "" if value is None else str(value)


def field_of(flag: Flag, help_text: str) -> dict[str, Any]:
    """Return what a form says about a flag: its kind, choices, default and help texts."""
    kind, choices = kind_of(flag.annotation)
    required = flag.default is dataclasses.MISSING
    default = written(None if required else flag.default)
    if kind == LIST and required:
        default = []
    if kind == CHOICE:
        default = str(default)
    texts = {language: _help_in(language, help_text) for language in ("en", "zh")}
    return {
        "name": flag.name,
        "kind": kind,
        "choices": choices,
        "default": default,
        "required": required,
        "rare": RARE in flag.marks,
        "free": FREE in flag.marks,
        "help": texts,
    }


def _help_in(language: str, help_text: str) -> str:
    """Return a help text in a language, as one paragraph."""
    token = own_language.set(language)
    try:
        return " ".join(tr_help(help_text).split())
    finally:
        own_language.reset(token)


def all_docstrings(config: type[Any]) -> dict[str, str]:
    """Return the docstring of every flag of a configuration and of its groups, by name."""
    help_texts = required_appendix("nanochat.data.help_texts", "--runs=start")
    texts = help_texts.docstrings(config)
    for group in _groups(config):
        texts |= all_docstrings(group)
    return texts


def _groups(config: type[Any]) -> Iterator[type[Any]]:
    """Yield the classes of the groups of flags in a configuration."""
    for hint in typing.get_type_hints(config).values():
        if dataclasses.is_dataclass(hint):
            yield typing.cast("type[Any]", hint)


def fields_of(config: type[Any]) -> list[dict[str, Any]]:
    """Return the fields of the form of a configuration, one for each flag."""
    texts = all_docstrings(config)
    return [field_of(flag, texts.get(flag.name, "")) for flag in flags_of(config)]


def _print_tag(cfg: Any) -> None:
    print(json.dumps({"tag": cfg.tag}))


def main(words: Sequence[str]) -> None:
    """Print the fields of a script's form or, with --check, the tag of the run that flags name."""
    name, *rest = words
    script = importlib.import_module(name)
    if rest[:1] != [CHECK]:
        print(json.dumps(fields_of(script.Config)))
        return
    # Refusals then name the script, whose flags they are about.
    sys.modules["__main__"].__spec__ = script.__spec__
    sys.argv = [name, *rest[1:]]
    run(_print_tag, script.Config, script.__doc__, OLD_FLAGS)


if __name__ == "__main__":
    main(sys.argv[1:])
