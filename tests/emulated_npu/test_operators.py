"""The calls that the emulated fused operators refuse, and the rounding of products.

tests/platforms compares what the operators compute with plain torch.
"""

from typing import Any

import pytest
import torch

from tests.emulated_npu.worker import on_npu
from tests.support.tensors import draw

NPU = "npu:0"


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


@on_npu(chip="910A")
def test_a_chip_without_fused_operators_refuses_them() -> None:
    import torch_npu

    q = torch.ones(1, 1, 2, 16, dtype=torch.float16, device=NPU)
    with pytest.raises(RuntimeError, match=r"npu_fusion_attention.*does not exist on Ascend910A"):
        torch_npu.npu_fusion_attention(q, q, q, 2, "BSND")
    with pytest.raises(RuntimeError, match=r"npu_fused_infer_attention_score.*does not exist on Ascend910A"):
        torch_npu.npu_fused_infer_attention_score(q, q, q, num_heads=2, input_layout="BSND")


@on_npu(chip="310P")
def test_a_310p_decodes_one_token_in_fp16_without_grouped_heads() -> None:
    import torch_npu

    q, k = draw(2, 2, 1, 16, dtype=torch.float16).to(NPU), draw(2, 2, 6, 16, dtype=torch.float16).to(NPU)
    for arguments, words in (
        ((q.float(), k.float(), k.float()), "format"),
        ((q, k[:, :1], k[:, :1]), "as many heads"),
        ((k, k, k), "one token long"),
    ):
        with pytest.raises(RuntimeError, match=words):
            torch_npu.npu_incre_flash_attention(*arguments, num_heads=2, input_layout="BNSD")


@on_npu()
def test_norms_and_rotations_refuse_other_shapes_and_formats() -> None:
    import torch_npu

    x = draw(2, 5, 3, 8).to(NPU)
    cos = sin = torch.ones(1, 5, 1, 8, device=NPU)
    for call, words in (
        (lambda: torch_npu.npu_rms_norm(x, torch.ones(5, device=NPU)), "gamma's shape"),
        (lambda: torch_npu.npu_rms_norm(x, torch.ones(8, device=NPU).half()), "one float format"),
        (lambda: torch_npu.npu_rotary_mul(x, cos[..., :4], sin[..., :4]), "D must be even"),
        (lambda: torch_npu.npu_rotary_mul(x.bfloat16(), cos, sin), "one float format"),
        (lambda: torch_npu.npu_rotary_mul(x, cos[:, :4], sin[:, :4]), "broadcast"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()


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
