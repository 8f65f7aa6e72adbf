"""Products in FP8, on a CPU, which computes the same products. What they save on a GPU is in dev/LOG.md."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import Tensor

from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError
from nanochat.gpt import GPT, GPTConfig
from nanochat.platforms.base import Platform
from nanochat.platforms.cpu.platform import Cpu
from nanochat.platforms.nvidia import fp8
from nanochat.platforms.nvidia.platform import Nvidia
from nanochat.platforms.operations import Operations
from nanochat.runtime.tracking import read_metrics
from tests.support.qwens import tiny_qwen
from tests.support.small_world import config, make_corpus, run_stage, shrink
from tests.support.tensors import draw
from tests.support.tiny_model import on_cpu, tiny_gpt

FEW_BITS = 0.04  # the error of a product as a share of its size; a number in e4m3 is wrong by 2^-4 of it at most


def off(found: Tensor, right: Tensor) -> float:
    """The distance of two tensors as a share of the size of the second."""
    return float((found.double() - right.double()).norm() / right.double().norm())


def all_three(x: Tensor, weight: Tensor, g: Tensor, bound: float | None = None) -> tuple[Tensor, ...]:
    """The product, and its gradients with respect to both factors."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = fp8.product(x, weight, bound)
    return y.detach(), *torch.autograd.grad(y, (x, weight), g)


def scaled_mm(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
    """torch's product of FP8 numbers, a hundred times as fast on a CPU."""
    return (a.float() @ b.float() * (of_a * of_b)).to(out_dtype)


def test_the_fast_product_of_these_tests_is_torchs() -> None:
    a, b = draw(32, 48).to(fp8.FINE), draw(48, 16, seed=1).t().contiguous().t().to(fp8.WIDE)
    scales = torch.tensor(0.5), torch.tensor(3.0)
    theirs = fp8._scaled_mm(a, b, *scales, out_dtype=torch.float32)
    assert torch.allclose(scaled_mm(a, b, *scales, torch.float32, False), theirs, rtol=1e-5, atol=1e-5)


def test_a_product_and_its_gradients_are_near_those_in_fp64_whatever_their_size() -> None:
    x, weight, g = draw(2, 48, 64), draw(32, 64, seed=1), draw(2, 48, 32, seed=2)
    rows, g_rows = x.flatten(0, 1).double(), g.flatten(0, 1).double()
    right = rows @ weight.double().T, g_rows @ weight.double(), g_rows.T @ rows
    for size, dtype in ((1.0, torch.bfloat16), (1e-6, torch.bfloat16), (1e4, torch.float32)):
        found = all_three(x.to(dtype) * size, weight, g.to(dtype) / size)
        y, to_x, to_weight = found
        assert (y.dtype, to_x.dtype, to_weight.dtype) == (dtype, dtype, torch.float32)
        for one, scale, exact in zip(found, (1 / size, size, 1.0), right, strict=True):
            assert 0.001 < off(one.double().view_as(exact) * scale, exact) < 2 * FEW_BITS
        assert off(y.double().flatten(0, 1) / size, right[0]) < FEW_BITS  # without a gradient's two bits


def test_numbers_that_eight_bits_hold_are_multiplied_exactly() -> None:
    whole = torch.randint(-15, 16, (32, 16), generator=torch.Generator().manual_seed(0)).float()
    whole[0, 0], weight = 448.0, torch.full((16, 16), 448.0)  # the largest number of e4m3: nothing is scaled
    g = torch.full((32, 16), 57344.0)
    y, to_x, to_weight = all_three(whole, weight, g)
    assert torch.equal(y, whole @ weight.T) and torch.equal(to_x, g @ weight) and torch.equal(to_weight, g.T @ whole)


def test_zeros_stay_zeros_and_what_is_no_number_is_not_hidden() -> None:
    zeros, weight = torch.zeros(16, 16), draw(16, 16)
    assert all(not one.any() for one in all_three(zeros, weight, zeros))
    broken = draw(16, 16, seed=3).index_fill(0, torch.tensor([5]), float("nan"))
    assert all_three(broken, weight, draw(16, 16))[0].isnan().any()
    assert all_three(draw(16, 16), weight, broken)[2].isnan().any()


def test_a_known_bound_serves_the_longest_row_that_a_norm_can_give() -> None:
    one_channel = torch.zeros(16, 64).index_fill(1, torch.tensor([3]), 5.0).bfloat16()
    x = torch.cat((Operations().norm(one_channel), Operations().norm(draw(16, 64).bfloat16())))
    assert x.max() == 8.0  # the root of the number of channels
    weight = draw(32, 64, seed=1)
    y = fp8.normed(64)(x, weight)
    assert y.isfinite().all() and off(y, x.double() @ weight.double().T) < FEW_BITS


def shaped(**changes: int) -> GPT:
    shape = GPTConfig(sequence_len=64, vocab_size=320, n_layer=2, n_head=2, n_kv_head=2, n_embd=64)
    return GPT(replace(shape, **changes))


def test_a_model_trains_in_fp8_and_validates_as_without() -> None:
    plain, coarse = (tiny_gpt(320, operations=Operations()) for _ in range(2))
    fp8.use(coarse)
    chosen = {name.split(".", 2)[2] for name, part in coarse.named_modules() if getattr(part, "multiply", None)}
    assert chosen == {"attn.c_q", "attn.c_k", "attn.c_v", "mlp.c_fc", "mlp.c_proj"}
    tokens = torch.randint(0, 320, (2, 65), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        assert torch.equal(plain(x, y), coarse(x, y))
    losses = [model(x, y) for model in (plain, coarse)]
    assert 0 < abs(losses[1] - losses[0]) < 0.01 * losses[0]
    for loss in losses:
        loss.backward()
    for (name, exact), found in zip(plain.named_parameters(), coarse.parameters(), strict=True):
        assert exact.grad is not None and found.grad is not None
        if exact.dim() > 1 and exact.grad.any():
            assert torch.cosine_similarity(exact.grad.flatten(), found.grad.flatten(), dim=0) > 0.95, name


def test_what_cannot_train_in_fp8_is_refused() -> None:
    with pytest.raises(UserError, match="only a GPT trains in FP8"):
        fp8.use(tiny_qwen("qwen3"))
    with pytest.raises(UserError, match=r"multiples of 16, and h.0.attn.c_q has 72: choose another --model_dim"):
        fp8.use(shaped(n_embd=72))
    with pytest.raises(UserError, match=r"rows of a multiple of 16 tokens, got 100: choose another --max_seq_len"):
        fp8.use(shaped(sequence_len=100))
    refusal = r"--matmul fp8 needs a GPU that multiplies in FP8 .* but the device is .*leave"
    with pytest.raises(UserError, match=refusal) as refused:
        Cpu().use_matmul(shaped(), "fp8", Operations())
    assert refused.value.exit_code == 2
    with pytest.raises(UserError, match=r"--matmul int8 needs .*but the device is .*leave"):
        Platform.use_int8(Cpu(), shaped(), Operations())
    with pytest.raises(UserError, match=r"passes of a multiple of 16 tokens.*--matmul=fp8"):
        config("rl", matmul="fp8")


@pytest.mark.parametrize(("capability", "can"), [((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_gpus_since_ada_multiply_in_fp8(
    capability: tuple[int, int], can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(Nvidia, "describe", lambda self: "cuda NVIDIA Some GPU")
    model = shaped()
    if can:
        Nvidia().use_matmul(model, "fp8", Operations())
        assert model.blocks[0].attn.c_q.multiply is not None
    else:
        with pytest.raises(UserError, match="but the device is cuda NVIDIA Some GPU"):
            Nvidia().use_matmul(model, "fp8", Operations())


@pytest.mark.slow
def test_pretraining_in_fp8_learns_and_a_run_that_was_stopped_ends_with_the_same_bits(
    base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cpu, "use_fp8", lambda self, model: fp8.use(model))
    monkeypatch.setattr(fp8, "_scaled_mm", scaled_mm)
    compute = replace(on_cpu(), dtype=torch.bfloat16, operations=Operations())  # not our C++ kernels
    make_corpus(base_folder)
    for tag, given, stops in (("bf16", "auto", [None]), ("straight", "fp8", [None]), ("stopped", "fp8", [3, None])):
        for stop in stops:
            run_stage("base", compute, matmul=given, model_tag=tag, stop_at=stop, num_iterations=8, eval_every=0)
    kept = {tag: checkpoint_dir("base", tag) / "step_000008" / "model.safetensors" for tag in ("straight", "stopped")}
    assert kept["straight"].read_bytes() == kept["stopped"].read_bytes()
    exact, coarse = (
        [line["loss"] for line in read_metrics(checkpoint_dir("base", tag)) if "loss" in line]
        for tag in ("bf16", "straight")
    )
    assert exact[0] == pytest.approx(coarse[0], abs=0.01) and exact != coarse
    assert fmean(coarse[-3:]) == pytest.approx(fmean(exact[-3:]), abs=0.05) and coarse[-1] < coarse[0] - 0.1
    with pytest.raises(UserError, match="--matmul: fp8 before, auto now"):
        run_stage("base", compute, model_tag="straight", num_iterations=30)
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        run_stage("mid", compute, matmul="fp8", model_tag="straight", num_iterations=8, eval_every=0)
    losses = [line["loss"] for line in read_metrics(checkpoint_dir("mid", "straight")) if "loss" in line]
    assert losses[-1] < losses[0]
