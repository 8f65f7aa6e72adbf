"""check_npu.py on a host without an NPU, on imitated hosts, on broken hosts, and on the emulated NPU."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import check_npu
from nanochat.planner import calibration
from tests.support.ascend_hosts import make_host, smi_table
from tools_npu import device_checks, host, host_checks, lines, numerics, setup
from tools_npu.device_checks import RankResult
from tools_npu.lines import FAIL, PASS, SKIP, WARN, Line

ROOT = Path(__file__).resolve().parent.parent.parent
CHINESE = re.compile("[\u4e00-\u9fff]")
TOPOLOGY = "\t NPU0 NPU1 CPU Affinity\nNPU0 X {link} 0-23\nNPU1 {link} X 0-23\n"


def run(*flags: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, str(ROOT / "check_npu.py"), *flags], env=os.environ | environment,
                          capture_output=True, text=True, cwd="/", stdin=subprocess.DEVNULL)  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def fake_smi(folder: Path, table: str, link: str = "HCCS") -> str:
    """A PATH that starts with an npu-smi that prints this table and a topology."""
    folder.mkdir()
    (folder / "table").write_text(table)
    (folder / "topo").write_text(TOPOLOGY.format(link=link))
    script = f'#!/bin/bash\ncase "$*" in *topo) cat {folder}/topo ;; *) cat {folder}/table ;; esac\n'
    (folder / "npu-smi").write_text(script)
    (folder / "npu-smi").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def by_name(found: list[Line]) -> dict[str, Line]:
    return {line.name: line for line in found}


# --- the whole script without an NPU ---------------------------------------------------------------


@pytest.mark.slow
def test_a_host_without_npu_gets_valid_json_exit_1_and_the_causes(tmp_path: Path) -> None:
    code, out, err = run("--json", ASCEND_ROOT_PREFIX=str(tmp_path), HOME=str(tmp_path), PATH="/usr/bin:/bin")
    told = json.loads(out)
    assert (code, told["ok"], err) == (1, False, "")
    assert [cause["name"] for cause in told["causes"]] == ["driver", "cann", "cards", "npu-smi", "torch_npu"]
    assert all(cause["text"] and cause["remedy"] for cause in told["causes"])
    assert {check["status"] for check in told["checks"]} <= set(lines.STATUSES)
    assert all(check["text_zh"] and not CHINESE.search(check["text"]) for check in told["checks"])
    assert all(cause["remedy"].isascii() and cause["remedy_zh"] for cause in told["causes"])
    assert told["checks"][-1]["status"] == SKIP
    assert sum(told["counts"].values()) == len(told["checks"])


@pytest.mark.slow
def test_lines_name_cause_and_remedy_in_the_language_of_the_locale(tmp_path: Path) -> None:
    where = {"ASCEND_ROOT_PREFIX": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    code, out, _ = run(**where, LC_ALL="zh_CN.UTF-8")
    assert code == 1
    assert "FAIL  driver: 未安装驱动" in out and "处理：" in out and "bash setup_ascend.sh" in out
    assert out.splitlines()[-1].startswith("check_npu: ") and "driver" in out.splitlines()[-1]


def test_locale_decides_the_language() -> None:
    assert lines.language_of({"LANG": "zh_CN.UTF-8"}) == "zh"
    assert lines.language_of({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}) == lines.language_of({}) == "en"


def test_the_python_of_venv_comes_before_one_that_brings_its_own_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_npu, "ROOT", tmp_path)
    monkeypatch.setattr(check_npu.importlib.util, "find_spec", lambda name: None)
    assert check_npu.python_with_torch() == ""
    (line,) = check_npu.device_lines("", "", {}, False, tmp_path / "log")
    assert (line.status, line.name, line.remedy) == (FAIL, "torch", "bash setup_ascend.sh")
    own = tmp_path / ".venv/bin/python"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/bash\nexit ${NO_TORCH:-0}\n")
    own.chmod(0o755)
    monkeypatch.setattr(check_npu.importlib.util, "find_spec", lambda name: name)  # as in conda's environments
    assert check_npu.python_with_torch() == str(own)
    monkeypatch.setenv("NO_TORCH", "1")
    assert check_npu.python_with_torch() == sys.executable


def test_the_log_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    target, base = tmp_path / "target", tmp_path / "own"
    target.write_text("mine")
    base.mkdir()
    assert check_npu.log_file(base) == base / "check_npu.log"
    (base / "check_npu.log").unlink()
    (base / "check_npu.log").symlink_to(target)
    first, second = check_npu.log_file(base), check_npu.log_file(base)
    assert first != second and {first.parent, second.parent} == {tmp_path}  # names that nobody can foresee
    with pytest.raises(OSError):
        check_npu.own_file(base / "check_npu.log")
    assert target.read_text() == "mine"


# --- the host --------------------------------------------------------------------------------------


def test_a_healthy_host_passes(tmp_path: Path) -> None:
    made = make_host(tmp_path / "host")
    env = {
        "ASCEND_ROOT_PREFIX": str(made.root), "HOME": str(tmp_path), "PATH": fake_smi(tmp_path / "bin", smi_table(2)),
        "ASCEND_HOME_PATH": str(made.home), "ASCEND_OPP_PATH": str(made.home / "opp"),
    }  # fmt: skip
    found = list(host_checks.all_of(setup.take_inventory(env), env, "2.9.0"))
    named = by_name(found)
    assert [line.name for line in found if line.status == FAIL] == []
    for name in ("driver", "cann", "variables of CANN", "cards", "npu-smi", "topology", "visible cards", "variables"):
        assert named[name].status == PASS, named[name]
    assert named["npu-smi"].data["cards"][1]["total_mb"] == 65536
    assert named["topology"].english == "2 cards, linked by HCCS"


@pytest.mark.parametrize(
    ("layout", "file", "text", "status"),
    [
        ("cann", "share/info/ops_nn/version.info", "Version=8.5.0\n", PASS),
        ("cann", "share/info/ops_nn/version.info", "Version=8.3.0\n", FAIL),
        ("cann", "share/info/ops_math/version.info", "Version=8.5.1\n", WARN),
        ("ascend-toolkit", "opp_kernel/version.info", "Version=8.5.T3.B1\nversion_dir=8.2.RC1\n", FAIL),
        ("ascend-toolkit", "version.cfg", "opp_kernel_running_version=[7.6.0.1.220:8.0.0]\n", FAIL),
        ("ascend-toolkit", "opp/built-in/op_impl/ai_core/tbe/kernel/ascend910b/a.o", "", PASS),
        ("ascend-toolkit", "opp/version.info", "Version=8.5.0\n", WARN),  # the toolkit has this folder without kernels
    ],
)
def test_the_ops_package_must_be_there_and_have_the_version_of_the_toolkit(
    tmp_path: Path, layout: str, file: str, text: str, status: str
) -> None:
    home = make_host(tmp_path / "host", layout, "8.5.0").home
    for installed in home.glob("*/**/version.info"):
        installed.unlink()
    (home / file).parent.mkdir(parents=True, exist_ok=True)
    (home / file).write_text(text)
    line = host_checks.ops_package(host.Cann(str(home), "", "8.5.0", layout))
    assert line.status == status
    assert status == PASS or ("8.5.0" in line.remedy_in("en") and "8.5.0" in line.remedy_in("zh"))


def smi_lines(tmp_path: Path, table: str, link: str = "HCCS", visible: str = "") -> dict[str, Line]:
    env = {
        "PATH": fake_smi(tmp_path / "bin", table, link),
        "ASCEND_ROOT_PREFIX": str(tmp_path),
        "ASCEND_RT_VISIBLE_DEVICES": visible,
    }
    return by_name(list(host_checks.smi(env, True)))


def test_an_unhealthy_card_fails_and_slow_links_give_a_warning(tmp_path: Path) -> None:
    found = smi_lines(tmp_path, smi_table(2, health="Alarm"), link="SYS")
    assert (found["card 0"].status, found["topology"].status) == (FAIL, WARN)


@pytest.mark.parametrize("card", ["0       0", "0        "])  # newer cards have rows with the number of the NPU alone
def test_a_card_in_use_is_named_with_its_processes(tmp_path: Path, card: str) -> None:
    table = smi_table(1, used_mb=40000) + (
        f"| {card}                 | 4711          | python                   | 36000                   |\n"
    )
    line = smi_lines(tmp_path, table)["card 0"]
    assert line.status == FAIL and "4711 python 36000 MB" in line.english
    assert line.remedy == "python check_npu.py --processes"


@pytest.mark.parametrize(
    ("used_mb", "visible", "status"), [(60000, "", FAIL), (60000, "0,1", FAIL), (60000, "1", WARN), (20000, "", WARN)]
)
def test_a_card_that_is_full_is_not_ready_unless_it_is_left_out(
    tmp_path: Path, used_mb: int, visible: str, status: str
) -> None:
    table = smi_table(1, used_mb=used_mb) + smi_table(3).replace(smi_table(1), "")
    line = smi_lines(tmp_path, table, visible=visible)["card 0"]
    assert line.status == status
    assert "ASCEND_RT_VISIBLE_DEVICES=1,2" in line.remedy_in("en") and "=1,2" in line.remedy_in("zh")


@pytest.mark.parametrize(("visible", "status"), [("", FAIL), ("1", WARN)])
def test_an_unhealthy_card_that_is_left_out_fails_nothing(tmp_path: Path, visible: str, status: str) -> None:
    table = smi_table(1, health="Alarm") + smi_table(2).replace(smi_table(1), "")
    line = smi_lines(tmp_path, table, visible=visible)["card 0"]
    assert line.status == status and "ASCEND_RT_VISIBLE_DEVICES=1" in line.remedy_in("en")


def test_a_missing_npu_smi_fails_a_host_but_not_a_container_with_cards(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "ASCEND_ROOT_PREFIX": str(tmp_path)}
    assert [line.status for there in (True, False) for line in host_checks.smi(env, there)] == [WARN, FAIL]


def test_permission_refused_by_the_driver_names_the_group(tmp_path: Path) -> None:
    (tmp_path / "npu-smi").write_text("#!/bin/bash\necho 'dcmi init failed, ret is -8005'\nexit 1\n")
    (tmp_path / "npu-smi").chmod(0o755)
    (line,) = host_checks.smi({"PATH": f"{tmp_path}:/bin:/usr/bin"}, True)
    assert line.status == FAIL and "usermod -aG HwHiAiUser" in line.remedy_in("en")


def test_device_files_without_permission_fail() -> None:
    shut = setup.Inventory(None, None, [host.Device("/dev/davinci0", False)], [host.Device("/dev/hisi_hdc", True)])
    named = by_name(list(host_checks.permissions(shut, {})))
    assert named["permissions"].status == FAIL and "/dev/davinci0" in named["permissions"].english
    assert named["device files"].status == FAIL and "davinci_manager" in named["device files"].english


def test_a_user_without_a_name_is_told_about_device_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as in a container that was started with --user 12345."""
    monkeypatch.setenv("NANOCHAT_LANG", "en")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    shut = setup.Inventory(None, None, [host.Device("/dev/davinci0", False)], [])
    setup.check_permissions(shut, {}, fix=False, dry=True)
    assert "12345 may not read and write /dev/davinci0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "name", "status"),
    [
        ({}, "visible cards", PASS),
        ({"NPROC_PER_NODE": "2"}, "visible cards", PASS),
        ({"NPROC_PER_NODE": "4"}, "ranks", FAIL),
        ({"NPROC_PER_NODE": "2", "ASCEND_RT_VISIBLE_DEVICES": "1"}, "ranks", FAIL),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,7"}, "visible cards", FAIL),
        ({"WORLD_SIZE": "8"}, "ranks", WARN),
    ],
)
def test_ranks_are_compared_with_visible_cards(variables: dict[str, str], name: str, status: str) -> None:
    found = setup.Inventory(None, None, [host.Device(f"/dev/davinci{n}", True) for n in range(2)], [])
    assert by_name(list(host_checks.launch(found, variables)))[name].status == status


@pytest.mark.parametrize("port", ["295000", "10.0.0.1:29500", "-1"])
def test_a_master_port_that_is_none_is_named(port: str) -> None:
    assert by_name(list(host_checks.variables({"MASTER_PORT": port}, "")))["MASTER_PORT"].status == FAIL


# --- the process with torch ------------------------------------------------------------------------


def from_fake_child(tmp_path: Path, script: str) -> list[Line]:
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/bash\ntell() {{ eval \"echo '$1' >&$3\"; }}\npipe=$3\n{script}\n".replace("&$3", "&$pipe")
    )
    python.chmod(0o755)
    return list(check_npu.device_lines(str(python), "", dict(os.environ), False, tmp_path / "log"))


def test_a_crash_in_a_check_is_a_finding_with_its_name(tmp_path: Path) -> None:
    found = from_fake_child(
        tmp_path,
        'tell "{\\"line\\": [\\"torch\\", \\"PASS\\", \\"2.9.0\\", \\"2.9.0\\"]}"\n'
        'tell "{\\"begin\\": \\"rotary\\"}"\necho "EZ9999: inner error" >&2\nkill -SEGV $$',
    )
    assert [(line.name, line.status) for line in found] == [("torch", PASS), ("rotary", FAIL)]
    assert "ended with code -11. EZ9999: inner error" in found[1].english
    assert str(tmp_path / "log") in found[1].remedy_in("zh")


def test_a_check_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_npu, "DEVICE_SECONDS", 0.2)
    (line,) = from_fake_child(tmp_path, 'tell "{\\"begin\\": \\"npu:0\\"}"\nexec sleep 60')
    assert (line.name, line.status) == ("npu:0", FAIL)
    assert "no answer within" in line.english


class Told(device_checks.Output):
    """Keeps the lines instead of sending them."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def write(self, message: dict[str, object]) -> None:
        if "line" in message:
            self.lines.append(Line(*message["line"]))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("raised", "words", "remedy"),
    [
        ("libhccl.so: cannot open shared object file: No such file or directory", "CANN", "source setup_ascend.sh"),
        ("libascend_hal.so: cannot open shared object file", "driver", "source setup_ascend.sh"),
        ("/x/libtorch_npu.so: undefined symbol: _ZN3c10", "another torch or CANN", "bash setup_ascend.sh --fix"),
        ("Two accelerators cannot be used at the same time in PyTorch", "the build of torch for CPUs", "--fix"),
        ("/x/python: symbol lookup error: /x/libtorch_npu.so", "another torch or CANN", "bash setup_ascend.sh --fix"),
        ("/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found", "another torch or CANN", "bash setup_ascend.sh"),
        ("Failed to load the backend extension: torch_npu", "another torch or CANN", "bash setup_ascend.sh --fix"),
        ("torch_npu: error code ERR00007", "another accelerator", "bash setup_ascend.sh --fix"),
        ("No module named 'torch_npu'", "not installed", "bash setup_ascend.sh"),
    ],
)
def test_why_torch_npu_does_not_load_is_named(
    raised: str, words: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_npu.py").write_text(f"raise ImportError({raised!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    told = Told()
    assert device_checks.load(told, "9.0.0") == ""
    line = told.lines[-1]
    assert (line.name, line.status) == ("torch_npu", FAIL)
    assert words in line.english and remedy in line.remedy_in("en") and raised in line.english


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "DEVICE", "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_operation_agrees_with_its_reference_on_the_host(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch)
    allowed = numerics.TOLERANCE[dtype]
    for check in (
        numerics.matmul,
        numerics.stacked_matmul,
        numerics.norm,
        numerics.rotary,
        numerics.loss,
        numerics.decode,
    ):
        assert check(dtype) <= allowed, check.__name__
    assert numerics.attend(dtype, 255) <= allowed
    assert numerics.attend(dtype, 64) <= allowed
    assert numerics.attend(dtype, 255, kv_heads=2) <= allowed
    assert numerics.adamw() <= numerics.TOLERANCE[torch.float32]


def test_an_operation_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanochat.platforms.operations import Operations

    on_cpu(monkeypatch)
    attend = Operations.attend
    # one key too few
    monkeypatch.setattr(Operations, "attend", lambda self, q, k, v, window: attend(self, q, k, v, window - 1))
    assert numerics.attend(torch.bfloat16, 64) > numerics.TOLERANCE[torch.bfloat16]
    monkeypatch.setattr(Operations, "norm", lambda self, x: x * float("nan"))
    assert numerics.norm(torch.bfloat16) == float("inf")


def failing(message: str) -> Callable[..., float]:
    def check(*_: object, **__: object) -> float:
        raise RuntimeError(message)

    return check


def test_a_chip_without_fp16_passes_if_training_uses_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch)
    for name in ("there_and_back", "attend", "decode", "norm", "rotary", "adamw"):
        monkeypatch.setattr(numerics, name, lambda *_, **__: 0.0)
    matmul = numerics.matmul
    lacks = failing("call aclnnMm failed, error code is 161002")
    monkeypatch.setattr(numerics, "matmul", lambda dtype: lacks() if dtype == torch.float16 else matmul(dtype))
    told = Told()
    device_checks.check_numerics(told, None, torch.bfloat16)
    named = by_name(told.lines)
    assert named["matmul float16"].status == WARN and {line.status for line in told.lines} == {PASS, WARN}
    told = Told()
    device_checks.check_numerics(told, None, torch.float16)  # a chip that trains in fp16 needs it
    assert by_name(told.lines)["matmul float16"].status == FAIL


@pytest.mark.parametrize(
    "message",
    [
        "call aclnnInplaceZero failed, error code is 561103 EZ9999: Parse dynamic kernel config fail.",
        "aclnnAddRmsNorm or aclnnAddRmsNormGetWorkspaceSize not in libopapi.so, or libopapi.so not found",
    ],
)
def test_an_operator_that_fails_without_its_ops_package_names_the_package(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "norm", failing(message))
    for name in ("there_and_back", "matmul", "stacked_matmul", "attend", "decode", "rotary", "loss", "adamw"):
        monkeypatch.setattr(numerics, name, lambda *_, **__: 0.0)
    told = Told()
    device_checks.check_numerics(told, None, torch.bfloat16)
    line = by_name(told.lines)["rms norm bfloat16"]
    assert line.status == FAIL and "ops" in line.remedy_in("en") and "算子包" in line.remedy_in("zh")


def answers(**changes: object) -> list[RankResult]:
    first = {"wrong": [], "gb_per_s": 21.0}
    second = {"wrong": [], "gb_per_s": 20.0, **changes}
    logged = f"noise\n{json.dumps(second)}\n[EVENT] HCCL(9,python): a line of CANN's log\n"
    return [RankResult(0, 0, json.dumps(first), ""), RankResult(1, 0, logged, "")]


def test_collectives_are_judged_one_by_one() -> None:
    told = Told()
    device_checks.report_collectives(told, answers(), 2)
    assert len(told.lines) == 7 and {line.status for line in told.lines} == {PASS}
    assert told.lines[-1].data == {"gb_per_s": 20.0, "ranks": 2}
    told = Told()
    device_checks.report_collectives(told, answers(wrong=["all_gather"]), 2)
    assert [line.name for line in told.lines if line.status == FAIL] == ["hccl all_gather"]
    assert "rank 1" in by_name(told.lines)["hccl all_gather"].english


def test_a_rank_that_fails_is_explained_by_its_error_code(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told()
    broken = RankResult(1, 1, "", "Traceback\nRuntimeError: EI0019: port 60000 has been bound")
    device_checks.report_collectives(told, [answers()[0], broken], 2)
    (line,) = told.lines
    assert (
        line.status == FAIL
        and all("HCCL_IF_BASE_PORT=" in line.remedy_in(language) for language in ("en", "zh"))
        and "rank 1" in line.english
    )


def ranks_of(*programs: str) -> list[subprocess.Popen[str]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(["bash", "-c", program], **pipes) for program in programs]  # type: ignore[call-overload]


def test_the_rank_that_fails_is_named_and_not_those_that_wait_for_it() -> None:
    waits = "exec sleep 60"
    results = device_checks.wait_for_ranks(ranks_of(waits, "echo 'EI0019: port' >&2; exit 1", waits))
    assert [result.exit_code for result in results] == [-9, 1, -9]
    told = Told()
    device_checks.report_collectives(told, results, 3)
    assert [line.english for line in told.lines] == ["rank 1: EI0019: port"]


def test_ranks_that_all_wait_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "HCCL_SECONDS", 0.1)
    results = device_checks.wait_for_ranks(ranks_of("exec sleep 60", "echo {}"))
    assert [(result.exit_code, result.output) for result in results] == [(-9, ""), (0, "{}\n")]
    assert results[0].errors == "\nno answer within 0.1 s"


# --- the emulated NPU ------------------------------------------------------------------------------


def emulated(chip: str, devices: int, *flags: str) -> tuple[int, dict[str, dict[str, str]]]:
    command = [sys.executable, "-m", "tests.emulated_npu", "--chip", chip, "--devices", str(devices), "--",
               sys.executable, "check_npu.py", "--json", *flags]  # fmt: skip
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.stdout, f"{done.stderr} after {time.monotonic() - start:.0f} s"
    told = json.loads(done.stdout)
    return done.returncode, {check["name"]: check for check in told["checks"]}


NUMERICS = ("pinned copy", "matmul", "stacked matmul", "attention", "rms norm", "rotary", "chunked loss", "fused AdamW")


@pytest.mark.npu
def test_two_emulated_910b3_pass_every_numeric_and_collective_check() -> None:
    code, found = emulated("910B3", 2, "--bench")
    assert [name for name, check in found.items() if check["status"] == FAIL] == [], found
    assert code == 0 and found["numpy and CANN"]["status"] == PASS
    numeric = {name: check for name, check in found.items() if name.startswith(NUMERICS) and "speed" not in name}
    assert len(numeric) == 12 and {check["status"] for check in numeric.values()} == {PASS}, numeric
    collective = {name: check for name, check in found.items() if name.startswith("hccl")}
    assert len(collective) == 7 and {check["status"] for check in collective.values()} == {PASS}
    assert {"launch", "copies", "attention speed", "matmul speed", "long matmul speed", "bench file"} <= set(found)
    bench = calibration.read(calibration.path_of())
    assert bench is not None and (bench.chip, bench.cards, bench.number_format) == ("910B3", 2, "bfloat16")
    assert bench.link_gb_per_s == found["hccl bandwidth"]["data"]["gb_per_s"]  # type: ignore[index]
    assert bench.toolkit == found["cann"]["data"].get("version", bench.toolkit)  # type: ignore[attr-defined]


@pytest.mark.npu
@pytest.mark.parametrize(("chip", "cards"), [("910A", 1), ("310P", 2)])
def test_chips_without_bf16_skip_it_and_fail_nothing(chip: str, cards: int) -> None:
    """Two 310P have no collectives to check."""
    code, found = emulated(chip, cards, *(["--bench"] if chip == "310P" else []))
    assert [(name, check["text"]) for name, check in found.items() if check["status"] == FAIL] == []
    assert code == 0
    assert found["matmul bfloat16"]["status"] == SKIP and found["hccl"]["status"] == SKIP
    assert found["attention causal float16"]["status"] == (SKIP if chip == "310P" else PASS)
    assert found["attention decode float16"]["status"] == PASS
    if chip == "310P":  # there is nothing to calibrate, and the speed is told in both languages
        assert found["bench"]["status"] == SKIP and "bench file" not in found
        assert "(estimate, fp16)" in found["matmul speed"]["text"] and "估计值" in found["matmul speed"]["text_zh"]
