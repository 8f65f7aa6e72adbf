"""The basics that every program shares: messages, atomic files and the command line.

The parts, in this order: messages in two languages and log lines; the base folder and atomic files;
the one command-line parser; appendices, which are modules that may be missing; and `run`, the entry
point of every script, which turns a mistake into one message and an exit code.
"""

import contextlib
import contextvars
import dataclasses
import errno
import functools
import gettext
import hashlib
import importlib
import io
import json
import math
import os
import re
import secrets
import select
import stat
import sys
import time
import traceback
import types
import typing
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

import nanochat

Config = TypeVar("Config")
T = TypeVar("T")
FREE = "does not change what is learned"  # marks a flag that a resumed run may change
Free = Annotated[T, FREE]  # the type of such a flag, as in Free[int]
RARE = "stands under --help_all only"  # marks a flag or a group that few users need
Rare = Annotated[T, RARE]  # the type of such a flag or group
# The first of these that is set chooses the language of messages.
LANGUAGE_VARIABLES = ("NANOCHAT_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
own_language = contextvars.ContextVar("own_language", default="")  # that of this thread or task
MAX_JSON_BYTES = 1 << 28  # larger JSON files are refused
# Characters that a terminal obeys or that reverse the direction of text: control characters except
# tab and line feed, bidirectional marks, and halves of surrogate pairs, which Python uses for the
# bytes of a file name that is not UTF-8.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
DAY_SECONDS = 86_400
# Errors of file systems that cannot flush a folder, such as CIFS and WSL drives.
NO_FOLDER_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.ENOSYS)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
LAUNCHED = "NANOCHAT_LAUNCHED"  # set by our launcher, which prints why a rank ended
# Time for rank 0 to print a mistake that stops all ranks, and for the launcher to end the others.
RANK_0_SECONDS = 10


# --- messages ------------------------------------------------------------------------------------


def visible(text: str) -> str:
    """Return a text with characters that could control a terminal spelled out, such as `\\x1b`.

    A message may quote a file name, which must not be able to control the terminal.
    """
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def language() -> str:
    """Return the language of messages, "zh" or "en", from NANOCHAT_LANG or else from the locale."""
    values = (own_language.get(), *map(os.environ.get, LANGUAGE_VARIABLES))
    chosen = next(filter(None, values), "en")
    return "zh" if chosen.lower().startswith("zh") else "en"


@functools.cache
def _catalogue(language: str) -> gettext.NullTranslations:
    folder = Path(__file__).with_name("data") / "locale"
    return gettext.translation("nanochat", folder, [language], fallback=language == "en")


def tr(template: str, **values: Any) -> str:
    """Return an English template translated to the user's language and filled with `values`.

    The Chinese templates are in data/locale; `python -m dev.messages` keeps them complete.
    """
    return _catalogue(language()).gettext(template).format(**values)


def tr_help(text: str) -> str:
    """Return a help text in the user's language; one that the catalogue lacks stays English."""
    plain = " ".join(text.split())
    chinese = _catalogue(language()).pgettext("help", plain) if plain else ""
    return text if chinese == plain else chinese


class UserError(ValueError):
    """A problem that the user can fix, with a message that says what happened and what to do.

    `run` prints this message and exits with `exit_code`, whereas a bug in the code gets a
    traceback. The message should also name the rule and the value that broke it. Its control
    characters, which a file name or a server's response may contain, are spelled out by visible().
    """

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(visible(message))
        self.exit_code = exit_code


def rank() -> int:
    """Return the rank of this process in the job, or 0 outside torchrun or if RANK is invalid."""
    word = os.environ.get("RANK", "")
    return int(word) if word.isdecimal() else 0


def log(message: str = "") -> None:
    """Print a line to standard output, on rank 0 only."""
    if rank() == 0:
        print(visible(message), flush=True)


def warn(message: str) -> None:
    """Print a warning to standard error, on rank 0 only."""
    if rank() == 0:
        print(tr("warning: {text}", text=visible(message)), file=sys.stderr, flush=True)


@dataclasses.dataclass
class Pulse:
    """Signs of life of a process: its progress, its step, and whether it has been asked to stop."""

    moments: int = 0  # how often the process has reported progress
    step: int = 0
    stop_reason: str = ""  # the first signal that asked the process to stop, or another reason
    catching: bool = False  # whether signals are noted here instead of ending the process
    at_once: bool = False  # whether a signal interrupts the current work at once

    def beat(self, step: int | None = None) -> None:
        """Record that this process is making progress and, if given, which step it has reached."""
        self.moments += 1
        if step is not None:
            self.step = step

    def ask(self, why: str) -> None:
        """Ask this process to save and stop as soon as it can; only the first reason is kept."""
        self.stop_reason = self.stop_reason or why


# --- files ---------------------------------------------------------------------------------------


def base_dir() -> Path:
    """Return the folder of all data, checkpoints and reports, creating it if necessary.

    NANOCHAT_BASE_DIR names it; the default is ~/.cache/nanochat. Raises UserError if the folder
    cannot be created.
    """
    name = os.environ.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat"
    try:
        folder = Path(name).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as failure:  # RuntimeError if the user has no home folder
        raise UserError(
            tr(
                "the base folder cannot be made: {failure}. Set NANOCHAT_BASE_DIR to a "
                "folder that you may write, then type the same command again.",
                failure=appendix("nanochat.data.library_words").in_words(failure),
            )
        ) from failure
    return folder


def folder_for_scripts() -> Path:
    """Return the base folder, for a shell script.

    Raises UserError if the folder cannot be created or this user may not write there.
    """
    folder = base_dir()
    if not os.access(folder, os.W_OK):
        raise UserError(
            tr(
                "the base folder {folder} cannot be written. Set NANOCHAT_BASE_DIR to a "
                "folder that you may write, then type the same command again.",
                folder=folder,
            )
        )
    return folder


def fsync_path(path: Path) -> None:
    """Flush a file's content to disk or, if the file system supports it, a folder's entries."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as failure:
        if failure.errno not in NO_FOLDER_FLUSH or not path.is_dir():
            raise


@functools.cache
def _leftovers(folder: str) -> dict[str, list[str]]:
    """Return a dict from the names of files in a folder to the paths of their temporary files.

    Killed writes leave temporary files behind. A folder is listed only once per process, because
    listing a large folder takes longer than a write.
    """
    leftovers: dict[str, list[str]] = {}
    for file in os.scandir(folder):
        name, marker, _ = file.name.rpartition(".tmp-")
        if marker and name.startswith("."):
            leftovers.setdefault(name[1:], []).append(file.path)
    return leftovers


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of killed writes to `path` that are more than a day old."""
    leftovers = _leftovers(os.path.abspath(path.parent))
    for leftover in leftovers.get(path.name, []):
        with contextlib.suppress(OSError):  # another process may have removed it
            age = time.time() - os.lstat(leftover).st_mtime
            if age > DAY_SECONDS:
                os.unlink(leftover)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` if the block succeeds.

    The temporary file is flushed to disk before the rename, and removed after a failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    # O_EXCL and a random name, because another user could put a link at a predictable name
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(6)}")
    new_file = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    os.close(os.open(temporary, new_file, 0o666))
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file so that readers see either all of the old content or all of the new."""
    content = data.encode() if isinstance(data, str) else data
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, with non-ASCII text unescaped and null for NaN and infinities."""
    return json.dumps(_finite(value), ensure_ascii=False, indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return a value with None in place of every NaN and infinity, and lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file atomically; to_json() describes the text."""
    write_atomic(path, to_json(value, indent=1) + "\n")


def check_regular(path: Path, max_bytes: int = MAX_JSON_BYTES) -> None:
    """Raise ValueError if an existing path is not a regular file of at most `max_bytes` bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(tr("it is not a regular file"))
    if status.st_size > max_bytes:
        sizes = {"size": status.st_size, "most": max_bytes}
        raise ValueError(tr("it has {size:,} bytes, and at most {most:,} are read", **sizes))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises ValueError if the text is not JSON or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(tr("it is nested too deeply")) from None


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises UserError, caused by a ValueError with the reason, if the file is not a regular file, is
    too large or is not JSON. Raises OSError if the file cannot be opened.
    """
    try:
        check_regular(path)
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as failure:
        raise UserError(
            tr(
                "{path} cannot be read as JSON: {failure}. Delete it, or copy it again from "
                "its source",
                path=path,
                failure=appendix("nanochat.data.library_words").in_words(failure),
            )
        ) from failure


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --- command lines -------------------------------------------------------------------------------


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
                raise UserError(tr("{name} is gone: {do}", name=name, do=self.removed()[old]), 2)
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
        field = ""
        if name.startswith("--"):
            field = name.removeprefix("--").replace("-", "_")
        negated = field not in switches
        if negated:
            field = field.removeprefix("no_")
        if field not in switches or (negated and equals):
            plain.append(word)
            continue
        if switches[field] == "open" and not negated:
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            if value and value.lower() not in _WORDS:  # tyro knows the values
                plain.append(f"{name}={value}")
                continue
        if equals and value.lower() not in _WORDS:
            raise UserError(
                tr(
                    "{name} takes True, False, 1 or 0, got {value!r}; write {name} or {name}=False",
                    name=name,
                    value=value,
                ),
                2,
            )
        value_follows = bool(words) and not value and words[0].lower() in _WORDS
        if not negated and not equals and value_follows:
            value = words.pop(0)
        switched_on = _WORDS[value.lower()] if value else not negated
        flag = field.replace("_", "-")
        if switches[field] != "flag":
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
    return json.loads(json.dumps(values_of(config), default=str))


# --- appendices ----------------------------------------------------------------------------------


def appendix(name: str) -> Any:
    """Import and return an optional module, or return None if this copy of nanochat lacks it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"{name}.".startswith(f"{missing.name}."):
            return None
        raise


def required_appendix(name: str, purpose: str) -> Any:
    """Import and return the module `name`, or raise UserError (exit code 2) if it is missing."""
    module = appendix(name)
    if module is None:
        names = {"purpose": purpose, "module": name}
        needs = tr("{purpose} needs {module}, which this copy of nanochat does not have", **names)
        raise UserError(needs + tr(": restore its file, or do without {purpose}", **names), 2)
    return module


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
            "set NANOCHAT_BASE_DIR to a folder on another disk, then type the same command again.",
            where=failure.filename or base_dir(),
        )
    if failure.errno in NOT_ALLOWED and failure.filename:
        return tr(
            "error: {where}: {reason}. Set NANOCHAT_BASE_DIR to a folder that you may write, or "
            "have the rights of this file changed, then type the same command again.",
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


if __name__ == "__main__":  # so that shell scripts use the same folder
    try:
        print(folder_for_scripts())
    except UserError as _mistake:
        sys.exit(f"error: {_mistake}")
