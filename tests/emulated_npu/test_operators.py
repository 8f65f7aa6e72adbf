"""The emulated fused operators against plain arithmetic in fp32, forward and backward, and the calls they refuse."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.emulated_npu import log
from tests.emulated_npu.worker import on_npu
from tests.support.tensors import draw

NPU = "npu:0"


def plain(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Softmax attention of (B, S, N, D) tensors. `hidden` is (Sq, Sk); True hides a key."""
    groups = q.size(2) // k.size(2)
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = (q @ k.mT) / math.sqrt(q.size(-1))
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def distance(queries: int, keys: int, end: bool) -> Tensor:
    """How far each key is before each query. With `end`, the last query is at the last key."""
    return torch.arange(queries)[:, None] + (keys - queries if end else 0) - torch.arange(keys)[None]


MASK = "2048 x 2048"  # stands for the mask of modes 2, 3 and 4
CASES: dict[str, tuple[dict[str, Any], int, int, Any]] = {
    "full": ({}, 6, 6, lambda d: d > 99),
    "own mask": ({"atten_mask": distance(6, 6, False) < -1}, 6, 6, lambda d: d < -1),
    "causal": ({"sparse_mode": 2, "atten_mask": MASK}, 6, 6, lambda d: d < 0),
    "causal from the left": ({"sparse_mode": 2, "atten_mask": MASK}, 3, 6, lambda d: d - 3 < 0),
    "causal from the right": ({"sparse_mode": 3, "atten_mask": MASK}, 3, 6, lambda d: d < 0),
    "band": (
        {"sparse_mode": 4, "atten_mask": MASK, "pre_tockens": 2, "next_tockens": 0}, 7, 7, lambda d: (d < 0) | (d > 2)
    ),
    "band of a chunk": (
        {"sparse_mode": 4, "atten_mask": MASK, "pre_tockens": 3, "next_tockens": 0}, 3, 8, lambda d: (d < 0) | (d > 3)
    ),
}  # fmt: skip


def causal_mask() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(NPU)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("case", CASES)
@on_npu()
def test_fusion_attention_is_softmax_attention(case: str, kv_heads: int) -> None:
    import torch_npu

    options, queries, keys, rule = CASES[case]
    options = dict(options)
    if isinstance(options.get("atten_mask"), Tensor):
        options["atten_mask"] = options["atten_mask"].to(NPU)
    elif "atten_mask" in options:
        options["atten_mask"] = causal_mask()
    shapes = [(2, queries, 4, 8), (2, keys, kv_heads, 8), (2, keys, kv_heads, 8)]
    ours = [draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    theirs = [t.detach().to(NPU).requires_grad_() for t in ours]
    expected = plain(*ours, rule(distance(queries, keys, True)))  # type: ignore[call-arg]
    with log.record() as seen:
        out, top, total, *_ = torch_npu.npu_fusion_attention(*theirs, 4, "BSND", scale=8**-0.5, **options)
        out.backward(draw(2, queries, 4, 8, seed=9).to(NPU))
    expected.backward(draw(2, queries, 4, 8, seed=9))
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-5, atol=1e-6)  # type: ignore[union-attr]
    assert top.shape == total.shape == (2, 4, queries, 8)
    assert seen.operators == {"npu_fusion_attention": 1, "npu_fusion_attention_grad": 1}


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BNSD", "TND"])
@on_npu()
def test_layouts_are_rearrangements(layout: str) -> None:
    import torch_npu

    q, k, v = (draw(2, 5, 4, 8, seed=i, dtype=torch.bfloat16).to(NPU) for i in range(3))
    arrange = {
        "BSH": lambda x: x.flatten(2), "SBH": lambda x: x.flatten(2).transpose(0, 1),
        "BNSD": lambda x: x.transpose(1, 2), "TND": lambda x: x.flatten(0, 1),
    }[layout]  # fmt: skip
    lengths = {"actual_seq_qlen": [5, 10], "actual_seq_kvlen": [5, 10]} if layout == "TND" else {}
    options: dict[str, Any] = {"scale": 0.3, "sparse_mode": 2, "atten_mask": causal_mask()}
    expected = torch_npu.npu_fusion_attention(q, k, v, 4, "BSND", **options)[0]
    got = torch_npu.npu_fusion_attention(*(arrange(x) for x in (q, k, v)), 4, layout, **options, **lengths)[0]
    assert torch.equal(got.cpu(), arrange(expected).cpu())


@on_npu()
def test_fusion_attention_refuses_what_the_kernel_refuses() -> None:
    import torch_npu

    q, k = torch.ones(1, 4, 4, 8, device=NPU), torch.ones(1, 4, 3, 8, device=NPU)
    upside_down = torch.ones(2048, 2048, dtype=torch.bool, device=NPU).tril()
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((q, q, q, 4, "BSN"), {}, "input_layout"),
        ((q, q, q, 8, "BSND"), {}, "heads"),
        ((q, k, k, 4, "BSND"), {}, "heads"),
        ((q, q.bfloat16(), q.bfloat16(), 4, "BSND"), {}, "format"),
        ((q, q, q, 4, "BSND"), {"sparse_mode": 2, "atten_mask": torch.ones(4, 4, device=NPU).bool()}, "2048 x 2048"),
        ((q, q, q, 4, "BSND"), {"sparse_mode": 2, "atten_mask": upside_down}, "above the diagonal"),
        ((q, q, q, 4, "BSND"), {"atten_mask": torch.ones(4, 4, device=NPU)}, "bool or uint8"),
        ((q, q, q, 4, "BSND"), {"atten_mask": torch.ones(5, 4, device=NPU).bool()}, "fits no attention"),
        ((q.flatten(0, 1),) * 3 + (4, "TND"), {}, "cumulative"),
        ((q.cpu(), q.cpu(), q.cpu(), 4, "BSND"), {}, "backend"),
        ((q, q.to("npu:1"), q, 4, "BSND"), {}, "at least two devices"),
    ]
    for arguments, options, words in wrong:
        with pytest.raises((RuntimeError, NotImplementedError), match=words):
            torch_npu.npu_fusion_attention(*arguments, **options)
    with pytest.raises(TypeError, match="attn_mask"):  # the real name is atten_mask
        torch_npu.npu_fusion_attention(q, q, q, 4, "BSND", attn_mask=None)


@pytest.mark.parametrize("chip", ["910A", "310P"])
def test_the_fused_operators_do_not_exist_on_every_chip(chip: str) -> None:
    {"910A": fused_operators_are_missing_on_910a, "310P": fused_operators_are_missing_on_310p}[chip]()


def check_missing() -> None:
    import torch_npu

    q = torch.ones(1, 1, 2, 16, dtype=torch.float16, device=NPU)
    with pytest.raises(RuntimeError, match=r"npu_fusion_attention.*does not exist on Ascend"):
        torch_npu.npu_fusion_attention(q, q, q, 2, "BSND")
    with pytest.raises(RuntimeError, match=r"npu_fused_infer_attention_score.*does not exist on Ascend"):
        torch_npu.npu_fused_infer_attention_score(q, q, q, num_heads=2, input_layout="BSND")


@on_npu(chip="910A")
def fused_operators_are_missing_on_910a() -> None:
    check_missing()


@on_npu(chip="310P")
def fused_operators_are_missing_on_310p() -> None:
    check_missing()


@on_npu()
def test_decoding_sees_each_sequences_own_length() -> None:
    import torch_npu

    q, k, v = (draw(3, s, n, 16, seed=i, dtype=torch.float16) for i, (s, n) in enumerate([(1, 4), (9, 2), (9, 2)]))
    lengths = [9, 1, 4]
    out, lse = torch_npu.npu_fused_infer_attention_score(
        q.to(NPU), k.to(NPU), v.to(NPU), num_heads=4, num_key_value_heads=2, scale=0.25, input_layout="BSND",
        actual_seq_lengths_kv=lengths, softmax_lse_flag=True,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        expected = plain(
            q[row : row + 1].float(), k[row : row + 1, :length].float(), v[row : row + 1, :length].float(),
            torch.zeros(1, length, dtype=torch.bool),
        )  # fmt: skip
        torch.testing.assert_close(out[row].cpu().float(), expected[0], rtol=1e-3, atol=1e-3)
    assert lse.shape == (3, 4, 1, 1)


@on_npu()
def test_decoding_refuses_fp32_gradients_and_tensors_of_lengths_and_ignores_a_long_mask() -> None:
    import torch_npu

    infer = torch_npu.npu_fused_infer_attention_score
    q, k = torch.ones(1, 1, 2, 16, device=NPU), draw(1, 600, 2, 16).to(NPU)
    options: dict[str, Any] = {"num_heads": 2, "input_layout": "BSND"}
    with pytest.raises(RuntimeError, match="format"):
        infer(q, k, k, **options)
    q, k = q.half(), k.half()
    with pytest.raises(RuntimeError, match="list of numbers"):
        infer(q, k, k, actual_seq_lengths_kv=torch.tensor([3]), **options)
    with pytest.raises(RuntimeError, match="no backward pass"):
        infer(q.clone().requires_grad_(), k, k, **options)
    mask = torch.zeros(1, 1, 1, 600, dtype=torch.bool, device=NPU)
    mask[..., 5:] = True
    assert torch.equal(infer(q, k, k, atten_mask=mask, **options)[0], infer(q, k, k, **options)[0])
    short, shorter = k[:, :500], k[:, :5]
    assert torch.equal(infer(q, short, short, atten_mask=mask[..., :500], **options)[0],
                       infer(q, shorter, shorter, **options)[0])  # fmt: skip


@on_npu(chip="310P")
def test_a_310p_decodes_in_fp16_without_grouped_heads() -> None:
    import torch_npu

    q, k, v = (draw(2, s, 2, 16, seed=i, dtype=torch.float16) for i, s in enumerate([1, 6, 6]))
    on = [x.transpose(1, 2).to(NPU) for x in (q, k, v)]
    options: dict[str, Any] = {"num_heads": 2, "scale_value": 0.25, "input_layout": "BNSD"}
    out = torch_npu.npu_incre_flash_attention(*on, actual_seq_lengths=[6, 3], **options)
    for row, length in ((0, 6), (1, 3)):
        hidden = torch.zeros(1, length, dtype=torch.bool)
        expected = plain(*(x[row : row + 1, :length].float() for x in (q, k, v)), hidden)  # type: ignore[call-arg]
        torch.testing.assert_close(out[row].transpose(0, 1).cpu().float(), expected[0], rtol=1e-3, atol=1e-3)
    with pytest.raises(RuntimeError, match="format"):
        torch_npu.npu_incre_flash_attention(*(x.float() for x in on), **options)
    with pytest.raises(RuntimeError, match="as many heads"):
        torch_npu.npu_incre_flash_attention(on[0], on[1][:, :1], on[2][:, :1], **options)
    with pytest.raises(RuntimeError, match="one token long"):
        torch_npu.npu_incre_flash_attention(on[1], on[1], on[2], **options)


@on_npu(chip="310P")
def test_a_310p_reads_prompts_causally() -> None:
    import torch_npu

    q, k, v = (draw(2, 6, 2, 16, seed=i, dtype=torch.float16) for i in range(3))
    hidden = distance(6, 6, False) < 0
    out = torch_npu.npu_prompt_flash_attention(
        *(x.to(NPU) for x in (q, k, v)), atten_mask=hidden.to(NPU), num_heads=2, scale_value=0.25, input_layout="BSND"
    )
    torch.testing.assert_close(out.cpu().float(), plain(q.float(), k.float(), v.float(), hidden), rtol=1e-3, atol=1e-3)


@on_npu()
def test_torchs_own_attention_is_fused_as_in_the_package() -> None:
    q, k, v = (draw(2, 4, 6, 8, seed=i) for i in range(3))
    masks: list[tuple[dict[str, Any], bool]] = [
        ({}, True), ({"is_causal": True}, True), ({"attn_mask": distance(6, 6, False) >= -1}, True),
        ({"attn_mask": torch.zeros(6, 6)}, False),
    ]  # fmt: skip
    for options, fused in masks:
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        there = {name: x.to(NPU) if isinstance(x, Tensor) else x for name, x in options.items()}
        with log.record() as seen:
            got = torch.nn.functional.scaled_dot_product_attention(q.to(NPU), k.to(NPU), v.to(NPU), **there)
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-6)
        assert bool(seen.operators["npu_fusion_attention_v3"]) == fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_npu()
def test_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    import torch_npu

    x, gamma = draw(3, 5, 16, dtype=dtype).requires_grad_(), draw(16, seed=1, dtype=dtype).requires_grad_()
    there = [t.detach().to(NPU).requires_grad_() for t in (x, gamma)]
    expected = torch.nn.functional.rms_norm(x.float(), (16,), gamma.float(), 1e-6).to(dtype)
    with log.record() as seen:
        got, rstd = torch_npu.npu_rms_norm(*there, epsilon=1e-6)
    got.backward(torch.ones_like(got))
    expected.backward(torch.ones_like(expected))
    torch.testing.assert_close(got.cpu(), expected)
    torch.testing.assert_close(there[0].grad.cpu(), x.grad)  # type: ignore[union-attr]
    torch.testing.assert_close(there[1].grad.cpu(), gamma.grad, rtol=2e-2, atol=2e-2)  # type: ignore[union-attr]
    assert (rstd.shape, rstd.dtype) == ((3, 5, 1), torch.float32)
    assert seen.operators == {"npu_rms_norm": 1}
    with pytest.raises(RuntimeError, match="gamma's shape"):
        torch_npu.npu_rms_norm(there[0], torch.ones(5, device=NPU, dtype=dtype))
    with pytest.raises(RuntimeError, match="one float format"):
        torch_npu.npu_rms_norm(there[0], torch.ones(16, device=NPU, dtype=torch.float16))


@pytest.mark.parametrize("mode", ["half", "interleave"])
@on_npu()
def test_rotary_mul_rotates_pairs_of_channels(mode: str) -> None:
    import torch_npu

    x = draw(2, 5, 3, 8)
    angle = torch.outer(torch.arange(5.0), 0.7 ** torch.arange(4.0))
    pairs = torch.complex(x[..., :4], x[..., 4:]) if mode == "half" else torch.view_as_complex(x.unflatten(-1, (4, 2)))
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[None, :, None]
    expected = torch.cat((turned.real, turned.imag), -1) if mode == "half" else torch.view_as_real(turned).flatten(-2)
    wide = torch.cat((angle, angle), -1) if mode == "half" else angle.repeat_interleave(2, -1)
    r1, r2 = (t[None, :, None].to(NPU) for t in (wide.cos(), wide.sin()))
    there = x.to(NPU).requires_grad_()
    got = torch_npu.npu_rotary_mul(there, r1, r2, mode)
    torch.testing.assert_close(got.cpu(), expected)
    (got.square().sum() / 2).backward()  # a rotation preserves lengths, so the gradient is x itself
    torch.testing.assert_close(there.grad.cpu(), x)  # type: ignore[union-attr]
    for arguments, words in (((x.to(NPU), r1[..., :4], r2[..., :4]), "D must be even"),
                             ((x.to(NPU).bfloat16(), r1, r2), "one float format"),
                             ((x.to(NPU), r1[:, :4], r2[:, :4]), "broadcast")):  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            torch_npu.npu_rotary_mul(*arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_npu()
def test_a_product_of_16_bit_matrices_is_rounded_once(dtype: torch.dtype) -> None:
    a, b, c = (
        draw(2, 24, 96, dtype=dtype),
        draw(2, 96, 40, seed=1, dtype=dtype),
        draw(2, 24, 40, seed=2, dtype=dtype),
    )
    x, y, z = (t.to(NPU) for t in (a, b, c))
    a, b, c = (t.double() for t in (a, b, c))
    found = {
        "mm": (x[0] @ y[0], a[0] @ b[0]),
        "a transposed mm": (y[0].mT @ x[0].mT, b[0].mT @ a[0].mT),
        "bmm": (x @ y, a @ b),
        "addmm": (torch.addmm(z[0], x[0], y[0], beta=0.5, alpha=2), 0.5 * c[0] + 2 * (a[0] @ b[0])),
        "addmm with a row": (torch.addmm(z[0, 0], x[0], y[0]), c[0, 0] + a[0] @ b[0]),
        "mv": (x[0] @ y[0, :, 0], a[0] @ b[0, :, 0]),
        "out": (torch.mm(x[0], y[0], out=torch.empty(24, 40, dtype=dtype, device=NPU)), a[0] @ b[0]),
        "out that grows": (torch.bmm(x, y, out=torch.empty(0, dtype=dtype, device=NPU)), a @ b),
        "in place": (z.clone().baddbmm_(x, y), c + a @ b),
    }
    for case, (got, exact) in found.items():
        assert got.dtype == dtype and got.device == torch.device(NPU), case
        # half a unit in the last place, and the error of the sum in fp32
        torch.testing.assert_close(got.cpu().double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=2e-5, msg=case)
    twice = z.clone()
    assert twice.baddbmm_(x, y).data_ptr() == twice.data_ptr()
    with pytest.raises(RuntimeError):
        torch.mm(x[0], y[0].float())
