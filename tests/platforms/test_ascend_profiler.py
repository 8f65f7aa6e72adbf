"""--profile on emulated NPUs: torch_npu's profiler, its files, and the message when files are missing."""

import json
from pathlib import Path

import pytest

from bench.updates import update
from nanochat import device
from nanochat.common import UserError, base_dir, read_json
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import Optimizers, Rates
from nanochat.platforms.ascend.profiler import AscendTracer
from nanochat.platforms.layers import accelerate
from nanochat.runtime import parallel, profiling
from nanochat.runtime.profiling import NEEDED, TRACED, PlatformTracer, TorchTracer, tracer_of
from nanochat.step import LossScale
from tests.emulated_npu.worker import on_npu, run_ranks
from tests.support.tiny_training import CPU, Batches


def run(compute: Compute, folder: Path) -> None:
    """Run a profiled stage of a tiny model, sharded over the ranks."""
    model = GPT(
        GPTConfig(sequence_len=16, vocab_size=290, n_layer=2, n_head=3, n_kv_head=3, n_embd=54),
        compute.dtype,
    )
    accelerate(model, compute.operations)
    model.init_weights(1)
    model.to(compute.device)
    parallel.shard(model, model.shard_groups(), compute)
    optimizers = Optimizers(model, model.parameter_roles(), 54, Rates(), 0.1, compute.dtype)
    profiled = profiling.Profile("base", folder, NEEDED, compute)
    for step in range(NEEDED):
        profiled.begin_step()
        update(model, optimizers, Batches(step, compute), LossScale(), compute, mark=profiled.mark)
        profiled.end_step()


@on_npu()
def test_a_step_is_told_part_by_part_and_traced_by_torch_npu() -> None:
    run(device.compute_init("npu"), base_dir() / "run")
    folder = base_dir() / "run" / "profile"
    told = read_json(folder / "profile.json")
    assert [part["name"] for part in told["parts"]][:3] == ["data", "forward", "backward"]
    assert all(part["ms"] > 0 and part["host_ms"] > 0 for part in told["parts"])
    traced = told["traced"]
    assert 0 < traced["computing_ms"] < traced["step_ms"] and traced["idle_ms"] > 0
    names = [operator["name"] for operator in traced["operators"]]
    assert {"mm", "bmm"} & set(names) and not [name for name in names if ":" in name]
    (trace,) = told["files"]
    assert json.loads(Path(trace).read_text(encoding="utf-8"))["traceEvents"]
    text = (folder / "profile.txt").read_text(encoding="utf-8")
    assert "host ms" in text and "idle" in text


@pytest.mark.npu
@pytest.mark.ranks
def test_every_rank_leaves_a_folder_of_its_own(tmp_path: Path) -> None:
    run_ranks(2, run, tmp_path)
    folders = sorted(path.name.split("_")[0] for path in (tmp_path / "profile").glob("*_ascend_pt"))
    assert folders == ["rank0", "rank1"]
    told = read_json(tmp_path / "profile" / "profile.json")
    assert told["ranks"] == 2 and told["traced"]["exposed_ms"] > 0


# --- files that are not as they should be ----------------------------------------------------------


class Silent:
    """torch_npu's profiler without CANN's tools: it prints an error and leaves no files."""

    def stop(self) -> None:
        pass


def tracer(folder: Path) -> PlatformTracer:
    made = object.__new__(AscendTracer)
    made.folder, made.name, made._profiler = folder, "rank0", Silent()
    return PlatformTracer(made, TRACED)


def write(folder: Path, steps: str, kernels: str) -> None:
    folder.mkdir(parents=True)
    (folder / "step_trace_time.csv").write_text(steps)
    (folder / "kernel_details.csv").write_text(kernels)


STEPS = "Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free\n"
KERNELS = "Step Id,Device_id,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us)\n"


def test_the_tables_of_torch_npu_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "rank0_77_20261121_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    rows = "0,1,5000,1000,500,1500,2000\n0,2,7000,1000,500,1500,0\n"
    kernels = "1,0,aclnnMm_MatMulV2_1,MatMulV2,AI_CORE,0,3000,1\n1,0,aclnnMm_MatMulV2_2,MatMulV2,AI_CORE,4,6000,1\n"
    write(folder, STEPS + rows, KERNELS + kernels + "1,0,hcom_allGather__1,N/A,COMMUNICATION,9,1500,1\n")
    traced, trace = tracer(tmp_path).finish()
    assert (traced.step_ms, traced.computing_ms, traced.communication_ms) == (8.0, 6.0, 1.5)
    assert (traced.exposed_ms, traced.idle_ms) == (1.0, 1.0)
    assert [(o.name, o.ms) for o in traced.operators] == [("MatMulV2", 3.0), ("hcom_allGather__1", 0.5)]
    assert trace == folder / "trace_view.json"


def test_a_profiler_that_leaves_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="left no folder ASCEND_PROFILER_OUTPUT"):
        tracer(tmp_path).finish()


@pytest.mark.parametrize(
    ("steps", "kernels", "said"),
    [
        (STEPS, KERNELS, "step_trace_time"),
        ("a,b\n1,2\n", "", "step_trace_time"),
        (STEPS + "0,1,5,1,0,1,2\n", "Name\nx\n", "kernel_details"),
    ],
)
def test_tables_of_another_kind_are_named(tmp_path: Path, steps: str, kernels: str, said: str) -> None:
    write(tmp_path / "rank0_77_20261121_ascend_pt" / "ASCEND_PROFILER_OUTPUT", steps, kernels)
    with pytest.raises(UserError, match=f"left no {said}.* with the columns"):
        tracer(tmp_path).finish()


def test_other_devices_are_traced_by_torch(tmp_path: Path) -> None:
    assert isinstance(tracer_of(tmp_path, CPU, TRACED), TorchTracer)
