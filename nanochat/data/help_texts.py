"""Shows the help of a command line, and in Chinese also why a command line is refused.

The catalogue has the Chinese of a flag's docstring, a group's docstring, each paragraph of a
script's description and each comment beside a command, all under the context "help". Texts that it
lacks stay English.
"""

import contextlib
import dataclasses
import difflib
import io
import re
import sys
import typing
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import docstring_parser
import tyro

from nanochat.common import UserError, appendix, language, log, tr, tr_help
from nanochat.data.command_line import RARE, flags_of

# tyro counts each character as one column, and a Chinese one takes two: this character follows
# each of them until the lines are laid out.
SECOND_COLUMN = "\u2060"
COMMAND = re.compile(r"\n+(?=(?:python|torchrun|echo|bash) )")
BREAK = re.compile(rf"(\n\n+|{COMMAND.pattern})")
COMMENT = re.compile(r"(?<= # ).+")  # beside a command
# How Python and tyro say that a value has the wrong type.
NOT_A_NUMBER = re.compile(r"(?:invalid literal for (int)\(\)|could not convert).*?: ('.*')")
NO_TYPE = re.compile(r"no type matching (\S+) could be instantiated from \[(.*)\]")


class _Page(io.StringIO):
    """Text for the terminal: boxes have its characters, but no colours, which would hide columns."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.__stdout__.encoding if sys.__stdout__ else "utf-8"


def _widened(text: str) -> str:
    """Return a text whose number of characters is its number of columns on a terminal."""
    letters = []
    for letter in text:
        letters.append(letter)
        if unicodedata.east_asian_width(letter) in "WF":
            letters.append(SECOND_COLUMN)
    return "".join(letters)


def _default(value: str) -> str:
    if value == "None":  # the help text says what happens then
        return ""
    return _widened(tr("(default: {value})", value=value) if value else tr("(default: none)"))


def docstrings(config: type[Any]) -> dict[str, str]:
    """Return the docstring of each field of a configuration, by name, or "" for lack of one."""
    text_of: dict[str, str] = {}
    for owner in reversed(config.__mro__[:-1]):
        parameters = docstring_parser.parse_from_object(owner).params
        text_of |= {field.arg_name: field.description or "" for field in parameters}
    return text_of


def _derived(config: Any, all_flags: bool) -> type[Any]:
    """Return a subclass of a configuration for --help, in the user's language.

    Unless `all_flags`, rare flags are hidden.
    """
    hints = typing.get_type_hints(config, include_extras=True)
    text_of = docstrings(config) if language() == "zh" else {}
    changed: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        is_marked = typing.get_origin(hint) is Annotated
        kind, *marks = typing.get_args(hint) if is_marked else (hint,)
        default = field.default
        if RARE in marks and not all_flags:
            marks.append(tyro.conf.Suppress)
        elif dataclasses.is_dataclass(kind):
            kind = _derived(kind, all_flags)
            names = [member.name for member in dataclasses.fields(kind)]
            default = kind(**{name: getattr(field.default, name) for name in names})
        english = text_of.get(field.name, "")
        chinese = tr_help(english)
        if language() == "zh":
            own_help = _widened(chinese) if chinese != english else None
            marks.append(tyro.conf.arg(help=own_help, help_behavior_hint=_default))
        changed[field.name] = Annotated[(kind, *marks)] if marks else kind
        if default is not dataclasses.MISSING:
            defaults[field.name] = default
    body = {"__annotations__": changed, "__doc__": config.__doc__, **defaults}
    make = dataclasses.dataclass(frozen=config.__dataclass_params__.frozen)
    return make(type(config.__name__, (config,), body))


def _description(text: str, rare_count: int) -> str:
    """Return a script's description in the user's language, with its commands on lines of their own.

    tyro joins lines of plain text, but not indented ones.
    """
    paragraphs = []
    for paragraph in BREAK.split(text.rstrip()):
        if COMMAND.match(f"\n{paragraph}"):
            paragraphs.append(COMMENT.sub(lambda comment: tr_help(comment[0]), paragraph))
        else:
            paragraphs.append(tr_help(paragraph))
    text = COMMAND.sub("\n  ", "".join(paragraphs))
    if rare_count:
        hint = tr("--help_all shows {count} more flags, which few need.", count=rare_count)
        text = f"{text}\n\n{hint}" if text else hint
    return _widened(text) if language() == "zh" else text


def _columns(line: str) -> int:
    return len(_widened(line))


def _in_chinese(page: str) -> str:
    """Return a page of help with tyro's own words in Chinese and its boxes closed."""
    page = page.replace(SECOND_COLUMN, "").replace("usage: ", tr("usage: "), 1)
    options, arguments = tr("options"), tr("positional arguments")
    # The box of a group says below its title, in Chinese, what its flags are for.
    page = re.sub(r"^╭─ .*?options ─", f"╭─ {options} ─", page, flags=re.MULTILINE)
    page = page.replace("╭─ positional arguments ─", f"╭─ {arguments} ─")
    own_words = "show this help message and exit"
    page = page.replace(own_words, tr("show this help message and exit"))
    page = page.replace("(required)", tr("(required)"))
    page = re.sub(r"(?<=\S) (?=（(?:默认|必填))", "", page)
    page = page.replace("{None}|", "").replace("{None,", "{")
    lines = page.splitlines()
    width = max((_columns(line) for line in lines if line.startswith("╰")), default=0)
    for number, line in enumerate(lines):
        for start, filling, end in (("╭", "─", "╮"), ("│", " ", "│")):
            if line.startswith(start):
                text = line.removesuffix(end).rstrip(filling)
                lines[number] = text + filling * (width - 1 - _columns(text)) + end
    return "\n".join(lines)


def show(
    config: Any,
    description: str | None,
    all_flags: bool,
    parse: Callable[..., Any],
) -> None:
    """Print the help of a script and end the process.

    `parse` is tyro.cli() with its settings. Unless `all_flags`, rare flags are hidden.
    """
    rare_count = 0 if all_flags else sum(RARE in flag.marks for flag in flags_of(config))
    shown_config = _derived(config, all_flags)
    text = _description(description or "", rare_count)
    page = _Page()
    target = page if language() == "zh" else sys.stdout
    try:
        with contextlib.redirect_stdout(target):
            parse(shown_config, args=["--help"], description=text or None)
    finally:
        if target is page:
            log(_in_chinese(page.getvalue()))


def _similar(tokens: Sequence[str], names: Sequence[str]) -> str:
    """Return the flags that are spelled most like unknown ones, as a part of a message."""
    similar: list[str] = []
    for token in tokens:
        name = token.partition("=")[0].lstrip("-").replace("-", "_")
        if token.startswith("-"):
            similar += difflib.get_close_matches(name, names, n=3)
    flags = ", ".join(f"--{name}" for name in dict.fromkeys(similar))
    return tr("Similar flags: {flags}.", flags=flags) if flags else ""


def _wrong_type(flag: str, why: str) -> str:
    """Return the message for a value that a flag cannot take; `why` is what Python or tyro says."""
    kinds: list[str] = []
    value = ""
    if match := NOT_A_NUMBER.match(why):
        kinds = ["INT" if match[1] else "FLOAT"]
        value = match[2]
    elif match := NO_TYPE.match(why):
        kinds = match[1].split("|")
        value = match[2]
    name_of = {"INT": tr("a whole number"), "FLOAT": tr("a number")}
    names: list[str] = []
    for kind in kinds:
        if kind.startswith("{"):
            names += kind.strip("{}").split(",")
        else:
            names.append(name_of.get(kind, ""))
    if not all(names) or not names:  # of another type, such as a path
        return tr("{flag} cannot take this value ({why}).", flag=flag, why=why)
    text, *alternatives = (name for name in names if name != "None")
    for alternative in alternatives:
        text = tr("{first} or {second}", first=text, second=alternative)
    return tr("{flag} must be {kinds}, got {value}.", flag=flag, kinds=text, value=value)


@contextlib.contextmanager
def refusals(config: Any) -> Iterator[None]:
    """Raise UserError (exit code 2) for errors that tyro would print in English within the block."""
    errors = appendix("tyro._errors")
    if errors is None:  # an older tyro
        yield
        return
    names = [flag.name for flag in flags_of(config)]

    def refuse(event: Any) -> None:
        help_command = f"{event.prog} --help"
        if isinstance(event, errors.UnrecognizedArgs | errors.MissingArgs):
            missing = [flag.arg.display_name() for flag in getattr(event, "missing_arguments", ())]
            tokens = getattr(event, "tokens", None) or getattr(event, "unrecognized_tokens", ())
            problem = ""
            if tokens:
                words = " ".join(tokens)
                problem += tr("unknown words on the command line: {words}.", words=words)
                problem += _similar(tokens, names)
            if missing:
                problem += tr("these flags must be given: {flags}.", flags=", ".join(missing))
        elif isinstance(event, errors.InvalidChoice):
            problem = tr(
                "{flag} must be one of {choices}, got {value!r}.",
                flag=event.argument.display_name(),
                choices=", ".join(sorted(set(event.choices) - {"None"})),
                value=event.value,
            )
        elif isinstance(event, errors.BadValue):
            problem = tr("{flag} has too few values.", flag=event.argument.display_name())
        elif isinstance(event, errors.InstantiationFailure):
            flag = event.argument.display_name() if event.argument else ""
            problem = _wrong_type(flag, event.message.splitlines()[0].rstrip("."))
        else:
            return
        raise UserError(
            tr("{problem} All flags: {command}", problem=problem, command=help_command), 2
        )

    with errors.on_parse_error(refuse):
        yield
