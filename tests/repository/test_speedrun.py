"""speedrun.sh with the smoke preset from nothing to the report, killed in every stage on the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanochat.runtime.tracking import read_metrics
from tests.support.small_world import files

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = ["bash", "speedrun.sh", "--preset", "smoke"]

# Set-up has its own tests. Here `python` is the Python that runs the tests.
SETUP = f"setup_env() {{ export PATH={str(Path(sys.executable).parent)!r}:$PATH; }}\n"

# Where the run is killed, in the order of the pipeline: a line of the log, and whether only the shell dies.
KILLS = [
    ("step 00003/00010", True),  # mid: the stage keeps running alone, and the next speedrun waits for it
    ("step 00001/00003", False),  # rl
]


@dataclass
class Clone:
    """A copy of the tree, and a base folder."""

    root: Path
    base: Path

    def start(self, *flags: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "NANOCHAT_BASE_DIR": str(self.base),
            "NANOCHAT_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        log = open(self.root / "log", "w", encoding="utf-8")  # noqa: SIM115 - the process writes it
        return subprocess.Popen(
            [*COMMAND, *flags], cwd=self.root, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    @property
    def log(self) -> str:
        return (self.root / "log").read_text(encoding="utf-8", errors="replace")

    def run(self, *flags: str) -> int:
        return self.start(*flags).wait(timeout=500)

    def kill_at(self, words: str, shell_only: bool) -> None:
        """Start, and kill -9 when the log has these words; with `shell_only` the running stage survives."""
        process = self.start()
        while words not in self.log:
            assert process.poll() is None, f"ended before {words!r}:\n{self.log}"
            time.sleep(0.05)
        if shell_only:
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def press_ctrl_c_at(self, words: str) -> int:
        """Start, and send SIGINT to every process as a terminal does when the log has these words; the exit code."""
        process = self.start()
        while words not in self.log:
            assert process.poll() is None, f"ended before {words!r}:\n{self.log}"
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        return process.wait(timeout=120)


def make_clone(folder: Path) -> Clone:
    root = folder / "clone"
    root.mkdir()
    for name in ("nanochat", "scripts", "tasks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "runs").mkdir()
    for name in ("speedrun.sh", "runs/sizes.sh"):
        shutil.copy(ROOT / name, root / name)
    (root / "setup_env.sh").write_text(SETUP)
    return Clone(root, folder / "base")


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
    assert stages["dataset"]["runs"] == 1 + len(KILLS) + 1  # Ctrl-C, kills, and the last


def kills_left_every_step_once(clone: Clone) -> None:
    for folder, first, last in [("base", 1, 20), ("mid", 1, 10), ("chatsft", 1, 10), ("chatrl", 0, 3)]:
        found = clone.base / f"{folder}_checkpoints" / "smoke"
        assert [line["step"] for line in read_metrics(found)] == list(range(first, last + 1))
        assert (found / f"step_{last:06d}" / "meta.json").exists()


def kills_left_nothing_half_written(clone: Clone) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["auto", "smoke", "tinyworld"])  # auto is a preset for TinyWorld on a CPU
def test_a_corpus_that_the_preset_would_not_train_on_is_refused(tmp_path: Path, preset: str) -> None:
    clone = make_clone(tmp_path)
    assert clone.run("--preset", preset, "--data", "fineweb") == 2
    assert "trains on TinyWorld only, got --data fineweb; add --preset d12, d20 or gpt2" in clone.log
    assert "== " not in clone.log and not (clone.base / "report").exists()


@pytest.mark.smoke
@pytest.mark.timeout(900)
def test_the_smoke_preset_from_nothing_over_kills_to_the_report(tmp_path: Path) -> None:
    """One test, because tests of a module may run in different processes, and each would need its own run."""
    clone = make_clone(tmp_path)
    assert clone.press_ctrl_c_at("step 00003/00020") == 130
    assert "SIGINT: saved step" in clone.log and "speedrun: stopped in the stage base_train" in clone.log
    assert "== base_loss" not in clone.log
    for words, shell_only in KILLS:
        clone.kill_at(words, shell_only)
    assert clone.run() == 0, clone.log
    the_report_has_what_it_promises(clone)
    costs_cover_every_stage_and_count_its_runs(clone)
    kills_left_every_step_once(clone)
    kills_left_nothing_half_written(clone)
    the_end_says_what_to_type_next(clone)
    typed_again_it_changes_no_file_and_says_so(clone)
    a_wrong_flag_is_refused_before_anything_happens(clone)


def test_a_plan_is_printed_without_a_card_and_nothing_else_happens(tmp_path: Path) -> None:
    clone = make_clone(tmp_path)
    assert clone.run("--preset", "gpt2", "--plan") == 0
    rows = [line.split(" | ")[:2] for line in clone.log.splitlines() if line.startswith("| ")]
    assert rows[2:] == [["| H100, fp8", "8"], ["| H100", "8"], ["| 910B3", "8"], ["| 910B3", "16"]]
    assert "CC BY-NC 4.0" in clone.log and "FLOPs" in clone.log
    assert not any(clone.base.iterdir())
    assert clone.run("--preset", "smoke", "--plan") == 2


def test_a_recipe_is_refused_where_it_changes_nothing(tmp_path: Path) -> None:
    clone = make_clone(tmp_path)
    for flags in (
        ["--recipe", "theirs"],
        ["--recipe=upstream"],
        ["--preset=gpt2", "--recipe=upstream", "--family=qwen3"],
    ):
        assert clone.run(*flags) == 2
        assert "error: --recipe " in clone.log
