"""Running out of memory: how it is recognised, and the next value to try."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanochat import device
from nanochat.common import UserError
from nanochat.platforms.cpu.platform import Cpu
from nanochat.platforms.nvidia.platform import Nvidia
from nanochat.train.fit import memory
from tests.support.tiny_model import on_cpu, pretend

CUDA = pretend(Nvidia())


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 60.96 GiB total capacity)"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_every_vendors_words_are_known(failure: RuntimeError) -> None:
    assert memory.ran_out(failure)
    next_one = r"pass of 8 row\(s\).*Try --device_batch_size=4:"
    with pytest.raises(UserError, match=next_one) as refused, memory.advising(8, 32):
        raise failure
    assert refused.value.__cause__ is failure


@pytest.mark.parametrize("failure", [RuntimeError("shape mismatch"), ValueError("out of memory"), KeyError("x")])
def test_other_errors_are_left_alone(failure: Exception) -> None:
    assert not memory.ran_out(failure)
    with pytest.raises(type(failure)) as raised, memory.advising(8, 32):
        raise failure
    assert raised.value is failure


@pytest.mark.parametrize(("rows", "of", "next_one"), [(8, 32, 4), (6, 12, 4), (5, 15, 3), (7, 7, 1), (2, 64, 1)])
def test_the_next_value_divides_a_ranks_rows(rows: int, of: int, next_one: int) -> None:
    assert f"Try --device_batch_size={next_one}:" in str(memory.advice(rows, of))


def test_a_pass_of_one_row_is_told_what_else_helps() -> None:
    said = str(memory.advice(1, 16))
    assert "--device_batch_size" not in said
    assert "--shard=full" in said and "--max_length" in said and "--max_seq_len" in said and "--depth" not in said


def fake_card(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Pretend that torch.cuda has these functions."""
    monkeypatch.setattr(Nvidia, "module", SimpleNamespace(**functions))


def test_the_budget_is_what_is_free_and_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_card(monkeypatch, mem_get_info=lambda: (700, 10_000), memory_reserved=lambda: 300)
    assert (memory.reachable(CUDA), memory.budget(CUDA)) == (1000, 900)
    assert memory.reachable(on_cpu()) == device.memory_total(on_cpu())


def test_the_peak_counts_from_the_start_of_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fake_card(
        monkeypatch, empty_cache=lambda: calls.append("empty"), reset_peak_memory_stats=lambda: calls.append("reset"),
        synchronize=lambda: calls.append("wait"), max_memory_reserved=lambda: 77,
    )  # fmt: skip
    memory.start_watch(CUDA)
    assert memory.peak(CUDA) == 77
    assert calls == ["empty", "reset", "wait"]
    memory.start_watch(on_cpu())  # the host has nothing to reset


@pytest.mark.parametrize(("tokens", "kept"), [(4096, True), (8192, False)])
def test_large_passes_on_a_cpu_make_cheap_values_again(tokens: int, kept: bool) -> None:
    """A norm that feeds a matmul is kept for its gradient, unless the pass is too large for the caches."""
    weight = torch.ones(16, 8, requires_grad=True)

    def work(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x * 2, (8,)) @ weight.mT

    x = torch.ones(64, 8, requires_grad=True)
    saved: list[torch.Tensor] = []
    torch.compiler.reset()
    fast = torch.compile(work, backend="aot_eager_decomp_partition", dynamic=False)
    with Cpu().saving_memory(tokens), torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t) or t, lambda t: t
    ):  # fmt: skip
        out = fast(x)
    wide = [t for t in saved if t.shape == x.shape]
    assert (len(wide) > 1) is kept  # the input, and the output of the norm
    (gradient,) = torch.autograd.grad(out.sum(), weight)
    torch.testing.assert_close(gradient, torch.full((16, 8), 64.0))
