"""Keeps the Chinese complete: finds each tr("...") and each help text, and compiles the catalogue.

python -m dev.messages            # adds new messages to nanochat.po without Chinese, drops old ones, compiles
python -m dev.messages --check    # says what is missing or stale, with exit code 1
"""

import argparse
import ast
import itertools
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import polib

from nanochat.data import help_texts

ROOT = Path(__file__).resolve().parent.parent
CATALOGUE = ROOT / "nanochat" / "data" / "locale" / "zh" / "LC_MESSAGES" / "nanochat.po"
HELP = "help"  # the context of help texts
PACKAGES = ("nanochat", "scripts", "tasks", "runs")


def source_files(root: Path) -> Iterator[Path]:
    """Yield the source files whose messages are translated."""
    for package in PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


def templates(root: Path = ROOT) -> dict[str, str]:
    """Return the English templates in the code, each with the file that has it.

    Raises ValueError if a call of tr() has anything but a plain string.
    """
    file_of: dict[str, str] = {}
    for path in source_files(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "tr":
                template = ast.literal_eval(node.args[0])
                file_of.setdefault(template, path.relative_to(root).as_posix())
    return file_of


def _docstrings(node: ast.ClassDef) -> list[str]:
    """Return the docstrings of a class's fields."""
    texts = []
    for field, text in itertools.pairwise(node.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            texts.append(str(ast.literal_eval(text.value)))
    return texts


def _descriptions(tree: ast.Module) -> list[str]:
    """Return the paragraphs of a script's description, and the comments beside its commands."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("run", "launch"):
            continue
        if any(getattr(value, "id", "") == "__doc__" for value in node.args):
            parts = help_texts.BREAK.split(ast.get_docstring(tree) or "")
            texts = []
            for part in parts:
                is_command = help_texts.COMMAND.match(f"\n{part}")
                texts += help_texts.COMMENT.findall(part) if is_command else [part]
            return texts
    return []


def helps(root: Path = ROOT) -> dict[str, str]:
    """Return the help texts of all scripts, each on one line, with the file that has it.

    Flags are the fields of the classes called Config, and of the classes that these fields name.
    """
    file_of: dict[str, str] = {}
    trees: dict[str, ast.Module] = {}
    for path in source_files(root):
        file = path.relative_to(root).as_posix()
        trees[file] = ast.parse(path.read_text(encoding="utf-8"))
        for text in _descriptions(trees[file]):
            file_of.setdefault(" ".join(text.split()), file)
    places = [(file, "Config") for file in trees]
    for file, name in places:  # grows in the loop
        classes = {node.name: node for node in trees[file].body if isinstance(node, ast.ClassDef)}
        if name not in classes:
            continue
        for text in _docstrings(classes[name]):
            file_of.setdefault(" ".join(text.split()), file)
        fields = [field for field in classes[name].body if isinstance(field, ast.AnnAssign)]
        kinds = [*classes[name].bases, *(field.annotation for field in fields)]
        words = {getattr(word, "id", "") for kind in kinds for word in ast.walk(kind)}
        places += [(file, word) for word in sorted(words & {*classes} - {name})]
        for node in trees[file].body:
            if isinstance(node, ast.ImportFrom) and node.module:
                module = f"{node.module.replace('.', '/')}.py"
                known = [alias.name for alias in node.names if alias.name in words]
                places += [(module, word) for word in known if module in trees]
    file_of.pop("", None)
    return file_of


def names(template: str) -> set[str]:
    """Return the names of the values that a template has."""
    fields = (name for _, name, _, _ in string.Formatter().parse(template))
    return {name for name in fields if name}


def problems(catalogue: polib.POFile, file_of: dict[str, str]) -> list[str]:
    """Return a line for each problem of a catalogue's messages."""
    chinese_of = {entry.msgid: entry.msgstr for entry in catalogue if not entry.msgctxt}
    lines = []
    for template, file in file_of.items():
        if template not in chinese_of:
            lines.append(f"{file}: no entry for {template!r}")
    for template, chinese in chinese_of.items():
        if template not in file_of:
            lines.append(f"no code has {template!r} any more")
        if not chinese:
            lines.append(f"no Chinese for {template!r}")
        elif names(chinese) != names(template):
            values = sorted(names(chinese))
            lines.append(f"the Chinese of {template!r} has the values {values}")
    return lines


def missing_helps(catalogue: polib.POFile, file_of: dict[str, str]) -> list[str]:
    """Return the help texts that have no Chinese."""
    chinese_of = {entry.msgid: entry.msgstr for entry in catalogue if entry.msgctxt == HELP}
    return [text for text in file_of if not chinese_of.get(text)]


def update(file: Path, file_of: dict[str, str], help_file_of: dict[str, str]) -> polib.POFile:
    """Write the catalogue, also in compiled form, and return it.

    It has an entry for every template, in the order of the code, and then for every help text.
    """
    chinese_of: dict[tuple[str, str], str] = {}
    if file.exists():
        for entry in polib.pofile(str(file)):
            chinese_of[entry.msgctxt or "", entry.msgid] = entry.msgstr
    catalogue = polib.POFile(wrapwidth=120)
    catalogue.metadata = {"Content-Type": "text/plain; charset=UTF-8", "Language": "zh"}
    for context, source_of in (("", file_of), (HELP, help_file_of)):
        for text, source in source_of.items():
            chinese = chinese_of.get((context, text), "")
            places = [(source, "")]
            entry = polib.POEntry(msgid=text, msgstr=chinese, occurrences=places)
            if context:
                entry.msgctxt = context
            catalogue.append(entry)
    file.parent.mkdir(parents=True, exist_ok=True)
    catalogue.save(str(file))
    catalogue.save_as_mofile(str(file.with_suffix(".mo")))
    return catalogue


def main() -> int:
    """Update the catalogue, or only check it, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing, and fail if anything is missing",
    )
    only_check = parser.parse_args().check
    file_of, help_file_of = templates(), helps()
    compiled = CATALOGUE.with_suffix(".mo")
    if not only_check:
        update(CATALOGUE, file_of, help_file_of)
    catalogue = polib.pofile(str(CATALOGUE))
    lines = problems(catalogue, file_of)
    if only_check and catalogue.to_binary() != compiled.read_bytes():
        lines.append(f"{compiled.name} is stale: python -m dev.messages")
    lines += [
        f"no Chinese for the help text {text!r}" for text in missing_helps(catalogue, help_file_of)
    ]
    print("\n".join(lines) or f"{len(file_of)} messages, all in Chinese")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
