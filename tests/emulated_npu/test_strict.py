"""What the emulated chips refuse like the hardware, and what their host shows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.emulated_npu import log
from tests.emulated_npu.worker import npu_environment, on_npu

NPU = "npu:0"
ROOT = Path(__file__).resolve().parent.parent.parent


@on_npu()
def test_float64_and_complex_numbers_can_be_moved_and_not_computed_with() -> None:
    for dtype in (torch.float64, torch.complex64):
        x = torch.ones(2, 2, dtype=dtype).to(NPU)
        assert torch.equal(x.cpu(), torch.ones(2, 2, dtype=dtype))
        for function in (lambda t: t + t, torch.sum, lambda t: t @ t, torch.abs):
            with pytest.raises(RuntimeError, match=r"161002.*not implemented for DT_(DOUBLE|COMPLEX64) on"):
                function(x)
    assert torch.ones(2, dtype=torch.float64, device=NPU).float().sum().item() == 2


@on_npu()
def test_integers_have_no_matrix_product() -> None:
    x = torch.ones(2, 2, dtype=torch.int64, device=NPU)
    assert (x + x).sum().item() == 8
    with pytest.raises(RuntimeError, match=r"'mm'.*DT_INT64"):
        x @ x


@on_npu(chip="910A")
def test_a_910a_has_no_bf16_in_any_spelling_of_an_operator() -> None:
    import torch_npu

    assert not torch.npu.is_bf16_supported()
    assert (torch.npu.get_device_name(0), torch.npu.utils.get_soc_version()) == ("Ascend910A", 102)
    x = torch.ones(2, 2, dtype=torch.bfloat16).to(NPU)
    calls = [
        lambda: x + x,
        lambda: x.add_(1),
        lambda: x.lerp_(x, 0.5),
        lambda: torch.mul(x, x, out=torch.empty_like(x)),
        lambda: x.float(),
        lambda: torch.ones(2, device=NPU).bfloat16(),
        lambda: torch.nn.functional.rms_norm(x, (2,)),
        lambda: torch_npu.npu_rms_norm(x, torch.ones(2, dtype=torch.bfloat16, device=NPU)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="DT_BFLOAT16 on Ascend910A"):
            call()
    assert (torch.ones(2, 2, dtype=torch.float16, device=NPU) @ torch.ones(2, 2, dtype=torch.float16, device=NPU)).sum()


@on_npu(chip="910A")
def test_a_910a_saturates_in_fp16_and_only_its_flag_tells() -> None:
    import torch_npu

    torch.npu.clear_npu_overflow_flag()
    x = torch.full((2,), 60000.0, device=NPU, dtype=torch.float16)
    assert not torch.npu.get_npu_overflow_flag()
    assert (x + x).tolist() == [65504, 65504]
    assert torch.npu.get_npu_overflow_flag()
    assert torch_npu.npu_get_float_status(torch.zeros(8, device=NPU))[0].item() == 1
    torch.npu.amp.GradScaler.clear_npu_overflow_flag()
    assert not torch.npu.get_npu_overflow_flag()
    assert torch.full((1,), -1e6, device=NPU).half().item() == -65504
    assert torch.npu.get_npu_overflow_flag()


@on_npu()
def test_a_910b_gives_infinity() -> None:
    x = torch.full((2,), 60000.0, device=NPU, dtype=torch.float16)
    assert (x + x).tolist() == [float("inf")] * 2
    with pytest.raises(RuntimeError, match="Unsupported api"):
        torch.npu.get_npu_overflow_flag()


@on_npu()
def test_an_operator_that_the_package_does_not_list_falls_back_with_a_warning() -> None:
    x = torch.ones(3, device=NPU)
    with log.record() as seen, pytest.warns(UserWarning, match=r"aten::hypot.*fall back to run on the CPU"):
        assert torch.hypot(x, x).shape == (3,)
    assert seen.unsupported == {"hypot": 1}
    assert seen.launches == 0


@on_npu(TORCH_NPU_FALLBACK_CPU_DISABLE="1")
def test_falling_back_can_be_forbidden() -> None:
    x = torch.ones(3, device=NPU)
    with pytest.raises(RuntimeError, match=r"aten::hypot' is not currently supported.*FALLBACK_CPU_DISABLE"):
        torch.hypot(x, x)
    assert (x + x).sum().item() == 6


@on_npu()
def test_the_log_counts_kernels_and_no_views_or_allocations() -> None:
    x, y = torch.ones(4, 4, device=NPU, requires_grad=True), torch.ones(4, 4, device=NPU)
    with log.record() as seen:
        z = torch.empty(4, 4, device=NPU)
        (x.T.reshape(2, 8)[:, None].squeeze().view(4, 4).transpose(0, 1).detach() + y).unsqueeze_(0)
        torch.add(y, y, out=z)
        z.mul_(2)
        (x * y).sum().backward()
    assert seen.by_phase["forward"] == {"copy": 1, "add": 2, "mul": 2, "sum": 1, "fill": 1}  # fill: ones for backward
    assert seen.by_phase["backward"] == {"mul": 1}
    assert seen.launches == 8
    assert not seen.synchronisations and not seen.copies


@on_npu()
def test_the_log_counts_copies_and_what_the_host_waits_for() -> None:
    host = torch.ones(10)
    with log.record() as seen:
        x = host.to(NPU)
        host.pin_memory().to(NPU, non_blocking=True)
        x.cpu()
        x.to("cpu", non_blocking=True)
        x.to("npu:1")
        x.sum().item()
        x.nonzero()
        torch.npu.synchronize()
    assert seen.copies == {"host to device": 2, "device to host": 2, "device to device": 1}
    assert seen.copied_bytes["host to device"] == 80
    assert seen.synchronisations == {
        "copy to device": 1, "copy to host": 1, "item": 1, "nonzero": 1, "synchronize": 1
    }  # fmt: skip
    with log.record() as seen:
        host.to(NPU, non_blocking=True)  # from pageable memory
        x[torch.tensor([1, 2])]
    assert seen.synchronisations == {"copy of pageable memory": 1, "index on the host": 1}


@on_npu()
def test_the_log_counts_multi_tensor_operators_as_they_are_launched() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, device=NPU)) for _ in range(50)]
    for parameter in parameters:
        parameter.grad = torch.ones(3, device=NPU)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.step()
    with log.record() as seen:
        optimizer.step()
        torch._foreach_mul_([parameter.grad for parameter in parameters], 2.0)
    assert seen.operators["_fused_adamw"] == 50
    assert seen.operators["_foreach_mul"] == 2
    gradients = [parameter.grad for parameter in parameters]
    with log.record() as seen:  # overloads without a kernel in the real package
        torch._foreach_mul_(gradients, torch.tensor(2.0, device=NPU))
        torch._foreach_lerp_(gradients, gradients, [0.5] * 50)
    assert seen.operators == {"mul": 50, "lerp": 50}


@on_npu(chip="910A")
def test_a_first_generation_chip_has_no_multi_tensor_kernels() -> None:
    with log.record() as seen:
        torch._foreach_mul_([torch.ones(3, device=NPU) for _ in range(5)], 2.0)
    assert seen.operators["_foreach_mul"] == 5


@pytest.mark.npu
def test_without_the_launcher_the_stub_says_what_it_is(tmp_path: Path) -> None:
    env = npu_environment(tmp_path)
    del env["NANOCHAT_EMULATED_NPU"]
    done = subprocess.run(
        [sys.executable, "-c", "import torch_npu"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "this torch_npu is an emulation" in done.stderr


@pytest.mark.npu
def test_another_torch_than_the_launchers_is_named(tmp_path: Path) -> None:
    env = npu_environment(tmp_path)
    env["NANOCHAT_EMULATED_NPU"] = json.dumps({**json.loads(env["NANOCHAT_EMULATED_NPU"]), "torch": "2.12.0"})
    done = subprocess.run(
        [sys.executable, "-c", "import torch_npu"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"made for torch 2.12.0, and this Python has {torch.__version__}" in done.stderr


@pytest.mark.npu
def test_the_launcher_runs_a_command_on_a_pretended_host(tmp_path: Path) -> None:
    npu_environment(tmp_path / "unused")  # skips the test, or compiles the device
    script = (
        "set -e; npu-smi info; npu-smi info -t topo; ls $ASCEND_ROOT_PREFIX/dev; source $ASCEND_HOME_PATH/set_env.sh; "
        "cat $ASCEND_ROOT_PREFIX/usr/local/Ascend/driver/version.info; exit 7"
    )
    command = [sys.executable, "-m", "tests.emulated_npu", "--chip", "910_93xx", "--devices", "3", "--", "bash", "-c"]
    done = subprocess.run([*command, script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    for words in ("| 1     Ascend910", "3161 / 65536", "NPU2       HCCS       HCCS       X", "davinci2\n", "Version="):
        assert words in done.stdout
    assert "davinci3" not in done.stdout
    assert all(len(line) == 98 for line in done.stdout.splitlines() if line[:1] in "|+" and line)


@pytest.mark.npu
@pytest.mark.parametrize("arguments", [["--chip", "910B"], ["--devices", "9", "--", "true"], ["--devices", "2"]])
def test_the_launcher_refuses_what_it_cannot_emulate(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "tests.emulated_npu", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage:" in done.stderr
