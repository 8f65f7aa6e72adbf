"""Compiled kernels against torch's own operators."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.attention import cache_mask
from nanochat.common import base_dir
from nanochat.engine import Engine
from nanochat.generate.sampling import Sampling
from nanochat.linear import Linear
from nanochat.models.qwen.int8 import hold_in_int8
from nanochat.models.qwen.model import Qwen
from nanochat.platforms import host
from nanochat.platforms.cpu import kernels as module
from nanochat.platforms.cpu.kernels import PANELS, Kernels, compiler, kernels
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.platforms.cpu.panels import Panels
from nanochat.platforms.cpu.platform import Cpu
from nanochat.platforms.cpu.stored import Packed, Packed8
from nanochat.platforms.layers import accelerate
from nanochat.platforms.operations import Operations
from nanochat.tokenizer import PATTERNS, ROLES, Tokenizer
from tests.support.qwens import CONFIGS, tiny_qwen
from tests.support.tensors import draw
from tests.support.tiny_model import tiny_gpt

if compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

LAID_OUT = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
FORMATS = [torch.float32, torch.bfloat16]
FAR = {torch.float32: 5e-6, torch.bfloat16: 2e-2}  # how far a number may be from fp64's, relative to the largest


@pytest.fixture
def made() -> Kernels:
    found = kernels(host.use_compile_cache(base_dir()))
    assert found is not None
    return found


def near(mine: Tensor, wanted: Tensor) -> bool:
    """Whether a result has the shape of the slow one and is close to it."""
    assert mine.shape == wanted.shape and mine.dtype in FORMATS
    return bool((mine.double() - wanted.double()).abs().max() <= FAR[mine.dtype] * wanted.abs().max())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("channels", [7, 48, 513])
def test_norms_of_sums(made: Kernels, dtype: torch.dtype, channels: int) -> None:
    x, added, weight = draw(3, 2, channels, dtype=dtype), draw(3, 2, channels, dtype=dtype, seed=2), draw(
        channels, dtype=torch.float32, seed=3)  # fmt: skip
    slow, both = Operations(), x + added
    for scale in (None, weight):
        one = torch.ones(channels) if scale is None else scale
        found, total = made.norm(x, scale, 1e-5)
        assert near(found, slow.weighted_norm(x.double(), one, 1e-5)) and torch.equal(total, x)
        found, total = made.norm(x.transpose(0, 1), scale, 1e-5, added.transpose(0, 1))
        assert near(found, slow.weighted_norm(both.transpose(0, 1).double(), one, 1e-5))
        assert torch.equal(total, both.transpose(0, 1))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("size", "rotated"), [(16, 16), (20, 12), (64, 64)])
def test_heads_are_normed_and_rotated(made: Kernels, dtype: torch.dtype, size: int, rotated: int) -> None:
    whole = draw(2, 3, 5, size, dtype=dtype)
    x, weight = whole[:, :, :4], draw(4, size, dtype=torch.float32, seed=2)
    cos, sin = (draw(rows, 3, 1, rotated // 2, dtype=dtype, seed=3) for rows in (2, 2))
    slow = Operations()

    def wanted(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = slow.weighted_norm(x.double(), weight, 1e-6)
        turned = slow.rotary(normed[..., :rotated], cos.double(), sin.double())
        return 1.5 * torch.cat((turned, normed[..., rotated:]), dim=3)

    assert near(made.turn(x, weight, cos, sin, 1e-6, 1.5), wanted(x, cos, sin))
    assert near(made.turn(x, weight, cos[:1], sin[:1], 1e-6, 1.5), wanted(x, cos[:1], sin[:1]))  # one row for all
    spread = draw(2, 5, 3, size, dtype=dtype).transpose(1, 2)[:, :, :4]  # heads that do not lie side by side
    assert near(made.turn(spread, weight, cos, sin, 1e-6, 1.5), wanted(spread, cos, sin))
    plain = slow.rotary(x[..., :rotated].double(), cos.double(), sin.double())
    assert near(made.turn(x, None, cos, sin, None), torch.cat((plain, x[..., rotated:].double()), dim=3))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (6, 2, 64), (2, 1, 128)])
@pytest.mark.parametrize("window", [3, 100])
def test_a_token_is_written_and_attends(
    made: Kernels, dtype: torch.dtype, heads: int, kv_heads: int, size: int, window: int
) -> None:
    whole = draw(3, 1, heads + 2 * kv_heads, size, dtype=dtype)
    q, k, v = whole[:, :, :heads], whole[:, :, heads : heads + kv_heads], whole[:, :, heads + kv_heads :]
    held_k, held_v = (draw(5, 9, kv_heads, size, dtype=dtype, seed=seed)[1:4] for seed in (2, 3))
    places = torch.tensor([[8], [3], [0]])
    wanted_k, wanted_v = held_k.clone(), held_v.clone()
    wanted_k[torch.arange(3)[:, None], places], wanted_v[torch.arange(3)[:, None], places] = k, v
    y = made.attend(q, k, v, held_k, held_v, places, window, 0.3)
    assert torch.equal(held_k, wanted_k) and torch.equal(held_v, wanted_v)
    for beyond in (9, -1):
        with pytest.raises(IndexError, match="9 places"):
            made.attend(q, k, v, held_k, held_v, torch.tensor([[0], [beyond], [0]]), window, 0.3)
    assert torch.equal(held_k, wanted_k), "nothing is written then"
    mask = cache_mask(places, 9, window)
    assert near(y, Operations().masked(q.double(), held_k.double(), held_v.double(), mask, 0.3))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (6, 2, 64), (2, 1, 128)])
@pytest.mark.parametrize(("count", "window"), [(16, 500), (23, 500), (130, 500), (130, 70), (40, 3)])
def test_many_queries_attend(
    made: Kernels, heads: int, kv_heads: int, size: int, count: int, window: int, dtype: torch.dtype
) -> None:
    whole = draw(3, count, heads + 2 * kv_heads, size, dtype=dtype)
    q, k, v = whole[:, :, :heads], whole[:, :, heads : heads + kv_heads], whole[:, :, heads + kv_heads :]
    if not made.takes_many(q):
        pytest.skip("the processor has no AVX512-BF16")
    held_k, held_v = (draw(3, 420, kv_heads, size, dtype=dtype, seed=seed) for seed in (2, 3))
    slow = Operations()
    for firsts in (torch.tensor([0, 0, 0]), torch.tensor([5, 280, 0]), torch.tensor([64, 63, 1])):
        places = firsts[:, None] + torch.arange(count)
        held_k[torch.arange(3)[:, None], places], held_v[torch.arange(3)[:, None], places] = k, v
        y = made.attend_many(q, held_k, held_v, firsts, window, 0.3)
        mask = cache_mask(places, 420, window)
        assert near(y, slow.masked(q.double(), held_k.double(), held_v.double(), mask, 0.3))
        alone = made.attend_many(q[1:2, 7:], held_k[1:2], held_v[1:2], firsts[1:2] + 7, window, 0.3)
        assert torch.equal(alone, y[1:2, 7:]), "a row depends on no other row"
    assert near(made.attend_many(q, k, v, torch.zeros(3, dtype=torch.long), window, 0.3),
                slow.attend(q.double(), k.double(), v.double(), window, 0.3))  # fmt: skip


@pytest.mark.parametrize("dtype", FORMATS)
def test_softcaps_and_totals(made: Kernels, dtype: torch.dtype) -> None:
    whole = 9 * draw(5, 3, 200, dtype=dtype)
    x = whole[..., :170]
    capped = made.softcap(x, 15.0)
    assert capped.dtype == torch.float32
    assert (capped - 15 * torch.tanh(x.double() / 15)).abs().max() < 1e-5
    rows = x.flatten(0, 1)
    totals = made.log_totals(rows)
    assert totals.dtype == torch.float32 and torch.allclose(totals.double(), rows.double().logsumexp(1), atol=1e-5)
    rows = rows.masked_fill(torch.arange(170) % 3 == 0, float("-inf"))
    assert torch.allclose(made.log_totals(rows).double(), rows.double().logsumexp(1), atol=1e-5)
    rows[2, 5] = float("nan")
    assert made.log_totals(rows).isnan().tolist() == [row == 2 for row in range(15)]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("cap", [15.0, 0.0])
def test_losses_and_their_gradients(made: Kernels, dtype: torch.dtype, cap: float) -> None:
    raw = (6 * draw(20, 192, dtype=dtype)).requires_grad_()
    targets = torch.randint(170, (20,), generator=torch.Generator().manual_seed(2))
    weights = draw(20, dtype=torch.float32, seed=3)
    weights[4:8], targets[4:6] = 0, -1
    wide = raw.double()
    logits = (cap * torch.tanh(wide / cap) if cap else wide)[:, :170]
    each = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    wanted = (each * weights.double()).sum()
    (gradient,) = torch.autograd.grad(wanted, raw)
    found = raw.detach().clone()
    assert float(made.loss(found, targets, weights, 170, cap).sum()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert near(found, gradient)
    with pytest.raises(IndexError, match="170 tokens"):
        made.loss(found, torch.full((20,), 170), weights, 170, cap)
    assert near(found, gradient), "nothing is written then"
    without = torch.full((20,), -1)
    assert not made.loss(found, without, weights, 170, cap).any() and not found.any()
    assert made.loss(found, without, weights * float("nan"), 170, cap).isnan().all(), "a NaN is seen even there"


@pytest.mark.parametrize("dtype", FORMATS)
def test_gates_and_sums(made: Kernels, dtype: torch.dtype) -> None:
    x = 20 * draw(3, 2, 70, dtype=dtype)
    x0, a, b = draw(3, 2, 70, dtype=dtype, seed=2), draw(1, dtype=dtype)[0], draw(1, dtype=dtype, seed=2)[0]
    gate, up = x.double().chunk(2, dim=2)
    assert near(made.swiglu(x), torch.nn.functional.silu(gate) * up)
    assert near(made.squared_relu(x), x.double().relu().square())
    assert near(made.mix(x, x0, a, b), a.double() * x.double() + b.double() * x0.double())


def test_numbers_that_are_not_finite_stay_so(made: Kernels) -> None:
    for dtype in FORMATS:
        x = torch.tensor([[float("nan"), 1.0, 2.0, 3.0]], dtype=dtype)
        assert made.norm(x, None, 1e-5)[0].isnan().all()
        assert made.squared_relu(torch.tensor([1e30, 1.0], dtype=dtype))[0].isinf()


def test_threads_change_no_result(made: Kernels) -> None:
    x, added = draw(64, 1, 8192, dtype=torch.float32), draw(64, 1, 8192, dtype=torch.float32, seed=2)
    held_k, held_v = (draw(64, 256, 2, 64, dtype=torch.float32, seed=seed) for seed in (3, 4))
    places = torch.arange(192, 256)[:, None]
    q, k = x[..., :128].unflatten(2, (2, 64)), added[..., :128].unflatten(2, (2, 64))
    cos = draw(64, 1, 1, 32, dtype=torch.float32, seed=5)

    heads = draw(6, 150, 3, 64, dtype=torch.bfloat16, seed=6)
    weights, targets = draw(64, dtype=torch.float32, seed=7), torch.arange(64)

    def work() -> list[Tensor]:
        logits = x[:, 0].clone()
        loss = made.loss(logits, targets, weights, 8192, 15.0)
        others = [loss, logits, made.softcap(x, 15.0), made.log_totals(x[:, 0])]
        if made.takes_many(heads):
            others.append(made.attend_many(heads, heads, heads, torch.zeros(6, dtype=torch.long), 70, 0.1))
        y = made.attend(q, k, k, held_k.clone(), held_v.clone(), places, 500, 0.1)
        turned = made.turn(x.unflatten(2, (-1, 64)), None, cos, cos, 1e-5)
        return [y, turned, *others, *made.norm(x, None, 1e-5, added), made.swiglu(x), made.squared_relu(x),
                made.mix(x, added, x[0, 0, 0], x[0, 0, 1])]  # fmt: skip

    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(work())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source that is compiled in no time."""
    path = tmp_path / "small.cpp"
    path.write_text('extern "C" int one() { return 1; }')
    return path


def test_a_library_that_another_user_compiled_is_compiled_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = module.compiled(tmp_path, compiler() or "", source)
    library.write_bytes(b"planted")
    if os.getuid() == 0:
        os.chown(library, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert module.compiled(tmp_path, compiler() or "", source) == library and library.read_bytes() != b"planted"


def test_a_library_that_others_may_write_is_compiled_again(tmp_path: Path, source: Path) -> None:
    before = os.umask(0)
    try:
        library = module.compiled(tmp_path, compiler() or "", source)
        assert library.stat().st_mode & 0o022 == 0
        library.write_bytes(b"planted")
        library.chmod(0o666)
        assert module.compiled(tmp_path, compiler() or "", source).read_bytes() != b"planted"
    finally:
        os.umask(before)


def test_the_library_is_compiled_once_and_named_after_what_it_is_made_from(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, cache = compiler() or "", tmp_path / "cache"
    library = module.compiled(cache, command, source)
    written = library.stat().st_mtime_ns
    assert module.compiled(cache, command, source) == library and library.stat().st_mtime_ns == written
    source.write_text('extern "C" int one() { return 2; }')
    changed = module.compiled(cache, command, source)
    assert changed != library
    assert len(list(cache.iterdir())) == 2  # nothing is left behind
    monkeypatch.setattr(host, "_cpuinfo", lambda key: {"CPU part": "0xd02"}.get(key, ""))
    arm = module._digest(command, [], source)
    monkeypatch.setattr(host, "_cpuinfo", lambda key: {"CPU part": "0xd01"}.get(key, ""))
    assert module._digest(command, [], source) != arm, "hosts of one home may have other processors"


WITHOUT_TORCH = """
import ctypes, sys
import numpy as np

call = ctypes.CDLL(sys.argv[1]).squared_relu_fp32
call.argtypes, call.restype = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2, None
x = np.linspace(-3, 3, 1 << 20, dtype=np.float32)
y = np.empty_like(x)
call(x.ctypes.data, y.ctypes.data, 4, x.size)
assert not hasattr(ctypes.CDLL(None), "GOMP_parallel") and "torch" not in sys.modules
assert np.array_equal(y, np.maximum(x, 0) ** 2)
"""


def test_kernels_have_threads_of_their_own_where_torchs_cannot_be_used(made: Kernels) -> None:
    library = module.compiled(host.use_compile_cache(base_dir()), compiler() or "")
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(library)], check=True, timeout=60)


@pytest.mark.parametrize("family", ["gpt", "qwen2", "qwen3", "qwen3.5"])
def test_a_held_fp32_model_replies_the_same_alone_in_a_batch_after_a_prefix_and_without_kernels(family: str) -> None:
    def model(compiles: bool) -> Any:
        operations = CpuOperations(compiles=compiles)
        made: Any = (
            tiny_gpt(320, 64, operations=operations) if family == "gpt" else tiny_qwen(family, operations=operations)
        )
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in made.parameters():  # larger than new weights: each layer matters
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        operations.serve(made)
        assert (operations._kernels is not None) == compiles
        return made.eval()

    ranks = [bytes([i % 256] * (1 + i // 256)) for i in range(320 - len(ROLES))]
    words = Tokenizer(ranks, "nanochat", PATTERNS["nanochat"])
    generator = torch.Generator().manual_seed(1)
    common = torch.randint(300, (20,), generator=generator).tolist()
    prompts = [[*common, *torch.randint(300, (3 + i,), generator=generator).tolist()] for i in range(7)]
    sampling = Sampling(0.0, max_tokens=12, ignore_eos=True)
    fast, slow = model(True), model(False)

    def replies(engine: Engine, asked: list[list[int]]) -> list[list[int]]:
        return [list(reply.tokens) for reply in engine.generate(asked, sampling)]

    together = replies(Engine(fast, words, 7), prompts)
    alone = [replies(Engine(fast, words, 1), [prompt])[0] for prompt in prompts]
    warm = Engine(fast, words, 2)
    replies(warm, [common])
    assert together == alone == [replies(warm, [prompt])[0] for prompt in prompts]
    assert together == replies(Engine(slow, words, 7), prompts)


def test_without_a_working_compiler_operators_stay_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "false")  # a compiler that fails
    assert kernels(tmp_path / "a") is None
    monkeypatch.setattr(module, "compiler", lambda: None)
    assert kernels(tmp_path / "b") is None
    said = "".join(capfd.readouterr())
    assert said.count("stay torch's own") == 2


def test_plain_kernels_use_torchs_operators_and_held_models_have_gradients() -> None:
    plain = Cpu().operations("plain")
    assert isinstance(plain, CpuOperations)
    plain.serve(tiny_gpt(320, 64))
    assert plain._kernels is None
    operations = CpuOperations()
    operations.serve(tiny_gpt(320, 64))
    x = draw(2, 1, 8, dtype=torch.float32).requires_grad_()
    operations.norm(x).sum().backward()
    assert x.grad is not None


@pytest.mark.skipif(not LAID_OUT, reason="oneDNN lays out no bf16 here")
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (128, 96), (320, 1024), (100, 48), (64, 7)])
def test_few_rows_are_multiplied_with_what_onednn_laid_out(made: Kernels, outputs: int, inputs: int) -> None:
    weight = draw(outputs, inputs, dtype=torch.bfloat16)
    held = Packed(weight, made)
    fits = "avx512_bf16" in host.cpu_flags() and outputs % 64 == 0 and inputs % 2 == 0
    assert (held.address is not None) == (held.rows is not None) == fits
    if held.rows is not None:
        numbers = torch.tensor([[0, outputs - 1], [63, 1]])
        assert torch.equal(held.rows(numbers), weight[numbers])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert held(draw(0, inputs, dtype=torch.bfloat16)).shape == (0, outputs)
        for rows in (1, 2, 3, 4, 5, 7, 8, 32, 33):
            x = draw(rows, 1, inputs, dtype=torch.bfloat16, seed=rows)
            y = held(x)
            assert near(y, torch.nn.functional.linear(x.double(), weight.double()))
            assert rows > 32 or not fits or torch.equal(y[:1], held(x[:1])), "a row depends on no other row"
        assert near(
            held(x.transpose(0, 1)[:, :3]), torch.nn.functional.linear(x.double(), weight.double())[:3, 0][None]
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif("avx512_bf16" not in host.cpu_flags(), reason="blocks of 8-bit numbers are for AVX512-BF16")
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (320, 1024), (100, 48), (17, 16)])
def test_few_rows_in_bf16_are_multiplied_with_8_bit_blocks(made: Kernels, outputs: int, inputs: int) -> None:
    integers = (40 * draw(outputs, inputs, dtype=torch.float32)).round().clamp(-127, 127).to(torch.int8)
    scales = draw(outputs, dtype=torch.float32)
    stored = Packed8(integers, scales, made)
    exact = integers.double() * scales.double()[:, None]
    numbers = torch.tensor([[0, outputs - 1], [3, 16]])
    assert torch.equal(stored.rows(numbers), exact.bfloat16()[numbers])
    alone = stored(draw(40, inputs, dtype=torch.bfloat16)[:1])[0]
    for rows in (1, 2, 4, 7, 16, 17, 32, 40):
        x = draw(40, inputs, dtype=torch.bfloat16)[:rows, None]
        y = stored(x)
        assert near(y, F.linear(x.double(), exact))
        assert torch.equal(y[0, 0], alone), "a row depends on no other row"


@pytest.mark.parametrize("format", PANELS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (320, 1024), (100, 48), (17, 7), (5, 33)])
def test_products_with_panels(made: Kernels, format: torch.dtype, outputs: int, inputs: int) -> None:
    weight, scales = draw(outputs, inputs, dtype=torch.float32), None
    if format == torch.int8:
        weight, scales = (40 * weight).round().clamp(-127, 127).to(format), draw(outputs, dtype=torch.float32)
    elif format == torch.bfloat16:
        weight = weight.bfloat16().float()
    stored = Panels(made, weight, scales)
    assert stored.panels.dtype == format, "weights that are bf16 numbers take two bytes"
    exact = weight.double() * (1 if scales is None else scales.double()[:, None])
    numbers = torch.tensor([[0, outputs - 1], [3, 1]])
    assert torch.equal(stored.rows(numbers), exact.float()[numbers])
    alone = stored(draw(250, inputs, dtype=torch.float32)[:1])[0]
    for rows in (1, 2, 3, 4, 6, 7, 8, 13, 97, 250):
        x = draw(250, inputs, dtype=torch.float32)[:rows, None]
        y = stored(x)
        assert near(y, F.linear(x.double(), exact))
        assert torch.equal(y[0, 0], alone), "a row depends on no other row"
    assert near(stored(x.transpose(0, 1)[:, :3]), F.linear(x.double(), exact)[:3, 0][None])


@pytest.mark.skipif("avx2" not in host.cpu_flags(), reason="panels are used with AVX2")
@pytest.mark.parametrize("family", ["llama3", "smollm3", "qwen2", "qwen3", "qwen3.5"])
@pytest.mark.parametrize("int8", [False, True])
def test_a_served_fp32_model_multiplies_by_panels(family: str, int8: bool) -> None:
    plain, served = tiny_qwen(family), tiny_qwen(family)
    operations = CpuOperations()
    accelerate(served, operations)
    if int8:
        hold_in_int8(plain)
        hold_in_int8(served)
    operations.serve(served)
    idx = torch.arange(40).view(2, 20)
    with torch.inference_mode():
        torch.testing.assert_close(served(idx), plain(idx), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(served(idx, idx), plain(idx, idx), rtol=1e-4, atol=1e-4)
    matrices = [module for module in served.modules() if isinstance(module, Linear) and module.multiply]
    assert matrices and all(isinstance(module.multiply, Panels) and not module.weight.numel() for module in matrices)
    assert not served.head.weight.numel(), "the table is in memory once"
    if not int8:
        operations.release(served)
        assert served.head.weight.shape == plain.head.weight.shape


@pytest.mark.parametrize("tied", [0, 1])
def test_a_vocabulary_is_in_memory_once_while_it_is_served(tied: int) -> None:
    config = replace(CONFIGS["qwen3"], n_embd=64, tied=tied)
    model = Qwen(config, torch.bfloat16)
    operations = CpuOperations()
    accelerate(model, operations)
    model.init_weights()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = (6 * parameter.data).bfloat16()
    idx = torch.arange(40).view(2, 20)
    targets = (idx + 1).masked_fill(idx % 5 == 0, -1)
    weights = torch.rand(2, 20, generator=torch.Generator().manual_seed(1))
    x = draw(2, 20, 64, dtype=torch.bfloat16)

    def results() -> list[Tensor]:
        with torch.inference_mode():
            return [
                model.head(x),
                model.head(x, targets, reduction="none"),
                model.head(x, targets),
                model.head(x, targets, weights),
            ]

    before = results()
    embeddings = model.embed(idx)
    operations.serve(model)
    is_stored = LAID_OUT and "avx512_bf16" in host.cpu_flags()
    assert (model.head.weight.numel() == 0) == is_stored
    assert torch.equal(model.embed(idx), embeddings)
    for actual, expected in zip(results(), before, strict=True):
        assert near(actual, expected.double())
    operations.release(model)
    assert model.head.weight.shape == model.head.shape == (320, 64)


def test_a_layout_that_is_not_known_is_left_to_onednn(made: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    if not LAID_OUT:
        pytest.skip("oneDNN lays out no bf16 here")
    weight = draw(64, 32, dtype=torch.bfloat16)
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    other = weight.clone()
    other[-1, -1] += 1
    assert made.reads(laid_out, other) is None
