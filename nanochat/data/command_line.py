"""Runs a script: reads its flags into a dataclass, and ends a mistake with one message and a code.

`run` is the entry point of every script. help_texts.py shows --help in the user's language.
"""

import dataclasses
import errno
import functools
import io
import json
import os
import select
import sys
import time
import traceback
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

import nanochat
from nanochat.common import (
    DISK_FULL,
    UserError,
    appendix,
    base_dir,
    language,
    log,
    rank,
    required_appendix,
    tr,
    warn,
)

Config = TypeVar("Config")
T = TypeVar("T")
FREE = "does not change what is learned"  # marks a flag that a resumed run may change
Free = Annotated[T, FREE]  # the type of such a flag, as in Free[int]
RARE = "stands under --help_all only"  # marks a flag or a group that few users need
Rare = Annotated[T, RARE]  # the type of such a flag or group
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
LAUNCHED = "NANOCHAT_LAUNCHED"  # set by our launcher, which prints why a rank ended
# Time for rank 0 to print a mistake that stops all ranks, and for the launcher to end the others.
RANK_0_SECONDS = 10


# --- flags ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Flag:
    """One command-line flag of a configuration."""

    name: str
    annotation: Any
    default: Any  # dataclasses.MISSING if the flag must be given
    marks: frozenset[Any]  # FREE and RARE, including the marks of its group


def flags_of(config: Any) -> list[Flag]:
    """Return the flags of a configuration, which is a dataclass or an instance of one.

    A field that is itself a dataclass is a group of flags, which are listed in place of the field.
    """
    hints = typing.get_type_hints(
        config if isinstance(config, type) else type(config), include_extras=True
    )
    flags = []
    for field in dataclasses.fields(config):
        annotation = hints[field.name]
        kind = typing.get_args(annotation)[0] if _is_marked(annotation) else annotation
        marks = frozenset(annotation.__metadata__ if _is_marked(annotation) else ())
        if not dataclasses.is_dataclass(kind):
            flags.append(Flag(field.name, annotation, field.default, marks))
            continue
        for flag in flags_of(kind):
            # the group's default is an instance, whose values may differ from the class defaults
            default = getattr(field.default, flag.name, flag.default)
            flags.append(dataclasses.replace(flag, default=default, marks=flag.marks | marks))
    return flags


@dataclasses.dataclass(frozen=True)
class OldFlags:
    """Flags of earlier versions and other programs, with their new names or what to do instead."""

    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # old name -> name
    removed: Callable[[], Mapping[str, str]] = dict  # returns: name -> what to do now
    # Switches that a value of another flag replaces: old name -> the flag and the value.
    replaced: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def translated(self, argv: Sequence[str], current: Container[str]) -> list[str]:
        """Return a command line with current flags in place of renamed and replaced ones.

        `current` holds the program's flag names. Each replacement is printed as a warning. A
        replaced switch stays if it is set to False. Raises UserError (exit code 2) for removed flags.
        """
        words = []
        for word in argv:
            name, equals, value = word.partition("=")
            old = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
            if old in self.removed() and old not in current:
                raise UserError(
                    tr("there is no {name} here: {do}", name=name, do=self.removed()[old]), 2
                )
            flag, setting = self.replaced.get(old, ("", ""))
            if flag in current and _WORDS.get(value.lower(), True):
                word = f"--{flag}={setting}"
                warn(tr("{name} is called {word} now", name=name, word=word))
            new = self.renamed.get(old, "")
            if new in current and old not in current:
                warn(tr("{name} is called {word} now", name=name, word=f"--{new}"))
                word = f"--{new}{equals}{value}"
            words.append(word)
        return words


def _is_marked(annotation: Any) -> bool:
    return typing.get_origin(annotation) is Annotated


def values_of(config: Any) -> dict[str, Any]:
    """Return the value of every flag of a configuration, by name."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values |= values_of(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def given(config: Any, names: Iterable[str]) -> list[str]:
    """Return those of the flags `names` that have other values than their defaults."""
    return [name for name in names if getattr(config, name) != getattr(type(config), name)]


_HELP = {"-h", "--help", "--help_all", "--help-all"}
_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _switch_kind(annotation: Any) -> str:
    """Return how tyro reads a switch of this type, or "" if the type is not that of a switch.

    A bool is a "flag" (--x, --no-x); a union with bool, such as bool | None, a "value" (--x True).
    A union with bool and a Literal is an "open" one, which takes further values (--x start).
    """
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = typing.get_args(annotation)
        if bool not in kinds:
            return ""
        return "open" if any(typing.get_origin(kind) is Literal for kind in kinds) else "value"
    return "flag" if annotation is bool else ""


def _plain_flags(argv: Sequence[str], switches: Mapping[str, str]) -> list[str]:
    """Return a command line with every switch in the form that tyro reads.

    Users may write `--flag`, `--no-flag`, `--flag=VALUE` or `--flag VALUE`, with True, False, 1, 0,
    yes or no as VALUE. A leading `--`, which torchrun users write, is dropped. Raises UserError
    (exit code 2) if `=` is followed by another value.
    """
    words = list(argv)
    if words[:1] == ["--"]:
        del words[0]
    plain: list[str] = []
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        field = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
        negated = field not in switches
        if negated:
            field = field.removeprefix("no_")
        kind = switches.get(field)
        if kind is None or (negated and equals):
            plain.append(word)
            continue
        if words and not negated and not equals:
            may_be_value = kind == "open" and not words[0].startswith("-")
            if may_be_value or words[0].lower() in _WORDS:
                value = words.pop(0)
        if value.lower() in _WORDS:
            switched_on = _WORDS[value.lower()]
        elif not value and not equals:
            switched_on = not negated
        elif value and kind == "open":  # tyro knows the values
            plain.append(f"{name}={value}")
            continue
        else:
            raise UserError(
                tr(
                    "{name} takes True, False, 1 or 0, got {value!r}; write {name} or {name}=False",
                    name=name,
                    value=value,
                ),
                2,
            )
        flag = field.replace("_", "-")
        if kind != "flag":
            plain += [f"--{flag}", str(switched_on)]
        else:
            plain.append(f"--{flag}" if switched_on else f"--no-{flag}")
    return plain


def parse(
    config: type[Config],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    old_flags: OldFlags = OldFlags(),
) -> Config:
    """Return an instance of `config`, a frozen dataclass, filled from a command line.

    If a flag is unknown, the closest flag names are printed and the process ends with code 2.
    --help hides the flags that are marked as Rare, and --help_all shows them too. --version alone
    prints the version of nanochat.
    """
    flags = flags_of(config)
    kinds = {flag.name: _switch_kind(flag.annotation) for flag in flags}
    switches = {name: kind for name, kind in kinds.items() if kind}
    argv = sys.argv[1:] if argv is None else argv
    if list(argv) == ["--version"]:
        log(f"nanochat {nanochat.__version__}")
        raise SystemExit(0)
    words = old_flags.translated(argv, kinds)
    words = _plain_flags(words, switches)
    module = sys.modules["__main__"].__spec__
    program = None
    if module and module.name != "__main__":
        program = f"python -m {module.name.removesuffix('.__main__')}"
    read = functools.partial(
        tyro.cli,
        prog=program,
        console_outputs=rank() == 0,  # all ranks have the same command line: one prints its errors
        config=(tyro.conf.OmitArgPrefixes,),
    )
    if _HELP & {*words}:  # tyro prints the help and ends the process
        help_texts = required_appendix("nanochat.data.help_texts", "--help")
        help_texts.show(config, description, not {"-h", "--help"} & {*words}, read)
    if language() == "zh" and (help_texts := appendix("nanochat.data.help_texts")):
        with help_texts.refusals(config):
            return read(config, args=words)
    return read(config, args=words)


def settings(config: Any) -> dict[str, Any]:
    """Return a configuration as the plain dict that checkpoints and reports keep.

    Tuples become lists, and paths become strings.
    """
    return plain(values_of(config))


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of flags as settings() does."""
    return json.loads(json.dumps(values, default=str))


# --- the edge of a process -----------------------------------------------------------------------


def run(
    main: Callable[[Any], Any],
    config: type[Any],
    description: str | None = None,
    old_flags: OldFlags = OldFlags(),
) -> None:
    """Parse the command line and call `main`, turning a mistake into one message and an exit code.

    Every script ends with this call. Under torchrun rank 0 prints the message, another rank only if
    rank 0 keeps running. Characters that standard output cannot show are escaped.
    Exit codes: 0 done, 1 refused, 2 a wrong command line or a missing earlier step, 130 Ctrl-C, 141
    the reader has left (`| head`). NANOCHAT_TRACEBACK=1 shows where a UserError was raised.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _run(main, config, description, old_flags)
    except Exception as bug:  # nobody foresaw it
        what = f"{type(bug).__name__}: {bug}"
        hint = tr("error: {what}. docs/en/troubleshooting.md explains codes of errors", what=what)
        complain(hint, details=traceback.format_exc())
        sys.exit(1)


def _run(
    main: Callable[[Any], Any],
    config: type[Any],
    description: str | None,
    old_flags: OldFlags,
) -> None:
    """Call `main` with the parsed command line; on an expected failure, print why and exit."""
    try:
        try:
            main(parse(config, description=description, old_flags=old_flags))
        finally:
            # If the reader has left, Python's own flush at exit would print a message about it.
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        sys.exit(141)
    except SystemExit as end:  # raised by the parser
        if end.code:
            _wait_for_rank_0()
            note_end(tr("error: the command line was refused; the lines above say why"))
        raise
    except UserError as mistake:
        if os.environ.get("NANOCHAT_TRACEBACK") == "1":
            traceback.print_exc()
        complain(tr("error: {mistake}", mistake=mistake))
        sys.exit(mistake.exit_code)
    except OSError as failure:
        if (message := _disk_message(failure)) is None:
            raise
        complain(message)
        sys.exit(1)
    except KeyboardInterrupt:
        complain(tr("stopped"))
        sys.exit(130)


def _disk_message(failure: OSError) -> str | None:
    """Return the message for a full disk or denied access to a named file, else None."""
    if failure.errno in DISK_FULL:
        return tr(
            "error: the disk is full ({where}); no half-written file was kept. Free some space, or "
            "choose another disk (by NANOCHAT_BASE_DIR or the flag that names this folder), then "
            "type the same command again.",
            where=failure.filename or base_dir(),
        )
    if failure.errno in NOT_ALLOWED and failure.filename:
        return tr(
            "error: {where}: {reason}. Choose a folder that you may write (by NANOCHAT_BASE_DIR or "
            "the flag that names this one), or have the rights of this file changed, then type the "
            "same command again.",
            where=failure.filename,
            reason=appendix("nanochat.data.library_words").os_problem(failure),
        )
    return None


def _reader_is_gone() -> bool:
    """Return whether the reader of standard output has left, as `| head` does.

    If so, redirect standard output to /dev/null, so that the remaining output is discarded.
    """
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    if not watch.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return True


def _wait_for_rank_0() -> None:
    if rank() > 0:
        time.sleep(RANK_0_SECONDS)


def with_rank(message: str, number: int) -> str:
    """Return a message with the rank that it comes from."""
    return tr("{message} (rank {rank})", message=message, rank=number)


def note_end(message: str) -> bool:
    """Leave the reason for this rank's end to its callers, and return whether one prints it."""
    alone = os.environ.get("WORLD_SIZE", "1") in ("", "1")
    reason = message if alone else with_rank(message, rank())
    # torchrun prints the call stack of the earliest failure. The ranks that it ends itself get a
    # time shortly after, so this failure is dated one second earlier to be sure to come first.
    details = {"py_callstack": reason, "timestamp": str(int(time.time()) - 1)}
    for_torchrun = {"message": {"message": reason, "extraInfo": details}}
    launcher_has_it = _write_for_parent("TORCHELASTIC_ERROR_FILE", json.dumps(for_torchrun))
    script_has_it = _write_for_parent("NANOCHAT_REASON_FILE", f"{reason}\n")
    return script_has_it or (launcher_has_it and LAUNCHED in os.environ)


def _write_for_parent(variable: str, text: str) -> bool:
    """Write a text to the file that an environment variable names, and return whether it is there."""
    try:
        return Path(os.environ[variable]).write_text(text, encoding="utf-8", errors="replace") > 0
    except (KeyError, OSError):
        return False


def complain(message: str, details: str = "") -> None:
    """Print any `details` and, unless a caller prints it, why this process ends.

    Ranks other than 0 wait first: most mistakes stop all, and the launcher ends them after rank 0.
    """
    _wait_for_rank_0()
    if not note_end(message):
        details += with_rank(message, rank()) if rank() > 0 else message
    if details:
        print(details.rstrip(), file=sys.stderr, flush=True)
