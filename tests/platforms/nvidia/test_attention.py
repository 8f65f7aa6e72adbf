"""Sliding windows on GPUs, as far as a CPU can check them: the choice, and what the libraries are asked for.

What was seen on a GPU is in dev/LOG.md.
"""

import os
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanochat.common import UserError
from nanochat.platforms.nvidia.attention import NvidiaOperations
from nanochat.platforms.nvidia.platform import Nvidia
from nanochat.platforms.operations import Operations
from tests.support.tensors import draw

TORCHS, ROWS = "torch's own", "torch's FlashAttention"


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANOCHAT_FLASH_KERNEL", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> types.ModuleType:
    """Pretend that a library of this name is installed, with these functions."""
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def seen(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Attention as the other tests define it, in the layout of FlashAttention."""
    return Operations().attend(q, k, v, window, scale)


def test_a_package_comes_first_and_plain_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NvidiaOperations(7).name == TORCHS
    assert [NvidiaOperations(generation).name for generation in (8, 9, 10)] == [ROWS] * 3
    made = install(monkeypatch, "flash_attn_interface", flash_attn_func=lambda *a, **k: None)
    assert NvidiaOperations(9).name == "FlashAttention 3" and NvidiaOperations(9).flash is made.flash_attn_func
    assert NvidiaOperations(8).name == NvidiaOperations(10).name == ROWS  # that package is for Hopper
    plain = NvidiaOperations(9, plain=True)
    assert plain.name == TORCHS and not plain.muon.stacks
    assert plain.flash is None and plain.of_rows is None


def test_a_package_that_is_broken_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, "flash_attn_interface")
    assert NvidiaOperations(9).name == ROWS
    assert "flash_attn_interface is installed, but cannot be used: " in capsys.readouterr().err


def test_an_older_torch_without_windows_is_asked_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        raise AssertionError

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    operations = NvidiaOperations(8)
    q = draw(1, 200, 2, 8).bfloat16()
    assert operations.name == TORCHS
    assert torch.equal(operations.attend(q, q, q, 64), Operations().attend(q, q, q, 64))


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

    install(monkeypatch, "flash_attn_interface", flash_attn_func=flash_attn_func)
    operations = NvidiaOperations(9)
    q, k, v = (torch.randn(1, 200, 2, 8).bfloat16() for _ in range(3))
    assert operations.attend(q, k, v, window, 0.5) is v
    assert given == {"softmax_scale": 0.5, "causal": True, "window_size": sizes}
    given.clear()
    operations.attend(q.float(), k.float(), v.float(), window, 0.5)  # the library multiplies 16-bit numbers only
    assert not given


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_windows_of_torch_are_those_of_the_mask(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes them on GPUs only; here a stand-in reads the rows by their starts, as torch documents them."""
    asked: list[tuple[int, ...]] = []

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        starts = cu_seq_q.tolist()
        assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
        asked.append((max_q, max_k, *window_size))
        rows = [tuple(x[None, a:b] for x in (query, key, value)) for a, b in pairwise(starts)]
        return torch.cat([Operations().attend(q, k, v, window_size[0], scale)[0] for q, k, v in rows])

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    operations = NvidiaOperations(8)
    B, T, window = 3, 200, 64
    q = draw(B, T, 2, 16, seed=1).bfloat16()
    k, v = (draw(B, T, kv_heads, 16, seed=seed).bfloat16() for seed in (2, 3))
    torch.testing.assert_close(operations.attend(q, k, v, window, 0.3), seen(q, k, v, window, 0.3))
    assert asked == [(T, T, window, 0)]
    operations.attend(q, k, v, T, 0.3)  # no window: scaled_dot_product_attention is as fast
    operations.attend(q.float(), k.float(), v.float(), window, 0.3)
    assert len(asked) == 1


@pytest.fixture
def fourth(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for the package flash-attn-4, by torch's own attention; the settings of every call."""
    calls: list[dict[str, Any]] = []

    def weights(q: Tensor, k: Tensor, scale: float, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:  # (B, H, T, T)
        calls.append(settings)
        T = q.size(1)
        distance = torch.arange(T)[:, None] - torch.arange(T)
        hidden = (distance < 0) | (distance > settings.get("window_size_left", T))
        scores = (torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale).masked_fill(hidden, float("-inf"))
        sums = scores.logsumexp(dim=-1)
        return (scores - sums[..., None]).exp(), sums

    def forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, **settings: Any) -> tuple[Any, ...]:
        share, sums = weights(q, k, softmax_scale, settings)
        return torch.einsum("bhqk,bkhd->bqhd", share, v.float()).to(q.dtype), sums, None, None

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float, **settings: Any
    ) -> tuple[Tensor, ...]:
        share, sums = weights(q, k, softmax_scale, settings)
        assert torch.equal(sums, lse)
        g = dout.float()
        along = (g * out.float()).sum(dim=-1).transpose(1, 2)[..., None]
        by_score = share * (torch.einsum("bqhd,bkhd->bhqk", g, v.float()) - along) * softmax_scale
        parts = (
            torch.einsum("bhqk,bkhd->bqhd", by_score, k.float()),
            torch.einsum("bhqk,bqhd->bkhd", by_score, q.float()),
            torch.einsum("bhqk,bqhd->bkhd", share, g),
        )
        return tuple(part.to(q.dtype) for part in parts)

    for name in ("flash_attn", "flash_attn.cute"):
        install(monkeypatch, name, __path__=[])
    install(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", raising=False)
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", raising=False)
    return calls


def test_the_fourth_version_is_an_operator_with_gradients_that_compiles(
    fourth: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = NvidiaOperations(9)
    assert operations.name == "FlashAttention 4" == NvidiaOperations(10).name and NvidiaOperations(8).name == ROWS
    cache = Path(os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"])
    assert cache.parent == Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), "a folder that was checked"
    compiled = torch.compile(operations.attend, backend="aot_eager", fullgraph=True, dynamic=False)
    mixed = draw(2, 140, 2, 16, seed=4)
    for window, settings in ((32, {"window_size_left": 32, "window_size_right": 0}), (140, {})):
        for attend in (operations.attend, compiled):
            fourth.clear()
            q, k, v = (draw(2, 140, 2, 16, seed=n).bfloat16().requires_grad_() for n in range(3))
            (attend(q, k, v, window, 0.3) * mixed).sum().backward()
            found = [x.grad for x in (q, k, v)]
            q.grad = k.grad = v.grad = None
            (seen(q, k, v, window, 0.3) * mixed).sum().backward()
            for ours, theirs in zip(found, (q.grad, k.grad, v.grad), strict=True):
                torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.03)
            assert fourth == [{"causal": True, "return_lse": True} | settings, {"causal": True} | settings]
    torch._dynamo.reset()


def test_the_choice_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.nn.attention import varlen  # imports the compiler

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    auto, plain = Nvidia().operations("auto"), Nvidia().operations("plain")
    assert isinstance(auto, NvidiaOperations) and auto.of_rows is varlen.varlen_attn
    assert isinstance(plain, NvidiaOperations) and plain.of_rows is None
    said = capsys.readouterr().out
    assert "attention: torch's FlashAttention" in said and "attention: torch's own" in said
