"""Keeps the Chinese of the translated messages complete: finds each tr("...") in the code and compiles the catalogue.

python -m dev.messages            # adds new messages to nanochat.po without Chinese, drops old ones, compiles
python -m dev.messages --check    # says what is missing or stale, with exit code 1
"""

import argparse
import ast
import string
import sys
from pathlib import Path

import polib

ROOT = Path(__file__).resolve().parent.parent
CATALOGUE = ROOT / "nanochat" / "data" / "locale" / "zh" / "LC_MESSAGES" / "nanochat.po"
PACKAGES = ("nanochat", "scripts", "tasks")


def templates(root: Path = ROOT) -> dict[str, str]:
    """Every English template in the code, and the file that has it."""
    found: dict[str, str] = {}
    for path in (path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "tr":
                template = ast.literal_eval(
                    node.args[0]
                )  # ValueError for anything but a plain string
                found.setdefault(template, path.relative_to(root).as_posix())
    return found


def names(template: str) -> set[str]:
    """The names of the values in a template."""
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def problems(catalogue: polib.POFile, wanted: dict[str, str]) -> list[str]:
    """What is wrong with a catalogue, in words."""
    known = {entry.msgid: entry for entry in catalogue}
    found = [
        f"{where}: no entry for {text!r}" for text, where in wanted.items() if text not in known
    ]
    found += [f"no code has {text!r} any more" for text in known if text not in wanted]
    for text, entry in known.items():
        if not entry.msgstr:
            found.append(f"no Chinese for {text!r}")
        elif names(entry.msgstr) != names(text):
            found.append(f"the Chinese of {text!r} has the values {sorted(names(entry.msgstr))}")
    return found


def update(file: Path, wanted: dict[str, str]) -> polib.POFile:
    """Write both files with an entry for every message that is wanted, in the order of the code."""
    old = {entry.msgid: entry.msgstr for entry in polib.pofile(str(file))} if file.exists() else {}
    catalogue = polib.POFile(wrapwidth=120)
    catalogue.metadata = {"Content-Type": "text/plain; charset=UTF-8", "Language": "zh"}
    for text, where in wanted.items():
        catalogue.append(
            polib.POEntry(msgid=text, msgstr=old.get(text, ""), occurrences=[(where, "")])
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    catalogue.save(str(file))
    catalogue.save_as_mofile(str(file.with_suffix(".mo")))
    return catalogue


def main() -> int:
    """Update, or only check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, and fail if anything is missing"
    )
    check, wanted = parser.parse_args().check, templates()
    catalogue = polib.pofile(str(CATALOGUE)) if check else update(CATALOGUE, wanted)
    found = problems(catalogue, wanted)
    if check and catalogue.to_binary() != CATALOGUE.with_suffix(".mo").read_bytes():
        found.append(f"{CATALOGUE.with_suffix('.mo').name} is stale: python -m dev.messages")
    print("\n".join(found) or f"{len(wanted)} messages, all in Chinese")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
