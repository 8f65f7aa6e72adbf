"""Compiles the C++ sources on this machine, and calls kernels.cpp on tensors.

torch's compiler is not used, because its code would check its inputs in every call, and would have
to be compiled for every model. A C++ source takes some ten seconds to compile, the library serves
every model, and later processes load it again. Shapes: B batch, T time, H heads, D head dimension,
C channels.
"""

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
from ctypes import c_bool, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat.common import atomic_path, log, tr, warn
from nanochat.data.library_words import in_words
from nanochat.platforms import host
from nanochat.platforms.host import compiler

CPP = Path(__file__).with_name("cpp")
SOURCE = CPP / "kernels.cpp"
TRAINING = CPP / "training.cpp"
INT8 = CPP / "int8.cpp"
# The headers that the sources include.
HEADERS = (
    "common.h",
    "lanes.h",
    "panels.h",
    "products.h",
    "tiles.h",
    "operators.h",
    "decode.h",
    "attention.h",
    "attention_chunk.h",
    "attention_fp32.h",
    "int8.h",
)
# Sums may be reordered so that they can be vectorized. Flags that change the rounding of the whole
# process are not used.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-ffp-contract=fast",
)
BLOCK = 64  # outputs of a matrix whose weights are stored together, as in products.h
# attend_many() takes head dimensions that are multiples of these
MANY_CHANNELS = {torch.bfloat16: BLOCK, torch.float32: 32}
MANY_QUERIES = 9  # queries in a row from which attend_many() is used; fewer are computed one by one
PANEL = 16  # outputs of a matrix whose weights are stored together, as in panels.h
PANELS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}  # formats of weights
USUAL_SECONDS = 10  # what compiling a source takes on an idle host
SECONDS = 300  # time limit for compiling, which a busy host may need
# The number of pointers, sizes and fp32 numbers that each function takes, in this order. The first
# size is the number of threads that the function may use.
FUNCTIONS = {
    "norm": (5, 3, 1),
    "turn": (5, 7, 2),
    "attend": (7, 11, 1),
    "swiglu": (2, 3, 0),
    "squared_relu": (2, 2, 0),
    "mix": (5, 2, 0),
    "softcap": (2, 4, 1),
    "log_total": (2, 3, 0),
    "loss": (4, 4, 1),
}
CHECKED = ("attend", "loss")  # these functions return whether their indices were in range
EPSILON = 2.0**-23  # the default of torch's RMS norm for fp32
SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


# --- compiling -----------------------------------------------------------------------------------


def compiled(
    folder: Path,
    command: str,
    source: Path | None = None,
) -> Path:
    """Return the path of a C++ source's library, compiling it into `folder` if it is missing.

    `command` is the compiler, and `source` is kernels.cpp by default. The library's name contains
    the hash from _digest(). A library that another user owns or may write to counts as missing.
    Raises OSError or subprocess.SubprocessError if the library cannot be compiled.
    """
    source = source or SOURCE
    flags = [*FLAGS, *_processor_flags()]
    digest = _digest(command, flags, source)
    library = folder / f"{source.stem}-{digest}.so"
    if _is_ours(library):
        return library
    log(
        tr(
            "compiling C++ kernels for this processor ({source}), once, some {seconds} s ...",
            source=source.name,
            seconds=USUAL_SECONDS,
        )
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with atomic_path(library) as fresh:
        words = [command, *flags, f"-I{CPP}", str(source), "-o", str(fresh)]
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=SECONDS)
        fresh.chmod(0o755)
    return library


def _processor_flags() -> list[str]:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    flags = ["-march=native" if is_x86 else "-mcpu=native"]
    if "avx512f" in host.cpu_flags():
        flags.append("-mprefer-vector-width=512")
    return flags


def _digest(command: str, flags: list[str], source: Path) -> str:
    """Return a hash of a library's sources, compiler command, flags and target processor."""
    processor = (sorted(host.cpu_flags()), host.cpu_model(), host.arm_core())
    content = repr((command, flags, processor)).encode()
    for name in (source, *HEADERS):
        content += (CPP / name).read_bytes()
    return hashlib.sha256(content).hexdigest()[:16]


def _is_ours(library: Path) -> bool:
    """Return whether a file exists that belongs to this user or root, and only they may write."""
    try:
        about = library.stat()
    except FileNotFoundError:
        return False
    return about.st_uid in (os.geteuid(), 0) and not host.others_write(about)


@functools.cache
def kernels(folder: Path) -> "Kernels | None":
    """Return the kernels for inference, compiling them into `folder` if they are missing.

    Returns None and logs the reason if they cannot be compiled or loaded.
    """
    library = library_of(folder, SOURCE)
    return None if library is None else Kernels(library)


def library_of(folder: Path, source: Path) -> ctypes.CDLL | None:
    """Load and return a C++ source's library, compiling it into `folder` if it is missing.

    Returns None and logs the reason if the library cannot be compiled or loaded.
    """
    command = compiler()
    if command is None:
        log(
            tr(
                "no C++ compiler was found, so small operators stay torch's own, which are slower; install g++"
            )
        )
        return None
    try:
        return ctypes.CDLL(str(compiled(folder, command, source)))
    except (OSError, subprocess.SubprocessError) as failure:
        warn(
            tr(
                "small operators stay torch's own, which are slower: {why}. The next run tries again.",
                why=_reason(failure),
            )
        )
        return None


def _reason(failure: OSError | subprocess.SubprocessError) -> str:
    """Return why a library could not be compiled or loaded, as a part of a sentence."""
    if isinstance(failure, subprocess.TimeoutExpired):
        return tr(
            "compiling the C++ kernels took more than {seconds} s, so this host is very busy",
            seconds=SECONDS,
        )
    if isinstance(failure, subprocess.CalledProcessError):
        said = (failure.stderr or "").strip().partition("\n")[0]
        return tr("the C++ compiler failed: {said}", said=said or failure.returncode)
    return in_words(failure)


# --- calling -------------------------------------------------------------------------------------


def _product(
    function: Any,
    x: Tensor,  # (..., inputs)
    pointer: int,  # to the stored matrix
    scales: Tensor | None,  # (outputs,) fp32
    outputs: int,
) -> Tensor:  # (..., outputs)
    """Return what a library's function for products computes from x and a stored matrix."""
    x = x.contiguous()
    inputs = x.size(-1)
    y = x.new_empty(*x.shape[:-1], outputs)
    function(
        x.data_ptr(),
        pointer,
        None if scales is None else scales.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
        x.numel() // inputs,
        outputs,
        inputs,
    )
    return y


class Kernels:
    """Calls the functions of a library that was compiled from kernels.cpp.

    Tensors are on the host, without gradients, and all in one format, fp32 or bf16, unless stated
    otherwise. What is computed for a row does not depend on the other rows.
    """

    def __init__(self, library: ctypes.CDLL):
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for name, (pointers, sizes, numbers) in FUNCTIONS.items():
            for dtype, suffix in SUFFIXES.items():
                function = getattr(library, f"{name}_{suffix}")
                function.argtypes = argument_types(pointers, sizes, numbers)
                function.restype = c_bool if name in CHECKED else None
                self._functions[name, dtype] = function
        self._panels: dict[torch.dtype, Any] = {}
        for dtype, suffix in PANELS.items():
            function = getattr(library, f"panels_{suffix}")
            function.argtypes = argument_types(4, 4, 0)
            function.restype = None
            self._panels[dtype] = function
        # The functions for activations in bf16 exist only if the processor has AVX512-BF16.
        self._blocks: dict[torch.dtype, Any] = {}
        for dtype in (torch.bfloat16, torch.int8):
            function = getattr(library, f"blocks_{PANELS[dtype]}", None)
            if function is not None:
                function.argtypes = argument_types(4, 4, 0)
                function.restype = None
                self._blocks[dtype] = function
        self.decode: dict[torch.dtype, Any] = {}  # decoder.py calls it
        self._attend_many: dict[torch.dtype, Any] = {}
        for dtype, suffix in SUFFIXES.items():
            function = getattr(library, f"decode_{suffix}", None)
            if function is not None:
                function.argtypes = argument_types(10, 1, 2)
                function.restype = c_bool
                self.decode[dtype] = function
            function = getattr(library, f"attend_many_{suffix}", None)
            if function is not None:
                function.argtypes = argument_types(5, 13, 1)
                function.restype = None
                self._attend_many[dtype] = function

    # --- attention -------------------------------------------------------------------------------

    def takes_many(self, q: Tensor) -> bool:  # (B, T, H, D)
        """Return whether attend_many() supports queries of this format and head dimension."""
        return q.dtype in self._attend_many and q.size(3) % MANY_CHANNELS[q.dtype] == 0

    def attend_many(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D)
        v: Tensor,  # (B, K, Hkv, D)
        first: Tensor,  # (B,) position of the first query of each row; the others follow it
        window: int,
        scale: float,
    ) -> Tensor:  # (B, T, H, D)
        """Return causal attention; a query sees its own key and at most `window` keys before it.

        All positions must be below K.
        """
        B, T, H, D = q.shape
        q = _side_by_side(q)
        k = _side_by_side(k)
        v = _side_by_side(v)
        first = first.contiguous()
        y = q.new_empty(q.shape)
        self._attend_many[q.dtype](
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            first.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            B,
            T,
            H,
            k.size(2),
            D,
            window,
            scale,
        )
        return y

    def attend(
        self,
        q: Tensor,  # (B, 1, H, D)
        k: Tensor,  # (B, 1, Hkv, D)
        v: Tensor,  # (B, 1, Hkv, D)
        cached_k: Tensor,  # (B, K, Hkv, D), each row contiguous
        cached_v: Tensor,  # (B, K, Hkv, D)
        positions: Tensor,  # (B, 1) position of the new token in its row
        window: int,
        scale: float,
    ) -> Tensor:  # (B, 1, H, D)
        """Write new keys and values into the cache, and return the attention to the cache.

        A query sees its row's new key and at most `window` keys before it. Raises IndexError if a
        position is outside the cache.
        """
        B, _, H, D = q.shape
        K = cached_k.size(1)
        q = _side_by_side(q)
        k = _side_by_side(k)
        v = _side_by_side(v)
        y = q.new_empty(q.shape)
        fits = self._functions["attend", q.dtype](
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            cached_k.data_ptr(),
            cached_v.data_ptr(),
            positions.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            cached_k.stride(0),
            K,
            B,
            H,
            k.size(2),
            D,
            window,
            scale,
        )
        if not fits:
            raise IndexError(
                f"a row of the cache has {K:,} places, and a new token goes beyond them"
            )
        return y

    # --- products --------------------------------------------------------------------------------

    @property
    def has_blocks(self) -> bool:
        """Whether multiply_blocks() exists: the processor has AVX512-BF16."""
        return bool(self._blocks)

    def reads(
        self,
        laid_out: Tensor,  # a bf16 matrix that oneDNN has laid out
        weight: Tensor,  # (outputs, inputs), the same matrix
        compare: bool = True,
    ) -> int | None:
        """Return the address of a laid-out matrix, or None if multiply_blocks() cannot read it.

        oneDNN's layout is not documented, so every number is compared with `weight`, unless
        `compare` is False because the layout of this shape is already known to be as expected.
        """
        outputs, inputs = weight.shape
        if not self.has_blocks or outputs % BLOCK or inputs % 2:
            return None
        if not hasattr(torch.ops.mkldnn, "data_ptr"):
            return None
        pointer = torch.ops.mkldnn.data_ptr(laid_out)
        size = torch.ops.mkldnn._nbytes(laid_out)
        if size != weight.numel() * weight.element_size():
            return None
        if not compare:
            return pointer
        blocks = weight.view(outputs // BLOCK, BLOCK, inputs // 2, 2)
        expected = blocks.transpose(1, 2)
        memory = (ctypes.c_char * size).from_address(pointer)
        actual = torch.frombuffer(memory, dtype=weight.dtype)
        return pointer if torch.equal(actual.view(expected.shape), expected) else None

    @staticmethod
    def pairs(
        pointer: int,
        shape: torch.Size,  # (outputs, inputs)
    ) -> Tensor:  # (outputs / 64, inputs / 2, 64) int32
        """Return the matrix at the address `pointer`, which reads() returned, without a copy.

        Each element holds two adjacent inputs of an output in bf16. The tensor does not keep the
        memory alive.
        """
        outputs, inputs = shape
        size = outputs * inputs // 2
        memory = (ctypes.c_int32 * size).from_address(pointer)
        elements = torch.frombuffer(memory, dtype=torch.int32)
        return elements.view(outputs // BLOCK, inputs // 2, BLOCK)

    def multiply_blocks(
        self,
        x: Tensor,  # (..., inputs) bf16
        pointer: int,
        dtype: torch.dtype,
        scales: Tensor | None,  # (outputs,) fp32, a factor for each output
        outputs: int,
    ) -> Tensor:  # (..., outputs) bf16
        """Return x times the transposed matrix whose blocks, in bf16 or int8, begin at `pointer`.

        Such a pointer is what reads() returns, or the address of a tensor that in_blocks() made.
        """
        return _product(self._blocks[dtype], x, pointer, scales, outputs)

    def multiply_panels(
        self,
        x: Tensor,  # (..., inputs) fp32
        panels: Tensor,  # (outputs / 16, inputs, 16) fp32, bf16 or int8
        scales: Tensor | None,  # (outputs,) fp32, a factor for each output
        outputs: int,  # at most those of the panels
    ) -> Tensor:  # (..., outputs) fp32
        """Return x times the transposed matrix that Panels stores."""
        function = self._panels[panels.dtype]
        return _product(function, x, panels.data_ptr(), scales, outputs)

    # --- small operators -------------------------------------------------------------------------

    def norm(
        self,
        x: Tensor,  # (..., C)
        weight: Tensor | None,  # (C,) fp32
        epsilon: float,
        added: Tensor | None = None,  # (..., C)
    ) -> tuple[Tensor, Tensor]:  # (..., C) twice
        """Return the RMS norm of x, or of x + `added`, times any `weight`, and the norm's input."""
        x = x.contiguous()
        y = torch.empty_like(x)
        total = x
        if added is not None:
            added = added.contiguous()
            total = torch.empty_like(x)
        channels = x.size(-1)
        self._functions["norm", x.dtype](
            x.data_ptr(),
            address(added),
            address(weight),
            total.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            x.numel() // channels,
            channels,
            epsilon,
        )
        return y, total

    def turn(
        self,
        x: Tensor,  # (B, T, H, D), the heads of a token adjacent in memory
        weight: Tensor | None,  # (H, D) fp32
        cos: Tensor,  # (1 or B, T, 1, R / 2), R <= D
        sin: Tensor,
        epsilon: float | None,  # None: x is not normed
        sharpen: float = 1.0,
    ) -> Tensor:  # (B, T, H, D)
        """Return x normed over D, times `weight` and `sharpen`, with the first R channels rotated.

        The norm is an RMS norm, and a `weight` of None counts as 1.
        """
        B, T, H, D = x.shape
        stride = x.stride(1)
        has_even_rows = B == 1 or x.stride(0) == T * stride
        if x.stride(3) != 1 or x.stride(2) != D or not has_even_rows:
            x = x.contiguous()
            stride = H * D
        cos = cos.contiguous()
        sin = sin.contiguous()
        y = x.new_empty(x.shape)
        half = cos.size(-1)
        self._functions["turn", x.dtype](
            x.data_ptr(),
            address(weight),
            cos.data_ptr(),
            sin.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            stride,
            cos.numel() // half,
            B * T,
            H,
            D,
            half,
            -1.0 if epsilon is None else epsilon,
            sharpen,
        )
        return y

    def swiglu(self, x: Tensor) -> Tensor:  # (..., 2 N) -> (..., N)
        """Return silu(first half of the channels) times the second half."""
        x = x.contiguous()
        width = x.size(-1) // 2
        y = x.new_empty(*x.shape[:-1], width)
        rows = y.numel() // width
        self._functions["swiglu", x.dtype](
            x.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            rows,
            width,
        )
        return y

    def squared_relu(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return relu(x)^2, written to `y` if given.

        `y` must be contiguous, and may be `x` itself.
        """
        x = x.contiguous()
        y = torch.empty_like(x) if y is None else y
        self._functions["squared_relu", x.dtype](
            x.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            x.numel(),
        )
        return y

    def mix(
        self,
        x: Tensor,  # (..., C)
        x0: Tensor,  # (..., C)
        a: Tensor,  # ()
        b: Tensor,  # ()
    ) -> Tensor:
        """Return a x + b x0."""
        x = x.contiguous()
        x0 = x0.contiguous()
        y = torch.empty_like(x)
        self._functions["mix", x.dtype](
            x.data_ptr(),
            x0.data_ptr(),
            a.data_ptr(),
            b.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            x.numel(),
        )
        return y

    # --- logits ----------------------------------------------------------------------------------

    def softcap(
        self,
        x: Tensor,  # (..., V), whose rows may be parts of longer rows
        cap: float,
    ) -> Tensor:  # (..., V) fp32
        """Return cap tanh(x / cap)."""
        rows = x.flatten(0, -2)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = x.new_empty(x.shape, dtype=torch.float32)
        self._functions["softcap", x.dtype](
            rows.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            *rows.shape,
            rows.stride(0),
            cap,
        )
        return y

    def log_totals(self, x: Tensor) -> Tensor:  # (B, V) -> (B,) fp32
        """Return the log-sum-exp of each row."""
        x = x.contiguous()
        y = x.new_empty(x.size(0), dtype=torch.float32)
        self._functions["log_total", x.dtype](
            x.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            *x.shape,
        )
        return y

    def loss(
        self,
        logits: Tensor,  # (n, V') contiguous, overwritten with the gradient of the losses' sum
        targets: Tensor,  # (n,) token IDs below `vocab`; any integer if the weight is 0
        weights: Tensor,  # (n,) fp32
        vocab: int,
        cap: float,  # of the softcap; 0 if there is none
    ) -> Tensor:  # (n,) fp32
        """Return the weighted cross-entropy of each row, and write their gradient to `logits`.

        Only the first `vocab` logits of each row count. Raises IndexError if a target whose weight
        is not 0 is `vocab` or more. A row with a negative target has no loss.
        """
        targets = targets.contiguous()
        weights = weights.contiguous()
        losses = torch.empty_like(weights)
        are_valid = self._functions["loss", logits.dtype](
            logits.data_ptr(),
            targets.data_ptr(),
            weights.data_ptr(),
            losses.data_ptr(),
            torch.get_num_threads(),
            *logits.shape,
            vocab,
            cap,
        )
        if not are_valid:
            raise IndexError(f"a target is not one of the {vocab:,} tokens of the vocabulary")
        return losses


def argument_types(pointers: int, sizes: int, numbers: int) -> list[Any]:
    """Return the ctypes of a function's arguments: pointers, then sizes, then fp32 numbers."""
    return [c_void_p] * pointers + [c_int64] * sizes + [c_float] * numbers


def address(tensor: Tensor | None) -> int | None:
    """Return the memory address of a tensor, or None for None."""
    return None if tensor is None else tensor.data_ptr()


def _side_by_side(x: Tensor) -> Tensor:  # (B, T, H, D)
    """Return x, copied if the heads of a token are not adjacent in memory."""
    if x.stride(3) == 1 and x.stride(2) == x.size(3):
        return x
    return x.contiguous()
