"""Attention against a plain softmax, rotation against complex numbers, the chunked loss against full logits."""

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.attention import cache_mask
from nanochat.loss import chunked_loss, softcap, token_losses
from nanochat.platforms import blocked_attention
from nanochat.platforms.blocked_attention import BlockedAttention
from nanochat.platforms.cpu import operations as cpu
from nanochat.platforms.cpu.decoding import by_products, one_query
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.platforms.operations import Operations
from tests.support.tensors import draw

CPU = torch.device("cpu")
PLAIN = Operations()
INF = float("inf")


def plain_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """softmax(q k / sqrt(D)) v, head by head, with a (..., T, K) mask; q (B, T, H, D), k and v (B, K, Hkv, D)."""
    heads = []
    for head in range(q.size(2)):
        shared = head * k.size(2) // q.size(2)  # consecutive query heads share a key head
        scores = q[:, :, head] @ k[:, :, shared].mT / math.sqrt(q.size(3))
        heads.append(scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ v[:, :, shared])
    return torch.stack(heads, dim=2)


def causal_window(T: int, window: int) -> Tensor:
    """(T, T): query i sees keys i - window .. i."""
    return torch.tensor([[0 <= i - j <= window for j in range(T)] for i in range(T)])


# --- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [1, 3, 5, 6, 11, 12, 13, 22, 23, 24, 100])
def test_attend_equals_a_masked_softmax_with_its_gradients(window: int, kv_heads: int) -> None:
    B, T, H, D = 2, 24, 4, 8
    ours = [draw(B, T, heads, D, seed=i).requires_grad_() for i, heads in enumerate((H, kv_heads, kv_heads))]
    plain = [x.detach().double().requires_grad_() for x in ours]
    mixed = draw(B, T, H, D, seed=9)
    out = PLAIN.attend(*ours, window)
    expected = plain_attention(*plain, causal_window(T, window))
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    (out * mixed).sum().backward()
    (expected * mixed).sum().backward()
    for x, reference in zip(ours, plain, strict=True):
        torch.testing.assert_close(x.grad.double(), reference.grad, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("T", "window"), [(1, 1), (1, 128), (2, 1), (7, 2), (129, 128), (130, 128), (257, 128)])
def test_attend_at_the_edges_of_its_blocks(T: int, window: int) -> None:
    q, k, v = (draw(1, T, 2, 4, seed=i) for i in range(3))
    expected = plain_attention(q, k, v, causal_window(T, window))
    torch.testing.assert_close(PLAIN.attend(q, k, v, window), expected, atol=1e-5, rtol=1e-5)


def test_attend_makes_no_mask_that_grows_with_the_sequence() -> None:
    operations = Operations()
    for T in (100, 200, 300):
        operations.attend(*(draw(1, T, 1, 4) for _ in range(3)), 16)
    assert len(operations.bands) == 1
    assert operations._band(16, CPU).shape == (16, 32)


def test_attend_first_used_for_inference_can_be_trained_afterwards() -> None:
    operations = Operations()
    q, k, v = (draw(1, 24, 2, 4, seed=i) for i in range(3))
    with torch.inference_mode():
        operations.attend(q, k, v, 8)
    q.requires_grad_()
    operations.attend(q, k, v, 8).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize(("T", "window"), [(1, 1), (24, 100), (128, 127), (129, 5), (300, 128), (300, 300), (700, 200)])
def test_blocked_attention_equals_a_masked_softmax_with_its_gradients(T: int, window: int) -> None:
    ours = [draw(2, T, 2, 8, seed=i).requires_grad_() for i in range(3)]
    plain = [x.detach().double().requires_grad_() for x in ours]
    mixed = draw(2, T, 2, 8, seed=9)
    out = BlockedAttention.apply(*ours, window, -INF)
    places = torch.arange(T)
    distance = places[:, None] - places
    expected = plain_attention(*plain, (distance >= 0) & (distance <= window))
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    (out * mixed).sum().backward()
    (expected * mixed).sum().backward()
    for x, reference in zip(ours, plain, strict=True):
        torch.testing.assert_close(x.grad.double(), reference.grad, atol=5e-6, rtol=1e-5)


@contextlib.contextmanager
def as_if_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Patch our modules, not torch: a compiler that is loaded meanwhile would keep the patched function."""
    with monkeypatch.context() as patch:
        for module in (cpu, blocked_attention):
            patch.setattr(module, "is_compiling", lambda: True)
        yield


def attend_as_if_compiled(monkeypatch: pytest.MonkeyPatch, *tensors: torch.Tensor) -> torch.Tensor:
    """Attention in a window of 64 as a compiled model computes it, two heads at a time, but without a compiler."""
    monkeypatch.setattr(blocked_attention, "_compiled", lambda work: work)
    monkeypatch.setattr(blocked_attention, "GROUP_BYTES", 2 * 4 * 128 * 200)
    with as_if_compiled(monkeypatch):
        return CpuOperations().attend(*tensors, 64)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (4, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_one_query_a_row_sees_the_cache_as_a_plain_softmax_does(heads: int, kv_heads: int, scale: float | None) -> None:
    B, keys, D = 5, 9, 16
    q, k, v = draw(B, 1, heads, D), draw(2, B, 20, kv_heads, D, seed=1)[1, :, :keys], draw(B, keys, kv_heads, D, seed=2)
    mask = torch.arange(keys) < torch.tensor([1, 3, 9, 5, 2])[:, None]
    mask = mask[:, None, None]
    expected = plain_attention(q * (1 if scale is None else scale * D**0.5), k, v, mask[:, 0])
    torch.testing.assert_close(one_query(q, k, v, mask, scale), expected)
    low = [x.bfloat16() for x in (q, k, v)]
    torch.testing.assert_close(one_query(*low, mask, scale).float(), expected, rtol=0.05, atol=0.05)


def test_attention_by_products_and_its_gradients_are_a_plain_softmax_s() -> None:
    B, T, H, D = 2, 7, 3, 8
    given = [draw(B, T, H, D, seed=seed).requires_grad_() for seed in range(3)]
    mask = (draw(B, 1, T, T, seed=4) > 0) | torch.eye(T, dtype=torch.bool)
    expected, found = plain_attention(*given, mask[:, 0]), by_products(*given, mask, None)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.square().sum(), given)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), given), wanted, rtol=1e-4, atol=1e-5)
    low = [x.detach().bfloat16().requires_grad_() for x in given]
    trained = CpuOperations().masked(*low, mask)
    torch.testing.assert_close(trained.float(), expected, rtol=0.05, atol=0.05)
    for one, other in zip(torch.autograd.grad(trained.float().square().sum(), low), wanted, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.1, atol=0.1)


def test_a_cpu_decodes_many_keys_in_bf16_by_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(cpu, "one_query", lambda *given: calls.append(given[0].shape) or one_query(*given))
    q, k = draw(8, 1, 2, 16), draw(8, 40, 2, 16, seed=1)
    mask = torch.ones(8, 1, 1, 40, dtype=torch.bool)
    operations = CpuOperations()
    for dtype, rows, expected in ((torch.float32, 8, 0), (torch.bfloat16, 2, 0), (torch.bfloat16, 8, 1)):
        calls.clear()
        given = [x[:rows].to(dtype) for x in (q, k, k)]
        y = operations.masked(*given, mask[:rows])
        assert len(calls) == expected
        plain = PLAIN.masked(*given, mask[:rows])
        torch.testing.assert_close(y, plain, rtol=0.03, atol=0.03)


def test_blocked_attention_is_what_compiled_bf16_training_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (draw(1, 200, 4, 8, seed=i).bfloat16() for i in range(3))
    leaves, exact_leaves = (
        [x.to(kind, copy=True).requires_grad_() for x in (q, k, v)] for kind in (torch.bfloat16, torch.float)
    )
    out = attend_as_if_compiled(monkeypatch, *leaves)
    assert "BlockedAttention" in str(out.grad_fn)
    exact = PLAIN.attend(*exact_leaves, 64)
    torch.testing.assert_close(out.float(), exact, atol=0.02, rtol=0.02)
    with as_if_compiled(monkeypatch):
        out.float().square().sum().backward()
    exact.square().sum().backward()
    for ours, reference in zip(leaves, exact_leaves, strict=True):
        torch.testing.assert_close(ours.grad.float(), reference.grad, atol=0.05, rtol=0.05)
    shared = attend_as_if_compiled(monkeypatch, leaves[0], leaves[1][:, :, :2], leaves[2][:, :, :2])
    assert "BlockedAttention" not in str(shared.grad_fn)  # grouped heads use torch's attention


def test_a_compiled_model_keeps_no_attention_weights_for_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_attention, "_compiled", lambda work: work)
    operations = CpuOperations()
    q, k, v = (draw(1, 256, 2, 8, seed=i).bfloat16().requires_grad_() for i in range(3))
    fast = torch.compile(lambda *x: operations.attend(*x, 256) * 2, backend="aot_eager_decomp_partition", dynamic=False)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = fast(q, k, v)
    assert kept and max(x.numel() for x in kept) <= q.numel()  # two heads' weights are 64 times a head's queries
    out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_cache_mask_marks_the_window_before_each_place() -> None:
    places = torch.tensor([[0, 1], [4, 5]])
    seen = cache_mask(places, keys=6, window=2)
    assert seen.shape == (2, 1, 2, 6)
    assert seen[:, 0].int().tolist() == [
        [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]],
        [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]],
    ]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [1, 4, 64])
def test_attend_cached_equals_the_end_of_each_rows_sequence(window: int, kv_heads: int) -> None:
    """Rows end at different places, and what the cache holds beyond the end of a row must not matter."""
    T, H, D, K, lengths = 3, 4, 8, 20, (3, 9, 20)
    k, v = draw(3, K, kv_heads, D, seed=1), draw(3, K, kv_heads, D, seed=2)
    q = draw(3, T, H, D, seed=3)
    places = torch.tensor([[length - T + t for t in range(T)] for length in lengths])
    out = PLAIN.masked(q, k, v, cache_mask(places, K, window))
    for row, length in enumerate(lengths):
        seen = causal_window(length, window)[-T:]
        expected = plain_attention(q[row, None], k[row, None, :length], v[row, None, :length], seen)
        torch.testing.assert_close(out[row, None], expected, atol=1e-6, rtol=1e-5)


# --- norm and rotation ---------------------------------------------------------------------------


def test_norm_divides_by_the_root_mean_square() -> None:
    x = draw(2, 3, 16, size=5.0)
    torch.testing.assert_close(PLAIN.norm(x), x / x.square().mean(dim=-1, keepdim=True).sqrt())
    assert PLAIN.norm(torch.zeros(2, 4)).isfinite().all()


def test_rotary_multiplies_complex_numbers_by_minus_theta() -> None:
    T, D = 50, 12
    x = draw(2, T, 3, D).double()
    cos, sin = PLAIN.rotary_tables(T, D, CPU, torch.float64)
    number = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    frequency = torch.tensor([100_000.0 ** (-2 * i / D) for i in range(D // 2)], dtype=torch.float64)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
    turned = number * torch.polar(torch.ones_like(angle), -angle)[None, :, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(PLAIN.rotary(x, cos[None, :, None], sin[None, :, None]), expected, atol=1e-5, rtol=0)


def test_rotary_leaves_scores_to_relative_places_only() -> None:
    cos, sin = PLAIN.rotary_tables(64, 16, CPU, torch.float32)
    q, k = draw(16, seed=1), draw(16, seed=2)

    def score(i: int, j: int) -> float:
        turned = [
            PLAIN.rotary(x[None, None, None], cos[None, t, None, None], sin[None, t, None, None])
            for x, t in ((q, i), (k, j))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(10, 3) == pytest.approx(score(60, 53), abs=1e-4)
    assert score(10, 3) != pytest.approx(score(10, 4), abs=1e-2)


# --- the loss ------------------------------------------------------------------------------------


def plain_losses(x: Tensor, weight: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """Cross-entropy of softcapped full logits, (N,), 0 where the target is -1."""
    logits = 15 * torch.tanh((x @ weight.mT)[:, :vocab] / 15)
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")


def loss_case(N: int, vocab: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, targets (some ignored), token weights; logits large enough that the cap bends them."""
    x, weight = draw(N, 16, seed=1), draw(rows, 16, seed=2, size=3.0)
    targets = torch.randint(0, vocab, (N,), generator=torch.Generator().manual_seed(3))
    targets[::5] = -1
    return x, weight, targets, draw(N, seed=4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 10, 37, 1000])
@pytest.mark.parametrize(("vocab", "rows"), [(64, 64), (50, 64)])
def test_chunked_loss_equals_full_logits_with_both_gradients(vocab: int, rows: int, chunk: int, weighted: bool) -> None:
    x, weight, targets, token_weights = loss_case(37, vocab, rows)
    given = token_weights if weighted else None
    ours = x.clone().requires_grad_(), weight.clone().requires_grad_()
    plain = x.double().requires_grad_(), weight.double().requires_grad_()
    loss = chunked_loss(*ours, targets, vocab, given, chunk)
    each = plain_losses(*plain, targets, vocab)
    expected = (each * token_weights.double()).sum() if weighted else each.sum()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-4)
    (loss * 0.3).backward()  # the incoming gradient is not always 1
    (expected * 0.3).backward()
    for mine, reference in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


def test_chunked_loss_of_ignored_targets_is_zero_without_gradient() -> None:
    x, weight, targets, _ = loss_case(6, 50, 64)
    x.requires_grad_()
    loss = chunked_loss(x, weight.requires_grad_(), torch.full_like(targets, -1), 50)
    loss.backward()
    assert loss == 0
    assert not x.grad.any()
    assert not weight.grad.any()


def test_padded_rows_of_the_head_get_no_gradient() -> None:
    x, weight, targets, _ = loss_case(20, 50, 64)
    weight[50:] = 100.0  # they would win every softmax
    weight.requires_grad_()
    loss = chunked_loss(x, weight, targets, 50)
    loss.backward()
    torch.testing.assert_close(loss, plain_losses(x, weight.detach(), targets, 50).sum())
    assert not weight.grad[50:].any()


def test_chunked_loss_in_bf16_is_close_for_both_kinds_of_masters() -> None:
    """The weight is fp32 (one rank) or bf16 (gathered by FSDP2): the gradient stays precise over many chunks."""
    x, weight, targets, _ = loss_case(4096, 64, 64)
    plain = x.bfloat16().float().requires_grad_(), weight.bfloat16().float().requires_grad_()
    expected = plain_losses(*plain, targets, 64).sum()
    expected.backward()
    for dtype in (torch.float32, torch.bfloat16):
        ours = x.bfloat16().requires_grad_(), weight.detach().clone().to(dtype).requires_grad_()
        loss = chunked_loss(*ours, targets, 64, chunk=16)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
        for mine, reference in zip(ours, plain, strict=True):
            distance = (mine.grad.float() - reference.grad).norm() / reference.grad.norm()
            assert distance < 0.01, (dtype, distance)


@pytest.mark.parametrize("chunk", [1, 10, 1000])
def test_token_losses_equal_full_logits(chunk: int) -> None:
    x, weight, targets, _ = loss_case(37, 50, 64)
    losses = token_losses(x, weight, targets, 50, chunk)
    torch.testing.assert_close(losses, plain_losses(x, weight, targets, 50), rtol=1e-5, atol=1e-5)
    assert not losses[targets == -1].any()


def test_token_losses_agree_with_the_chunked_loss() -> None:
    x, weight, targets, token_weights = loss_case(37, 50, 64)
    each = token_losses(x, weight, targets, 50)
    total = chunked_loss(x, weight, targets, 50, token_weights)
    torch.testing.assert_close(total, (each * token_weights).sum(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("capped", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_token_losses_have_the_gradient_of_full_logits(capped: bool, frozen: bool) -> None:
    x, weight, targets, token_weights = loss_case(37, 64, 64)
    x, weight = x.requires_grad_(), weight.requires_grad_(not frozen)
    found = []
    for of_each in (
        lambda: token_losses(x, weight, targets, 64, 10, capped),
        lambda: F.cross_entropy(softcap(x @ weight.T) if capped else x @ weight.T, targets, ignore_index=-1,
                                reduction="none"),
    ):  # fmt: skip
        each = of_each()
        (each * token_weights).square().sum().backward()  # so that the weights of tokens depend on their losses
        found.append((each.detach(), x.grad, weight.grad))
        x.grad = weight.grad = None
    assert (found[0][2] is None) == frozen
    for ours, plain in zip(*found, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_softcap_bounds_logits_in_fp32() -> None:
    capped = softcap(torch.tensor([-1e4, 0.0, 0.1, 1e4], dtype=torch.bfloat16))
    assert capped.dtype == torch.float32
    assert capped[[0, 1, 3]].tolist() == [-15, 0, 15]
    assert capped[2] == pytest.approx(0.1, rel=1e-2)
