"""Sliding windows on GPUs, as far as a CPU can check them: the choice, block masks, FlexAttention's arithmetic."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask

from nanochat.common import UserError
from nanochat.nn.operations import Operations
from nanochat.platforms import nvidia_attention
from nanochat.platforms.nvidia import Nvidia
from nanochat.platforms.nvidia_attention import NvidiaOperations, block_mask

TORCHS, FLEX = "torch's own", "FlexAttention where compiled, else torch's own"


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("NANOCHAT_FLASH_KERNEL", raising=False)
    yield
    torch._dynamo.reset()


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> types.ModuleType:
    """Pretend that a library of this name is installed, with these functions."""
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_the_library_of_the_generation_comes_first_and_plain_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NvidiaOperations(9).name == FLEX
    assert NvidiaOperations(7).name == TORCHS
    install(monkeypatch, "flash_attn", flash_attn_func=lambda *a, **k: None)
    assert NvidiaOperations(9).name == "flash_attn" == NvidiaOperations(8).name
    install(monkeypatch, "flash_attn_interface", flash_attn_func=lambda *a, **k: None)
    assert NvidiaOperations(9).name == "flash_attn_interface"
    assert NvidiaOperations(8).name == "flash_attn"  # the newer library is for Hopper
    assert NvidiaOperations(10).name == FLEX
    plain = NvidiaOperations(9, plain=True)
    assert plain.name == TORCHS and not plain.stacks_matrices
    assert plain.flash is None and not plain.flex


def test_a_kernel_of_the_hub_is_taken_where_asked_for_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_FLASH_KERNEL", "someone/flash")
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(UserError, match=r"NANOCHAT_FLASH_KERNEL=someone/flash .* cannot be had"):
        NvidiaOperations(9)
    interface = types.SimpleNamespace(flash_attn_func=lambda *a, **k: None)
    install(monkeypatch, "kernels", get_kernel=lambda name: types.SimpleNamespace(flash_attn_interface=interface))
    made = NvidiaOperations(9)
    assert made.name == "someone/flash"
    assert made.flash is interface.flash_attn_func


@pytest.mark.parametrize("gives_sums", [False, True])
@pytest.mark.parametrize(("window", "sizes"), [(64, (64, 0)), (200, (-1, -1))])
def test_flash_attention_gets_windows_as_it_counts_them(
    gives_sums: bool, window: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Any:
        given.update(settings)
        return (v, q) if gives_sums else v

    install(monkeypatch, "flash_attn", flash_attn_func=flash_attn_func)
    operations = NvidiaOperations(8)
    q, k, v = (torch.randn(1, 200, 2, 8).bfloat16() for _ in range(3))
    assert operations.attend(q, k, v, window, 0.5) is v
    assert given == {"softmax_scale": 0.5, "causal": True, "window_size": sizes}
    assert (
        operations.attend_fast(q.float(), k.float(), v.float(), window, 0.5) is None
    )  # the library multiplies 16-bit numbers only


@pytest.mark.parametrize(("length", "window"), [(512, 128), (300, 128), (1000, 256), (640, 200), (256, 1), (129, 127)])
def test_block_masks_are_those_of_the_whole_mask(length: int, window: int) -> None:
    ours = block_mask(length, window, torch.device("cpu"))
    theirs = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k <= window), None, None, length, length, "cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_compiled_windows_are_those_of_torchs_attention_with_their_gradients(
    kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CPU FlexAttention refuses gradients, since its compiler has no kernel for them; its arithmetic has gradients.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda query, key, value: None)
    operations = NvidiaOperations(8)
    T, window = 300, 128
    shapes = ((1, T, 2, 16), (1, T, kv_heads, 16), (1, T, kv_heads, 16))
    generator = torch.Generator().manual_seed(1)
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    plain = [x.detach().clone().requires_grad_() for x in ours]
    assert operations.attend_fast(*ours, window, None) is None  # nothing is compiled: the block mask is made
    assert list(operations.block_masks) == [(T, window, 0)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = operations.attend_fast(q, k, v, window, None)
        assert out is not None
        return out

    out = torch.compile(attend, backend="aot_eager", dynamic=False, fullgraph=True)(*ours)
    expected = Operations().attend(*plain, window)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    mixed = torch.randn(out.shape, generator=generator)
    (out * mixed).sum().backward()
    (expected * mixed).sum().backward()
    for x, reference in zip(ours, plain, strict=True):
        torch.testing.assert_close(x.grad, reference.grad, atol=1e-5, rtol=1e-5)


def test_a_shape_that_was_not_seen_before_compilation_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = NvidiaOperations(8)
    monkeypatch.setattr(nvidia_attention, "is_compiling", lambda: True)
    x = torch.randn(1, 300, 2, 16)
    assert operations.attend_fast(x, x, x, 128, None) is None
    assert operations.attend_fast(x, x, x, 299, None) is None  # no window
    assert operations.attend_fast(x[..., :8], x[..., :8], x[..., :8], 128, None) is None


def test_evaluating_many_lengths_keeps_few_block_masks() -> None:
    operations = NvidiaOperations(8)
    for length in range(130, 160):
        x = torch.randn(1, length, 1, 16)
        assert operations.attend_fast(x, x, x, 64, None) is None
    assert len(operations.block_masks) == nvidia_attention.MOST_MASKS
    assert (130, 64, 0) in operations.block_masks  # training comes first, and its masks stay


def test_the_choice_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    auto, plain = Nvidia().operations("auto"), Nvidia().operations("plain")
    assert isinstance(auto, NvidiaOperations) and auto.flex
    assert isinstance(plain, NvidiaOperations) and not plain.flex
    said = capsys.readouterr().out
    assert "attention: FlexAttention where compiled" in said and "attention: torch's own" in said
