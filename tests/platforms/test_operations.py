"""Attention against a plain softmax, rotation against complex numbers, the chunked loss against full logits."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.attention import cache_mask
from nanochat.loss import Softcapped, chunked_loss, softcap, token_losses
from nanochat.models.qwen.loss import Uncapped
from nanochat.platforms import blocked_attention
from nanochat.platforms.blocked_attention import BlockedAttention
from nanochat.platforms.cpu.decoding import by_products
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


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(
    ("T", "window"),
    [(1, 1), (1, 128), (2, 1), (7, 2), (24, 5), (24, 11), (24, 12), (24, 23), (24, 24), (129, 128), (257, 128)],
)
def test_attend_equals_a_masked_softmax_with_its_gradients(T: int, window: int, kv_heads: int) -> None:
    B, H, D = 2, 4, 8
    ours = [draw(B, T, heads, D, seed=i).requires_grad_() for i, heads in enumerate((H, kv_heads, kv_heads))]
    check_window(lambda *x: PLAIN.attend(*x, window), ours, window)


def check_window(attend: Callable[..., Tensor], ours: list[Tensor], window: int) -> None:
    """Compare attention and its gradients with a masked softmax in fp64."""
    exact = [x.detach().double().requires_grad_() for x in ours]
    distance = torch.arange(ours[0].size(1))[:, None] - torch.arange(ours[0].size(1))
    out = attend(*ours)
    expected = plain_attention(*exact, (distance >= 0) & (distance <= window))
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    mixed = draw(*out.shape, seed=9)
    (out * mixed).sum().backward()
    (expected * mixed).sum().backward()
    for x, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), reference.grad, atol=5e-6, rtol=1e-5)


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


@pytest.mark.parametrize(("T", "window"), [(1, 1), (24, 100), (129, 5), (300, 128), (300, 300), (700, 200)])
def test_blocked_attention_equals_a_masked_softmax_with_its_gradients(T: int, window: int) -> None:
    ours = [draw(2, T, 2, 8, seed=i).requires_grad_() for i in range(3)]
    check_window(lambda *x: BlockedAttention.apply(*x, window, -INF), ours, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(2, 3, 3), (20, 3, 3), (3, 6, 2), (3, 3, 1)])
def test_single_queries_on_a_cpu_see_the_cache_as_a_plain_softmax_does(
    rows: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    q, k, v = (draw(rows, T, H, 16, seed=T + H).to(dtype) for T, H in ((1, heads), (30, kv_heads), (30, kv_heads)))
    visible = cache_mask(torch.arange(rows)[:, None] + 9, 30, 5)
    for scale in (None, 0.5):
        scaled = q.double() * (1 if scale is None else scale * 16**0.5)
        expected = plain_attention(scaled, k.double(), v.double(), visible[:, 0])
        attended = CpuOperations().masked(q, k, v, visible, scale)
        assert attended.dtype == dtype
        error = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(attended.double(), expected, rtol=0, atol=error)


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


def test_a_compiled_model_attends_in_blocks_and_keeps_no_attention_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    T, blocks = 256, []
    monkeypatch.setattr(blocked_attention, "_compiled", lambda work: blocks.append(work) or work)
    monkeypatch.setattr(blocked_attention, "GROUP_BYTES", 2 * 4 * 128 * T)  # two of the four heads at a time
    operations = CpuOperations()
    fast = torch.compile(lambda *x: operations.attend(*x, 64) * 2, backend="aot_eager_decomp_partition", dynamic=False)
    ours = [draw(1, T, 4, 8, seed=i).bfloat16().requires_grad_() for i in range(3)]
    exact = [x.detach().float().requires_grad_() for x in ours]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = fast(*ours)
    assert (
        blocks and saved and max(x.numel() for x in saved) <= ours[0].numel()
    )  # a head's weights are 32 times its queries
    expected = PLAIN.attend(*exact, 64) * 2
    torch.testing.assert_close(out.float(), expected, atol=0.04, rtol=0.02)
    out.float().square().sum().backward()
    expected.square().sum().backward()
    for x, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(x.grad.float(), reference.grad, atol=0.2, rtol=0.05)


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
@pytest.mark.parametrize("chunk", [1, 10, 1000])
def test_chunked_loss_equals_full_logits_with_both_gradients(chunk: int, weighted: bool) -> None:
    vocab = 50
    x, weight, targets, token_weights = loss_case(37, vocab, 64)
    given = token_weights if weighted else None
    ours = x.clone().requires_grad_(), weight.clone().requires_grad_()
    plain = x.double().requires_grad_(), weight.double().requires_grad_()
    loss = chunked_loss(*ours, targets, Softcapped(vocab), given, chunk)
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
    loss = chunked_loss(x, weight.requires_grad_(), torch.full_like(targets, -1), Softcapped(50))
    loss.backward()
    assert loss == 0
    assert not x.grad.any()
    assert not weight.grad.any()


def test_chunked_loss_in_bf16_is_close_for_both_kinds_of_masters() -> None:
    """The weight is fp32 (one rank) or bf16 (gathered by FSDP2): the gradient stays precise over many chunks."""
    x, weight, targets, _ = loss_case(4096, 64, 64)
    plain = x.bfloat16().float().requires_grad_(), weight.bfloat16().float().requires_grad_()
    expected = plain_losses(*plain, targets, 64).sum()
    expected.backward()
    for dtype in (torch.float32, torch.bfloat16):
        ours = x.bfloat16().requires_grad_(), weight.detach().clone().to(dtype).requires_grad_()
        loss = chunked_loss(*ours, targets, Softcapped(64), chunk=16)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
        for mine, reference in zip(ours, plain, strict=True):
            distance = (mine.grad.float() - reference.grad).norm() / reference.grad.norm()
            assert distance < 0.01, (dtype, distance)


@pytest.mark.parametrize("capped", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_token_losses_equal_full_logits_with_their_gradients(capped: bool, frozen: bool) -> None:
    vocab = 50 if capped else 64  # only heads whose logits are capped have padded rows
    x, weight, targets, token_weights = loss_case(37, vocab, 64)
    x, weight = x.requires_grad_(), weight.requires_grad_(not frozen)
    logits = (x @ weight.T)[:, :vocab]
    full = F.cross_entropy(softcap(logits) if capped else logits, targets, ignore_index=-1, reduction="none")
    criterion = Softcapped(vocab) if capped else Uncapped()
    results = []
    for losses in (token_losses(x, weight, targets, criterion, 10), full):
        (losses * token_weights).square().sum().backward()  # so that the weights of tokens depend on their losses
        results.append((losses.detach(), x.grad, weight.grad))
        x.grad = weight.grad = None
    assert (results[0][2] is None) == frozen
    for ours, plain in zip(*results, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_softcap_bounds_logits_in_fp32() -> None:
    capped = softcap(torch.tensor([-1e4, 0.0, 0.1, 1e4], dtype=torch.bfloat16))
    assert capped.dtype == torch.float32
    assert capped[[0, 1, 3]].tolist() == [-15, 0, 15]
    assert capped[2] == pytest.approx(0.1, rel=1e-2)
