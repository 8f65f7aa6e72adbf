"""The documents hold what they promise: commands parse, links lead somewhere, the two languages match."""

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from test_architecture import LAYER

from nanochat import common

ROOT = Path(__file__).resolve().parent.parent
SHELL = ("bash", "sh", "shell")
COMMAND = re.compile(r"(python|torchrun|bash|echo) ")  # how a command in the middle of a sentence begins
OURS = ("nanochat", "scripts", "bench")
NO_CONFIG = ("nanochat.device", "nanochat.measure")  # they read no flags


@dataclass(frozen=True)
class Document:
    """What the tests compare, in order: heading levels, code blocks as (language, text), links, code in lines."""

    headings: tuple[int, ...]
    blocks: tuple[tuple[str, str], ...]
    links: tuple[str, ...]
    inline: tuple[str, ...]


def read(text: str) -> Document:
    tokens = MarkdownIt("commonmark").parse(text)
    inline = [child for token in tokens for child in token.children or []]
    return Document(
        tuple(int(token.tag[1]) for token in tokens if token.type == "heading_open"),
        tuple((token.info.strip(), token.content) for token in tokens if token.type == "fence"),
        tuple(str(t.attrs.get("href") or t.attrs.get("src")) for t in inline if t.type in ("link_open", "image")),
        tuple(t.content for t in inline if t.type == "code_inline"),
    )


def documents() -> list[str]:
    folders = [ROOT, ROOT / "docs", ROOT / "dev", ROOT / "rustbpe"]
    return sorted(file.relative_to(ROOT).as_posix() for folder in folders for file in folder.glob("*.md"))


def twins() -> list[tuple[str, str]]:
    """Pairs of one document in two languages: X.md with X.zh.md or X.en.md."""
    pairs = [(re.sub(r"\.(zh|en)\.md$", ".md", name), name) for name in documents()]
    return [(plain, other) for plain, other in pairs if plain != other]


def without_comments(block: tuple[str, str]) -> tuple[str, str]:
    """A code block without its comments, which are translated."""
    language, text = block
    lines = [re.sub(r"(^|\s)#(?!!).*", "", line).rstrip() for line in text.splitlines()]
    return language, "\n".join(line for line in lines if line)


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a shell block as words: lines joined, comments, variables and pipes taken off."""
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if set(word) <= set("();<>|&"):
                while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
                    words.pop(0)
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def launched(words: list[str]) -> tuple[str, list[str]] | None:
    """The module that `python -m M ARGS` or `torchrun FLAGS -m M -- ARGS` runs, and what it is given."""
    program = words[0].rsplit("/", 1)[-1]
    if program not in ("python", "python3", "torchrun") or "-m" not in words:
        return None
    at = words.index("-m")
    return words[at + 1], words[at + 2 :]


def problem(words: list[str]) -> str | None:
    """What is wrong with a command of the documents; None if it would be understood."""
    if run := launched(words):
        module, arguments = run
        if module.split(".")[0] not in OURS:
            return None
        if importlib.util.find_spec(module) is None:
            return f"no module {module}"
        return parse_problem(module, arguments)
    files = [word for word in words[:2] if re.fullmatch(r"(\./)?[\w./-]+\.(sh|py)", word)]
    missing = [word for word in files if not (ROOT / word).exists()]
    if missing or not files:
        return f"no file {missing[0]}" if missing else None
    known = (ROOT / files[0]).read_text(encoding="utf-8")
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    return f"{files[0]} knows no {unknown[0]}" if unknown else None


def parse_problem(module: str, arguments: list[str]) -> str | None:
    """What the module's own command line says to the arguments."""
    if module in NO_CONFIG:
        return None
    config = getattr(importlib.import_module(module), "Config", None)
    if not inspect.isclass(config):
        return f"{module} has no Config, so it cannot be launched"
    try:
        common.parse(config, arguments)
    except SystemExit as refusal:
        return f"{module} refuses {shlex.join(arguments)}" if refusal.code else None
    except common.UserError as refusal:
        return f"{module} refuses {shlex.join(arguments)}: {refusal}"
    return None


@pytest.mark.parametrize("name", documents())
def test_commands_are_understood(name: str) -> None:
    document = read((ROOT / name).read_text(encoding="utf-8"))
    for text in [
        *(text for language, text in document.blocks if language in SHELL),
        *filter(COMMAND.match, document.inline),
    ]:
        shell = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert shell.returncode == 0, f"{name}: {shell.stderr}\n{text}"
        found = [f"{shlex.join(words)}: {why}" for words in commands(text) if (why := problem(words))]
        assert not found, "\n".join([name, *found])


def launch_lines() -> Iterator[tuple[str, str]]:
    """The commands in the docstrings of modules, which --help shows: (file, line)."""
    for package in OURS:
        for file in sorted((ROOT / package).glob("*.py")):
            lines = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()
            yield from ((file.relative_to(ROOT).as_posix(), line) for line in lines if COMMAND.match(line))


def test_launch_lines_of_modules_are_understood() -> None:
    lines = list(launch_lines())
    assert [
        f"{file}: {line}: {why}" for file, line in lines for words in commands(line) if (why := problem(words))
    ] == []
    launchable = {file for file, _ in lines if file.startswith("scripts/")}
    assert launchable == {f"scripts/{file.name}" for file in (ROOT / "scripts").glob("[!_]*.py")}


@pytest.mark.parametrize("name", ["docs/architecture.md", "docs/architecture.zh.md"])
def test_the_tree_has_every_module_in_its_layer(name: str) -> None:
    tree = read((ROOT / name).read_text(encoding="utf-8")).blocks[0][1].partition("\nscripts/")[0]
    told: dict[str, int] = {}
    layer = -1
    for line in tree.splitlines():
        word = line.split()[0]
        if word == "layer":
            layer = int(line.split()[1])
        elif layer >= 0:
            told[word.removesuffix("/").removesuffix(".py")] = layer
    there = {path.stem for path in (ROOT / "nanochat").iterdir() if path.stem in LAYER}
    assert told == {module: LAYER[module] for module in there}


@pytest.mark.parametrize("name", documents())
def test_links_lead_to_files_that_exist(name: str) -> None:
    links = read((ROOT / name).read_text(encoding="utf-8")).links
    local = [link.split("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    missing = [link for link in local if link and not ((ROOT / name).parent / link).exists()]
    assert not missing, f"{name}: {missing}"


def test_a_translation_has_its_original() -> None:
    assert [other for plain, other in twins() if plain not in documents()] == []


@pytest.mark.parametrize(("plain", "other"), twins())
def test_two_languages_match(plain: str, other: str) -> None:
    one, two = (read((ROOT / name).read_text(encoding="utf-8")) for name in (plain, other))
    assert one.headings == two.headings, f"heading levels of {plain} and {other}"
    assert [without_comments(b) for b in one.blocks] == [without_comments(b) for b in two.blocks], "code blocks"


# --- the checks themselves -----------------------------------------------------------------------


def test_commands_are_read_as_a_shell_reads_them() -> None:
    text = "A=1 B='x y' torchrun --nproc_per_node=2 \\\n  -m scripts.x -- --depth=2  # why\ncd a && bash b.sh | tail\n"
    assert list(commands(text)) == [
        ["torchrun", "--nproc_per_node=2", "-m", "scripts.x", "--", "--depth=2"],
        ["cd", "a"],
        ["bash", "b.sh"],
        ["tail"],
    ]
    assert launched(["torchrun", "--standalone", "-m", "scripts.x", "--", "-n", "1"]) == (
        "scripts.x",
        ["--", "-n", "1"],
    )
    assert launched([".venv/bin/python", "-m", "bench.train"]) == ("bench.train", [])
    assert launched(["python", "check_npu.py"]) is None


def test_what_is_not_there_is_found() -> None:
    assert problem(["python", "-m", "scripts.no_such_stage"]) == "no module scripts.no_such_stage"
    assert problem(["bash", "no_such_file.sh"]) == "no file no_such_file.sh"
    assert problem(["bash", "test.sh", "--quick"]) is None
    assert problem(["bash", "speedrun.sh", "--no_such_flag", "1"]) == "speedrun.sh knows no --no_such_flag"
    assert "has no Config" in str(problem(["python", "-m", "nanochat.gpt"]))
    assert problem(["python", "-m", "pip", "install", "x"]) is None


def test_a_refused_flag_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Config:
        depth: int = 4

    monkeypatch.setattr(common, "Config", Config)
    assert problem(["python", "-m", "nanochat.common", "--depth=2"]) is None
    assert "refuses --width=2" in str(problem(["python", "-m", "nanochat.common", "--width=2"]))
    assert "refuses --depth=x" in str(problem(["python", "-m", "nanochat.common", "--depth=x"]))


def test_blocks_that_differ_in_more_than_comments_are_found() -> None:
    english, chinese = (
        read(f"# A\n\n```bash\nls  # {word}\n{more}```\n") for word, more in [("all", ""), ("全部", "")]
    )
    assert [without_comments(b) for b in english.blocks] == [without_comments(b) for b in chinese.blocks]
    longer = read("# A\n\n```bash\nls\npwd\n```\n")
    assert without_comments(english.blocks[0]) != without_comments(longer.blocks[0])
