"""Sliding-window attention on GPUs: FlashAttention 4 or 3 where a package has it, else the FlashAttention within torch.

torch's scaled_dot_product_attention takes a window only as a mask, which its fast kernels refuse.
"""

import importlib
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanochat.common import UserError, base_dir, warn
from nanochat.platforms import host
from nanochat.platforms.few_launches import square_sums
from nanochat.platforms.muon import ForeachMuon
from nanochat.platforms.operations import Operations

HUB = "NANOCHAT_FLASH_KERNEL"  # names a FlashAttention 3 of the hub, for the package `kernels`
KEEP = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"  # FlashAttention 4 then reads the kernels that it wrote before
KEPT_IN = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"  # where; by default a folder in /tmp that others could make first
FOUR, THREE = "flash_attn.cute", "flash_attn_interface"  # the modules of FlashAttention 4 and 3
PACKAGES = {
    9: (FOUR, THREE),
    10: (FOUR,),
}  # the fastest first, by the generation: Hopper, Blackwell


class NvidiaOperations(Operations):
    """torch's own operators, and attention with windows by the fastest library that is there."""

    loss_chunk = 8192
    grain = 64
    muon_class = ForeachMuon

    def __init__(self, generation: int, plain: bool = False):
        """`generation` is the first number of the compute capability; `plain` asks for torch's own attention.

        UserError where NANOCHAT_FLASH_KERNEL asks for a kernel of the hub that cannot be had.
        """
        super().__init__(stacks_matrices=not plain)
        self.flash: Callable[..., Any] | None = None  # of a package, called as FlashAttention 3 is
        self.of_rows: Callable[..., Any] | None = None  # torch's, for rows of different lengths
        if plain or generation < 8:
            return
        if name := os.environ.get(HUB):
            self.flash, self.name = _of_hub(name), name
        elif package := _of_package(PACKAGES.get(generation, ())):
            self.flash, self.name = package
        else:
            self.of_rows = windows_of_torch()
            self.name = "torch's own" if self.of_rows is None else "torch's FlashAttention"

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
        """See PlainAttention.attend."""
        fits, cuts = q.element_size() == 2 and q.size(3) % 8 == 0, window < k.size(1) - 1
        if self.flash is not None and fits:
            sizes = (window, 0) if cuts else (-1, -1)
            out = self.flash(q, k, v, softmax_scale=scale, causal=True, window_size=sizes)
            return (
                out[0] if isinstance(out, tuple) else out
            )  # some versions return the sums of the softmax too
        if self.of_rows is not None and fits and cuts:
            return self._by_rows(q, k, v, window, scale)
        return super().attend(q, k, v, window, scale)

    def _by_rows(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
        """attend() by torch's attention for rows of different lengths, which takes windows; here all have one."""
        assert self.of_rows is not None
        B, T, H, _ = q.shape
        k, v = (x.repeat_interleave(H // x.size(2), dim=2) if x.size(2) < H else x for x in (k, v))
        starts = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return self.of_rows(
            *rows, starts, starts, T, T, scale=scale, window_size=(window, 0)
        ).view_as(q)


def windows_of_torch() -> Callable[..., Any] | None:
    """torch's attention for rows of different lengths; None for torch before 2.11, where it takes no windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


def _of_hub(name: str) -> Callable[..., Any]:
    try:
        return (
            importlib.import_module("kernels").get_kernel(name).flash_attn_interface.flash_attn_func
        )
    except Exception as failure:  # the edge to a foreign library, which loads code from the network
        raise UserError(
            f"{HUB}={name} was asked for, but cannot be had: {str(failure) or repr(failure)}. Install the package "
            "kernels and let it reach the hub or its cache, or leave the variable out."
        ) from failure


def _installed(module: str) -> bool:
    package = module.rpartition(".")[0]
    return (not package or _installed(package)) and importlib.util.find_spec(module) is not None


def _of_package(modules: Sequence[str]) -> tuple[Callable[..., Any], str] | None:
    """The attention of the first of the modules that is installed and works, and its name; None if there is none."""
    for module in modules:
        try:
            if not _installed(module):
                continue
            if module == FOUR:
                os.environ.setdefault(KEEP, "1")
                os.environ.setdefault(
                    KEPT_IN, str(host.use_compile_cache(base_dir()) / "flash_attention")
                )
                # said of every kernel that the package writes, about an argument that is None in all of them
                warnings.filterwarnings(
                    "ignore", "Argument .* cannot be converted to a JitArgument", UserWarning
                )
                from nanochat.platforms.nvidia.flash4 import flash_attn_func

                return flash_attn_func, "FlashAttention 4"
            return importlib.import_module(module).flash_attn_func, "FlashAttention 3"
        except (ImportError, AttributeError, OSError) as failure:
            warn(f"{module} is installed, but cannot be used: {failure}")
    return None
