"""Sliding-window attention on GPUs.

It uses FlashAttention 4 or 3 if a package provides it, and otherwise the FlashAttention inside
torch. torch's scaled_dot_product_attention takes a window only as a mask, which its fast kernels
refuse.
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

from nanochat.common import UserError, base_dir, tr, warn
from nanochat.data.library_words import in_words
from nanochat.platforms import host
from nanochat.platforms.few_launches import square_sums
from nanochat.platforms.muon import ForeachMuon
from nanochat.platforms.operations import Operations

HUB = "NANOCHAT_FLASH_KERNEL"  # names a FlashAttention 3 on the hub, for the package `kernels`
# Makes FlashAttention 4 keep its compiled kernels and load them again.
KEEP = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
# The folder for them. The default is a folder in /tmp, which another user could create first.
KEPT_IN = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
FOUR = "flash_attn.cute"  # the module of FlashAttention 4
THREE = "flash_attn_interface"  # the module of FlashAttention 3
# Modules for each generation (9 is Hopper, 10 is Blackwell), fastest first.
PACKAGES = {
    9: (FOUR, THREE),
    10: (FOUR,),
}
Attention = Callable[..., Any]  # has the signature of FlashAttention 3


class NvidiaOperations(Operations):
    """Torch's own operators, with windowed attention from FlashAttention where possible."""

    loss_chunk = 8192
    grain = 64
    muon_class = ForeachMuon

    def __init__(self, generation: int, plain: bool = False):
        """Choose the attention for a GPU; with `plain`, it is torch's own.

        `generation` is the major version of the compute capability. Raises UserError if the kernel
        that NANOCHAT_FLASH_KERNEL names cannot be loaded from the hub.
        """
        super().__init__(stacks_matrices=not plain)
        self.flash: Attention | None = None  # from a package
        self.of_rows: Attention | None = None  # torch's attention for rows of different lengths
        if plain or generation < 8:
            return
        hub_kernel = os.environ.get(HUB)
        if hub_kernel:
            self.flash = _of_hub(hub_kernel)
            self.name = hub_kernel
            return
        package = _of_package(PACKAGES.get(generation, ()))
        if package is not None:
            self.flash, self.name = package
            return
        self.of_rows = windows_of_torch()
        if self.of_rows is not None:
            self.name = "torch's FlashAttention"

    def square_sums(self, gradients: Sequence[Tensor]) -> Tensor:  # (number of gradients,) fp32
        """Implement Operations.square_sums with a single norm operator."""
        return square_sums(gradients)

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """Implement PlainAttention.attend with FlashAttention if it supports these tensors.

        It needs 16-bit numbers and a head dimension that is a multiple of 8. The one inside torch
        is called directly only for windows that hide keys.
        """
        fits = q.element_size() == 2 and q.size(3) % 8 == 0
        hides_keys = window < k.size(1) - 1
        if self.flash is not None and fits:
            window_size = (window, 0) if hides_keys else (-1, -1)
            out = self.flash(
                q,
                k,
                v,
                softmax_scale=scale,
                causal=True,
                window_size=window_size,
            )
            if isinstance(out, tuple):  # some versions also return the softmax sums
                return out[0]
            return out
        if self.of_rows is not None and fits and hides_keys:
            return self._by_rows(q, k, v, window, scale)
        return super().attend(q, k, v, window, scale)

    def _by_rows(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None,
    ) -> Tensor:  # (B, T, H, D)
        """Return the result of attend() from torch's attention for rows of different lengths.

        That function supports windows. Here all rows have the same length.
        """
        assert self.of_rows is not None
        B, T, H, _ = q.shape
        group = H // k.size(2)
        if group > 1:
            k = k.repeat_interleave(group, dim=2)
            v = v.repeat_interleave(group, dim=2)
        starts = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
        out = self.of_rows(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            starts,
            starts,
            T,
            T,
            scale=scale,
            window_size=(window, 0),
        )
        return out.view_as(q)


def windows_of_torch() -> Attention | None:
    """Return torch's attention for rows of different lengths, or None if it lacks windows.

    It supports windows from torch 2.11 on.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    return varlen_attn if "window_size" in parameters else None


def _of_hub(name: str) -> Attention:
    try:
        kernel = importlib.import_module("kernels").get_kernel(name)
        return kernel.flash_attn_interface.flash_attn_func
    except Exception as failure:  # a third-party library, which downloads code
        raise UserError(
            tr(
                "{hub}={name} was asked for, but cannot be had: {failure}. Install the "
                "package kernels and let it reach the hub or its cache, or leave the "
                "variable out.",
                hub=HUB,
                name=name,
                failure=str(failure) or repr(failure),
            )
        ) from failure


def _installed(module: str) -> bool:
    package = module.rpartition(".")[0]
    if package and not _installed(package):
        return False
    return importlib.util.find_spec(module) is not None


def _of_package(modules: Sequence[str]) -> tuple[Attention, str] | None:
    """Return the attention function of the first usable module, and the library's name.

    Returns None if no module is usable. Warns about modules that are installed but unusable.
    """
    for module in modules:
        try:
            if not _installed(module):
                continue
            if module == FOUR:
                return _flash_attention_4(), "FlashAttention 4"
            attention = importlib.import_module(module).flash_attn_func
            return attention, "FlashAttention 3"
        except (ImportError, AttributeError, OSError) as failure:
            warn(
                tr(
                    "{module} is installed, but cannot be used: {failure}",
                    module=module,
                    failure=in_words(failure),
                )
            )
    return None


def _flash_attention_4() -> Attention:
    folder = host.use_compile_cache(base_dir()) / "flash_attention"
    os.environ.setdefault(KEEP, "1")
    os.environ.setdefault(KEPT_IN, str(folder))
    # Each kernel that the package compiles warns about an argument that is always None.
    message = "Argument .* cannot be converted to a JitArgument"
    warnings.filterwarnings("ignore", message, UserWarning)
    from nanochat.platforms.nvidia.flash4 import flash_attn_func

    return flash_attn_func
