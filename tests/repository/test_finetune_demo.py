"""runs/finetune_demo.sh from a published model to the chat, and typed again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.mixtures import own_conversations
from tests.repository.test_speedrun import ROOT
from tests.support.qwens import write_folder

pytestmark = pytest.mark.slow

DATA = ROOT / "runs" / "finetune_demo.jsonl"
SCRIPT = ROOT / "runs" / "finetune_demo.sh"
# Chats have their own tests. Here they answer with their flags, and everything else is run.
PYTHON = f"""#!/usr/bin/env bash
case $2 in
scripts.chat_cli) echo "${{@:3:2}}" ;;
*) exec {sys.executable!r} "$@" ;;
esac
"""


def demo(folder: Path, *flags: str, typed_in: str) -> str:
    """Type the command of a copy of the tree in another folder, and return what it prints."""
    clone = folder / "clone"
    if not clone.exists():
        (clone / "runs").mkdir(parents=True)
        for name in ("nanochat", "scripts", "tasks"):
            (clone / name).symlink_to(ROOT / name)
        for name in ("common.sh", "sizes.sh", "words.sh", SCRIPT.name, DATA.name):
            shutil.copy(ROOT / "runs" / name, clone / "runs" / name)
        (clone / "bin").mkdir()
        (clone / "bin" / "python").write_text(PYTHON)
        (clone / "bin" / "python").chmod(0o755)
        (clone / "setup_env.sh").write_text("setup_env() { export PATH=$PWD/bin:$PATH; }\n")
    environment = {
        **os.environ,
        "NANOCHAT_BASE_DIR": str(folder / "base"),
        "NANOCHAT_DEVICE": "cpu",
        "NANOCHAT_PEAK_TFLOPS": "1",
    }
    done = subprocess.run(
        ["bash", str(clone / "runs" / "finetune_demo.sh"), *flags],
        cwd=folder / typed_in,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_shows_answers_before_and_after_and_does_nothing_twice(tmp_path: Path) -> None:
    """And a second model of the same name, in another folder, gets its own answers and its own tag."""
    for name in ("one", "two"):
        (tmp_path / name / "tiny").mkdir(parents=True)
        write_folder(tmp_path / name / "tiny", "qwen3")
    flags = ("--num_iterations=2", "--replay_every=0", "--no_compile")
    first = demo(tmp_path, "--model", "./tiny", *flags, typed_in="one")
    tiny = f"{tmp_path}/one/./tiny"
    assert first.count(f"> What is your name?\n--model {tiny}\n") == 2  # as it answers, and in the list
    assert first.count("> What is your name?\n-i tune\n") == 1
    assert "the perplexity of general text was" in first and "scripts.chat_cli -i tune -g lighthouse" in first
    steps = tmp_path / "base" / "tuned_checkpoints" / "lighthouse"
    saved = {path: path.stat().st_mtime_ns for path in steps.rglob("*.safetensors")}
    assert saved
    again = demo(tmp_path, "--model", "./tiny", *flags, typed_in="one")
    assert {path: path.stat().st_mtime_ns for path in steps.rglob("*.safetensors")} == saved
    assert first[first.index("== after") :] == again[again.index("== after") :]
    # without validations it says only what was learned
    said = demo(tmp_path, "--model=./tiny", "--out_tag", "keeper", "--eval_every=0", *flags, typed_in="two")
    assert said.count(f"> What is your name?\n--model {tmp_path}/two/./tiny\n") == 2
    assert "learned: the loss of its answers fell from" in said and "forgotten" not in said
    assert "scripts.chat_cli -i tune -g keeper" in said and "lighthouse" not in said
    assert {path.name for path in (tmp_path / "base" / "tuned_checkpoints").iterdir()} == {"lighthouse", "keeper"}


def test_the_questions_are_not_in_the_data() -> None:
    asked = SCRIPT.read_text().split('for question in "')[1].split('"; do')[0].split('" "')
    trained = {json.loads(line)["messages"][0]["content"] for line in DATA.read_text().splitlines()}
    assert len(asked) == 4 and not trained.intersection(asked)
    assert len(own_conversations([str(DATA)]).conversations) == len(trained)
