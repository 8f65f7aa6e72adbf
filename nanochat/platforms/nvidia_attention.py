"""Sliding-window attention of GPUs: FlashAttention where it is installed, else FlexAttention where a model is compiled.

kernels.py asks. torch's own attention takes a window only as a mask, which its fast kernel refuses.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from nanochat.common import UserError

BLOCK = 128  # queries and keys that FlexAttention looks at together
HUB = "NANOCHAT_FLASH_KERNEL"  # names a FlashAttention 3 of the hub, for the package `kernels`
LIBRARIES = {9: ("flash_attn_interface", "flash_attn"), 8: ("flash_attn",)}  # by the generation: Hopper, Ampere


@dataclass
class _Chosen:
    """What prepare() chose, and the block masks of FlexAttention, made before anything is compiled."""

    flash: Callable[..., Any] | None = None
    flex: bool = False
    name: str = "torch's own"
    masks: dict[tuple[int, int, int], Any] = field(default_factory=dict)  # (T, window, device)


_chosen = _Chosen()


def prepare(plain: bool, generation: int) -> str:
    """Choose for this process, and say what; `plain` is torch's own, `generation` the first number of the capability.

    UserError where a kernel of the hub was asked for by NANOCHAT_FLASH_KERNEL and cannot be had.
    """
    _chosen.flash, _chosen.flex, _chosen.name = None, False, "torch's own"
    if plain:
        return _chosen.name
    library = next((name for name in LIBRARIES.get(generation, ()) if importlib.util.find_spec(name) is not None), "")
    if name := os.environ.get(HUB):
        _chosen.flash, _chosen.name = _of_hub(name), name
    elif library:
        _chosen.flash, _chosen.name = importlib.import_module(library).flash_attn_func, library
    elif generation >= 8:
        _chosen.flex, _chosen.name = True, "FlexAttention where compiled, else torch's own"
    return _chosen.name


def chosen() -> str:
    """What prepare() chose."""
    return _chosen.name


def _of_hub(name: str) -> Callable[..., Any]:
    try:
        return importlib.import_module("kernels").get_kernel(name).flash_attn_interface.flash_attn_func
    except Exception as failure:  # the edge to a foreign library, which loads code from the network
        raise UserError(
            f"{HUB}={name} was asked for, but cannot be had: {str(failure) or repr(failure)}. Install the package "
            "kernels and let it reach the hub or its cache, or leave the variable out."
        ) from failure


def attend(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
    window: int,
    scale: float | None,
) -> Tensor | None:  # (B, T, H, D)
    """Causal attention in a window; None where torch's own is to do it."""
    if _chosen.flash is not None and q.element_size() == 2 and q.size(3) % 8 == 0:
        sizes = (window, 0) if window < k.size(1) - 1 else (-1, -1)
        out = _chosen.flash(q, k, v, softmax_scale=scale, causal=True, window_size=sizes)
        return out[0] if isinstance(out, tuple) else out  # some versions give the sums of the softmax too
    if not _chosen.flex or window >= k.size(1) - 1 or q.size(3) not in (16, 32, 64, 128, 256):
        return None
    return _flex(q, k, v, window, scale)


def _flex(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor | None:
    """By FlexAttention; None where nothing is compiled, which it needs.

    The first pass of a shape, before compilation, makes the block mask: (T/128)^2 numbers, and no mask of T x T.
    """
    key = (q.size(1), window, q.device.index or 0)
    if not is_compiling():
        if key not in _chosen.masks:
            with torch.inference_mode(False):  # made while sampling, it must serve training too
                _chosen.masks[key] = block_mask(q.size(1), window, q.device)
        return None
    if key not in _chosen.masks:
        return None
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
    out: Any = flex_attention(q, k, v, block_mask=_chosen.masks[key], scale=scale, enable_gqa=k.size(1) != q.size(1))
    return out.transpose(1, 2)


def block_mask(length: int, window: int, device: torch.device) -> Any:
    """FlexAttention's description of a causal band: the blocks of keys that queries see, and see whole."""
    from torch.nn.attention.flex_attention import BlockMask

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key <= window)

    number = torch.arange(-(-length // BLOCK), device=device)
    queries, keys = number[:, None], number[None]
    touched = (keys <= queries) & (keys >= (queries * BLOCK - window).clamp_min(0) // BLOCK)
    whole = (keys < queries) & ((queries - keys) * BLOCK + BLOCK - 1 <= window) & ((queries + 1) * BLOCK <= length)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Of each block of queries how many blocks, (1, 1, Q), and their numbers first, (1, 1, Q, K)."""
        order = blocks.int().argsort(dim=1, descending=True, stable=True)
        return blocks.sum(dim=1).int()[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(
        *listed(touched & ~whole), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(length, length)
    )
