"""The Ascend platform with a pretended torch_npu: loading, formats, order of initialisation, ports, peaks, errors."""

import datetime
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanochat import device
from nanochat.common import UserError
from nanochat.device import Compute, choose, compute_init
from nanochat.platforms.ascend import kernels as ascend_kernels
from nanochat.platforms.ascend.chips import AscendChip, chip_of
from nanochat.platforms.ascend.environment import PortBlocks
from nanochat.platforms.ascend.platform import Ascend
from nanochat.platforms.cpu.platform import Cpu

ROOT = Path(__file__).resolve().parent.parent.parent
GIB = 2**30


@dataclass
class Card:
    """A pretended torch.npu that records its calls."""

    soc: int = 223
    count: int = 8
    free: int = 60 * GIB
    broken: str = ""
    compiles: bool | None = None  # None: as the chip does by default
    calls: list[str] = field(default_factory=list)

    def is_bf16_supported(self) -> bool:
        return self.soc >= 220

    def get_soc_version(self) -> int:
        return self.soc

    def device_count(self) -> int:
        return self.count

    def set_device(self, index: int) -> None:
        if self.broken:
            raise RuntimeError(self.broken)
        self.calls.append(f"set_device {index}")

    def set_compile_mode(self, jit_compile: bool) -> None:
        self.compiles = jit_compile

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, 64 * GIB

    def get_device_name(self, index: int) -> str:
        return f"Ascend910B3 {index}"


def known(soc: int) -> AscendChip:
    chip = chip_of(soc)
    assert chip is not None
    return chip


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    for name in ("NANOCHAT_DTYPE", "NANOCHAT_PEAK_TFLOPS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "HCCL_IF_BASE_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HCCL_CONNECT_TIMEOUT", "HCCL_WHITELIST_DISABLE", "HCCL_EVENT_TIMEOUT"):
        monkeypatch.setenv(name, "1")  # so that pytest restores what compute_init() sets
    made = Card()
    monkeypatch.setattr(torch, "npu", made, raising=False)
    monkeypatch.setattr(Ascend, "unavailable", lambda self: "")
    monkeypatch.setattr(ascend_kernels, "missing", lambda operators: [])
    monkeypatch.setattr(
        torch, "device", lambda name, index=0: f"{name}:{index}"
    )  # without torch_npu there is no such device type
    return made


@pytest.mark.parametrize(
    ("soc", "dtype", "why", "scaler"),
    [
        (223, torch.bfloat16, "the NPU has bf16", False),
        (102, torch.float16, "a gradient scaler is used", True),
        (202, torch.float16, "for inference only", True),
    ],
)
def test_the_format_follows_the_chip(card: Card, soc: int, dtype: torch.dtype, why: str, scaler: bool) -> None:
    card.soc = soc
    compute = compute_init("npu")
    assert compute.dtype == dtype
    assert why in compute.dtype_reason
    assert compute.scaler == scaler
    assert compute.chip is chip_of(soc)


def test_bf16_is_refused_on_a_chip_without(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_DTYPE", "bfloat16")
    assert compute_init("npu").dtype == torch.bfloat16
    card.soc = 104
    with pytest.raises(UserError, match="bfloat16 was asked for, but this NPU has no bf16"):
        compute_init("npu")
    monkeypatch.delenv("NANOCHAT_DTYPE")
    with pytest.raises(UserError, match="bfloat16 was asked for, but this NPU has no bf16"):
        compute_init("npu").in_format("bfloat16")


def test_a_910a_is_warned_of_float32_and_others_are_not(
    card: Card, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    for soc, warned in ((223, False), (102, True)):
        card.soc = soc
        assert compute_init("npu").dtype == torch.float32
        assert ("a 910A multiplies float32 matrices in float16" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(("setting", "compiles"), [("", False), ("0", False), ("1", True)])
def test_operators_are_compiled_for_every_shape_only_if_that_is_asked_for(
    card: Card, setting: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_JIT_COMPILE", setting)
    compute_init("npu")
    assert card.compiles is compiles


@pytest.mark.parametrize(
    ("soc", "ranks", "visible", "refused", "warned"),
    [
        (102, 7, "", True, False),
        (102, 8, "", False, False),
        (102, 2, "4,5,6", False, False),
        (102, 2, "3,4", False, True),
        (223, 7, "", False, False),
        (223, 2, "3,4", False, False),
    ],
)
def test_only_groups_of_cards_that_collectives_join_are_started(
    card: Card, soc: int, ranks: int, visible: str, refused: bool, warned: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    card.soc = soc
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("HCCL_IF_BASE_PORT", "x")  # nothing is reserved
    if refused:
        with pytest.raises(UserError, match=r"join 1, 2, 4 or 8 cards of a host, not 7: start 4 processes"):
            Ascend().ranks_met(0, 0, ranks)
    else:
        Ascend().ranks_met(0, 0, ranks)
    assert ("all are among 0 to 3 or among 4 to 7" in capsys.readouterr().err) == warned


def as_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what torchrun sets for one of four ranks."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)


def test_the_device_is_taken_before_the_process_group(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(3, monkeypatch)
    monkeypatch.setenv("HCCL_IF_BASE_PORT", "61008")  # the group is pretended, so the ranks cannot agree on a block
    given: dict[str, Any] = {}

    def init(both: str, timeout: datetime.timedelta) -> None:
        card.calls.append(f"group {both}")
        given["timeout"] = timeout

    monkeypatch.setattr(dist, "init_process_group", init)
    compute_init("npu")
    assert card.calls == ["set_device 3", "group cpu:gloo,npu:hccl"]
    assert given["timeout"] > datetime.timedelta(seconds=1836)


def test_more_ranks_than_cards_are_refused(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.count = 2
    as_rank(2, monkeypatch)
    with pytest.raises(UserError, match=r"shows 2 npu device\(s\).*use --nproc_per_node=2 or fewer"):
        compute_init("npu")


def test_a_card_that_cannot_be_opened_is_named(card: Card) -> None:
    card.broken = "aclrtSetDevice failed, error code 507033"
    with pytest.raises(UserError, match="NPU 0 cannot be opened: aclrtSetDevice failed"):
        compute_init("npu")


@pytest.mark.parametrize(("free", "warns"), [(20, True), (60, False)])
def test_a_card_in_use_is_a_warning(card: Card, free: int, warns: bool, capsys: pytest.CaptureFixture[str]) -> None:
    card.free = free * GIB
    compute_init("npu")
    assert (f"NPU 0 is in use: {free} of 64 GiB are free" in "".join(capsys.readouterr())) == warns


def test_a_taken_meeting_port_is_named_with_a_free_one(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(UserError, match=rf"MASTER_PORT={port} is taken.*MASTER_PORT=\d+"):
            device._join(Cpu())


def meet(platform: Ascend, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call ranks_met() as rank 2 + local_rank of four ranks on two hosts; the answers of the others are pretended."""
    monkeypatch.setattr(dist, "all_reduce", lambda blocks: blocks.add_(torch.tensor([61008, 0, 0, 0])))
    platform.ranks_met(2 + local_rank, local_rank, 4)


def test_a_host_chooses_a_free_block_of_ports(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PortBlocks, "free", lambda self, hold: 61040)
    meet(Ascend(), 0, monkeypatch)
    assert os.environ.pop("HCCL_IF_BASE_PORT") == "61040"  # this host's first rank is 2, its choice is not 61008


def test_a_block_that_is_given_and_taken_is_refused(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Ascend()
    base = platform.ports.free()
    monkeypatch.setenv("HCCL_IF_BASE_PORT", str(base))
    meet(platform, 0, monkeypatch)
    assert os.environ["HCCL_IF_BASE_PORT"] == str(base)
    platform.ports.release(base)
    with socket.socket() as other:
        other.bind(("", base))
        other.listen()
        with pytest.raises(UserError, match=f"port {base} is taken by another"):
            meet(platform, 0, monkeypatch)
        meet(platform, 1, monkeypatch)  # the second rank of a host leaves the ports to the first


def test_mfu_has_the_chips_peak_and_its_source(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = compute_init("npu")
    assert device.peak_flops(compute) == (313e12, "910B3, data sheet, bf16 dense")
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    assert device.peak_flops(compute) == (313e12, "910B3，稠密算力（数据手册, bf16）")
    card.soc = 251
    assert device.peak_flops(compute_init("npu"))[0] == 376e12
    monkeypatch.setenv("NANOCHAT_PEAK_TFLOPS", "354")
    assert device.peak_flops(compute) == (354e12, "NANOCHAT_PEAK_TFLOPS")


def test_what_the_table_leaves_open_is_asked_of_the_device(card: Card) -> None:
    card.soc = 260
    compute = compute_init("npu")
    assert compute.chip == replace(known(260), memory_gib=64)
    assert compute.dtype == torch.bfloat16 and compute.platform.peak_flops() is None
    card.soc = 241  # torch_npu says that this chip has bf16, because it only compares numbers
    assert compute_init("npu").dtype == torch.float16


def test_an_error_of_the_npu_becomes_a_message(card: Card) -> None:
    def work(cfg: Any, compute: Compute) -> None:
        raise RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB\nmore")

    with pytest.raises(UserError, match=r"Lower --device_batch_size.*It said: NPU out of memory") as refused:
        device.with_compute(work)(SimpleNamespace(device_type="npu"))
    assert isinstance(refused.value.__cause__, RuntimeError)


def test_an_unknown_error_is_not_dressed_up(card: Card) -> None:
    def work(cfg: Any, compute: Compute) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        device.with_compute(work)(SimpleNamespace(device_type="npu"))


def test_cards_are_counted_only_where_the_npu_is_the_device(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_type", "npu")
    assert device.cards() == (chip_of(223), 8)
    monkeypatch.setattr(device, "device_type", "cpu")
    assert device.cards() == (None, 0)


# --- torch_npu that cannot be used ---------------------------------------------------------------

BROKEN = "raise ImportError('libhccl.so: cannot open shared object file\\nmore lines')\n"
NO_DRIVER = """
class npu:
    @staticmethod
    def is_available():
        raise RuntimeError('drvInit failed')
"""
NO_CARD = """
class npu:
    @staticmethod
    def is_available():
        return False
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that Python searches first for packages; a torch_npu imported from it is forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    yield folder
    sys.modules.pop("torch_npu", None)


def test_a_choice_of_cards_that_are_not_there_is_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "torch_npu.py").write_text(NO_CARD)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")
    assert Ascend().unavailable().endswith("sees no NPU with ASCEND_RT_VISIBLE_DEVICES=3")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (BROKEN, "torch_npu could not be loaded: libhccl.so: cannot open shared object file (a library of CANN"),
        (NO_DRIVER, "torch_npu could not be loaded: drvInit failed"),
        (NO_CARD, "torch_npu loaded, but sees no NPU"),
        ("raise OSError()\n", "torch_npu could not be loaded: OSError()"),
    ],
)
def test_a_torch_npu_that_fails_is_only_a_reason(site: Path, code: str, reason: str) -> None:
    (site / "torch_npu.py").write_text(code)
    assert Ascend().unavailable().startswith(reason)
    name, _, why = choose(None)
    assert name != "npu"
    assert f"no npu: {reason}" in why
    with pytest.raises(UserError, match="device npu was asked for but cannot be used: torch_npu"):
        choose("npu")


FRESH = """
import threading
from nanochat import device
import torch, torch.distributed
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
assert threading.active_count() == 1
print(device.device_type, "|", device.reason)
"""


@pytest.mark.slow
def test_importing_initialises_nothing_even_beside_a_broken_backend(tmp_path: Path) -> None:
    """The pretended package registers itself with torch, as the real one does; torch could not be imported with it."""
    (tmp_path / "torch_npu.py").write_text(BROKEN)
    about = tmp_path / "torch_npu-2.13.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13\n")
    (about / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    clean = {k: v for k, v in os.environ.items() if k not in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "NANOCHAT_DEVICE")}
    fresh = subprocess.run(
        [sys.executable, "-c", FRESH], cwd=ROOT, env={**clean, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert fresh.returncode == 0, fresh.stderr
    assert "no npu: torch_npu could not be loaded: libhccl.so: cannot open shared object file" in fresh.stdout
