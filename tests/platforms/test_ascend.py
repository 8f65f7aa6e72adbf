"""Chips by SoC version, the environment before loading and before collectives, ports, and errors in words."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.platforms.ascend import chips as ascend_chips
from nanochat.platforms.ascend import environment as ascend_environment
from nanochat.platforms.ascend import errors as ascend_errors
from nanochat.platforms.ascend.environment import PortBlocks
from tools_npu import environment

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("soc", "name", "bf16", "trains", "saturates"),
    [
        (100, "910A", False, True, True),
        (104, "910A", False, True, True),  # calls itself Ascend910B, and is not one of the 910B1..B4
        (202, "310P", False, False, False),
        (220, "910B1", True, True, False),
        (223, "910B3", True, True, False),
        (225, "910B4-1", True, True, False),
        (243, "310B", False, False, False),
        (255, "910C", True, True, False),
        (260, "950", True, True, False),
    ],
)
def test_a_chip_is_known_by_its_soc_version(soc: int, name: str, bf16: bool, trains: bool, saturates: bool) -> None:
    chip = ascend_chips.chip_of(soc)
    assert chip is not None
    assert (chip.name, chip.bf16, chip.trains, chip.saturates) == (name, bf16, trains, saturates)


@pytest.mark.parametrize("soc", [-1, 105, 206, 226, 244, 257, 261, 999])
def test_an_unknown_soc_version_has_no_chip(soc: int) -> None:
    assert ascend_chips.chip_of(soc) is None


def test_no_soc_version_belongs_to_two_chips() -> None:
    socs = [soc for chip in ascend_chips.CHIPS for soc in chip.socs]
    assert len(socs) == len(set(socs))


# --- the environment -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "variable"),
    [
        ("2.7.1", "PYTORCH_NPU_ALLOC_CONF"),
        ("2.9.0.post9", "PYTORCH_NPU_ALLOC_CONF"),
        ("2.10.0.post6", "PYTORCH_NPU_ALLOC_CONF"),
        ("2.10.0.post7", "PYTORCH_ALLOC_CONF"),  # TorchNPU 26.2
        ("2.11.0.post3", "PYTORCH_ALLOC_CONF"),
        ("2.12.0", "PYTORCH_NPU_ALLOC_CONF"),
        ("2.12.0.post3", "PYTORCH_ALLOC_CONF"),
        ("2.13.0+cpu", "PYTORCH_ALLOC_CONF"),
        ("2.14", "PYTORCH_ALLOC_CONF"),
        ("3.0a0", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_the_allocators_variable_goes_by_version_and_is_only_one(version: str, variable: str) -> None:
    environ: dict[str, str] = {}
    assert ascend_environment.prepare_loading(version, environ) == ""
    assert environ == {"TASK_QUEUE_ENABLE": "2", "CPU_AFFINITY_CONF": "2", variable: "expandable_segments:True"}
    assert environment.allocator_variable(version) == variable  # what set-up says to the shell


def test_what_the_user_has_set_is_left_alone() -> None:
    given = {"TASK_QUEUE_ENABLE": "1", "CPU_AFFINITY_CONF": "0", "PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64"}
    environ = dict(given)
    assert ascend_environment.prepare_loading("2.13.0", environ) == ""
    assert environ == given


def test_both_allocator_variables_are_refused_before_they_abort() -> None:
    environ = {"PYTORCH_NPU_ALLOC_CONF": "a", "PYTORCH_ALLOC_CONF": "b"}
    assert "unset PYTORCH_NPU_ALLOC_CONF" in ascend_environment.prepare_loading("2.13.0", environ)


def test_each_timeout_exceeds_the_one_inside_it() -> None:
    environ: dict[str, str] = {}
    assert ascend_environment.prepare_collectives(environ) > 1836
    assert environ == {"HCCL_CONNECT_TIMEOUT": "1200", "HCCL_WHITELIST_DISABLE": "1"}
    environ = {"HCCL_EXEC_TIMEOUT": "7000", "HCCL_CONNECT_TIMEOUT": "600"}
    assert ascend_environment.prepare_collectives(environ) > int(environ["HCCL_EVENT_TIMEOUT"]) > 7000
    assert environ["HCCL_CONNECT_TIMEOUT"] == "600"


def test_a_user_who_wants_to_wait_without_end_waits() -> None:
    environ = {"HCCL_EXEC_TIMEOUT": "0"}  # HCCL's word for never
    assert ascend_environment.prepare_collectives(environ) > 7 * 24 * 3600
    assert "HCCL_EVENT_TIMEOUT" not in environ


# --- ports ---------------------------------------------------------------------------------------


def test_a_taken_port_of_a_block_is_named_with_a_free_block() -> None:
    ports = PortBlocks()
    base = ports.free()
    assert base % 2 == 0 and ascend_environment.BLOCK == 32, "what CANN 8.5 and later take"
    assert ports.hold(base) == 0
    ports.release(base)
    with socket.socket() as other:
        other.bind(("", base + 5))
        other.listen()
        assert ascend_environment.port_taken(base + 5)
        assert ports.free(base) == base + ascend_environment.BLOCK
        taken = ports.hold(base)
        words = ascend_environment.block_words(base, taken)
    assert f"port {base + 5} is taken" in words
    assert f"use HCCL_IF_BASE_PORT={base + ascend_environment.BLOCK}" in words


A_JOB = """
from nanochat.platforms.ascend.environment import PortBlocks
from tools_npu import environment
ports = PortBlocks()
print(ports.free(hold=True), flush=True)
input()
"""


def test_a_block_ends_with_the_last_port() -> None:
    ports = PortBlocks()
    assert ports.hold(65520) in (0, *range(65520, 65536))
    ports.release(65520)


def test_jobs_that_start_together_take_blocks_of_their_own_until_they_end() -> None:
    """No job binds its ports before all jobs have chosen."""
    jobs = [
        subprocess.Popen([sys.executable, "-c", A_JOB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    blocks = [int(job.stdout.readline()) for job in jobs if job.stdout]
    assert len(set(blocks)) == 3
    ports = PortBlocks()
    assert ports.hold(blocks[0] + 7) == blocks[0] + 7  # a block that overlaps is refused too
    assert ports.free() not in blocks
    jobs[0].kill()  # a killed job releases its block too
    for job in jobs:
        job.communicate("\n")
    assert ports.hold(blocks[0]) == 0
    assert ports.free() != blocks[0] != PortBlocks().free()
    assert ports.hold(blocks[0]) == 0  # the block is still held here
    ports.release(blocks[0])


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 32.00 GiB total capacity)",
            "Lower --device_batch_size",
        ),
        ("Failed to allocate device memory, error code 207001", "TASK_QUEUE_ENABLE=1"),
        ("Unsupported soc version: Ascend950PR 9599", "--torch-npu VERSION"),
        ("SetPrecisionMode:AclInterface.cpp:72 NPU function error, error code is 500001", "numpy that fits this CANN"),
        ("EJ0003: Failed to bind the IP port", "HCCL_IF_BASE_PORT=6"),
        ("EI0019: port conflict", "HCCL_IF_BASE_PORT=6"),
        ("EI0006: getting socket times out", "HCCL_CONNECT_TIMEOUT"),
        ("EI0002: the wait execution of the Notify register times out", "HCCL_EXEC_TIMEOUT"),
        ("dcmi model initialized failed, because the device is used. ret is -8005", "HwHiAiUser"),
        ("CAUTION: The operator 'aten::x' is not currently implemented for the NPU backend", "--kernels plain"),
        ("Cannot re-initialize NPU in forked subprocess", "spawn"),
        ("call aclnnCast failed, detail:EZ1001: [PID: 1] dtype DT_DOUBLE, error code is 161002", "--kernels plain"),
        ("aclnnInplaceZero failed, error code is 561103", "ops (kernels) package"),
        ("rtSetDevice failed, error code is 107001 EE1001: The argument is invalid", "ASCEND_RT_VISIBLE_DEVICES"),
        ("SetDevice: error code is 507899, driver error:internal error EE9999: Inner Error!", "`dmesg`"),
        ("synchronize: error code is 507015 aicore exception EZ9999", "ASCEND_LAUNCH_BLOCKING=1"),
        ("EE9999: Inner Error!", "another code"),
        ("EI0004: The ranktable is invalid", "RANK_TABLE_FILE"),
        ("EI0015: Ranktable_Detect_Failed", "HCCL_CONNECT_TIMEOUT"),
        ("EI0006 EE9999: the code with a cause wins", "HCCL_CONNECT_TIMEOUT"),
        ("EZ9999: port 61070150, 1507015", "another code"),  # a code is a whole number
        ("tensor a must match tensor b", ""),
    ],
)
def test_known_errors_have_words_and_a_remedy(failure: str, words: str) -> None:
    said = ascend_errors.explain(failure)
    assert words in said if words else said == ""
    chinese = ascend_errors.explain(failure, "zh")
    assert (bool(chinese) == bool(said) and chinese != said) or not said


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            "libhccl.so: cannot open shared object file",
            "a library of CANN is not found: its set_env.sh was not sourced; source setup_ascend.sh",
        ),
        ("libascend_hal.so: cannot open shared object file", "a library of the driver"),
        ("libtorch_npu.so: undefined symbol: _ZN3c10", "built for another torch or CANN; bash setup_ascend.sh --fix"),
    ],
)
def test_what_a_failed_load_needs_is_said(failure: str, words: str) -> None:
    said = ascend_errors.cannot_load(f"{failure}\nmore")
    assert said.startswith(failure)
    assert words in said
    assert "more" not in said


def test_other_reasons_of_a_failed_load_are_kept_as_they_are() -> None:
    assert ascend_errors.cannot_load("drvInit failed\nsecond line") == "drvInit failed"


def test_a_chinese_terminal_is_told_the_reason_and_the_remedy_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert "请减小 --device_batch_size" in ascend_errors.explain("NPU out of memory")
    used = ascend_errors.in_use(3, 12 * 2**30, 64 * 2**30)
    assert "NPU 3 正被占用" in used and "python check_npu.py --processes" in used
    shut = ascend_errors.cannot_open(2, "odd things")
    assert "NPU 2 打不开：odd things" in shut and "python check_npu.py" in shut
