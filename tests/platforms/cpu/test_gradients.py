"""Operations of training with compiled kernels against plain torch in fp64 on the same inputs."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nanochat.common import base_dir
from nanochat.context import Packed
from nanochat.platforms import host
from nanochat.platforms.cpu.kernels import compiler, kernels
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.platforms.cpu.training import Training
from nanochat.platforms.operations import Operations
from nanochat.platforms.together import Linear
from tests.support.compiled import made_without
from tests.support.tensors import draw

if compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

FORMATS = [torch.float32, torch.bfloat16]
FAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # how far a number may be from fp64's, relative to the largest
FAST, SLOW = CpuOperations(), Operations()
Work = Callable[[Operations, Sequence[Tensor]], Sequence[Tensor]]


def linear(outputs: int, inputs: int, dtype: torch.dtype, seed: int) -> Linear:
    """A matrix whose fp32 master holds numbers of a format, so that a cast does not change them."""
    matrix = Linear(inputs, outputs)
    matrix.weight.data = (draw(outputs, inputs, dtype=dtype, seed=seed) * inputs**-0.5).to(dtype).float()
    return matrix


def results(work: Work, operations: Operations, inputs: Sequence[Tensor], matrices: nn.Module) -> list[Tensor]:
    """What `work` gives, and then the gradients of a weighted sum of that with respect to inputs and matrices."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    parameters = list(matrices.parameters())
    found = work(operations, inputs)
    total = sum(
        (y.double() * draw(*y.shape, dtype=torch.bfloat16, seed=50 + i).double()).sum() for i, y in enumerate(found)
    )
    return [y.detach() for y in found] + list(torch.autograd.grad(total, [*inputs, *parameters]))  # type: ignore[arg-type]


def compare(
    work: Callable[[nn.Module], Work], inputs: Sequence[Tensor], matrices: nn.Module, far: float = 0.0
) -> None:  # fmt: skip
    """Compare fast and slow results, and two fast runs with each other."""
    again = [results(work(matrices), FAST, inputs, matrices) for _ in range(2)]
    exact = matrices.double()
    wanted = results(work(exact), SLOW, [x.double() for x in inputs], exact)
    for i, (mine, other, slow) in enumerate(zip(*again, wanted, strict=True)):
        assert torch.equal(mine, other), "two runs differ"
        assert mine.shape == slow.shape and mine.dtype in FORMATS
        most = far or FAR[inputs[0].dtype]
        apart = float((mine.double() - slow).abs().max() / slow.abs().max().clamp_min(1e-2))
        assert apart <= most, f"result {i} is {apart:.2g} apart"


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("channels", [7, 48, 513])
def test_norms(dtype: torch.dtype, channels: int, threads: int) -> None:
    x, y = (draw(3, 211, channels, dtype=dtype, seed=seed) for seed in (1, 2))
    none = nn.Module()
    compare(lambda _: lambda operations, x: [operations.norm(x[0])], [x], none)
    compare(lambda _: lambda operations, x: operations.norm_and_keep(x[0]), [x], none)
    total = (x.double() + y.double()).to(dtype)  # a sum that needs no rounding
    compare(lambda _: lambda operations, x: operations.add_norm(*x), [total, torch.zeros_like(x)], none)
    compare(lambda _: lambda operations, x: [operations.norm(x[0].transpose(0, 1))], [x], none)


@pytest.mark.parametrize("dtype", FORMATS)
def test_mixtures(dtype: torch.dtype, threads: int) -> None:
    x, x0 = (draw(3, 211, 70, dtype=dtype, seed=seed) for seed in (1, 2))
    factors = draw(2, dtype=dtype, seed=3)

    def twice(operations: Operations, given: Sequence[Tensor]) -> list[Tensor]:
        x, x0, factors = given
        a, b = factors.unbind()
        y, x0 = operations.mix(x, x0, a, b)
        return [y, *operations.mix(x0, y, b, a)]

    def backed_out(operations: Operations, given: Sequence[Tensor]) -> list[Tensor]:
        return [operations.backout(*given)]

    compare(lambda _: twice, [x, x0, factors], nn.Module(), 0.02 if dtype == torch.bfloat16 else 0)
    compare(lambda _: backed_out, [x, x0, factors[:1]], nn.Module())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 67), (40, 50)])
def test_smears_and_offsets(dtype: torch.dtype, rows: int, length: int, threads: int) -> None:
    x, most = draw(rows, length, 72, dtype=dtype), draw(1, dtype=dtype, seed=2)

    def smeared(gate: nn.Module) -> Work:
        return lambda operations, given: [operations.smear(given[0], None, gate, given[1])]

    compare(smeared, [x, most], linear(1, 24, dtype, 3))
    spread = draw(rows, length, 3, 24, dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2)
    compare(lambda _: lambda operations, given: [operations.offset_keys(given[0])], [spread], nn.Module())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_component_along_the_own_value(dtype: torch.dtype, kv_heads: int, threads: int) -> None:
    y, values = draw(3, 65, 4, 24, dtype=dtype), draw(3, 65, 9, 24, dtype=dtype, seed=2)

    def excluded(operations: Operations, given: list[Tensor]) -> list[Tensor]:
        return [operations.exclude_own(given[0], given[1][:, :, :kv_heads])]

    compare(lambda _: excluded, [y, values], nn.Module())


@pytest.mark.parametrize("dtype", FORMATS)
def test_mlps(dtype: torch.dtype, threads: int) -> None:
    def inner(matrices: nn.Module) -> Work:
        into, out = matrices.children()
        return lambda operations, given: [operations.mlp(given[0], into, out, (None, None))]

    matrices = nn.ModuleList([linear(100, 40, dtype, 2), linear(40, 100, dtype, 3)])
    compare(inner, [draw(3, 65, 40, dtype=dtype)], matrices)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 3, 64), (4, 2, 16)])
@pytest.mark.parametrize("gated", [True, False])
def test_heads(dtype: torch.dtype, heads: int, kv_heads: int, size: int, gated: bool, threads: int) -> None:
    rows, length, channels = 3, 67, heads * size
    sizes = [channels, kv_heads * size, kv_heads * size]
    matrices = nn.ModuleList([linear(outputs, channels, dtype, i) for i, outputs in enumerate(sizes)])
    if gated:
        matrices.append(linear(kv_heads, 12, dtype, 9))
    x, value = draw(rows, length, channels, dtype=dtype), draw(rows, length, kv_heads * size, dtype=dtype, seed=2)
    angles = draw(1, length, 1, size // 2, dtype=torch.float32, seed=3)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    turned = (cos.double().square() + sin.double().square()).sqrt()  # 1, but for rounding, which a norm undoes

    def attended(matrices: nn.Module) -> Work:
        own, gate = list(matrices.children())[:3], list(matrices.children())[3:]

        def work(operations: Operations, given: Sequence[Tensor]) -> Sequence[Tensor]:
            exact = given[0].dtype == torch.float64
            tables = (cos.double() / turned, sin.double() / turned) if exact else (cos, sin)
            if gate:
                return operations.gated_heads(given[0], own, gate[0], given[1], size, *tables, 1.2)
            return operations.heads(given[0], own, size, *tables, 1.2)

        return work

    compare(attended, [x, value][: 1 + gated], matrices)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "length", "window"),
    [
        (3, 3, 64, 1, 5),
        (4, 2, 128, 23, 500),
        (3, 3, 64, 130, 130),
        (4, 2, 128, 197, 70),
        (2, 1, 32, 197, 70),
        (2, 1, 32, 140, 3),
        (3, 3, 64, 130, 1),
    ],
)
def test_attention(
    made: Training, dtype: torch.dtype, heads: int, kv_heads: int, size: int, length: int, window: int, threads: int
) -> None:
    whole = draw(2, length, heads + 2 * kv_heads, size, dtype=dtype)
    q, k, v = whole.split([heads, kv_heads, kv_heads], dim=2)  # not contiguous
    assert made.takes(q) or dtype == torch.bfloat16
    if not made.takes(q):
        pytest.skip("the processor has no AVX512-BF16, or its products take whole blocks of 64 numbers")
    cancels = length == 1  # gradients of q and k are then 0, and what is left of them is rounding
    far = 0.015 if dtype == torch.bfloat16 else 2e-3 if cancels else FAR[dtype]

    def attended(operations: Operations, given: Sequence[Tensor]) -> list[Tensor]:
        return [operations.attend(given[0], given[1], given[2], window, 0.2)]

    compare(lambda _: attended, [q, k, v], nn.Module(), far)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]  # heads that are not side by side
    compare(lambda _: attended, apart, nn.Module(), far)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("length", "window"), [(197, 500), (130, 20), (70, 69)])
def test_attention_within_documents(made: Training, dtype: torch.dtype, length: int, window: int, threads: int) -> None:
    whole = draw(2, length, 8, 64, dtype=dtype)
    q, k, v = whole.split([4, 2, 2], dim=2)
    if not made.takes(q):
        pytest.skip("the processor has no AVX512-BF16")
    begins = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.1
    context = Packed(begins.long().cumsum(dim=1))

    def attended(operations: Operations, given: Sequence[Tensor]) -> list[Tensor]:
        q, k, v = given
        assert (operations.by_documents(q, k, v, context.positions, window) is None) == (operations is SLOW)
        context.attention = operations
        return [context.attend(0, q, k, v, window)]

    compare(lambda _: attended, [q, k, v], nn.Module(), 0.015 if dtype == torch.bfloat16 else FAR[dtype])


@pytest.mark.parametrize("dtype", FORMATS)
def test_compiled_code_attends_by_the_same_kernels(made: Training, dtype: torch.dtype) -> None:
    if dtype not in made.attention_formats:
        pytest.skip("the processor has no AVX512-BF16")
    operations = CpuOperations()
    operations.prepare_compiling()
    positions = torch.arange(70)[None].expand(2, -1) % 30

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        return operations.by_documents(q, k, v, positions, 70)

    compiled = torch.compile(attended, backend="aot_eager", fullgraph=True, dynamic=False)
    outcomes = []
    for work in (attended, compiled):
        inputs = [draw(2, 70, 2, 64, dtype=dtype, seed=seed).requires_grad_() for seed in (1, 2, 3)]
        y = work(*inputs)
        assert y is not None
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    for eager, traced in zip(*outcomes, strict=True):
        assert torch.equal(eager, traced)


@pytest.mark.skipif("amx_bf16" not in host.cpu_flags(), reason="the processor has no AMX")
def test_attention_by_amx_is_attention_by_avx512(
    made: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_avx512 = made_without(tmp_path, monkeypatch, "-mno-amx-bf16")
    for size, length, window in ((64, 197, 70), (128, 130, 500)):
        q, k, v, g = (draw(2, length, 2, size, dtype=torch.bfloat16, seed=seed) for seed in range(4))
        results = []
        for use in (made, by_avx512):
            y, logs = use.attention(q, k, v, window, 0.2)
            grads = [torch.empty_like(x) for x in (q, k, v)]
            use.attention_back(q, k, v, y, g, logs, grads, window, 0.2)
            results.append([y, logs, *grads])
        for one, other in zip(*results, strict=True):  # sums in another order
            assert (one.double() - other.double()).abs().max() <= 0.01 * other.abs().max()


@pytest.mark.parametrize("dtype", FORMATS)
def test_attention_with_large_scores_overflows_nowhere(made: Training, dtype: torch.dtype) -> None:
    q, k, v = (100 * draw(2, 70, 2, 64, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    if not made.takes(q):
        pytest.skip("the processor has no AVX512-BF16")
    y = FAST.attend(q.requires_grad_(), k, v, 70)
    (g,) = torch.autograd.grad(y.sum(), q)
    slow = SLOW.attend(q.detach().double(), k.double(), v.double(), 70)
    assert g.isfinite().all() and (y.double() - slow).abs().max() <= 0.02 * slow.abs().max()
    q = q.detach().clone()
    q[1, 3] = float("nan")
    seen = FAST.attend(q.requires_grad_(), k, v, 70).isnan().any(dim=3).any(dim=2)
    assert seen.nonzero().tolist() == [[1, 3]]


def test_without_compiled_kernels_and_in_other_formats_operators_are_torchs() -> None:
    x = draw(2, 3, 8, dtype=torch.float32).requires_grad_()
    plain = CpuOperations(compiles=False)
    assert plain._train(x) is None and FAST._train(x) is not None
    assert FAST._train(x.half()) is None and FAST._train(x, x.bfloat16()) is None
    with torch.no_grad():
        assert FAST._train(x) is None
    assert kernels(host.use_compile_cache(base_dir())) is not None
    assert torch.equal(plain.norm(x), SLOW.norm(x))


def test_square_sums(threads: int) -> None:
    tensors = [draw(*shape, dtype=torch.float32) for shape in ((3,), (70, 5000), (4097,), ())]
    wanted = torch.stack([x.double().square().sum() for x in tensors])
    assert torch.allclose(FAST.square_sums(tensors).double(), wanted, rtol=1e-6)
    turned = [tensors[1].mT]  # not contiguous
    assert torch.allclose(FAST.square_sums(turned).double(), wanted[1:2], rtol=1e-5)
    assert FAST.square_sums([tensors[1].fill_(float("nan"))]).isnan().all()


def test_compiling_is_needless_where_the_kernels_compute_everything(made: Training) -> None:
    wide = bool({"avx512f", "avx2"} & host.cpu_flags())
    assert bool(FAST.needs_no_compiler(64, torch.float32)) == wide
    takes = made.takes(torch.empty(1, 1, 1, 64, dtype=torch.bfloat16))
    assert bool(FAST.needs_no_compiler(64, torch.bfloat16)) == (wide and takes)
    assert not FAST.needs_no_compiler(48, torch.bfloat16) and not FAST.needs_no_compiler(64, torch.float16)
    assert not CpuOperations(compiles=False).needs_no_compiler(64, torch.float32)
    assert not SLOW.needs_no_compiler(64, torch.float32)
