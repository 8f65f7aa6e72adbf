"""Products in integers of 8 bits against the same arithmetic in fp64, and what a model trained with them computes."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError, base_dir
from nanochat.gpt import GPT, GPTConfig
from nanochat.loss import Softcapped
from nanochat.platforms import host
from nanochat.platforms.cpu import operations as cpu_operations
from nanochat.platforms.cpu.gradients import Product, Product8, Trained
from nanochat.platforms.cpu.int8 import Int8Head
from nanochat.platforms.cpu.kernels import compiler
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.platforms.cpu.platform import Cpu
from nanochat.platforms.cpu.training import ProductsInt8, products_int8
from nanochat.platforms.layers import accelerate
from nanochat.platforms.operations import Matmul, Operations
from nanochat.train import compile as compiling
from tests.support.compiled import products_without
from tests.support.qwens import tiny_qwen
from tests.support.small_world import make_corpus, run_stage, shrink
from tests.support.tensors import draw
from tests.support.tiny_model import on_cpu

if compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)


@pytest.fixture
def made() -> ProductsInt8:
    products = products_int8(host.use_compile_cache(base_dir()))
    assert products is not None
    return products


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ProductsInt8:
    """The functions as they are compiled for a processor that cannot multiply integers of 8 bits in one instruction."""
    folder = tmp_path_factory.mktemp("kernels")
    monkeypatch = pytest.MonkeyPatch()
    try:
        return products_without(folder, monkeypatch, "-mno-avx512vnni")
    except subprocess.CalledProcessError as failure:  # another kind of processor, which has only plain C++
        assert "avx512vnni" in failure.stderr
        return products_without(folder, monkeypatch)


def rounded(x: Tensor) -> Tensor:  # (..., N)
    """Rows of numbers, rounded to 8 bits in fp64."""
    factor = 127 / x.double().abs().amax(-1, keepdim=True)
    return torch.where(factor.isfinite(), (x.double() * factor.float()).round() / factor, 0.0)


def apart(x: Tensor, wanted: Tensor) -> float:
    """How far numbers are from others, relative to the largest."""
    assert x.shape == wanted.shape
    return float((x.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("rows", [1, 12, 205])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (96, 64), (64, 192)])
def test_products_are_those_of_rounded_numbers(
    made: ProductsInt8, threads: int, rows: int, outputs: int, inputs: int
) -> None:
    x, weight = draw(rows, inputs).bfloat16(), draw(outputs, inputs, seed=2)
    y = made.product_int8(x, *made.pack_int8(weight, back=False))
    wanted = rounded(x) @ rounded(weight).mT
    assert y.dtype == torch.bfloat16 and apart(y, wanted) < 0.006  # bf16 rounds the result
    squared = made.product_int8(x, *made.pack_int8(weight, back=False), squared=True)
    assert apart(squared, wanted.relu().square()) < 0.012
    g = draw(rows, outputs, seed=3).bfloat16()
    back = made.product_int8(g, *made.pack_int8(weight, back=True))
    assert apart(back, rounded(g) @ rounded(weight.mT).mT) < 0.006


@pytest.mark.parametrize("tokens", [1, 255, 700])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (96, 32), (160, 96)])
def test_gradients_of_matrices_are_those_of_rounded_numbers(
    made: ProductsInt8, threads: int, tokens: int, outputs: int, inputs: int
) -> None:
    g, x = draw(tokens, outputs).bfloat16(), draw(tokens, inputs, seed=2).bfloat16()
    g[:, 3], x[tokens // 2] = 0, x[tokens // 2] * 50
    wanted = torch.zeros(outputs, inputs, dtype=torch.float64)
    for first in range(0, tokens, 256):  # the tokens that share factors
        some = slice(first, first + 256)
        wanted += rounded(g[some].mT) @ rounded(x[some].mT).mT
    assert apart(made.gradient_int8(g, x), wanted) < 2e-3  # a number between two integers may go either way


@pytest.mark.slow
def test_every_processor_computes_the_same_numbers(made: ProductsInt8, plain: ProductsInt8) -> None:
    x, weight = draw(205, 192).bfloat16(), draw(64, 192, seed=2)
    for squared in (False, True):
        mine, other = (each.product_int8(x, *each.pack_int8(weight, False), squared) for each in (made, plain))
        assert torch.equal(mine, other)
    g = draw(205, 64, seed=3).bfloat16()
    assert torch.equal(made.gradient_int8(g, x), plain.gradient_int8(g, x))
    for mine, other in zip(made.pack_int8(weight, back=True), plain.pack_int8(weight, back=True), strict=True):
        assert torch.equal(mine, other)


def test_a_row_does_not_depend_on_the_others_and_threads_change_nothing(made: ProductsInt8) -> None:
    x, weight = draw(400, 64).bfloat16(), draw(256, 64, seed=2)
    whole, slope = made.product_int8(x, *made.pack_int8(weight, back=False)), made.gradient_int8(x, x)
    assert torch.equal(whole[7:8], made.product_int8(x[7:8], *made.pack_int8(weight, back=False)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(whole, made.product_int8(x, *made.pack_int8(weight, back=False)))
        assert torch.equal(slope, made.gradient_int8(x, x))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_gives_nan_and_zeros_give_zeros(
    made: ProductsInt8, plain: ProductsInt8, value: float
) -> None:
    for use in (made, plain):
        x, weight = draw(30, 64).bfloat16(), draw(64, 64, seed=2)
        x[3, 5], x[4] = value, 0
        weight[9] = 0
        for squared in (False, True):
            y = use.product_int8(x, *use.pack_int8(weight, back=False), squared=squared)
            other = torch.arange(64) != 9
            assert y[3, other].isnan().all() and y[torch.arange(30) != 3].isfinite().all()
            assert not y[4].any() and not y[5:, 9].any()
        weight[2, 7] = value
        y = use.product_int8(x[5:], *use.pack_int8(weight, back=False))
        assert y[:, 2].isnan().all() and y[:, 3].isfinite().all()
        back = use.product_int8(x[5:], *use.pack_int8(weight, back=True))
        assert back[:, 7].isnan().all() and back[:, 6].isfinite().all()
        slope = use.gradient_int8(torch.cat([draw(300, 32), x[:, :32].float()]).bfloat16(), draw(330, 32).bfloat16())
        assert slope[5].isnan().all() and slope[torch.arange(32) != 5].isfinite().all()


def test_matrices_of_bf16_as_ranks_gather_them_are_multiplied_in_8_bits_and_may_be_freed(made: ProductsInt8) -> None:
    use = in_int8()
    x, weight = draw(64, 96).bfloat16(), draw(32, 96, seed=2).bfloat16().requires_grad_()
    y = Product.apply(use, x.requires_grad_(), weight)
    wanted = made.product_int8(x.detach(), *made.pack_int8(weight.detach().float(), back=False))
    assert torch.equal(y, wanted)
    g = draw(64, 32, seed=3).bfloat16()
    back = made.product_int8(g, *made.pack_int8(weight.detach().float(), back=True))
    with torch.no_grad():
        weight.zero_()  # what --shard=full gathered is gone before the gradient is made
    y.backward(g)
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert torch.equal(x.grad, back) and torch.equal(weight.grad, made.gradient_int8(g, x.detach()).bfloat16())


def in_int8() -> Trained:
    """The kernels that train in 8 bits."""
    use = CpuOperations().in_int8()
    assert use is not None and use.int8
    return use


def small_gpt(operations: Operations, dtype: torch.dtype, matmul: Matmul = "auto", **shape: int) -> GPT:
    """A GPT that multiplies in a number format."""
    model = GPT(replace(GPTConfig(64, 256, 2, 2, 1, 128, "L", offset_layers=1), **shape), dtype)
    accelerate(model, operations)
    Cpu().use_matmul(model, matmul, operations)
    model.init_weights(1)
    return model


def gradients(operations: Operations, dtype: torch.dtype, matmul: Matmul = "auto") -> dict[str, Tensor]:
    """The gradients of a small GPT on fixed tokens, by name, and its loss."""
    model = small_gpt(operations, dtype, matmul)
    with torch.no_grad():
        for block in model.blocks:  # matrices that begin as zeros would hide the others' gradients
            for i, matrix in enumerate((block.attn.c_proj, block.mlp.c_proj)):
                matrix.weight.copy_(draw(*matrix.weight.shape, seed=5 + i) * 0.05)
    tokens = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(4))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_gradients_of_a_model_are_near_those_of_fp32() -> None:
    exact, full = gradients(Operations(), torch.float32), gradients(CpuOperations(), torch.bfloat16)
    coarse = gradients(CpuOperations(), torch.bfloat16, "int8")
    assert exact.keys() == coarse.keys()
    assert not torch.equal(full["h.0.mlp.c_fc.weight"], coarse["h.0.mlp.c_fc.weight"]), "8 bits took no part"
    for name, wanted in exact.items():
        if float(wanted.norm()) > 1e-6:
            far = float((coarse[name] - wanted).norm() / wanted.norm())
            assert far < (0.12 if wanted.dim() == 1 else 0.05), f"{name} is {far:.2g} apart"


def test_the_matrices_of_the_layers_have_the_format_in_their_slot() -> None:
    model = small_gpt(CpuOperations(), torch.bfloat16, "int8")
    slots = {name: getattr(part, "multiply", None) for name, part in model.named_modules()}
    filled = {name.split(".", 2)[2] for name, slot in slots.items() if slot is not None}
    assert filled == {"attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert all(isinstance(slot, Product8) for slot in slots.values() if slot is not None)
    assert type(model.lm_head) is Int8Head


def test_a_matrix_by_itself_multiplies_in_8_bits_with_gradients_alone(made: ProductsInt8) -> None:
    matrix = small_gpt(CpuOperations(), torch.bfloat16, "int8").blocks[0].mlp.c_fc
    x = draw(64, 128).bfloat16()
    weight = matrix.weight.detach()
    assert torch.equal(matrix(x), made.product_int8(x, *made.pack_int8(weight, back=False)))
    with torch.no_grad():
        assert torch.equal(matrix(x), x @ weight.bfloat16().mT)


def test_passes_without_gradients_never_use_8_bits() -> None:
    tokens, found = torch.randint(0, 256, (4, 64)), []
    formats: tuple[Matmul, ...] = ("auto", "int8")
    for matmul in formats:
        model = small_gpt(CpuOperations(), torch.bfloat16, matmul)
        with torch.no_grad():
            found.append([model(tokens), model(tokens, tokens), model(tokens, tokens, "none")])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_logits_of_the_head_are_made_in_8_bits_for_many_tokens_in_training_alone() -> None:
    operations, head = CpuOperations(), draw(320, 64, seed=2)
    x, targets = draw(512, 64).bfloat16(), torch.arange(512) % 300
    losses = []
    formats = (in_int8(), None)
    for use8 in formats:
        near, master = x.clone().requires_grad_(), head.clone().requires_grad_()
        total = operations.loss(near, master, targets, Softcapped(300), None, 1024, use8=use8)
        total.backward()
        losses.append((total.detach(), near.grad, master.grad))
    assert not torch.equal(losses[0][0], losses[1][0])
    for coarse, full in zip(*losses, strict=True):
        assert coarse is not None and full is not None and float((coarse - full).norm() / full.norm()) < 0.03
    near = x[:255].requires_grad_()
    few = [operations.loss(near, head, targets[:255], Softcapped(300), None, 1024, use8=use8) for use8 in formats]
    assert torch.equal(*few)
    with torch.no_grad():
        both = [operations.loss(x, head, targets, Softcapped(300), None, 1024, use8=use8) for use8 in formats]
    assert torch.equal(*both)


@pytest.mark.parametrize(
    ("flags", "dtype", "wanted"),
    [
        ({"avx512_vnni", "avx512_bf16"}, torch.bfloat16, "int8"),
        ({"avx512_vnni", "avx512_bf16"}, torch.float32, "auto"),
        ({"avx512_vnni", "amx_bf16"}, torch.bfloat16, "auto"),
        ({"avx2"}, torch.bfloat16, "auto"),
    ],
)
def test_presets_ask_for_int8_where_it_is_faster(
    flags: set[str], dtype: torch.dtype, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(CpuOperations, "in_int8", lambda self: object())  # as where the kernels were compiled
    assert Cpu().preset_matmul(dtype) == wanted


@pytest.mark.parametrize("without", ["--kernels plain", "a compiler"])
def test_without_kernels_int8_is_refused_and_no_preset_asks_for_it(
    without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset({"avx512_vnni"}))
    if without == "a compiler":
        monkeypatch.setattr(cpu_operations, "kernels", lambda folder: None)
    else:
        monkeypatch.setenv("NANOCHAT_KERNELS", "plain")
    operations = Cpu().operations("auto" if without == "a compiler" else "plain")
    assert Cpu().preset_matmul(torch.bfloat16) == "auto"
    assert Cpu().preset_matmul(torch.bfloat16, operations) == "auto"
    with pytest.raises(UserError, match=r"--matmul int8 needs the C\+\+ kernels.*leave --matmul out") as refused:
        small_gpt(operations, torch.bfloat16, "int8")
    assert refused.value.exit_code == 2


def test_what_cannot_train_in_int8_or_bf16_is_refused() -> None:
    formats: tuple[Matmul, ...] = ("int8", "bf16")
    for matmul in formats:
        with pytest.raises(UserError, match=f"--matmul {matmul} .*bfloat16.* float32.*NANOCHAT_DTYPE") as refused:
            small_gpt(CpuOperations(), torch.float32, matmul)
        assert refused.value.exit_code == 2
    with pytest.raises(UserError, match=r"multiples of 32, and h.0.attn.c_q has 80: .*--matmul"):
        small_gpt(CpuOperations(), torch.bfloat16, "int8", n_embd=80)
    qwen = tiny_qwen("qwen3", dtype=torch.bfloat16)
    with pytest.raises(UserError, match="only a GPT trains in int8"):
        Cpu().use_matmul(qwen, "int8", CpuOperations())


def test_a_model_in_int8_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "compiler_missing", lambda self: "")
    model = small_gpt(CpuOperations(), torch.bfloat16, "int8")
    assert "--matmul int8" in compiling.missing(None, on_cpu(), model)
    with pytest.raises(UserError, match="--compile was asked for, but cannot be used: --matmul int8"):
        compiling.missing(True, on_cpu(), model)
    assert not compiling.missing(True, on_cpu(), small_gpt(CpuOperations(), torch.bfloat16))


@pytest.mark.slow
def test_every_stage_trains_in_int8_where_it_is_asked_for_and_says_so_once(
    base_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compute = replace(on_cpu(), dtype=torch.bfloat16, operations=CpuOperations())
    make_corpus(base_folder)
    stages = ("base", "mid", "sft", "rl")
    folders = {"base": "base", "mid": "mid", "sft": "sft", "rl": "rl"}
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        for stage in stages:
            run_stage(stage, compute, matmul="int8", num_iterations=2, eval_every=0)
            log = capsys.readouterr().out
            assert log.count("matmul: ") == 1 and "matmul: int8 in training, bfloat16 elsewhere" in log
            assert checkpoint_dir(folders[stage], "d2").exists()
        run_stage("base", compute, num_iterations=2, eval_every=0, model_tag="fine")
    assert "matmul: bfloat16" in capsys.readouterr().out
    weights = [checkpoint_dir("base", tag) / "step_000002" / "model.safetensors" for tag in ("d2", "fine")]
    assert weights[0].read_bytes() != weights[1].read_bytes(), "auto is not int8"
    with pytest.raises(UserError, match="--matmul: int8 before, auto now"):
        run_stage("base", compute, num_iterations=2, eval_every=0)
