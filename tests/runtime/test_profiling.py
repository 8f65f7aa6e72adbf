"""--profile: the parts of a step, the trace and its tables, on one rank and on many; what is learned stays."""

import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.updates import update
from nanochat.common import UserError, read_json
from nanochat.device import Compute
from nanochat.platforms.nvidia.platform import Nvidia
from nanochat.report.__main__ import generate
from nanochat.report.sections import training_section
from nanochat.run import NoProfile
from nanochat.runtime.profiling import NEEDED, TRACED, Profile, TorchTracer
from nanochat.step import LossScale
from tests.support.ranks import run_ranks
from tests.support.small_world import make_corpus, run_stage
from tests.support.tiny_model import pretend
from tests.support.tiny_training import CPU, Batches, make

PARTS = ["data", "forward", "backward", "gradient norm", "optimizer"]


def run(folder: Path, steps: int, profile: bool, compute: Compute = CPU, total: int = 0) -> list[float]:
    """A stage of a tiny model, of `total` steps; the losses of the first `steps`."""
    model, optimizers = make(compute=compute)
    profiled = Profile("base", folder, total or steps, compute) if profile else NoProfile()
    losses = []
    for step in range(steps):
        profiled.begin_step()
        outcome = update(model, optimizers, Batches(step, compute), LossScale(), compute, mark=profiled.mark)
        losses.append(outcome.loss)
        profiled.end_step()
    return losses


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("profiled")
    return folder, run(folder, NEEDED + 2, profile=True)


def test_a_profile_changes_nothing_that_is_learned(profiled: tuple[Path, list[float]], tmp_path: Path) -> None:
    assert profiled[1] == run(tmp_path, NEEDED + 2, profile=False)
    assert not (tmp_path / "profile").exists()


def test_every_part_of_a_step_is_told_and_the_operators_of_a_traced_one(profiled: tuple[Path, list[float]]) -> None:
    profile = read_json(profiled[0] / "profile" / "profile.json")
    assert [part["name"] for part in profile["parts"]] == PARTS
    assert all(part["ms"] == part["host_ms"] == part["slowest_ms"] > 0 for part in profile["parts"])
    assert (profile["stage"], profile["ranks"]) == ("base", 1)
    told = profile["traced"]
    assert told["communication_ms"] == told["exposed_ms"] == 0
    assert 0 < told["computing_ms"] <= told["step_ms"]
    assert told["computing_ms"] + told["idle_ms"] == pytest.approx(told["step_ms"])
    products = next(operator for operator in told["operators"] if operator["name"] == "aten::mm")
    assert products["calls"] == int(products["calls"]) > 20  # in every step the same
    assert sum(operator["ms"] for operator in told["operators"]) <= told["step_ms"]
    assert not [operator for operator in told["operators"] if operator["name"] in ("nanochat step", *PARTS)]


def test_the_trace_shows_the_parts_of_the_traced_steps(profiled: tuple[Path, list[float]]) -> None:
    (file,) = read_json(profiled[0] / "profile" / "profile.json")["files"]
    assert Path(file) == profiled[0] / "profile" / "trace-rank-0.json.gz"
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        events = json.load(opened)["traceEvents"]
    counts = Counter(event["name"] for event in events if event.get("ph") == "X")
    assert counts["nanochat step"] == counts["forward"] == counts["optimizer"] == TRACED


def test_the_tables_are_shown_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, NEEDED, profile=True)
    said = capsys.readouterr().out
    kept = (tmp_path / "profile" / "profile.txt").read_text(encoding="utf-8")
    assert kept.strip() in said and str(tmp_path / "profile" / "profile.txt") in said
    assert "gradient norm" in kept and "aten::mm" in kept


def test_too_few_steps_are_refused_before_the_first(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{NEEDED} steps .* {NEEDED - 1} left") as refusal:
        run(tmp_path, 0, profile=True, total=NEEDED - 1)
    assert refusal.value.exit_code == 2


def test_a_profiler_that_fails_costs_a_warning_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: TorchTracer) -> Any:
        raise UserError("nothing was left")

    monkeypatch.setattr(TorchTracer, "finish", fail)
    assert len(run(tmp_path, NEEDED + 1, profile=True)) == NEEDED + 1
    assert "no trace of rank 0: nothing was left" in "".join(capsys.readouterr())
    told = read_json(tmp_path / "profile" / "profile.json")
    assert told["traced"] is None and told["files"] == [] and len(told["parts"]) == len(PARTS)


def test_the_report_shows_where_a_steps_time_goes(profiled: tuple[Path, list[float]], base_folder: Path) -> None:
    line = dict.fromkeys(("loss", "smooth_loss", "total_seconds", "tokens_per_second", "mfu"), 1.0)
    (profiled[0] / "metrics.jsonl").write_text(json.dumps({"step": 1, "skipped": False, **line}) + "\n")
    training_section("base", "d2", profiled[0], {}, {})
    text = generate().read_text(encoding="utf-8")
    assert "| part of a step | ms | share |" in text and "| gradient norm |" in text


@pytest.mark.slow
def test_a_script_marks_every_part_of_its_steps(base_folder: Path) -> None:
    make_corpus(base_folder)
    run_stage("base", num_iterations=NEEDED, profile=True)
    told = read_json(base_folder / "base_checkpoints" / "d2" / "profile" / "profile.json")
    assert [part["name"] for part in told["parts"]] == PARTS and told["traced"]


# --- what belongs to the device --------------------------------------------------------------------


GPU_EVENT = torch.autograd.DeviceType.CUDA
HOST = torch.autograd.DeviceType.CPU
GPU = pretend(Nvidia())


def event(name: str, device: Any = GPU_EVENT, annotation: bool = False, in_background: bool = False) -> Any:
    """One of the profiler's events, which lasts two microseconds."""
    return SimpleNamespace(
        name=lambda: name, device_type=lambda: device, start_ns=lambda: 1000, end_ns=lambda: 3000,
        is_user_annotation=lambda: annotation, is_async=lambda: in_background,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("compute", "seen", "kind"),
    [
        (GPU, event("gemm_bf16"), "computing"),
        (GPU, event("ncclDevKernel_AllGather_RING_LL"), "communication"),
        (GPU, event("nccl:all_gather", annotation=True), None),
        (GPU, event("nanochat step", annotation=True), None),
        (GPU, event("aten::mm", HOST), None),
        (CPU, event("aten::mm", HOST), "computing"),
        (CPU, event("gloo:all_reduce", HOST, annotation=True, in_background=True), "communication"),
        (CPU, event("FSDP::all_gather", HOST, annotation=True), None),
        (CPU, event("something", HOST, in_background=True), None),
    ],
)
def test_on_a_gpu_kernels_count_and_on_a_host_operators(
    compute: Compute, seen: Any, kind: str | None, tmp_path: Path
) -> None:
    span = TorchTracer(tmp_path, compute, 1)._span(seen)
    assert (span and span.kind) == kind


# --- many ranks ------------------------------------------------------------------------------------


def a_rank(compute: Compute, folder: Path) -> list[float]:
    return run(folder, NEEDED, profile=True, compute=compute)


@pytest.mark.ranks
def test_ranks_are_compared_and_each_leaves_a_trace(tmp_path: Path) -> None:
    run_ranks(2, a_rank, tmp_path)
    told = read_json(tmp_path / "profile" / "profile.json")
    assert told["ranks"] == 2 and [part["name"] for part in told["parts"]] == PARTS
    assert all(part["slowest_ms"] >= part["ms"] > 0 for part in told["parts"])
    assert sorted(path.name for path in (tmp_path / "profile").glob("*.gz")) == [
        "trace-rank-0.json.gz", "trace-rank-1.json.gz",
    ]  # fmt: skip
    traced = told["traced"]
    assert traced["communication_ms"] >= traced["exposed_ms"] > 0
    assert traced["computing_ms"] + traced["exposed_ms"] + traced["idle_ms"] == pytest.approx(traced["step_ms"])
    assert any(operator["name"].startswith("gloo:") for operator in traced["operators"])
    text = (tmp_path / "profile" / "profile.txt").read_text(encoding="utf-8")
    assert "slowest rank" in text and "not hidden" in text
