"""speedrun_npu.sh: the published flags on any number of cards, a host without NPU, and a run on two emulated NPUs."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanochat.data.command_line import parse, values_of
from nanochat.gpt import GPTConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.planner.presets import PRESETS
from nanochat.planner.work import size_of
from nanochat.runtime.tracking import read_metrics
from nanochat.train import sizes
from nanochat.train.flags import BatchFlags
from scripts import base_train, chat_rl, chat_sft, mid_train
from tests.emulated_npu import worker
from tests.repository.test_speedrun import make_clone
from tests.support.ascend_hosts import make_host
from tests.support.tiny_model import on_cpu

ROOT = Path(__file__).resolve().parent.parent.parent

# A python that records how the stages are called.
PYTHON = r"""#!/bin/bash
case "$*" in "-m nanochat.device" | "-m nanochat.planner"*)
    if [ "${ASCEND_SLOG_PRINT_TO_STDOUT:-}" = 1 ]; then echo "[INFO] RUNTIME(1,python): a line of CANN's log"; fi ;;
esac
case "$*" in
*"import torch_npu"*) echo torch 2.9.0; echo torch_npu "${FAKE_TORCH_NPU:-2.9.0}"; exit ;;
*tools_npu.setup*) exec REAL "$@" ;;
*version_info*) exit 0 ;;
"-c "*"import cores"*) echo 2; exit ;;
"-m nanochat.device") echo "${NANOCHAT_DEVICE:-cpu} bfloat16 ${FAKE_CARDS:-8} fast ${FAKE_MATMUL:-auto no}"; exit ;;
"-m nanochat.planner"*)
    echo "$*" >>"$CALLS"
    if [ "${FAKE_CHIP:-}" = 310P ]; then echo "error: 310P cards are for inference only" >&2; exit 1; fi
    echo "--depth=12 --total_batch_size=262144 --device_batch_size=32"
    exit
    ;;
"-m nanochat.common") mkdir -p "${FAKE_BASE:-$NANOCHAT_BASE_DIR}" && echo "${FAKE_BASE:-$NANOCHAT_BASE_DIR}"; exit ;;
"-m nanochat.runtime.cost ${FAKE_FAILS:-none} "*)
    [ -z "${FAKE_REASON:-}" ] || echo "$FAKE_REASON" >"$NANOCHAT_REASON_FILE"
    exit 3
    ;;
"-m scripts.base_eval --download_only") [ -z "${FAKE_CTRL_C:-}" ] || { kill -INT $PPID && exit 130; } ;;
"-m nanochat.report finished"*) exit "${FAKE_FINISHED:-1}" ;;
"-m nanochat.report"*) exit ;;
esac
echo "${0##*/} $* [$TASK_QUEUE_ENABLE $HF_ENDPOINT]" >>"$CALLS"
"""


class Clone:
    """Copies of the scripts, an imitated host, and a PATH that begins with stubs."""

    def __init__(self, folder: Path):
        self.root, self.stubs, self.calls, self.host = (folder / name for name in ("clone", "bin", "calls", "host"))
        self.root.mkdir()
        self.stubs.mkdir()
        self.calls.touch()
        (self.root / "runs").mkdir()
        for name in ("speedrun.sh", "speedrun_npu.sh", "setup_ascend.sh", "runs/sizes.sh", "runs/words.sh"):
            shutil.copy(ROOT / name, self.root / name)
        shutil.copytree(ROOT / "tools_npu", self.root / "tools_npu", ignore=shutil.ignore_patterns("__pycache__"))
        (self.root / "setup_env.sh").write_text("setup_env() { :; }\n")
        for name in ("python", "python3"):
            (self.stubs / name).write_text(PYTHON.replace("REAL", sys.executable))
            (self.stubs / name).chmod(0o755)

    def run(self, *flags: str, script: str = "speedrun_npu.sh", **environment: str) -> tuple[int, str]:
        base = {
            "PATH": f"{self.stubs}:/usr/bin:/bin", "HOME": str(self.host / "home"), "CALLS": str(self.calls),
            "NANOCHAT_BASE_DIR": str(self.root / "base"), "ASCEND_ROOT_PREFIX": str(self.host),
        }  # fmt: skip
        given = {name: value for name, value in (base | environment).items() if value != "unset"}
        done = subprocess.run(["bash", str(self.root / script), *flags], env=given,
                              capture_output=True, text=True, cwd="/")  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def called(self, module: str) -> str:
        """The command line of the only stage that ran this module."""
        (line,) = [line for line in self.calls.read_text().splitlines() if f" -m {module} " in line]
        return line


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize(("cards", "used"), [(1, 1), (3, 2), (8, 8)])
def test_the_published_pipeline_runs_on_any_number_of_cards(clone: Clone, cards: int, used: int) -> None:
    make_host(clone.host, cards=cards)
    code, out = clone.run(FAKE_CARDS=str(cards))
    assert code == 0, out
    launcher = f"python -m nanochat.runtime.launch --nproc_per_node={used} -m" if used > 1 else "python -m"
    base = clone.called("scripts.base_train")
    flags = "--data fineweb --model_tag=d12 --depth=12 --total_batch_size=262144 --device_batch_size=32"
    assert launcher in base and flags in base
    assert "--model_tag=d12 --total_batch_size=262144 --device_batch_size=32" in clone.called("scripts.mid_train")
    assert "--device_batch_size=8 --target_examples_per_step=32" in clone.called("scripts.chat_sft")
    assert "--device_batch_size=4 --examples_per_step=16" in clone.called("scripts.chat_rl")
    assert "--vocab_size=65536" in clone.called("scripts.tok_train")
    assert f"--vocab_size=65536 --ranks={used}\n" in clone.calls.read_text()
    assert (f"{used} of {cards} devices" in out) == (used < cards)
    assert "[2 " in base, "the stages see the variables of setup_ascend.sh"


EVERY_PRESET = ["smoke", "tinyworld", "tinyworld-small", "d12", "d20", "gpt2"]


@pytest.mark.parametrize(
    ("preset", "cards"),
    [case for i, preset in enumerate(EVERY_PRESET) for case in ((preset, 1), (preset, (3, 8)[i % 2]))],
)
def test_every_stage_of_a_preset_can_split_its_step_over_any_number_of_cards(
    clone: Clone, preset: str, cards: int
) -> None:
    make_host(clone.host, cards=cards)
    published = preset in PRESETS
    data = [] if published else ["--data", "tinyworld"]
    code, out = clone.run("--preset", preset, *data, FAKE_CARDS=str(cards))
    assert code == 0, out
    steps = []
    for script in (base_train, mid_train, chat_sft, chat_rl):
        words = shlex.split(clone.called(script.__name__).partition(" [")[0])
        ranks = next((int(word.split("=")[1]) for word in words if word.startswith("--nproc_per_node=")), 1)
        flags = parse(script.Config, words[words.index(script.__name__) + 1 :])
        cfg: Any = SimpleNamespace(**values_of(flags))
        compute = replace(on_cpu(), world_size=ranks)
        if script in (base_train, mid_train):
            split = BatchFlags(cfg.total_batch_size, cfg.device_batch_size)
            shape = GPTConfig(2048 if published else 256, 1024, 2, 2, 2, 64)
            corpus = "fineweb" if published else "tinyworld"
            sizes.batch(split, shape, 10**6, corpus, compute, 1e9)
            steps.append(cfg.total_batch_size)
        else:
            name = "target_examples_per_step" if script is chat_sft else "examples_per_step"
            sizes.check_for_ranks(name, values_of(flags)[name], compute)
    if cards == 1:  # what the presets were tuned for
        tuned = {"smoke": 2048, "tinyworld": 3072, "tinyworld-small": 4096, "d12": 262_144}
        assert steps[0] == tuned.get(preset, "auto")


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_every_preset_can_train_a_qwen3(clone: Clone, preset: str) -> None:
    corpus = "fineweb" if preset in PRESETS else "tinyworld"
    data = [] if preset in PRESETS else ["--data", corpus]
    code, out = clone.run("--family=qwen3", "--preset", preset, *data, script="speedrun.sh", NANOCHAT_DEVICE="cpu")
    assert code == 0, out
    words = shlex.split(clone.called("scripts.base_train").partition(" [")[0])
    cfg = parse(base_train.Config, words[words.index("scripts.base_train") + 1 :])
    shape = sizes.model_config(cfg.shape, 2048, corpus, on_cpu())
    assert isinstance(shape, QwenConfig) and shape.n_layer == cfg.shape.depth


@pytest.mark.parametrize("eight_bits", ["fp8", "no"])
@pytest.mark.parametrize("recipe", ["ours", "upstream"])
def test_the_run_to_gpt2_has_the_sizes_of_its_plan(clone: Clone, recipe: str, eight_bits: str) -> None:
    code, out = clone.run("--preset=gpt2", f"--recipe={recipe}", script="speedrun.sh", NANOCHAT_DEVICE="cuda",
                          FAKE_MATMUL=f"auto {eight_bits}")  # fmt: skip
    assert code == 0, out
    preset = PRESETS["gpt2"]
    words = shlex.split(clone.called("scripts.base_train").partition(" [")[0])
    cfg = parse(base_train.Config, words[words.index("scripts.base_train") + 1 :])
    assert (cfg.data, cfg.shape.depth, cfg.shape.matmul) == (
        "climbmix",
        preset.depth,
        "fp8" if eight_bits == "fp8" else "auto",
    )
    assert cfg.schedule.target_param_data_ratio == preset.ratio and preset.corpus == "climbmix"
    assert (cfg.model_tag == "d24") == (recipe == "ours") == (cfg.shape.bigram_rows == "auto")
    assert f"--vocab_size={preset.vocab_size}" in clone.called("scripts.tok_train")
    assert f"--data climbmix -n {preset.shards}" in clone.called("nanochat.dataset")
    checked = clone.called("scripts.preflight")
    assert ("--bigram_rows=0 --offset_layers=0" in checked) == (recipe == "upstream")
    told = float(checked.partition("--tokens ")[2].split()[0])
    assert told == pytest.approx(preset.ratio * size_of(preset.depth, preset.vocab_size).scaling, rel=1e-3)


def test_ctrl_c_while_the_tasks_of_core_are_fetched_ends_the_run(clone: Clone) -> None:
    make_host(clone.host)
    code, out = clone.run("--preset", "gpt2", FAKE_CTRL_C="1")
    assert code == 130 and out.endswith("type the same command again to resume\n")
    assert "nanochat.dataset" not in clone.calls.read_text()


def test_the_users_cards_and_mirror_are_used(clone: Clone) -> None:
    make_host(clone.host, cards=8)
    assert clone.run(FAKE_CARDS="8", NPROC_PER_NODE="4", HF_ENDPOINT="https://hf-mirror.com")[0] == 0
    assert "--nproc_per_node=4" in clone.called("scripts.base_train")
    assert "https://hf-mirror.com]" in clone.called("nanochat.dataset")


@pytest.mark.parametrize("ranks", ["4", "0", "many"])
def test_more_ranks_than_visible_cards_are_refused(clone: Clone, ranks: str) -> None:
    make_host(clone.host, cards=2)
    code, out = clone.run(FAKE_CARDS="2", NPROC_PER_NODE=ranks)
    assert code == 2 and "NPROC_PER_NODE must be from 1 to 2" in out and f"got {ranks}" in out
    assert clone.calls.read_text() == ""


def test_cann_may_print_its_log(clone: Clone) -> None:
    make_host(clone.host)
    code, out = clone.run(FAKE_CARDS="2", ASCEND_SLOG_PRINT_TO_STDOUT="1")
    assert code == 0 and "on npu in bfloat16 (2 device(s))" in out, out
    assert "--model_tag=d12 --depth=12 --total_batch_size=262144" in clone.called("scripts.base_train")


def test_flags_are_passed_on_and_the_users_preset_wins(clone: Clone) -> None:
    make_host(clone.host)
    code, out = clone.run("--data", "tinyworld", "--preset=smoke", FAKE_CARDS="2")
    assert code == 0, out
    assert "preset smoke, corpus tinyworld, on npu in bfloat16 (2 device(s))" in out
    assert "--num_iterations=20" in clone.called("scripts.base_train")
    assert "preset tinyworld, corpus tinyworld" in clone.run("--data=tinyworld")[1]


def test_other_code_reaches_the_training_stages_and_no_others(clone: Clone) -> None:
    make_host(clone.host)
    code, out = clone.run("--data", "tinyworld", "--other_code", FAKE_CARDS="2")
    assert code == 0, out
    calls = clone.calls.read_text().splitlines()
    stages = {line.split(" -m ")[-1].split()[0] for line in calls if "--other_code" in line}
    assert stages == {"scripts.base_train", "scripts.mid_train", "scripts.chat_sft", "scripts.chat_rl"}


def test_without_an_npu_it_says_so_and_runs_speedrun(clone: Clone) -> None:
    code, out = clone.run("--preset", "smoke", FAKE_CARDS="1")
    assert code == 0, out
    assert "running speedrun.sh instead" in out and "没有找到昇腾 NPU" in out and "corpus tinyworld, on cpu" in out
    for language, chinese in (("zh", True), ("en", False)):
        out = clone.run("--preset", "smoke", FAKE_CARDS="1", NANOCHAT_LANG=language)[1]
        assert ("没有找到昇腾 NPU" in out, "running speedrun.sh instead" in out) == (chinese, not chinese)
    make_host(clone.host, cards=0)  # CANN, but no card
    code, out = clone.run("--preset", "smoke", FAKE_CARDS="1")
    assert code == 0 and "running speedrun.sh instead" in out


def test_unusable_npus_stop_it_instead_of_training_on_the_cpu(clone: Clone) -> None:
    make_host(clone.host, cann="8.1.RC1")
    code, out = clone.run()
    assert code == 1 and "CANN 8.1.RC1 is too old" in out
    assert clone.calls.read_text() == ""
    code, out = clone.run("--preset", "smoke", NANOCHAT_DEVICE="cpu", FAKE_CARDS="1")
    assert code == 0 and "running speedrun.sh instead" in out


def test_speedrun_sh_hands_over_where_there_are_npus(clone: Clone) -> None:
    make_host(clone.host)
    code, out = clone.run("--other_code", script="speedrun.sh", FAKE_CARDS="2")
    assert code == 0, out
    base = clone.called("scripts.base_train")
    assert "--model_tag=d12" in base and "--other_code" in base and "[2 " in base, "set up, with the default preset"
    clone.calls.write_text("")
    code, out = clone.run("--preset", "smoke", script="speedrun.sh", NANOCHAT_DEVICE="cpu", FAKE_CARDS="1")
    assert code == 0 and "--model_tag smoke" in clone.called("scripts.base_train")


@pytest.mark.parametrize("code", [71, 127])  # a file system without locks, no program flock
def test_a_folder_that_cannot_be_locked_is_a_warning(clone: Clone, code: int) -> None:
    make_host(clone.host)
    (clone.stubs / "flock").write_text(f"#!/bin/bash\nexit {code}\n")
    (clone.stubs / "flock").chmod(0o755)
    returned, out = clone.run("--preset", "smoke", "--data", "tinyworld", FAKE_CARDS="1")
    assert returned == 0 and f"warning: {clone.root}/base cannot be locked" in out and "Another" not in out


def test_inference_cards_stop_it_before_any_training(clone: Clone) -> None:
    make_host(clone.host)
    code, out = clone.run(FAKE_CHIP="310P", FAKE_CARDS="2")
    assert (code, "310P cards are for inference only" in out) == (1, True)
    assert "scripts." not in clone.calls.read_text()


def test_a_finished_run_says_so(clone: Clone) -> None:
    make_host(clone.host)
    code, out = clone.run(FAKE_FINISHED="0")
    assert (code, "Everything is done already" in out) == (0, True)


def test_the_next_commands_on_an_ascend_host_are_those_for_npus(clone: Clone) -> None:
    """A new terminal there lacks CANN's variables, which .venv/bin/activate does not set."""
    make_host(clone.host)
    _, out = clone.run("--preset", "smoke", "--data", "tinyworld", FAKE_FINISHED="0")
    assert "\n  bash speedrun_npu.sh --data tinyworld\n" in out and "\n  source setup_ascend.sh\n" in out
    assert "activate" not in out
    _, out = clone.run("--preset", "smoke", FAKE_FINISHED="0", NANOCHAT_DEVICE="cpu")
    assert "\n  bash speedrun.sh\n" in out and "\n  source .venv/bin/activate\n" in out


def test_the_last_line_of_a_failed_stage_is_its_reason(clone: Clone) -> None:
    make_host(clone.host)
    reason = "error: rank 1 was killed (SIGKILL)"
    code, out = clone.run(FAKE_CARDS="2", FAKE_FAILS="mid_train", FAKE_REASON=reason)
    assert code == 3 and out.splitlines()[-1] == reason and "mid_train" in out.splitlines()[-2]
    code, out = clone.run(FAKE_CARDS="2", FAKE_FAILS="tok_train")
    assert code == 3 and out.splitlines()[-1] == "error: the lines above say why"


def test_no_home_and_an_odd_base_folder_are_no_obstacle(clone: Clone, tmp_path: Path) -> None:
    make_host(clone.host)
    odd = str(tmp_path / 'it\'s a "base"')
    code, out = clone.run(FAKE_CARDS="2", HOME="unset", NANOCHAT_BASE_DIR="unset", FAKE_BASE=odd)
    assert code == 0 and f"files in {odd}" in out, out
    assert (tmp_path / odd / ".speedrun.lock").exists()


@pytest.mark.parametrize("preset", ["auto", "smoke", "tinyworld"])  # auto is a preset for TinyWorld on a CPU
def test_a_corpus_that_the_preset_would_not_train_on_is_refused(clone: Clone, preset: str) -> None:
    flags = ["--preset", preset, "--data", "fineweb"]
    code, out = clone.run(*flags, script="speedrun.sh", NANOCHAT_DEVICE="cpu", FAKE_CARDS="1")
    assert code == 2
    assert "trains on TinyWorld only, got --data fineweb; add --preset d12, d20 or gpt2" in out
    assert clone.calls.read_text() == "", "no stage has begun"


def test_a_plan_starts_the_planner_and_nothing_else(clone: Clone) -> None:
    code, out = clone.run("--preset", "gpt2", "--plan", script="speedrun.sh", NANOCHAT_DEVICE="cpu")
    assert (code, out.strip()) == (0, "--depth=12 --total_batch_size=262144 --device_batch_size=32")
    assert clone.calls.read_text().splitlines() == ["-m nanochat.planner --preset gpt2 --recipe ours"]


@pytest.mark.parametrize(
    ("preset", "cards", "processes", "flags"),
    [("gpt2", 8, "", ""), ("gpt2", 8, "4", " --ranks 4"), ("d12", 6, "", " --ranks 4"), ("d20", 6, "", "")],
)
def test_a_plan_is_for_the_devices_that_the_run_would_take(
    clone: Clone, preset: str, cards: int, processes: str, flags: str
) -> None:
    on_cards = {"FAKE_CARDS": str(cards), "NPROC_PER_NODE": processes, "NANOCHAT_DEVICE": "npu"}
    code, out = clone.run("--preset", preset, "--plan", script="speedrun.sh", **on_cards)
    assert code == 0, out
    assert clone.calls.read_text().splitlines() == [f"-m nanochat.planner --preset {preset} --recipe ours{flags}"]


def test_a_plan_of_another_model_or_corpus_is_refused(clone: Clone) -> None:
    for flag in ("--family=qwen3", "--data=mine"):
        code, out = clone.run("--preset=d12", "--plan", flag, script="speedrun.sh", NANOCHAT_DEVICE="cpu")
        assert code == 2 and "--plan is for the GPT and the corpus of a preset" in out
    assert clone.calls.read_text() == ""


def test_a_recipe_is_refused_where_it_changes_nothing(clone: Clone) -> None:
    for flags in (
        ["--recipe", "theirs"],
        ["--recipe=upstream"],
        ["--preset=gpt2", "--recipe=upstream", "--family=qwen3"],
    ):
        code, out = clone.run(*flags, script="speedrun.sh", NANOCHAT_DEVICE="cpu")
        assert code == 2 and "error: --recipe " in out


@pytest.mark.npu
@pytest.mark.smoke
def test_two_emulated_npus_are_set_up_and_pretrain(tmp_path: Path) -> None:
    """Stopped after pretraining: tests/emulated_npu/test_pipeline.py trains and measures every stage on two NPUs."""
    host = worker.npu_environment(tmp_path / "host", devices=2)
    clone = make_clone(tmp_path, script="speedrun_npu.sh", host=host)
    for name in ("speedrun_npu.sh", "setup_ascend.sh"):
        shutil.copy(ROOT / name, clone.root)
    shutil.copytree(ROOT / "tools_npu", clone.root / "tools_npu")
    process = clone.start_until("== base_loss")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert "preset smoke, corpus tinyworld, on npu in bfloat16 (2 device(s))" in clone.log
    assert "2 ranks over hccl" in clone.log
    assert read_metrics(clone.base / "base_checkpoints" / "smoke")[-1]["step"] == 20


@pytest.mark.parametrize("version, is_strict", [("3 2", False), ("4 3", False), ("4 4", True)])
def test_an_empty_list_of_flags_is_no_error_in_an_old_bash(version: str, is_strict: bool, tmp_path: Path) -> None:
    """Bash before 4.4 takes an empty array for an unset variable, which `set -u` refuses."""
    lines = (ROOT / "speedrun_npu.sh").read_text(encoding="utf-8").split("flags=(")[0]
    words = (ROOT / "runs/words.sh").read_text(encoding="utf-8")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/words.sh").write_text(
        f"version=({version})\n" + words.replace("BASH_VERSINFO", "version"), encoding="utf-8"
    )
    script = tmp_path / "start.sh"
    script.write_text(lines + "echo $-\n", encoding="utf-8")
    options = subprocess.run(["bash", script], capture_output=True, text=True, check=True).stdout
    assert ("u" in options) == is_strict
