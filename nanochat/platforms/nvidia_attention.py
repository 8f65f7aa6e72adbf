"""Sliding-window attention on GPUs: FlashAttention where it is installed, else FlexAttention where a model is compiled.

torch's own attention takes a window only as a mask, which its fast kernel refuses.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from nanochat.common import UserError
from nanochat.nn.few_launches import square_sums
from nanochat.nn.operations import Operations

BLOCK = 128  # queries and keys that FlexAttention looks at together
HUB = "NANOCHAT_FLASH_KERNEL"  # names a FlashAttention 3 of the hub, for the package `kernels`
LIBRARIES = {9: ("flash_attn_interface", "flash_attn"), 8: ("flash_attn",)}  # by the generation: Hopper, Ampere
MOST_MASKS = 16  # of FlexAttention: more shapes than training has, and evaluation must not collect masks without end


class NvidiaOperations(Operations):
    """torch's own operators, and attention with windows by the fastest library that is there."""

    loss_chunk = 8192
    hidden_score = -1e30
    shape_grain = 64
    launches_are_dear = True

    def __init__(self, generation: int, plain: bool = False):
        """`generation` is the first number of the compute capability; `plain` asks for torch's own attention.

        UserError where NANOCHAT_FLASH_KERNEL asks for a kernel of the hub that cannot be had.
        """
        super().__init__(stacks_matrices=not plain)
        self.flash: Callable[..., Any] | None = None
        self.flex = False
        # FlexAttention's block masks by (T, window, device), which are made before anything is compiled.
        self.block_masks: dict[tuple[int, int, int], Any] = {}
        if plain:
            return
        libraries = LIBRARIES.get(generation, ())
        library = next((name for name in libraries if importlib.util.find_spec(name) is not None), "")
        if name := os.environ.get(HUB):
            self.flash, self.name = _of_hub(name), name
        elif library:
            self.flash, self.name = importlib.import_module(library).flash_attn_func, library
        elif generation >= 8:
            self.flex, self.name = True, "FlexAttention where compiled, else torch's own"

    def square_sums(self, gradients: Sequence[Tensor]) -> Tensor:  # (number of gradients,) fp32
        """See Operations.square_sums."""
        return square_sums(gradients)

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """See Operations.attend."""
        out = self.attend_fast(q, k, v, window, scale)
        return super().attend(q, k, v, window, scale) if out is None else out

    def attend_fast(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor | None:
        """attend() by a library; None where torch's own attention is to do it."""
        if self.flash is not None and q.element_size() == 2 and q.size(3) % 8 == 0:
            sizes = (window, 0) if window < k.size(1) - 1 else (-1, -1)
            out = self.flash(q, k, v, softmax_scale=scale, causal=True, window_size=sizes)
            return out[0] if isinstance(out, tuple) else out  # some versions return the sums of the softmax too
        if not self.flex or window >= k.size(1) - 1 or q.size(3) not in (16, 32, 64, 128, 256):
            return None
        return self._flex(q, k, v, window, scale)

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor | None:
        """attend() by FlexAttention; None outside compiled code, since FlexAttention needs a compiler.

        The first pass of a shape, before compilation, makes the block mask: (T/128)^2 numbers instead of T x T.
        """
        key = (q.size(1), window, q.device.index or 0)
        if not is_compiling():
            if key not in self.block_masks and len(self.block_masks) < MOST_MASKS:
                with torch.inference_mode(False):  # a mask made while sampling must serve training too
                    self.block_masks[key] = block_mask(q.size(1), window, q.device)
            return None
        if key not in self.block_masks:
            return None
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        grouped = k.size(1) != q.size(1)
        out: Any = flex_attention(q, k, v, block_mask=self.block_masks[key], scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)


def _of_hub(name: str) -> Callable[..., Any]:
    try:
        return importlib.import_module("kernels").get_kernel(name).flash_attn_interface.flash_attn_func
    except Exception as failure:  # the edge to a foreign library, which loads code from the network
        raise UserError(
            f"{HUB}={name} was asked for, but cannot be had: {str(failure) or repr(failure)}. Install the package "
            "kernels and let it reach the hub or its cache, or leave the variable out."
        ) from failure


def block_mask(length: int, window: int, device: torch.device) -> Any:
    """FlexAttention's description of a causal band: the blocks of keys that queries see in part, and see whole."""
    from torch.nn.attention.flex_attention import BlockMask

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key <= window)

    number = torch.arange(-(-length // BLOCK), device=device)
    queries, keys = number[:, None], number[None]
    touched = (keys <= queries) & (keys >= (queries * BLOCK - window).clamp_min(0) // BLOCK)
    whole = (keys < queries) & ((queries - keys) * BLOCK + BLOCK - 1 <= window) & ((queries + 1) * BLOCK <= length)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """For each block of queries: how many blocks of keys it has, (1, 1, Q), and their numbers, those first,
        (1, 1, Q, K)."""
        order = blocks.int().argsort(dim=1, descending=True, stable=True)
        return blocks.sum(dim=1).int()[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(
        *listed(touched & ~whole), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(length, length)
    )
