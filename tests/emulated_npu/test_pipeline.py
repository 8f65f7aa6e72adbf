"""Every script of the pipeline on emulated NPUs gives the losses of the CPU in fp32."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanochat.device import Compute
from nanochat.runtime.tracking import read_metrics
from scripts import base_eval, base_loss, chat_cli, chat_eval
from tests.emulated_npu import worker
from tests.scripts.test_ranks import STEPS
from tests.scripts.test_ranks import alone as alone  # a fixture: the same few steps in one process on the CPU
from tests.support.forks import forks
from tests.support.small_world import run_stage, shrink, stage_folder, up_to, words
from tests.support.tiny_model import on_cpu

ROOT = Path(__file__).resolve().parent.parent.parent
BUNDLE = ROOT / "tests" / "support" / "files" / "eval_bundle"

pytestmark = [pytest.mark.npu, pytest.mark.slow]


@pytest.fixture(autouse=True)
def compiled() -> None:
    worker.skip_without_compiler()


LOSS = ("loss", "grad_norm")
EVERY_STEP = {"base": LOSS, "sft": LOSS, "rl": (*LOSS, "reward")}
AT_EVALUATIONS = {"base": "val_bpb", "sft": "val_bpb", "rl": "accuracy"}


def check_equal_metrics(one: Path, two: Path, stage: str) -> None:
    """Both runs logged the same figures at the same steps, and logged each figure where the stage must log it."""
    runs = [read_metrics(stage_folder(base, stage)) for base in (one, two)]
    assert [line["step"] for line in runs[0]] == [line["step"] for line in runs[1]]
    for name in (*EVERY_STEP[stage], AT_EVALUATIONS[stage]):
        expected, found = ({line["step"]: line[name] for line in lines if name in line} for lines in runs)
        required = range(1, STEPS + 1) if name in EVERY_STEP[stage] else [STEPS]
        assert set(required) <= set(expected), f"{name} is missing from steps of {stage}: {expected}"
        assert found == pytest.approx(expected, abs=2e-4, rel=2e-4), name


def a_stage(compute: Compute, stage: str) -> None:
    shrink(pytest.MonkeyPatch())  # the process ends with the stage
    run_stage(stage, compute, num_iterations=STEPS, eval_every=STEPS)
    run_stage(stage, compute, num_iterations=STEPS, eval_every=STEPS)  # done: all ranks see it


@pytest.mark.ranks
@pytest.mark.parametrize("stage", ["base", "sft", "rl"])  # mid takes base's steps on other texts
def test_a_stage_learns_on_two_npus_what_it_learns_on_the_cpu(stage: str, alone: Path, base_folder: Path) -> None:
    up_to(stage, alone, base_folder)
    worker.run_ranks(2, a_stage, stage)
    check_equal_metrics(alone, base_folder, stage)


def run(command: list[str], environment: dict[str, str]) -> str:
    """Run a script and return its output. If the script fails, the test fails."""
    environment = {"NANOCHAT_DTYPE": "float32", "OMP_NUM_THREADS": "1", **environment}
    code, said, errors = forks().run(command, ROOT, environment)
    assert code == 0, said[-2000:] + errors[-4000:]
    return said


LEFT_OUT = ("second", "memory", "time", "samples")  # samples: a rank keeps only its own


def figures(base: Path, name: str) -> dict[str, float]:
    """The numbers in a section of the report that do not depend on the device, by their place in the section."""
    found: dict[str, float] = {}

    def walk(value: Any, place: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{place}/{key}")
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                walk(inner, f"{place}/{i}")
        elif isinstance(value, int | float) and not any(word in place for word in LEFT_OUT):
            found[place] = float(value)

    walk(json.loads((base / "report" / "sections" / f"{name}.json").read_text()), "")
    return found


# name -> the measurement, its section of the report and its configuration
MEASUREMENTS: dict[str, tuple[Callable[[Any, Compute], Any], str, Any]] = {
    "base_loss": (base_loss.evaluate, "base_loss", base_loss.Config(model_tag="d2", split_tokens=2048)),
    "base_eval": (
        base_eval.evaluate,
        "base_eval",
        base_eval.Config(eval_bundle=str(BUNDLE), max_per_task=4, split_tokens=2048),
    ),
    "chat_eval": (
        chat_eval.chat_eval,
        "rl_eval",
        chat_eval.Config(task_name="tinyworld_en", max_problems=8, max_new_tokens=16),
    ),
}


def measure(compute: Compute, name: str) -> None:
    work, _, config = MEASUREMENTS[name]
    work(config, compute)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_measurement_on_two_npus_equals_the_one_on_the_cpu(
    name: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases = [shutil.copytree(alone, tmp_path / device) for device in ("cpu", "npu")]
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(bases[0]))
    measure(on_cpu(), name)
    worker.run_ranks(2, measure, name, NANOCHAT_BASE_DIR=str(bases[1]))
    expected, found = (figures(base, MEASUREMENTS[name][1]) for base in bases)
    assert len(expected) > 3
    assert found == pytest.approx(expected, abs=1e-3, rel=1e-3)


@pytest.mark.parametrize(("chip", "dtype"), [("910A", "float32"), ("310P", "float16")])  # a 310P attends in fp16 only
def test_a_chat_on_older_chips_says_what_it_says_on_the_cpu(
    chip: str,
    dtype: str,
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = {"NANOCHAT_BASE_DIR": str(alone), "NANOCHAT_DTYPE": dtype}
    for name, value in base.items():
        monkeypatch.setenv(name, value)
    chat_cli.main(chat_cli.Config(source="base", prompt="the capital of France is", temperature=0.0, max_tokens=24))
    expected = capsys.readouterr().out
    command = ["scripts.chat_cli", "-i", "base", "-p", "the capital of France is", "-t", "0", "-m", "24"]
    assert run(command, {**worker.npu_environment(tmp_path, chip, 1), **base}) == expected
    assert expected.strip()


def test_a_910a_trains_in_fp16_with_a_loss_scale(alone: Path, base_folder: Path, tmp_path: Path) -> None:
    up_to("base", alone, base_folder)
    command = ["scripts.base_train", *words("base", num_iterations=12, eval_every=12)]
    said = run(command, {**worker.npu_environment(tmp_path, "910A", 1), "NANOCHAT_DTYPE": ""})
    assert "float16" in said
    lines = read_metrics(stage_folder(base_folder, "base"))
    assert lines[-1]["step"] == 12
    assert lines[-1]["loss"] < lines[0]["loss"]
