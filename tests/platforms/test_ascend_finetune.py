"""Fine-tuning published models on two emulated NPUs: every --shard mode, every kind of chip, the guides' launcher."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.device import Compute
from nanochat.runtime.tracking import read_metrics
from scripts import finetune
from tests.emulated_npu.worker import run_ranks, skip_without_compiler
from tests.scripts.test_finetune import config
from tests.scripts.test_finetune import models as models  # a fixture: two small models and a file of conversations
from tests.support.tiny_model import on_cpu

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.npu]


@pytest.fixture(autouse=True)
def compiled() -> None:
    skip_without_compiler()


def losses(tag: str) -> list[float]:
    return [line["loss"] for line in read_metrics(checkpoint_dir("tune", tag)) if "loss" in line]


RUNS: dict[str, dict[str, Any]] = {
    "none": {"shard": "none"},
    "grad": {"shard": "grad"},
    "full": {"shard": "full"},
    "aside": {"offload_activations": True},  # the inputs of layers go through the host's memory
}


def each_run(compute: Compute, models: Path, family: str, rank: int, tags: list[str]) -> None:
    """The same few steps in each way, one after the other on the same two cards."""
    for tag in tags:
        finetune.train(config(models, family, lora_rank=rank, out_tag=tag, **RUNS[tag]), compute)


@pytest.mark.parametrize(("family", "rank"), [("qwen3", 0), ("qwen3.5", 4)])
def test_every_mode_on_two_cards_has_the_losses_of_one_cpu(models: Path, family: str, rank: int) -> None:
    finetune.train(config(models, family, lora_rank=rank, out_tag="cpu"), on_cpu())
    run_ranks(2, each_run, models, family, rank, list(RUNS))
    for tag in RUNS:
        assert losses(tag) == pytest.approx(losses("cpu"), abs=1e-4), tag


def test_a_chip_without_bf16_trains_an_adapter_in_fp16(models: Path) -> None:
    finetune.train(config(models, lora_rank=4, out_tag="cpu"), on_cpu())
    run_ranks(2, each_run, models, "qwen3", 4, ["none", "full"], chip="910A", NANOCHAT_DTYPE="float16")
    assert losses("full") == pytest.approx(losses("none"), abs=1e-4)
    assert losses("none")[0] == pytest.approx(losses("cpu")[0], abs=0.005)  # the loss scale may skip the step after
    assert losses("none")[-1] < losses("none")[0] - 0.3


def test_the_guides_launcher_trains_on_two_cards(models: Path) -> None:
    command = [sys.executable, "-m", "tests.emulated_npu", "--devices", "2", "--", sys.executable,
               "runs/launch_npu_training.py", "--npus", "2", "--model", str(models / "qwen3"), "--data",
               str(models / "chats.jsonl"), "--max_length=64", "--num_iterations=2", "--eval_every=0",
               "--replay_every=0"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every parameter of qwen3" in done.stdout and "2 ranks over hccl" in done.stdout
    assert "pass(es) x 6 rows x 64 tokens x 2 rank(s)" in done.stdout  # of the 48 rows that the file asks for
    assert len(losses("qwen_npu")) == 2
