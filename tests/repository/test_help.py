"""The help texts of every script: each flag has one, and each reads well on the terminal."""

import dataclasses
import importlib
import re
import subprocess
import sys
from typing import Any

import pytest
import tyro._docstrings

from tests.repository.test_docs import ROOT

MODULES = [
    *(f"scripts.{path.stem}" for path in sorted((ROOT / "scripts").glob("[!_]*.py"))),
    *(f"nanochat.{name}" for name in ("dataset", "planner.__main__", "prepare.__main__", "export.__main__",
                                      "report.__main__", "checkpoint_manager.__main__")),
]  # fmt: skip


def helps(config: Any) -> dict[str, str]:
    """The help text of each flag, with the line breaks of its source."""
    found = {}
    for field in dataclasses.fields(config):
        for owner in config.__mro__:
            text = tyro._docstrings.parse_docstring_from_object(owner).get(field.name) if owner is not object else None
            if text:
                found[field.name] = text
                break
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_flag_has_a_help_text_that_breaks_between_sentences(module: str) -> None:
    config = importlib.import_module(module).Config
    texts = helps(config)
    assert texts.keys() == {field.name for field in dataclasses.fields(config)}
    # The terminal shows a line break of the source as it is, so one in the middle of a sentence looks broken.
    broken = {name: text for name, text in texts.items() if re.search(r"[^.;:,\s]\s*\n", text)}
    assert broken == {}


def test_commands_that_need_no_model_start_without_torch() -> None:
    """Loading torch takes two seconds, and a speedrun calls these commands six times."""
    names = "nanochat.report.__main__, nanochat.dataset, scripts.tok_train, scripts.tok_eval"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
