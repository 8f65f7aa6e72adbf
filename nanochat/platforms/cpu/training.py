"""Calls what training.cpp compiled to, on tensors: attention that keeps what its gradient needs, and gradients.

The gradients are joined to torch's autograd in gradients.py. Sums of many numbers are fp32.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat.platforms.cpu.kernels import BLOCK, SUFFIXES, TRAINING, found

# As in kernels.py: how many pointers, sizes and fp32 numbers each function takes; the first size is the threads.
FUNCTIONS = {
    "norm_back": (4, 3, 1),
    "mix_back": (9, 3, 0),
    "turn_back": (5, 7, 2),
    "squared_relu_back": (3, 2, 0),
    "smear": (5, 5, 0),
    "smear_back": (7, 5, 0),
    "gate": (5, 7, 0),
    "gate_back": (8, 7, 0),
    "shift": (2, 6, 0),
    "square_sum": (2, 2, 0),
    "pack_int8": (3, 4, 0),
    "product_int8": (4, 5, 0),
    "gradient_int8": (3, 4, 0),
}
ATTENTION = {
    "attention": (6, 7, 1),
    "attention_back": (10, 7, 1),
}  # of bf16 only where the processor has AVX512-BF16

GRAINS = {
    torch.float32: 32,
    torch.bfloat16: BLOCK,
}  # numbers of a head that attention computes together


def side_by_side(x: Tensor) -> Tensor:  # (B, T, H, D)
    """The tensor, or a copy, in which the heads of a token lie side by side."""
    return (
        x if x.stride(3) == 1 and (x.stride(2) == x.size(3) or x.size(2) == 1) else x.contiguous()
    )


def tokens_apart(x: Tensor) -> tuple[Tensor, int]:  # (B, T, H, D)
    """The tensor, or a copy, whose tokens are evenly spaced, with the heads of each side by side; and the space."""
    x = side_by_side(x)
    B, T, H, D = x.shape
    if B > 1 and x.stride(0) != T * x.stride(1):
        x = x.contiguous()
    return x, x.stride(1) if T > 1 else x.stride(0) if B > 1 else H * D


@functools.cache
def training(folder: Path) -> "Training | None":
    """The functions of training.cpp, compiled into `folder` unless they are there; None, and a line that says why, if
    they cannot be compiled."""
    library = found(folder, TRAINING)
    return None if library is None else Training(library)


class Training:
    """The functions of a library compiled from training.cpp. All tensors of a call are on the host and have one format,
    fp32 or bf16, unless stated otherwise."""

    def __init__(self, loaded: ctypes.CDLL):
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for name, (pointers, sizes, numbers) in (FUNCTIONS | ATTENTION).items():
            for dtype, suffix in SUFFIXES.items():
                function = getattr(loaded, f"{name}_{suffix}", None)
                if function is not None:
                    function.argtypes = (
                        [c_void_p] * pointers + [c_int64] * sizes + [c_float] * numbers
                    )
                    function.restype = None
                    self._functions[name, dtype] = function

    def _call(
        self,
        name: str,
        dtype: torch.dtype,
        tensors: Sequence[Tensor | None],
        sizes: Sequence[int],
        numbers: Sequence[float] = (),
    ) -> None:
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._functions[name, dtype](*pointers, torch.get_num_threads(), *sizes, *numbers)

    def norm_back(
        self, x: Tensor, g: Tensor, more: Tensor | None, epsilon: float
    ) -> Tensor:  # (..., C) each
        """The gradient of x, from the gradient `g` of its RMS norm and `more`, what x gets besides."""
        x, g, more = x.contiguous(), g.contiguous(), None if more is None else more.contiguous()
        dx, channels = torch.empty_like(x), x.size(-1)
        self._call(
            "norm_back", x.dtype, (x, g, more, dx), (x.numel() // channels, channels), (epsilon,)
        )
        return dx

    def mix_back(
        self,
        g: Tensor,  # (..., C)
        x: Tensor,  # (..., C)
        x0: Tensor,  # (..., C)
        more: Tensor | None,  # (..., C) what x0 gets besides
        a: Tensor,  # ()
        b: Tensor,  # ()
    ) -> tuple[Tensor, Tensor, Tensor]:  # (..., C), (..., C), (2,) fp32
        """The gradients of x, x0, and both factors in a x + b x0."""
        g, x, x0, more = (
            g.contiguous(),
            x.contiguous(),
            x0.contiguous(),
            None if more is None else more.contiguous(),
        )
        dx, dx0, sums = (
            torch.empty_like(x),
            torch.empty_like(x),
            x.new_empty(2, dtype=torch.float32),
        )
        channels = x.size(-1)
        self._call(
            "mix_back",
            x.dtype,
            (g, x, x0, more, a, b, dx, dx0, sums),
            (x.numel() // channels, channels),
        )
        return dx, dx0, sums

    def turn_back(
        self,
        g: Tensor,  # (B, T, H, D)
        x: Tensor,  # (B, T, H, D), tokens evenly spaced
        cos: Tensor,  # (1 or B, T, 1, D / 2)
        sin: Tensor,
        dx: Tensor,  # (B, T, H, D), tokens evenly spaced, written here
        epsilon: float,
        sharpen: float,
    ) -> None:
        """The gradient of x, from the gradient `g` of kernels.turn() without a weight."""
        (B, T, H, D), half = x.shape, cos.size(-1)
        assert half * 2 == D
        g, cos, sin = g.contiguous(), cos.contiguous(), sin.contiguous()
        spaces = [tokens_apart(tensor)[1] for tensor in (x, dx)]
        sizes = (*spaces, cos.numel() // half, B * T, H, D)
        self._call("turn_back", x.dtype, (g, x, cos, sin, dx), sizes, (epsilon, sharpen))

    def squared_relu_back(
        self, g: Tensor, y: Tensor, dx: Tensor
    ) -> None:  # contiguous, of one shape
        """Write the gradient of x, from y = relu(x)^2 and the gradient `g` of y, to `dx`, which may be `g`."""
        self._call("squared_relu_back", y.dtype, (g, y, dx), (y.numel(),))

    def smear(
        self, x: Tensor, w: Tensor, smear_lambda: Tensor
    ) -> tuple[Tensor, Tensor]:  # (B, T, C), (R,), ()
        """x + most sigmoid(w x[:R]) before, (B, T, C), where `before` is x of the token before; and the sigmoids,
        (B, T) in fp32."""
        B, T, C = x.shape
        x, w, y, gates = (
            x.contiguous(),
            w.contiguous(),
            x.new_empty(B, T, C),
            x.new_empty(B, T, dtype=torch.float32),
        )
        self._call("smear", x.dtype, (x, w, smear_lambda, y, gates), (B * T, T, C, len(w)))
        return y, gates

    def smear_back(
        self,
        g: Tensor,  # (B, T, C)
        x: Tensor,  # (B, T, C) contiguous
        w: Tensor,  # (R,)
        smear_lambda: Tensor,  # ()
        gates: Tensor,  # (B, T) fp32
    ) -> tuple[Tensor, Tensor]:  # (B, T, C), (R + 1,) fp32
        """The gradient of x; and those of w and, last, of `most`."""
        B, T, C = x.shape
        g, dx, sums = (
            g.contiguous(),
            torch.empty_like(x),
            x.new_empty(len(w) + 1, dtype=torch.float32),
        )
        self._call(
            "smear_back", x.dtype, (g, x, w, smear_lambda, gates, dx, sums), (B * T, T, C, len(w))
        )
        return dx, sums

    def gate(
        self,
        x: Tensor,  # (N, C) contiguous
        w: Tensor,  # (H, R) contiguous
        value: Tensor,  # (N, H, D) contiguous
        v: Tensor,  # (N, H, D), heads side by side, changed here
    ) -> Tensor:  # (N, H) fp32
        """Add 3 sigmoid(w x[:R]) value to v; gives the sigmoids."""
        (N, H, D), gates = value.shape, x.new_empty(value.shape[:2], dtype=torch.float32)
        self._call(
            "gate", x.dtype, (x, w, value, v, gates), (N, x.size(1), v.stride(0), H, D, w.size(1))
        )
        return gates

    def gate_back(
        self,
        g: Tensor,  # (N, H, D), heads side by side
        x: Tensor,  # (N, C) contiguous
        w: Tensor,  # (H, R) contiguous
        value: Tensor,  # (N, H, D) contiguous
        gates: Tensor,  # (N, H) fp32
        dx: Tensor,  # (N, C) contiguous; what x gets by the gates is added here
    ) -> tuple[Tensor, Tensor]:  # (N, H, D), (H, R) fp32
        """The gradients of value and w."""
        (N, H, D), gate_channels = value.shape, w.size(1)
        by_value, sums = torch.empty_like(value), w.new_empty(w.shape, dtype=torch.float32)
        self._call(
            "gate_back",
            x.dtype,
            (g, x, w, value, gates, by_value, dx, sums),
            (N, x.size(1), g.stride(0), H, D, gate_channels),
        )
        return by_value, sums

    def shift(self, k: Tensor, back: bool) -> Tensor:  # (B, T, H, D)
        """k, with half of each head from the token before (the token after if `back`), as gpt.offset_keys()."""
        B, T, H, D = k.shape
        assert D % 4 == 0
        k = k.contiguous()
        y = torch.empty_like(k)
        self._call("shift", k.dtype, (k, y), (B * T, T, H, D, int(back)))
        return y

    def square_sums(
        self, tensors: Sequence[Tensor]
    ) -> Tensor:  # contiguous -> (number of tensors,) fp32
        """The sum of squares of each tensor."""
        sums = torch.empty(len(tensors), dtype=torch.float32)
        for x, place in zip(tensors, sums.unbind(), strict=True):
            self._call("square_sum", x.dtype, (x, place), (x.numel(),))
        return sums

    def pack_int8(
        self, weight: Tensor, back: bool
    ) -> tuple[Tensor, Tensor]:  # contiguous (outputs, inputs) fp32
        """A matrix in integers of 8 bits, as product_int8() reads it, and the factor of each of its outputs. `back`: of
        the transposed matrix, which has as many outputs as the matrix has inputs."""
        outputs, inputs = weight.shape[::-1] if back else weight.shape
        packed, factors = (
            weight.new_empty(inputs, outputs, dtype=torch.uint8),
            weight.new_empty(outputs),
        )
        self._call(
            "pack_int8", weight.dtype, (weight, packed, factors), (outputs, inputs, int(back))
        )
        return packed, factors

    def product_int8(
        self, x: Tensor, packed: Tensor, factors: Tensor, squared: bool = False
    ) -> Tensor:
        """The product (N, outputs) of bf16 rows x (N, inputs) with a matrix from pack_int8(), or its squared ReLU."""
        x, (inputs, outputs) = x.contiguous(), packed.shape
        y = x.new_empty(len(x), outputs)
        self._call(
            "product_int8",
            x.dtype,
            (x, packed, factors, y),
            (len(x), outputs, inputs, int(squared)),
        )
        return y

    def gradient_int8(
        self, g: Tensor, x: Tensor
    ) -> Tensor:  # (N, outputs), (N, inputs) bf16 -> (outputs, inputs) fp32
        """The sum over N of the products of every channel of g with every channel of x, multiples of 32 channels."""
        g, x = g.contiguous(), x.contiguous()
        dw = torch.empty(g.size(1), x.size(1))
        self._call("gradient_int8", x.dtype, (g, x, dw), (len(x), *dw.shape))
        return dw

    def takes(self, q: Tensor) -> bool:  # (B, T, H, D)
        """Whether attention() computes with queries such as these."""
        return ("attention", q.dtype) in self._functions and q.size(3) % GRAINS[q.dtype] == 0

    def attention(
        self,
        q: Tensor,  # (B, T, H, D), D a multiple of GRAINS
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # (B, T, H, D), (B, H, T) fp32
        """Causal attention to at most `window` keys before the own; and the logarithm of the sum of the exponentials of
        each query's scores, base 2."""
        (B, T, H, D), y = q.shape, q.new_empty(q.shape)
        logs = q.new_empty(B, H, T, dtype=torch.float32)
        sizes = (B, T, H, k.size(2), D, min(window, T))
        self._call("attention", q.dtype, (q, k, v, y, logs, _strides(q, k, v, y)), sizes, (scale,))
        return y, logs

    def attention_back(
        self,
        q: Tensor,  # (B, T, H, D), as all tensors of attention()
        k: Tensor,
        v: Tensor,
        y: Tensor,
        g: Tensor,  # the gradient of y
        logs: Tensor,
        grads: Sequence[Tensor],  # of q, k and v, written here
        window: int,
        scale: float,
    ) -> None:
        """The gradients of q, k and v."""
        B, T, H, D = q.shape
        sizes = (B, T, H, k.size(2), D, min(window, T))
        strides = _strides(q, k, v, y, g, *grads)
        self._call(
            "attention_back", q.dtype, (q, k, v, y, g, logs, *grads, strides), sizes, (scale,)
        )


def _strides(*tensors: Tensor) -> Tensor:  # (B, T, H, D) each -> (2 * tensors,)
    """From row to row and from token to token of each tensor; in each of them heads lie side by side."""
    return torch.tensor([stride for x in tensors for stride in x.stride()[:2]])
