"""The operations of every kind of chip on the emulated NPU, against a plain softmax and the CPU; what is refused."""

import pytest
import torch
from torch import Tensor

from nanochat import device
from nanochat.attention import cache_mask
from nanochat.common import UserError
from nanochat.platforms.ascend import kernels as ascend_kernels
from nanochat.platforms.ascend.chips import AscendChip, chip_of
from nanochat.platforms.ascend.kernels import AscendFused
from nanochat.platforms.ascend.platform import Ascend
from nanochat.platforms.base import requested_kernels
from nanochat.platforms.cpu.platform import Cpu
from nanochat.platforms.operations import KernelChoice, Operations
from nanochat.run import open_folder
from nanochat.train.flags import RunFlags
from tests.emulated_npu.worker import on_npu
from tests.support.tensors import draw
from tests.support.tiny_model import pretend

PLAIN = Operations()  # the reference, on the CPU


def qkv(T: int, H: int, kv_heads: int, D: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [draw(2, T, heads, D, seed=i, dtype=dtype) for i, heads in enumerate((H, kv_heads, kv_heads))]


def on_this_chip(asked: KernelChoice = "auto") -> Operations:
    """What models compute with on the emulated chip."""
    return Ascend().operations(asked)


def check_attention(
    T: int, window: int, kv_heads: int, scale: float | None = None, operations: Operations | None = None
) -> None:
    """Forward and backward of attend() on the NPU in fp32, against plain attention in fp64 on the CPU."""
    operations = operations or on_this_chip()
    given = qkv(T, 4, kv_heads, 16)
    ours = [x.npu().requires_grad_() for x in given]
    plain = [x.double().requires_grad_() for x in given]
    mixed = draw(2, T, 4, 16, seed=9)
    out = operations.attend(*ours, window, scale)
    expected = PLAIN.attend(*plain, window, scale)
    torch.testing.assert_close(out.cpu().double(), expected, atol=2e-6, rtol=1e-5)
    (out * mixed.npu()).sum().backward()
    (expected * mixed).sum().backward()
    for x, reference in zip(ours, plain, strict=True):
        torch.testing.assert_close(x.grad.cpu().double(), reference.grad, atol=1e-5, rtol=1e-4)


# --- 910B and 910C: fused operators ----------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(("T", "window"), [(1, 1), (24, 100), (24, 23), (24, 22), (200, 64)])
@on_npu()
def test_fused_attention_is_a_banded_softmax_with_its_gradients(T: int, window: int, kv_heads: int) -> None:
    check_attention(T, window, kv_heads)
    check_attention(T, window, kv_heads, scale=0.36)


@on_npu()
def test_fused_attention_launches_one_operator_each_way_and_makes_its_mask_once() -> None:
    from tests.emulated_npu import log

    ours = [x.npu().requires_grad_() for x in qkv(300, 4, 2, 16)]
    operations = on_this_chip()
    assert isinstance(operations, AscendFused)
    operations.attend(*ours, 64).sum()
    with log.record() as seen:
        out = operations.attend(*ours, 128)
    assert dict(seen.operators) == {"npu_fusion_attention": 1}
    with log.record() as seen:
        out.backward(out.detach())
    assert dict(seen.operators) == {"npu_fusion_attention_grad": 1}
    assert operations.causal_mask(out.device).shape == (2048, 2048)
    assert len(operations.constants) == 1


@on_npu()
def test_a_residual_is_added_in_the_norm_with_one_operator_each_way() -> None:
    from tests.emulated_npu import log

    x, y = (draw(2, 5, 32, seed=i).npu().requires_grad_() for i in (1, 2))
    with log.record() as seen:
        normed, total = on_this_chip().add_norm(x, y)
        (normed + total).sum().backward()
    assert (seen.operators["npu_add_rms_norm"], seen.operators["npu_rms_norm_backward"]) == (1, 1)


@on_npu()
def test_a_mask_made_while_sampling_serves_training() -> None:
    operations = on_this_chip()
    with torch.inference_mode():
        operations.norm(operations.attend(*(x.npu() for x in qkv(8, 2, 2, 16)), 4))
    check_attention(8, 4, 2, operations=operations)
    operations.norm(draw(3, 16).npu().requires_grad_()).sum().backward()


# --- attention over a cache --------------------------------------------------------------------------


def unneeded() -> torch.Tensor:
    raise AssertionError("nobody needs the last keys")


def check_lengths(T: int, window: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Rows hold 3, 40 and 64 keys, the last T keys are new: attend by lengths on the NPU, by a mask on the CPU."""
    D, K, ends = 16, 64, (3, 40, 64)
    k, v = draw(3, K, kv_heads, D, seed=1, dtype=dtype), draw(3, K, kv_heads, D, seed=2, dtype=dtype)
    q = draw(3, T, 4, D, seed=3, dtype=dtype)
    places = torch.tensor([[end - T + t for t in range(T)] for end in ends])
    expected = PLAIN.masked(q.float(), k.float(), v.float(), cache_mask(places, K, window))
    last = (places.npu()[:, :1] - window).clamp_min(0) + torch.arange(min(window + 1, K), device="npu")
    operations = on_this_chip()
    out = operations.by_lengths(q.npu(), k.npu(), v.npu(), [T] * 3, ends, lambda: last, window)
    assert out is not None
    torch.testing.assert_close(out.cpu().float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [1, 16, 63, 64])
@pytest.mark.parametrize("T", [1, 3])
@on_npu()
def test_attention_by_lengths_is_attention_by_mask(T: int, window: int, kv_heads: int) -> None:
    check_lengths(T, window, kv_heads, torch.bfloat16)


@on_npu()
def test_padding_columns_do_not_disturb_the_real_ones() -> None:
    q, k, v = (draw(2, size, 2, 16, seed=i, dtype=torch.float16) for i, size in enumerate((4, 20, 20)))
    fused = on_this_chip()
    alone = fused.by_lengths(q[:1, :2].npu(), k[:1].npu(), v[:1].npu(), [2], [7], unneeded, 5)
    both = fused.by_lengths(q.npu(), k.npu(), v.npu(), [2, 4], [7, 20], unneeded, 5)
    torch.testing.assert_close(both[:1, :2].cpu(), alone.cpu())


@on_npu()
def test_formats_and_widths_that_the_operator_lacks_go_by_mask() -> None:
    fused = on_this_chip()
    for operations, x in (
        (fused, torch.zeros(1, 1, 2, 16, device="npu")),
        (fused, torch.zeros(1, 1, 2, 24, device="npu", dtype=torch.bfloat16)),
        (PLAIN, torch.zeros(1, 1, 2, 16, dtype=torch.bfloat16)),
    ):
        assert operations.by_lengths(x, x, x, [1], [1], unneeded, 5) is None


@on_npu(chip="310P")
def test_an_inference_card_attends_by_matmuls_in_fp32() -> None:
    """Its own operators take fp16 alone; NANOCHAT_DTYPE=float32 asks for another format."""
    given = qkv(24, 4, 2, 16, torch.float32)
    with torch.inference_mode():
        out = on_this_chip().attend(*(x.npu() for x in given), 5)
    torch.testing.assert_close(out.cpu(), PLAIN.attend(*given, 5), atol=1e-4, rtol=1e-4)


@on_npu(chip="310P")
def test_an_inference_card_attends_with_its_own_operators() -> None:
    from tests.emulated_npu import log

    given, operations = qkv(24, 4, 2, 16, torch.float16), on_this_chip()
    with torch.inference_mode(), log.record() as seen:
        for window, scale in ((5, None), (100, None), (5, 0.4)):
            out = operations.attend(*(x.npu() for x in given), window, scale)
            expected = PLAIN.attend(*(x.float() for x in given), window, scale)
            torch.testing.assert_close(out.cpu().float(), expected, atol=0.01, rtol=0.01)
    assert seen.operators["npu_prompt_flash_attention"] == 3
    with torch.inference_mode(), log.record() as seen:
        for window in (1, 16, 64):
            check_lengths(1, window, 2, torch.float16)
    assert seen.operators["npu_incre_flash_attention"] == 3
    with torch.inference_mode():
        q = draw(2, 3, 4, 16, dtype=torch.float16)
        mask = cache_mask(torch.tensor([[4, 5, 6], [21, 22, 23]]), 24, 8)
        out = operations.masked(q.npu(), given[1].npu(), given[2].npu(), mask.npu())
        expected = PLAIN.masked(q.float(), given[1].float(), given[2].float(), mask)
    torch.testing.assert_close(out.cpu().float(), expected, atol=0.01, rtol=0.01)


# --- 910A: blocks of matmuls -------------------------------------------------------------------------


@on_npu(chip="910A")
def test_fp16_attention_in_blocks_counts_no_overflow() -> None:
    compute = device.compute_init("npu")
    assert compute.scaler
    device.clear_overflow(compute)
    ours = [x.npu().requires_grad_() for x in qkv(64, 4, 4, 16, torch.float16)]
    compute.operations.attend(*ours, 16).sum().backward()
    assert [float(flag) for flag in device.overflows(compute)] == [0.0]
    torch.full((4,), 60000.0, dtype=torch.float16, device="npu") * 2
    assert [float(flag) != 0 for flag in device.overflows(compute)] == [True]
    device.clear_overflow(compute)
    assert [float(flag) for flag in device.overflows(compute)] == [0.0]


# --- what is asked for -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANOCHAT_KERNELS", raising=False)


def test_fused_kernels_are_refused_where_there_is_no_npu() -> None:
    assert not Cpu().operations("plain").muon.stacks
    assert Cpu().operations("auto").muon.stacks
    with pytest.raises(UserError, match="--kernels fused was asked for, but the device is cpu, which has no fused"):
        device.compute_init("cpu", "fused")


def test_the_environment_asks_where_the_flag_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_KERNELS", "plain")
    assert requested_kernels("auto") == "plain"
    assert requested_kernels("fused") == "fused"
    assert not device.compute_init("cpu").operations.muon.stacks
    monkeypatch.setenv("NANOCHAT_KERNELS", "quick")
    with pytest.raises(UserError, match="NANOCHAT_KERNELS must be auto, fused or plain, got 'quick'"):
        device.compute_init("cpu")


def npu(soc: int) -> Ascend:
    """The platform of an NPU of this SoC version; there is no such device."""
    platform = Ascend()
    platform.chip = chip_of(soc) or AscendChip(f"SoC {soc}", (soc,), True, "listed", 0, "not known", 40)
    return platform


@pytest.mark.parametrize(("soc", "who"), [(102, "a 910A"), (202, "a 310P"), (241, "a 310B")])
def test_fused_kernels_are_refused_on_chips_without(soc: int, who: str) -> None:
    with pytest.raises(UserError, match=f"--kernels fused was asked for, but {who}.* has no fused attention"):
        npu(soc).operations("fused")


@pytest.mark.parametrize("name", ["auto", "fused"])
def test_an_operator_that_is_missing_is_an_error_and_no_fallback(
    name: KernelChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ascend_kernels, "missing", lambda operators: ["npu_rotary_mul"])
    with pytest.raises(UserError, match=r"torch_npu lacks npu_rotary_mul, .* a 910B3 .* or give --kernels plain"):
        npu(223).operations(name)
    npu(223).operations("plain")


@pytest.mark.parametrize(
    ("soc", "kind"),
    [(223, "fused"), (251, "fused"), (102, "chunked"), (202, "inference"), (260, "listed"), (241, "listed")],
)
def test_auto_takes_what_the_chip_has_and_says_so(
    soc: int, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ascend_kernels, "missing", lambda operators: [])
    assert npu(soc).operations("auto").name == kind
    assert f"kernels: {kind}" in "".join(capsys.readouterr())


@on_npu()
def test_an_operator_that_torch_npu_lacks_is_missing() -> None:
    import torch_npu

    assert ascend_kernels.missing(ascend_kernels.NEEDS["fused"]) == []
    rotary = torch_npu.npu_rotary_mul
    del torch_npu.npu_rotary_mul
    try:
        assert ascend_kernels.missing(ascend_kernels.NEEDS["fused"]) == ["npu_rotary_mul"]
    finally:
        torch_npu.npu_rotary_mul = rotary


@on_npu()
def test_plain_kernels_on_an_npu_use_no_operator_of_its_own() -> None:
    from tests.emulated_npu import log

    plain = device.compute_init("npu", "plain").operations
    with log.record() as seen:
        plain.norm(draw(2, 16).npu())
    assert "npu_rms_norm" not in seen.operators
    check_attention(24, 5, 2, operations=plain)


def test_an_inference_card_is_not_trained_on() -> None:
    with pytest.raises(UserError, match=r"a 310P is for inference only, it cannot train.*chat_cli"):
        open_folder("base", "d2", RunFlags(), RunFlags(), pretend(npu(202)))
