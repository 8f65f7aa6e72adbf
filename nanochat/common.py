"""The base folder, atomic files, logging that prints once per job, and the one command-line parser."""

import contextlib
import dataclasses
import errno
import functools
import gettext
import glob
import hashlib
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
from typing import Annotated, Any, TypeVar

import tyro

Config = TypeVar("Config")
T = TypeVar("T")
FREE = "does not change what is learned"  # the mark of such a flag
Free = Annotated[T, FREE]  # the type of such a flag: Free[int]
RARE = "stands under --help_all only"  # the mark of a flag, or of a group of flags, that few need
Rare = Annotated[T, RARE]  # the type of such a flag or group
JSON_BYTES = 1 << 28  # of the largest JSON file that is read
# What a terminal obeys, and what turns the direction of text: control characters but tab and line feed, bidirectional
# marks, and halves of surrogate pairs, which are the bytes of a file name that is not UTF-8.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
DAY_SECONDS = 86_400
NO_FOLDER_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.ENOSYS)
RANK_0_SECONDS = 10  # time for rank 0 to print a mistake that all ranks make, and for the launcher to end the others


def visible(text: str) -> str:
    """Text with its control characters as `\\x1b`, since the name of a file must not be able to control a terminal."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def language() -> str:
    """zh or en: the language of messages, by NANOCHAT_LANG, or by the locale of the environment."""
    given = (os.environ.get(name) for name in ("NANOCHAT_LANG", "LC_ALL", "LC_MESSAGES", "LANG"))
    return "zh" if next(filter(None, given), "").lower().startswith("zh") else "en"


@functools.cache
def _catalogue(language: str) -> gettext.NullTranslations:
    folder = Path(__file__).with_name("data") / "locale"
    return gettext.translation("nanochat", folder, [language], fallback=language == "en")


def tr(template: str, **values: Any) -> str:
    """A message of the first day in the user's language: an English template with {names}, and their values.

    Its Chinese is in data/locale; `python -m dev.messages` keeps it complete.
    """
    return _catalogue(language()).gettext(template).format(**values)


class UserError(ValueError):
    """Something the user can fix. The text says what happened, the rule, what was given, and the next step.

    UserError is a separate class so that `run` can tell a mistake in a command, which gets one message, from a bug in
    this code, which gets a traceback. Its text is `visible`, whatever name of a file or word of a server it quotes.
    """

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(visible(message))
        self.exit_code = exit_code


def base_dir() -> Path:
    """The folder of all data, checkpoints and reports: NANOCHAT_BASE_DIR, or ~/.cache/nanochat."""
    try:
        folder = Path(os.environ.get("NANOCHAT_BASE_DIR") or Path("~/.cache/nanochat")).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as failure:  # RuntimeError: this user has no home folder
        raise UserError(
            f"the base folder cannot be made: {failure}. Set NANOCHAT_BASE_DIR to a folder that you may write, then "
            "type the same command again."
        ) from failure
    return folder


def folder_for_scripts() -> Path:
    """The base folder for a shell script that will write there; UserError if this user may not."""
    folder = base_dir()
    if not os.access(folder, os.W_OK):
        raise UserError(
            f"the base folder {folder} cannot be written. Set NANOCHAT_BASE_DIR to a folder that you may write, then "
            "type the same command again."
        )
    return folder


def rank() -> int:
    """The rank of this process in the job; 0 outside torchrun, and where RANK is no number."""
    word = os.environ.get("RANK", "")
    return int(word) if word.isdecimal() else 0


def log(message: str = "") -> None:
    """Print a line to standard output, on rank 0 only."""
    if rank() == 0:
        print(visible(message), flush=True)


def warn(message: str) -> None:
    """Print a warning to standard error, on rank 0 only."""
    if rank() == 0:
        print(f"warning: {visible(message)}", file=sys.stderr, flush=True)


@dataclasses.dataclass
class Pulse:
    """What a process tells those who watch it: that it moves, at which step it is, and whether it was asked to stop."""

    moments: int = 0  # how often the process has said that it moves
    step: int = 0
    asked: str = ""  # the name of the first signal that asked for the end, or another reason
    catching: bool = False  # signals are noted here instead of ending the process
    at_once: bool = False  # a signal ends the work of this moment, which is not worth finishing

    def beat(self, step: int | None = None) -> None:
        """Say that this process moves, and which step it has reached."""
        self.moments += 1
        self.step = self.step if step is None else step

    def ask(self, why: str) -> None:
        """Ask this process to save and stop at its next step."""
        self.asked = self.asked or why


# --- files ---------------------------------------------------------------------------------------


def fsync_path(path: Path) -> None:
    """Flush a file's content to disk; for a folder, flush the renames inside it, if its file system can do that."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as failure:  # CIFS, WSL's drives and others flush files only, so nothing more can be done there
        if failure.errno not in NO_FOLDER_FLUSH or not path.is_dir():
            raise


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give the path of a temporary file beside `path`. On success the file is fsynced and renamed to `path`; on
    failure the file is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
        with contextlib.suppress(
            OSError
        ):  # of a killed process, if it is a day old; others may remove it meanwhile
            if time.time() - leftover.lstat().st_mtime > DAY_SECONDS:
                leftover.unlink()
    # A new file with a random name: another user may have put a link at a name that can be guessed.
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(6)}")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        yield temporary
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a whole file so that readers see either the old content or the new content, never part of the new."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def to_json(value: Any, indent: int | None = None) -> str:
    """A value as JSON text. Chinese characters are not escaped; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_finite(value), ensure_ascii=False, indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Write a value as a JSON file, atomically; `to_json` describes the text."""
    write_atomic(path, to_json(value, indent=1) + "\n")


def check_regular(path: Path, most: int = JSON_BYTES) -> None:
    """Raise ValueError for a pipe, a device or a file of more than `most` bytes, which a reader would wait for."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is not a regular file")
    if about.st_size > most:
        raise ValueError(f"it has {about.st_size:,} bytes, and at most {most:,} are read")


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text. ValueError if it is not JSON, also if it is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """Read a JSON file. UserError, whose cause is the reason, if it is not JSON or not an ordinary file."""
    try:
        check_regular(path)
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as failure:
        raise UserError(
            f"{path} cannot be read as JSON: {failure}. Delete it, or copy it again from its source"
        ) from failure


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --- command lines -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a configuration."""

    name: str
    annotation: Any
    default: Any  # dataclasses.MISSING if the flag must be given
    marks: frozenset[Any]  # FREE, RARE; those of its group too


def flags_of(config: Any) -> list[Flag]:
    """Return the flags of a configuration, which is a dataclass or an object of one.

    A field that is a dataclass itself is a group of flags: on the command line and in the settings
    of a run its flags stand beside the others.
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
            # the default of a group is an object, whose values may differ from its class's
            default = getattr(field.default, flag.name, flag.default)
            flags.append(dataclasses.replace(flag, default=default, marks=flag.marks | marks))
    return flags


@dataclasses.dataclass(frozen=True)
class OldFlags:
    """Flags of earlier versions and of programs that this one follows."""

    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # old name -> name
    removed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name -> what to do now

    def translated(self, argv: Sequence[str], known: Container[str]) -> list[str]:
        """Return a command line in which flags have the names that they have now.

        Names in `known` are flags of the program. UserError (code 2) for a flag that is gone.
        """
        words = []
        for word in argv:
            name, equals, value = word.partition("=")
            old = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
            if old in self.removed and old not in known:
                raise UserError(f"{name} is gone: {self.removed[old]}", exit_code=2)
            new = self.renamed.get(old, "")
            if new in known and old not in known:
                warn(f"{name} is called --{new} now")
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


_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _switch_kind(annotation: Any) -> str:
    """How tyro reads a field: "flag" (--x, --no-x) for bool, "value" (--x True) for bool | None, "" for all others."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return "value" if bool in typing.get_args(annotation) else ""
    return "flag" if annotation is bool else ""


def _plain_flags(argv: Sequence[str], switches: Mapping[str, str]) -> list[str]:
    """Drop the `--` that torchrun users write, and rewrite every True-or-False flag in the form that tyro reads.

    Users may write `--flag`, `--no-flag`, `--flag=VALUE` or `--flag VALUE`, with True, False, 1, 0, yes or no as VALUE.
    """
    rest = list(argv[1:] if argv[:1] == ["--"] else argv)
    plain: list[str] = []
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        field = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
        on = field in switches
        field = field if on else field.removeprefix("no_")
        if field not in switches or (equals and not on):
            plain.append(word)
            continue
        if equals and value.lower() not in _WORDS:
            raise UserError(
                f"{name} takes True, False, 1 or 0, got {value!r}; write {name} or {name}=False", 2
            )
        if not equals and on and rest and rest[0].lower() in _WORDS:
            value = rest.pop(0)
        wanted = _WORDS[value.lower()] if value else on
        flag = field.replace("_", "-")
        if switches[field] == "value":
            plain += [f"--{flag}", str(wanted)]
        else:
            plain.append(f"--{flag}" if wanted else f"--no-{flag}")
    return plain


def parse(
    config: type[Config],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    old_flags: OldFlags = OldFlags(),
) -> Config:
    """Read a command line into a frozen dataclass.

    An unknown flag ends the process with code 2 and prints the names that are nearest to it.
    --help leaves out the flags that are marked as Rare, and --help_all shows them too.
    """
    flags = flags_of(config)
    kinds = {flag.name: _switch_kind(flag.annotation) for flag in flags}
    switches = {name: kind for name, kind in kinds.items() if kind}
    words = old_flags.translated(sys.argv[1:] if argv is None else argv, kinds)
    words = _plain_flags(words, switches)
    shown: type[Any] = config
    rare = sum(RARE in flag.marks for flag in flags)
    if rare and {"-h", "--help"} & {*words}:
        shown = _without_rare(config)
        more = f"--help_all shows {rare} more flags, which few need."
        description = f"{description.rstrip()}\n\n{more}" if description else more
    words = ["--help" if word in ("--help_all", "--help-all") else word for word in words]
    launched = sys.modules["__main__"].__spec__
    program = None
    if launched and launched.name != "__main__":
        program = f"python -m {launched.name.removesuffix('.__main__')}"
    speaks = rank() == 0  # all ranks have the same command line, so one of them prints its mistakes
    about = _indented_commands(description)
    return tyro.cli(
        shown,
        prog=program,
        args=words,
        description=about,
        console_outputs=speaks,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _without_rare(config: Any) -> type[Any]:
    """Return a configuration for --help, in which no rare flag is shown."""
    hints = typing.get_type_hints(config, include_extras=True)
    changed: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        if RARE in getattr(hint, "__metadata__", ()):
            changed[field.name] = Annotated[hint, tyro.conf.Suppress]
            defaults[field.name] = field.default
        elif dataclasses.is_dataclass(hint):
            group = _without_rare(hint)
            names = [member.name for member in dataclasses.fields(hint)]
            changed[field.name] = group
            defaults[field.name] = group(**{name: getattr(field.default, name) for name in names})
    body = {"__annotations__": changed, "__doc__": config.__doc__, **defaults}
    return dataclasses.dataclass(frozen=True)(type(config.__name__, (config,), body))


def _indented_commands(description: str | None) -> str | None:
    """Indent the launch lines of a docstring, since tyro joins lines that begin with a letter."""
    return description and re.sub(r"\n+(?=(python|torchrun|echo) )", "\n  ", description)


def run(
    main: Callable[[Any], Any],
    config: type[Any],
    description: str | None = None,
    old_flags: OldFlags = OldFlags(),
) -> None:
    """The edge of every script: parse the command line, call `main`, and turn a mistake into one message.

    Under torchrun rank 0 prints errors; another rank prints only if rank 0 is still running. Characters that standard
    output cannot show are printed as escape sequences.
    Exit codes: 0 done, 1 refused, 2 a wrong command line or a missing earlier step, 130 Ctrl-C, 141 the reader of
    standard output has left (`| head`). NANOCHAT_TRACEBACK=1 shows where a UserError was raised.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # a terminal that cannot show a character gets its escape sequence
            stream.reconfigure(errors="backslashreplace")
    try:
        _edge(main, config, description, old_flags)
    except Exception as bug:  # the edge of the process; Python prints the traceback
        note_end(f"error: {type(bug).__name__}: {bug}")
        raise


def _edge(
    main: Callable[[Any], Any], config: type[Any], description: str | None, old_flags: OldFlags
) -> None:
    try:
        try:
            main(parse(config, description=description, old_flags=old_flags))
        finally:
            sys.stdout.flush()  # here, since at exit Python would print its own message about a reader that has left
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        sys.exit(141)
    except SystemExit as end:  # of the parser
        if end.code:
            time.sleep(RANK_0_SECONDS if rank() > 0 else 0)  # as in complain()
            note_end("error: the command line was refused; the lines above say why")
        raise
    except UserError as mistake:
        if os.environ.get("NANOCHAT_TRACEBACK") == "1":
            traceback.print_exc()
        complain(tr("error: {mistake}", mistake=mistake))
        sys.exit(mistake.exit_code)
    except OSError as failure:
        where = failure.filename or base_dir()
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            complain(
                tr(
                    "error: the disk is full ({where}); no half-written file was kept. Free some space, or set "
                    "NANOCHAT_BASE_DIR to a folder on another disk, then type the same command again.",
                    where=where,
                )
            )
        elif failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and failure.filename:
            complain(
                tr(
                    "error: {where}: {reason}. Set NANOCHAT_BASE_DIR to a folder that you may write, or have the "
                    "rights of this file changed, then type the same command again.",
                    where=where,
                    reason=failure.strerror,
                )
            )
        else:
            raise
        sys.exit(1)
    except KeyboardInterrupt:
        complain("stopped")
        sys.exit(130)


def _reader_is_gone() -> bool:
    """Whether the reader of standard output has left, as `| head` does. If so, drop whatever is still to be written."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    if not watch.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def note_end(message: str) -> None:
    """Leave the reason of this rank's end for those who print it last: torchrun, and the script that started it."""
    said = (
        message if os.environ.get("WORLD_SIZE", "1") in ("", "1") else f"{message} (rank {rank()})"
    )
    # torchrun prints the call stack of the earliest failure, and dates ranks that it ended itself a moment later.
    about = {"py_callstack": said, "timestamp": str(int(time.time()) - 1)}
    for name, text in (
        ("TORCHELASTIC_ERROR_FILE", json.dumps({"message": {"message": said, "extraInfo": about}})),
        ("NANOCHAT_REASON_FILE", f"{said}\n"),
    ):
        with contextlib.suppress(OSError):
            if path := os.environ.get(name):
                Path(path).write_text(text, encoding="utf-8", errors="replace")


def complain(message: str) -> None:
    """Print why this process ends. Most mistakes stop every rank, so the other ranks wait: once rank 0 has printed
    the message and ended, the launcher ends them before they print it too."""
    time.sleep(RANK_0_SECONDS if rank() > 0 else 0)
    note_end(message)
    message = f"{message} (rank {rank()})" if rank() > 0 else message
    print(message, file=sys.stderr, flush=True)


def settings(config: Any) -> dict[str, Any]:
    """A configuration as a plain dict, as checkpoints and reports keep it: lists for tuples, text for paths."""
    return json.loads(json.dumps(values_of(config), default=str))


if __name__ == "__main__":  # for shell scripts, which must mean the same folder
    try:
        print(folder_for_scripts())
    except UserError as _mistake:
        sys.exit(f"error: {_mistake}")
