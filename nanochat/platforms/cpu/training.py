"""Calls the libraries compiled from training.cpp and int8.cpp: operators for training.

gradients.py registers these functions with torch's autograd. Sums of many numbers are fp32. Shapes:
B batch, T time, C channels, H heads, D head dimension, N tokens.
"""

import ctypes
import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat.platforms.cpu.kernels import (
    BLOCK,
    INT8,
    SUFFIXES,
    TRAINING,
    address,
    argument_types,
    library_of,
)

# The number of pointers, sizes and fp32 numbers that each function takes, as in kernels.py. The
# first size is the number of threads.
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
    "exclude": (3, 6, 1),
    "exclude_back": (5, 6, 1),
    "square_sum": (2, 2, 0),
}
PRODUCTS = {
    "pack_int8": (3, 4, 0),
    "product_int8": (4, 5, 0),
    "gradient_int8": (3, 4, 0),
}
# The bf16 versions exist only if the processor has AVX512-BF16.
ATTENTION = {
    "attention": (7, 7, 1),
    "attention_back": (11, 7, 1),
}
# The head dimension must be a multiple of this for attention().
GRAINS = {
    torch.float32: 32,
    torch.bfloat16: BLOCK,
}


def takes_attention(q: Tensor, formats: Collection[torch.dtype]) -> bool:  # (B, T, H, D)
    """Return whether kernels with these `attention_formats` support the queries."""
    return q.dtype in formats and q.size(3) % GRAINS[q.dtype] == 0


def side_by_side(x: Tensor) -> Tensor:  # (B, T, H, D)
    """Return x, copied if the heads of a token are not adjacent in memory."""
    _, _, H, D = x.shape
    is_apart = H > 1 and x.stride(2) != D
    if x.stride(3) != 1 or is_apart:
        return x.contiguous()
    return x


def evenly_spaced(x: Tensor) -> Tensor:  # (B, T, H, D)
    """Return x, copied if its tokens are not evenly spaced or the heads of a token not adjacent."""
    x = side_by_side(x)
    B, T, _, _ = x.shape
    if B > 1 and x.stride(0) != T * x.stride(1):
        return x.contiguous()
    return x


def token_stride(x: Tensor) -> int:  # (B, T, H, D)
    """Return the distance in elements between consecutive tokens of evenly_spaced(x)."""
    x = evenly_spaced(x)
    B, T, H, D = x.shape
    if T > 1:
        return x.stride(1)
    if B > 1:
        return x.stride(0)
    return H * D


@functools.cache
def training(folder: Path) -> "Training | None":
    """Return the functions for training, compiling them into `folder` if they are missing.

    Returns None and logs the reason if they cannot be compiled or loaded.
    """
    library = library_of(folder, TRAINING)
    return None if library is None else Training(library, FUNCTIONS | ATTENTION)


@functools.cache
def products_int8(folder: Path) -> "ProductsInt8 | None":
    """Return the 8-bit products, compiling them into `folder` if they are missing.

    Returns None and logs the reason if they cannot be compiled or loaded.
    """
    library = library_of(folder, INT8)
    return None if library is None else ProductsInt8(library, PRODUCTS)


class Functions:
    """Calls the functions of a library.

    All tensors of a call are on the host and have one format, fp32 or bf16, unless stated
    otherwise.
    """

    def __init__(self, library: ctypes.CDLL, signatures: Mapping[str, tuple[int, int, int]]):
        """`signatures` has the number of pointers, sizes and fp32 numbers of each function."""
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for name, (pointers, sizes, numbers) in signatures.items():
            arguments = argument_types(pointers, sizes, numbers)
            for dtype, suffix in SUFFIXES.items():
                function = getattr(library, f"{name}_{suffix}", None)
                if function is None:
                    continue
                function.argtypes = arguments
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
        function = self._functions[name, dtype]
        pointers = [address(tensor) for tensor in tensors]
        threads = torch.get_num_threads()
        function(*pointers, threads, *sizes, *numbers)


class Training(Functions):
    """Calls the functions of a library that was compiled from training.cpp."""

    # --- a layer ---------------------------------------------------------------------------------

    def norm_back(
        self,
        x: Tensor,  # (..., C)
        y_grad: Tensor,  # (..., C)
        x_grad_besides: Tensor | None,  # (..., C)
        epsilon: float,
    ) -> Tensor:  # (..., C)
        """Return the gradient of x, given the gradient of its RMS norm.

        `x_grad_besides`, the gradient of x from its other uses, is added.
        """
        x = x.contiguous()
        y_grad = y_grad.contiguous()
        x_grad_besides = _contiguous(x_grad_besides)
        x_grad = torch.empty_like(x)
        C = x.size(-1)
        tokens = x.numel() // C
        tensors = (x, y_grad, x_grad_besides, x_grad)
        self._call("norm_back", x.dtype, tensors, (tokens, C), (epsilon,))
        return x_grad

    def mix_back(
        self,
        g: Tensor,  # (..., C)
        x: Tensor,  # (..., C)
        x0: Tensor,  # (..., C)
        x0_grad_besides: Tensor | None,  # (..., C)
        a: Tensor,  # ()
        b: Tensor,  # ()
    ) -> tuple[Tensor, Tensor, Tensor]:  # (..., C), (..., C), (2,) fp32
        """Return the gradients of x, x0 and (a, b), given `g`, the gradient of a x + b x0.

        `x0_grad_besides`, the gradient of x0 from its other uses, is added.
        """
        g = g.contiguous()
        x = x.contiguous()
        x0 = x0.contiguous()
        x0_grad_besides = _contiguous(x0_grad_besides)
        x_grad = torch.empty_like(x)
        x0_grad = torch.empty_like(x)
        sums = x.new_empty(2, dtype=torch.float32)
        C = x.size(-1)
        tokens = x.numel() // C
        tensors = (g, x, x0, x0_grad_besides, a, b, x_grad, x0_grad, sums)
        self._call("mix_back", x.dtype, tensors, (tokens, C))
        return x_grad, x0_grad, sums

    def turn_back(
        self,
        y_grad: Tensor,  # (B, T, H, D)
        x: Tensor,  # (B, T, H, D), with evenly spaced tokens
        cos: Tensor,  # (1 or B, T, 1, D / 2)
        sin: Tensor,
        x_grad: Tensor,  # (B, T, H, D), with evenly spaced tokens, written here
        epsilon: float,
        sharpen: float,
    ) -> None:
        """Write the gradient of x to `x_grad`, where y is Kernels.turn() of x without a weight."""
        B, T, H, D = x.shape
        half = cos.size(-1)
        assert half * 2 == D
        y_grad = y_grad.contiguous()
        cos = cos.contiguous()
        sin = sin.contiguous()
        positions = cos.numel() // half
        sizes = (token_stride(x), token_stride(x_grad), positions, B * T, H, D)
        tensors = (y_grad, x, cos, sin, x_grad)
        self._call("turn_back", x.dtype, tensors, sizes, (epsilon, sharpen))

    def squared_relu_back(
        self,
        y_grad: Tensor,  # all three tensors are contiguous
        y: Tensor,
        x_grad: Tensor,  # written here; may be `y_grad`
    ) -> None:
        """Write the gradient of x to `x_grad`, given y = relu(x)^2 and the gradient of y."""
        self._call("squared_relu_back", y.dtype, (y_grad, y, x_grad), (y.numel(),))

    def gate(
        self,
        x: Tensor,  # (N, C) contiguous
        w: Tensor,  # (H, R) contiguous
        value_embedding: Tensor,  # (N, H, D) contiguous
        v: Tensor,  # (N, H, D), heads adjacent in memory, changed here
    ) -> Tensor:  # (N, H) fp32
        """Add 3 sigmoid(w x[:R]) times `value_embedding` to v, and return the sigmoids."""
        N, H, D = value_embedding.shape
        opened = x.new_empty((N, H), dtype=torch.float32)
        sizes = (N, x.size(1), v.stride(0), H, D, w.size(1))
        self._call("gate", x.dtype, (x, w, value_embedding, v, opened), sizes)
        return opened

    def gate_back(
        self,
        v_grad: Tensor,  # (N, H, D), heads adjacent in memory
        x: Tensor,  # (N, C) contiguous
        w: Tensor,  # (H, R) contiguous
        value_embedding: Tensor,  # (N, H, D) contiguous
        opened: Tensor,  # (N, H) fp32
        x_grad: Tensor,  # (N, C) contiguous, changed here
    ) -> tuple[Tensor, Tensor]:  # (N, H, D), (H, R) fp32
        """Return the gradients of the value embedding and of w.

        The gradient of x through the gates is added to `x_grad`.
        """
        N, H, D = value_embedding.shape
        R = w.size(1)
        embedding_grad = torch.empty_like(value_embedding)
        w_grad = w.new_empty(w.shape, dtype=torch.float32)
        tensors = (v_grad, x, w, value_embedding, opened, embedding_grad, x_grad, w_grad)
        sizes = (N, x.size(1), v_grad.stride(0), H, D, R)
        self._call("gate_back", x.dtype, tensors, sizes)
        return embedding_grad, w_grad

    def shift(
        self,
        k: Tensor,  # (B, T, H, D)
        back: bool,
    ) -> Tensor:
        """Return k with half of each head taken from the token before, as in gpt.offset_keys().

        With `back`, that half comes from the token after, as the gradient needs. It is 0 where a
        row has no such token.
        """
        B, T, H, D = k.shape
        assert D % 4 == 0
        k = k.contiguous()
        y = torch.empty_like(k)
        self._call("shift", k.dtype, (k, y), (B * T, T, H, D, int(back)))
        return y

    def exclude(
        self,
        y: Tensor,  # (B, T, H, D)
        v: Tensor,  # (B, T, Hkv, D), with evenly spaced tokens
        epsilon: float,
    ) -> Tensor:  # (B, T, H, D)
        """Return y without its component along v, as in gpt.exclude_own().

        v is not normed. `epsilon` is that of its norm.
        """
        B, T, H, D = y.shape
        y = y.contiguous()
        z = torch.empty_like(y)
        sizes = (token_stride(v), B * T, H, v.size(2), D)
        self._call("exclude", y.dtype, (y, v, z), sizes, (epsilon,))
        return z

    def exclude_back(
        self,
        z_grad: Tensor,  # (B, T, H, D)
        y: Tensor,  # (B, T, H, D) contiguous
        v: Tensor,  # (B, T, Hkv, D), with evenly spaced tokens
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:  # (B, T, H, D), (B, T, Hkv, D)
        """Return the gradients of y and v, given that of exclude()."""
        B, T, H, D = y.shape
        z_grad = z_grad.contiguous()
        y_grad = torch.empty_like(y)
        v_grad = v.new_empty(v.shape)
        sizes = (token_stride(v), B * T, H, v.size(2), D)
        self._call("exclude_back", y.dtype, (z_grad, y, v, y_grad, v_grad), sizes, (epsilon,))
        return y_grad, v_grad

    def smear(
        self,
        x: Tensor,  # (B, T, C)
        w: Tensor,  # (R,)
        smear_lambda: Tensor,  # ()
    ) -> tuple[Tensor, Tensor]:  # (B, T, C), (B, T) fp32
        """Return x + smear_lambda sigmoid(w x[:R]) previous, and the sigmoids.

        `previous` is the x of the token before, or 0 for a row's first token.
        """
        B, T, C = x.shape
        x = x.contiguous()
        w = w.contiguous()
        y = x.new_empty(B, T, C)
        opened = x.new_empty(B, T, dtype=torch.float32)
        sizes = (B * T, T, C, len(w))
        self._call("smear", x.dtype, (x, w, smear_lambda, y, opened), sizes)
        return y, opened

    def smear_back(
        self,
        y_grad: Tensor,  # (B, T, C)
        x: Tensor,  # (B, T, C) contiguous
        w: Tensor,  # (R,)
        smear_lambda: Tensor,  # ()
        opened: Tensor,  # (B, T) fp32
    ) -> tuple[Tensor, Tensor]:  # (B, T, C), (R + 1,) fp32
        """Return the gradient of x, and one tensor with the gradients of w and `smear_lambda`."""
        B, T, C = x.shape
        y_grad = y_grad.contiguous()
        x_grad = torch.empty_like(x)
        sums = x.new_empty(len(w) + 1, dtype=torch.float32)
        tensors = (y_grad, x, w, smear_lambda, opened, x_grad, sums)
        self._call("smear_back", x.dtype, tensors, (B * T, T, C, len(w)))
        return x_grad, sums

    def square_sums(
        self,
        tensors: Sequence[Tensor],  # contiguous
    ) -> Tensor:  # (number of tensors,) fp32
        """Return the sum of squares of each tensor."""
        sums = torch.empty(len(tensors), dtype=torch.float32)
        for x, total in zip(tensors, sums.unbind(), strict=True):
            self._call("square_sum", x.dtype, (x, total), (x.numel(),))
        return sums

    # --- attention -------------------------------------------------------------------------------

    @property
    def attention_formats(self) -> tuple[torch.dtype, ...]:
        """The formats of numbers that attention() supports on this processor."""
        return tuple(dtype for dtype in GRAINS if ("attention", dtype) in self._functions)

    def takes(self, q: Tensor) -> bool:  # (B, T, H, D)
        """Return whether attention() supports queries of this format and head dimension."""
        return takes_attention(q, self.attention_formats)

    def attention(
        self,
        q: Tensor,  # (B, T, H, D), for which takes() is True
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float,
        positions: Tensor | None = None,  # (B, T) of each token in its document
    ) -> tuple[Tensor, Tensor]:  # (B, T, H, D), (B, H, T) fp32
        """Return causal attention, and the log-sum-exp of each query's scores in base 2.

        A query sees its own key and at most `window` keys before it, in its own document. Without
        positions, a row is one document.
        """
        B, T, H, D = q.shape
        y = q.new_empty(q.shape)
        log_sums = q.new_empty(B, H, T, dtype=torch.float32)
        sizes = (B, T, H, k.size(2), D, min(window, T))
        positions = _contiguous(positions)
        tensors = (q, k, v, positions, y, log_sums, _strides(q, k, v, y))
        self._call("attention", q.dtype, tensors, sizes, (scale,))
        return y, log_sums

    def attention_back(
        self,
        q: Tensor,  # q, k and v as passed to attention()
        k: Tensor,
        v: Tensor,
        y: Tensor,  # from attention()
        y_grad: Tensor,  # (B, T, H, D)
        log_sums: Tensor,  # from attention()
        input_grads: Sequence[Tensor],  # of q, k and v, written here
        window: int,
        scale: float,
        positions: Tensor | None = None,
    ) -> None:
        """Write the gradients of attention() to `input_grads`, given its results and `y_grad`."""
        B, T, H, D = q.shape
        sizes = (B, T, H, k.size(2), D, min(window, T))
        strides = _strides(q, k, v, y, y_grad, *input_grads)
        positions = _contiguous(positions)
        tensors = (q, k, v, positions, y, y_grad, log_sums, *input_grads, strides)
        self._call("attention_back", q.dtype, tensors, sizes, (scale,))


class ProductsInt8(Functions):
    """Calls the functions of a library that was compiled from int8.cpp."""

    def pack_int8(
        self,
        weight: Tensor,  # (outputs, inputs) fp32, contiguous
        back: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return a matrix as 8-bit integers for product_int8(), and a factor for each output.

        With `back`, the matrix is transposed, so it has as many outputs as `weight` has inputs.
        """
        outputs, inputs = weight.shape
        if back:
            outputs, inputs = inputs, outputs
        packed = weight.new_empty(inputs, outputs, dtype=torch.uint8)
        factors = weight.new_empty(outputs)
        tensors = (weight, packed, factors)
        self._call("pack_int8", weight.dtype, tensors, (outputs, inputs, int(back)))
        return packed, factors

    def product_int8(
        self,
        x: Tensor,  # (N, inputs) bf16
        packed: Tensor,  # from pack_int8()
        factors: Tensor,  # from pack_int8()
        squared: bool = False,
    ) -> Tensor:  # (N, outputs)
        """Return the product of x and a packed matrix, or with `squared`, its squared ReLU."""
        x = x.contiguous()
        inputs, outputs = packed.shape
        N = len(x)
        y = x.new_empty(N, outputs)
        sizes = (N, outputs, inputs, int(squared))
        self._call("product_int8", x.dtype, (x, packed, factors, y), sizes)
        return y

    def gradient_int8(
        self,
        g: Tensor,  # (N, outputs) bf16, outputs a multiple of 32
        x: Tensor,  # (N, inputs) bf16, inputs a multiple of 32
    ) -> Tensor:  # (outputs, inputs) fp32
        """Return the gradient of a matrix, g transposed times x, computed in 8 bits."""
        g = g.contiguous()
        x = x.contiguous()
        w_grad = torch.empty(g.size(1), x.size(1))
        self._call("gradient_int8", x.dtype, (g, x, w_grad), (len(x), *w_grad.shape))
        return w_grad


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _strides(*tensors: Tensor) -> Tensor:  # (B, T, H, D) each -> (2 * tensors,)
    """Return one tensor with the strides of the first two dimensions of each of `tensors`.

    The heads of a token must be adjacent in memory.
    """
    strides = []
    for x in tensors:
        strides += [x.stride(0), x.stride(1)]
    return torch.tensor(strides)
