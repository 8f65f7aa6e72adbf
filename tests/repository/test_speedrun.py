"""speedrun.sh with the smoke preset from nothing to the report, stopped and killed on the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nanochat.runtime.tracking import read_metrics
from tests.support.small_world import files

ROOT = Path(__file__).resolve().parent.parent.parent

# Set-up has its own tests. Here `python` is the Python that runs the tests.
SETUP = f"setup_env() {{ export PATH={str(Path(sys.executable).parent)!r}:$PATH; }}\n"

# In midtraining the shell alone is killed: the stage goes on without it, and the next speedrun waits for the stage.
KILLED_AT = "step 00003/00010"


@dataclass
class Clone:
    """A copy of the tree, and a base folder."""

    root: Path
    base: Path
    script: str = "speedrun.sh"
    host: Mapping[str, str] = field(default_factory=lambda: {**os.environ, "NANOCHAT_DEVICE": "cpu"})

    def start(self, *flags: str) -> subprocess.Popen[str]:
        environment = {**self.host, "NANOCHAT_BASE_DIR": str(self.base), "OMP_NUM_THREADS": "1"}
        command = ["bash", self.script, "--data", "tinyworld", "--preset", "smoke", *flags]
        log = open(self.root / "log", "w", encoding="utf-8")  # noqa: SIM115 - the process writes it
        return subprocess.Popen(
            command, cwd=self.root, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    @property
    def log(self) -> str:
        return (self.root / "log").read_text(encoding="utf-8", errors="replace")

    def run(self, *flags: str) -> int:
        return self.start(*flags).wait(timeout=500)

    def start_until(self, words: str) -> subprocess.Popen[str]:
        """Start, and wait until the log has these words."""
        process = self.start()
        while words not in self.log:
            assert process.poll() is None, f"ended before {words!r}:\n{self.log}"
            time.sleep(0.05)
        return process

    def kill_shell_at(self, words: str) -> None:
        """Start, and kill -9 the shell when the log has these words; the running stage survives."""
        process = self.start_until(words)
        process.kill()
        process.wait()

    def press_ctrl_c_at(self, words: str) -> int:
        """Start, and send SIGINT to every process as a terminal does when the log has these words; the exit code."""
        process = self.start_until(words)
        os.killpg(process.pid, signal.SIGINT)
        return process.wait(timeout=120)


def make_clone(folder: Path, **settings: Any) -> Clone:
    """Copy the tree; what Python compiled is valid in the copy."""
    root = folder / "clone"
    root.mkdir()
    for name in ("nanochat", "scripts", "tasks"):
        shutil.copytree(ROOT / name, root / name)
    (root / "runs").mkdir()
    for name in ("speedrun.sh", "runs/sizes.sh", "runs/words.sh"):
        shutil.copy(ROOT / name, root / name)
    (root / "setup_env.sh").write_text(SETUP)
    return Clone(root, folder / "base", **settings)


def the_report_has_what_it_promises(clone: Clone) -> None:
    report = json.loads((clone.base / "report" / "report.json").read_text(encoding="utf-8"))
    for name in ("tinyworld_en", "tinyworld_zh", "calculator"):
        assert 0 <= report["summary"][name] <= 1
        assert {"mid", "sft", "rl"} <= set(report["table"][name])
    for stage, text in (("base", "documents"), ("mid", "conversations"), ("sft", "answers")):
        assert set(report["table"][f"bits per byte of {text}"]) == {stage}
    assert report["summary"]["minutes"] > 0.2 and report["summary"]["cpu_minutes"] > 0.2
    assert 0.1 < report["summary"]["memory_gb"] <= 2.5
    assert {"base_train", "mid_train", "sft_train", "rl_train", "tok_train", "sft_eval"} <= set(report["sections"])
    text = (clone.base / "report" / "report.md").read_text(encoding="utf-8")
    assert "## Samples" in text and "base_train.png" in text


def costs_cover_every_stage_and_count_its_runs(clone: Clone) -> None:
    stages = json.loads((clone.base / "report" / "stages.json").read_text(encoding="utf-8"))
    training = ["base_train", "mid_train", "chat_sft", "chat_rl"]
    assert [name for name in stages if name in training] == training
    assert stages["dataset"]["runs"] == 3  # until Ctrl-C, until the kill, and to the end


def the_kill_left_every_step_once(clone: Clone) -> None:
    for folder, first, last in [("base", 1, 20), ("mid", 1, 10), ("chatsft", 1, 10), ("chatrl", 0, 3)]:
        found = clone.base / f"{folder}_checkpoints" / "smoke"
        assert [line["step"] for line in read_metrics(found)] == list(range(first, last + 1))
        assert (found / f"step_{last:06d}" / "meta.json").exists()


def the_kill_left_nothing_half_written(clone: Clone) -> None:
    leftovers = [name for name in files(clone.base) if ".tmp" in name or ".deleted" in name or name.endswith(".part")]
    # The costs are written every few seconds. A temporary file of them is removed when it is a day old.
    assert [name for name in leftovers if not name.startswith("report/.stages.json.tmp-")] == []


def the_end_says_what_to_type_next(clone: Clone) -> None:
    assert "python -m scripts.chat_cli" in clone.log and "python -m scripts.chat_web" in clone.log
    assert "tinyworld_zh" in clone.log


def typed_again_it_changes_no_file_and_says_so(clone: Clone) -> None:
    before = files(clone.base)
    assert clone.run() == 0
    assert "Everything is done already" in clone.log and "== " not in clone.log
    assert "python -m scripts.chat_cli" in clone.log
    assert files(clone.base) == before


def a_wrong_flag_is_refused_before_anything_happens(clone: Clone) -> None:
    for flags in (["--presets", "smoke"], ["--preset", "none"], ["--data"]):
        assert clone.run(*flags) == 2
        assert "error: " in clone.log


@pytest.mark.smoke
@pytest.mark.timeout(900)
def test_the_smoke_preset_from_nothing_over_a_kill_to_the_report(tmp_path: Path) -> None:
    """One test, because tests of a module may run in different processes, and each would need its own run."""
    clone = make_clone(tmp_path)
    assert clone.press_ctrl_c_at("step 00003/00020") == 130
    assert "SIGINT: saved step" in clone.log and "speedrun: stopped in the stage base_train" in clone.log
    assert "== base_loss" not in clone.log
    clone.kill_shell_at(KILLED_AT)
    assert clone.run() == 0, clone.log
    the_report_has_what_it_promises(clone)
    costs_cover_every_stage_and_count_its_runs(clone)
    the_kill_left_every_step_once(clone)
    the_kill_left_nothing_half_written(clone)
    the_end_says_what_to_type_next(clone)
    typed_again_it_changes_no_file_and_says_so(clone)
    a_wrong_flag_is_refused_before_anything_happens(clone)
