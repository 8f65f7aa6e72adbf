"""Keeps the Chinese of messages complete: finds each tr("...") and compiles the catalogue.

python -m dev.messages            # adds new messages to nanochat.po without Chinese, drops old ones, compiles
python -m dev.messages --check    # says what is missing or stale, with exit code 1
"""

import argparse
import ast
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import polib

ROOT = Path(__file__).resolve().parent.parent
CATALOGUE = ROOT / "nanochat" / "data" / "locale" / "zh" / "LC_MESSAGES" / "nanochat.po"
PACKAGES = ("nanochat", "scripts", "tasks")


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


def names(template: str) -> set[str]:
    """Return the names of the values that a template has."""
    fields = (name for _, name, _, _ in string.Formatter().parse(template))
    return {name for name in fields if name}


def problems(catalogue: polib.POFile, file_of: dict[str, str]) -> list[str]:
    """Return a line for each problem of a catalogue."""
    chinese_of = {entry.msgid: entry.msgstr for entry in catalogue}
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


def update(file: Path, file_of: dict[str, str]) -> polib.POFile:
    """Write the catalogue, also in compiled form, and return it.

    It has an entry for every template, in the order of the code.
    """
    chinese_of = {}
    if file.exists():
        chinese_of = {entry.msgid: entry.msgstr for entry in polib.pofile(str(file))}
    catalogue = polib.POFile(wrapwidth=120)
    catalogue.metadata = {"Content-Type": "text/plain; charset=UTF-8", "Language": "zh"}
    for template, source in file_of.items():
        chinese = chinese_of.get(template, "")
        entry = polib.POEntry(msgid=template, msgstr=chinese, occurrences=[(source, "")])
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
    file_of = templates()
    compiled = CATALOGUE.with_suffix(".mo")
    if not only_check:
        update(CATALOGUE, file_of)
    catalogue = polib.pofile(str(CATALOGUE))
    lines = problems(catalogue, file_of)
    if only_check and catalogue.to_binary() != compiled.read_bytes():
        lines.append(f"{compiled.name} is stale: python -m dev.messages")
    print("\n".join(lines) or f"{len(file_of)} messages, all in Chinese")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
