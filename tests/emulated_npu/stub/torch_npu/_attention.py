"""The attention operators of the real package: the layouts, masks and formats they accept, and what they compute.

Shapes: B batch, S sequence, N heads, D head dimension, T tokens of all sequences, H = N * D.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torch_npu._load import emulated
from torch_npu._operators import FLOATS, kernel, refuse
from torch_npu._softmax import Band, Sequences, attend, attend_backward
from torch_npu.npu.graphs import is_current_stream_capturing

FOREVER = 2147483647


class _FusionAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, plan: Sequences, band: Band, version: str
    ) -> Any:  # fmt: skip
        _check_capture(f"npu_fusion_attention{version}")
        with kernel(f"npu_fusion_attention{version}", q, k, v, mask) as device:
            alias = device.cpu_alias
            out, top, total = attend(alias(q), alias(k), alias(v), None if mask is None else alias(mask), plan, band)
            results = device.give(out.to(q.dtype), q), device.give(top, q), device.give(total, q)
        ctx.save_for_backward(q, k, v, mask, *results)
        ctx.plan, ctx.band, ctx.version = plan, band, version
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)  # no kernels that fill gradients with zeros: the real package launches none
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, mask, out, top, total = ctx.saved_tensors
        name = f"npu_fusion_attention_grad{ctx.version}"
        _check_capture(name)
        with kernel(name, grads[0], q, k, v, mask, out, top, total) as device:
            given = (None if t is None else device.cpu_alias(t) for t in (grads[0], q, k, v, mask, out, top, total))
            parts = attend_backward(*given, plan=ctx.plan, band=ctx.band)
            return *(device.give(part.to(q.dtype), q) for part in parts), None, None, None, None


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = FOREVER, next_tockens: int = FOREVER, inner_precise: int = 0, prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None, actual_seq_kvlen: list[int] | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:  # fmt: skip
    """Attention for training on 910B and 910C: (out, softmax_max, softmax_sum, reserved, seed, offset, mask_len)."""
    lengths = actual_seq_qlen, actual_seq_kvlen
    if pse is not None or padding_mask is not None or prefix is not None or keep_prob != 1.0 or softmax_layout:
        refuse("npu_fusion_attention", "pse, padding_mask, prefix, keep_prob and softmax_layout are not emulated")
    band = Band(scale, sparse_mode, pre_tockens, next_tockens)
    results = _fusion("", query, key, value, head_num, input_layout, atten_mask, band, lengths)
    return *results, query.new_empty(0), 0, 0, 0


def npu_fusion_attention_v3(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = FOREVER, next_tockens: int = FOREVER,
    inner_precise: int = 0, prefix: list[int] | None = None, actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The version that a graph can capture, in the layout BNSD; torch's own attention calls it too."""
    if any(x is not None for x in (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen)) or keep_prob != 1.0:
        refuse("npu_fusion_attention_v3", "pse, padding_mask, prefix, keep_prob and lengths are not emulated")
    if is_current_stream_capturing() and input_layout != "BNSD":
        refuse("npu_fusion_attention_v3", f"a graph can hold the layout BNSD alone, got {input_layout}")
    band = Band(scale, sparse_mode, pre_tockens, next_tockens)
    results = _fusion("_v3", query, key, value, head_num, input_layout, atten_mask, band, (None, None))
    return *results, *(query.new_empty(0) for _ in range(3))


def _fusion(
    version: str, q: Tensor, k: Tensor, v: Tensor, heads: int, layout: str, mask: Tensor | None, band: Band,
    lengths: tuple[list[int] | None, list[int] | None],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    name = f"npu_fusion_attention{version}"
    _check_chip(name)
    _check_formats(name, q, k, v, FLOATS)
    plan = Sequences.of(name, q, k, v, heads, 0, layout, *lengths)
    if plan.heads > 256 or not 1 <= plan.width <= 768:
        refuse(name, f"there may be at most 256 heads of 1 to 768 channels, got {plan.heads} of {plan.width}")
    _check_mask(name, mask, band.mode, plan)
    return _FusionAttention.apply(q, k, v, mask, plan, band, version)  # type: ignore[no-any-return]


def _check_capture(name: str) -> None:
    """Refuse the first version inside a graph: it makes its dropout mask on a second stream."""
    if is_current_stream_capturing() and not name.endswith("_v3"):
        raise RuntimeError(
            f"aclmdlRICapture: operation not permitted while a stream is capturing a graph: {name} on a second stream"
        )


def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, *, pse_shift: Tensor | None = None, atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None, actual_seq_lengths_kv: list[int] | None = None, num_heads: int = 1,
    scale: float = 1.0, pre_tokens: int = FOREVER, next_tokens: int = FOREVER, input_layout: str = "BSH",
    num_key_value_heads: int = 0, sparse_mode: int = 0, inner_precise: int = 0, softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention for inference on 910B and 910C: (out, logarithm of the softmax's sum or an empty tensor)."""
    name = "npu_fused_infer_attention_score"
    _check_chip(name)
    if pse_shift is not None or input_layout == "TND":
        refuse(name, "pse_shift and the layout TND are not emulated")
    _check_formats(name, query, key, value, FLOATS[:2])
    plan = Sequences.of(name, query, key, value, num_heads, num_key_value_heads, input_layout)
    plan = plan.with_lengths(name, actual_seq_lengths, actual_seq_lengths_kv)
    if plan.heads > 256 or not 1 <= plan.width <= 512:
        refuse(name, f"there may be at most 256 heads of 1 to 512 channels, got {plan.heads} of {plan.width}")
    _check_mask(name, atten_mask, sparse_mode, plan)
    if atten_mask is not None and sparse_mode == 0 and atten_mask.size(-2) == 1 and plan.keys > 512:
        atten_mask = None  # according to an open issue, the hardware silently ignores such a mask
    return _infer(name, query, key, value, atten_mask, plan, Band(scale, sparse_mode, pre_tokens, next_tokens),
                  softmax_lse_flag)  # fmt: skip


def npu_incre_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None, actual_seq_lengths: list[int] | None = None, num_heads: int = 1,
    scale_value: float = 1.0, input_layout: str = "BSH", num_key_value_heads: int = 0, inner_precise: int = 1,
) -> Tensor:  # fmt: skip
    """Attention of one query per sequence over a cache: a 310P's only way to decode. True in the mask hides a key."""
    name = "npu_incre_flash_attention"
    if padding_mask is not None or pse_shift is not None:
        refuse(name, "padding_mask and pse_shift are not emulated")
    plan = _plan_for_inference(name, query, key, value, num_heads, num_key_value_heads, input_layout)
    if plan.queries != 1:
        refuse(name, f"the query must be one token long, got {plan.queries}")
    plan = plan.with_lengths(name, None, actual_seq_lengths)
    _check_mask(name, atten_mask, 0, plan)
    return _infer(name, query, key, value, atten_mask, plan, Band(scale_value, 0, FOREVER, FOREVER), False)[0]


def npu_prompt_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None, actual_seq_lengths: list[int] | None = None, num_heads: int = 1,
    scale_value: float = 1.0, pre_tokens: int = FOREVER, next_tokens: int = 0, input_layout: str = "BSH",
    num_key_value_heads: int = 0, actual_seq_lengths_kv: list[int] | None = None, sparse_mode: int = 0,
) -> Tensor:  # fmt: skip
    """Attention over whole prompts, without a backward pass. True in the mask hides a key."""
    name = "npu_prompt_flash_attention"
    if padding_mask is not None or pse_shift is not None:
        refuse(name, "padding_mask and pse_shift are not emulated")
    plan = _plan_for_inference(name, query, key, value, num_heads, num_key_value_heads, input_layout)
    plan = plan.with_lengths(name, actual_seq_lengths, actual_seq_lengths_kv)
    _check_mask(name, atten_mask, sparse_mode, plan)
    band = Band(scale_value, sparse_mode, pre_tokens, next_tokens)
    return _infer(name, query, key, value, atten_mask, plan, band, False)[0]


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's attention like the real package's: fused without a mask or with a bool mask, otherwise with matmuls."""
    fits = query.dim() == 4 and query.dtype in FLOATS and dropout_p == 0
    if not fits or (attn_mask is not None and attn_mask.dtype != torch.bool):
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    mask, mode = attn_mask, 0
    if is_causal:  # the real package makes the 2048 x 2048 mask again in every call
        mask, mode = torch.ones(2048, 2048, dtype=torch.bool, device=query.device).triu(1), 2
    elif mask is not None:
        mask = mask.logical_not()  # True means seen in torch's mask, and hidden in this one
        if mask.dim() == 3:
            mask = mask.unsqueeze(1)
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    return npu_fusion_attention_v3(
        query, key, value, query.size(1), "BNSD", atten_mask=mask, scale=factor, sparse_mode=mode
    )[0]


def _check_chip(name: str) -> None:
    chip = emulated()["chip"]
    if not chip["fused_attention"]:
        refuse(name, f"the operator does not exist on {chip['name']}")


def _check_formats(name: str, q: Tensor, k: Tensor, v: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if q.dtype not in allowed or k.dtype != q.dtype or v.dtype != q.dtype:
        refuse(name, f"query, key and value must have one format of {allowed}, got {q.dtype}, {k.dtype}, {v.dtype}")


def _plan_for_inference(
    name: str, q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, layout: str
) -> Sequences:
    chip = emulated()["chip"]
    _check_formats(name, q, k, v, FLOATS[:2] if chip["bf16"] else FLOATS[:1])
    plan = Sequences.of(name, q, k, v, heads, kv_heads, layout)
    if not chip["grouped_decode"] and plan.kv_heads != plan.heads:
        refuse(name, f"{chip['name']} needs as many heads of keys as of queries, got {plan.kv_heads} and {plan.heads}")
    return plan


def _check_mask(name: str, mask: Tensor | None, mode: int, plan: Sequences) -> None:
    if not 0 <= mode <= 4:
        refuse(name, f"sparse_mode {mode} is not emulated")
    if mask is None:
        if mode:
            refuse(name, f"sparse_mode {mode} needs a mask") if mode == 1 else None
        return
    if mask.dtype not in (torch.bool, torch.uint8):
        refuse(name, f"the mask must be bool or uint8, got {mask.dtype}")
    shape = tuple(mask.shape)
    if mode >= 2:
        if shape != (2048, 2048):
            refuse(name, f"the mask of sparse_mode {mode} must be 2048 x 2048, got {shape}")
        return
    q, k = plan.queries, plan.keys
    heads = (1, plan.heads)
    fits = shape in ((q, k), (1, k)) or (
        len(shape) == 4 and shape[0] in (1, plan.batch) and shape[1] in heads and shape[2] in (1, q) and shape[3] == k
    )
    fits = fits or (len(shape) == 3 and shape[0] in (1, plan.batch) and shape[1] in (1, q) and shape[2] == k)
    if not fits:
        refuse(name, f"a mask of shape {shape} fits no attention of {q} queries over {k} keys")


def _infer(
    name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, plan: Sequences, band: Band, want_lse: bool
) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        refuse(name, "the operator has no backward pass: call it under torch.no_grad()")
    with kernel(name, q, k, v, mask) as device:
        alias = device.cpu_alias
        out, top, total = attend(alias(q), alias(k), alias(v), None if mask is None else alias(mask), plan, band)
        lse = (top + total.log())[..., :1] if want_lse else torch.empty(0)
        return device.give(out.to(q.dtype), q), device.give(lse, q)
