"""Compiles kernels.cpp and training.cpp on this machine, once, and calls what the former compiled to on tensors.

torch's compiler is not used: its code would check its inputs at every call and has to be compiled for every model. This
file takes a second or two, serves every model, and is found again by the next process.
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

from nanochat.common import log, tr, warn
from nanochat.platforms import host
from nanochat.platforms.host import compiler

CPP = Path(__file__).with_name("cpp")
SOURCE = CPP / "kernels.cpp"
TRAINING = CPP / "training.cpp"
HEADERS = (
    "common.h",
    "products.h",
    "tiles.h",
    "attention.h",
    "attention_fp32.h",
    "int8.h",
)  # that they include
# Sums may be reordered, so that vectors compute them. Flags that change how the whole process rounds are not used.
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
BLOCK = 64  # outputs of a matrix whose weights lie together, as in products.h
SECONDS = 120  # that compiling may take
# The functions: how many pointers, sizes and fp32 numbers each of them takes, in this order. The first size is the
# number of threads that they may use.
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
EPSILON = 2.0**-23  # that torch's RMS norm adds by default
SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def compiled(folder: Path, command: str, source: Path | None = None) -> Path:
    """The library compiled from `source`, by default SOURCE, and HEADERS, in `folder`, by the compiler `command`. Its
    name says what it was made from and for which processor. OSError or subprocess.SubprocessError if it cannot be
    made."""
    source = source or SOURCE
    flags = host.cpu_flags()
    machine_flags = [
        "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    ]
    machine_flags += ["-mprefer-vector-width=512"] if "avx512f" in flags else []
    made_from = repr((command, FLAGS, machine_flags, sorted(flags), host.cpu_model())).encode()
    made_from += b"".join(path.read_bytes() for path in (source, *(CPP / name for name in HEADERS)))
    library = folder / f"{source.stem}-{hashlib.sha256(made_from).hexdigest()[:16]}.so"
    if not _is_ours(library):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = library.with_name(f".{library.name}-{os.getpid()}")
        words = [command, *FLAGS, *machine_flags, f"-I{CPP}", str(source), "-o", str(fresh)]
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=SECONDS)
        os.replace(fresh, library)
    return library


def _is_ours(library: Path) -> bool:
    """Whether a library is there and was compiled by this user, or by root."""
    try:
        return library.stat().st_uid in (os.geteuid(), 0)
    except FileNotFoundError:
        return False


@functools.cache
def kernels(folder: Path) -> "Kernels | None":
    """The kernels of this machine, compiled into `folder` unless they are there; None, and a line that says why, if
    they cannot be compiled."""
    library = found(folder, SOURCE)
    return None if library is None else Kernels(library)


def found(folder: Path, source: Path) -> ctypes.CDLL | None:
    """The library of a source, compiled into `folder` unless it is there; None, and a line that says why, if it cannot
    be compiled."""
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
        first_line = (getattr(failure, "stderr", None) or str(failure)).strip().splitlines()[:1]
        warn(
            tr("small operators stay torch's own, which are slower: {why}", why="".join(first_line))
        )
        return None


class Kernels:
    """The functions of a compiled library. Tensors are on the host, fp32 or bf16, all of one format; nothing has
    gradients. Each row of a result depends on its own row of the arguments alone."""

    def __init__(self, loaded: ctypes.CDLL):
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for name, (pointers, sizes, numbers) in FUNCTIONS.items():
            for dtype, suffix in SUFFIXES.items():
                function = getattr(loaded, f"{name}_{suffix}")
                function.argtypes = [c_void_p] * pointers + [c_int64] * sizes + [c_float] * numbers
                function.restype = c_bool if name in ("attend", "loss") else None
                self._functions[name, dtype] = function
        self._multiply = getattr(
            loaded, "multiply_bf16", None
        )  # only where the processor has AVX512-BF16
        if self._multiply is not None:
            self._multiply.argtypes, self._multiply.restype = [c_void_p] * 3 + [c_int64] * 3, None

        self._attend_many = getattr(loaded, "attend_many_bf16", None)  # likewise
        if self._attend_many is not None:
            arguments = [c_void_p] * 5 + [c_int64] * 13 + [c_float]
            self._attend_many.argtypes, self._attend_many.restype = arguments, None

    def takes_many(self, q: Tensor) -> bool:
        """Whether attend_many() computes with queries (B, T, H, D)."""
        return (
            self._attend_many is not None and q.dtype == torch.bfloat16 and q.size(3) % BLOCK == 0
        )

    def attend_many(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D)
        v: Tensor,  # (B, K, Hkv, D)
        first: Tensor,  # (B,) place of the first query of each row; the others follow
        window: int,
        scale: float,
    ) -> Tensor:  # (B, T, H, D)
        """Attend to the key at each query's own place and at most `window` before it; places must be below K."""
        assert self._attend_many is not None
        B, T, H, D = q.shape
        q, k, v = (
            x if x.stride(3) == 1 and x.stride(2) == D else x.contiguous() for x in (q, k, v)
        )
        y, first = q.new_empty(q.shape), first.contiguous()
        strides = [stride for x in (q, k, v) for stride in (x.stride(0), x.stride(1))]
        self._attend_many(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            first.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            *strides,
            B,
            T,
            H,
            k.size(2),
            D,
            window,
            scale,
        )
        return y

    def reads(self, laid_out: Tensor, weight: Tensor, compare: bool = True) -> int | None:
        """Where a bf16 matrix (outputs, inputs) lies that oneDNN has laid out, if multiply() can read it there: the
        layout is not documented, so every number is compared. Without `compare`, the layout of the shape is known."""
        outputs, inputs = weight.shape
        if (
            self._multiply is None
            or outputs % BLOCK
            or inputs % 2
            or not hasattr(torch.ops.mkldnn, "data_ptr")
        ):
            return None
        place, size = torch.ops.mkldnn.data_ptr(laid_out), torch.ops.mkldnn._nbytes(laid_out)
        if size != weight.numel() * weight.element_size():
            return None
        if not compare:
            return place
        packed = torch.frombuffer((ctypes.c_char * size).from_address(place), dtype=weight.dtype)
        blocks = weight.view(outputs // BLOCK, BLOCK, inputs // 2, 2).transpose(1, 2)
        return place if torch.equal(packed.view(blocks.shape), blocks) else None

    def multiply(
        self, x: Tensor, place: int, outputs: int
    ) -> Tensor:  # (..., inputs) -> (..., outputs), bf16
        """x times the transpose of the matrix at a place that reads() gave; for few rows, and on one thread."""
        x, inputs = x.contiguous(), x.size(-1)
        y = x.new_empty(*x.shape[:-1], outputs)
        self._multiply(x.data_ptr(), place, y.data_ptr(), x.numel() // inputs, outputs, inputs)  # type: ignore[misc]
        return y

    def norm(
        self,
        x: Tensor,  # (..., C)
        weight: Tensor | None,  # (C,) fp32
        epsilon: float,
        added: Tensor | None = None,  # (..., C)
    ) -> tuple[Tensor, Tensor]:  # (..., C) twice
        """RMS norm of x + added, times the weight, and x + added."""
        x = x.contiguous()
        added = None if added is None else added.contiguous()
        y, total = torch.empty_like(x), x if added is None else torch.empty_like(x)
        channels = x.size(-1)
        self._functions["norm", x.dtype](
            x.data_ptr(),
            None if added is None else added.data_ptr(),
            None if weight is None else weight.data_ptr(),
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
        x: Tensor,  # (B, T, H, D), whose heads lie side by side
        weight: Tensor | None,  # (H, D) fp32
        cos: Tensor,  # (1 or B, T, 1, R / 2), R <= D
        sin: Tensor,
        epsilon: float,
        sharpen: float = 1.0,
    ) -> Tensor:  # (B, T, H, D)
        """RMS norm over D, times the weight and `sharpen`, with the first R channels rotated."""
        B, T, H, D = x.shape
        stride = x.stride(1)
        if x.stride(3) != 1 or x.stride(2) != D or (B > 1 and x.stride(0) != T * stride):
            x, stride = x.contiguous(), H * D
        cos, sin, y = cos.contiguous(), sin.contiguous(), x.new_empty(x.shape)
        half = cos.size(-1)
        self._functions["turn", x.dtype](
            x.data_ptr(),
            None if weight is None else weight.data_ptr(),
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
            epsilon,
            sharpen,
        )
        return y

    def attend(
        self,
        q: Tensor,  # (B, 1, H, D)
        k: Tensor,  # (B, 1, Hkv, D)
        v: Tensor,  # (B, 1, Hkv, D)
        held_k: Tensor,  # (B, T, Hkv, D) of the cache, each row contiguous
        held_v: Tensor,  # (B, T, Hkv, D)
        places: Tensor,  # (B, 1) where in its row the new token goes
        window: int,
        scale: float,
    ) -> Tensor:  # (B, 1, H, D)
        """Write the new keys and values into the cache, then attend to the new key and at most `window` before it."""
        B, _, H, D = q.shape
        q, k, v = (
            x if x.stride(3) == 1 and x.stride(2) == D else x.contiguous() for x in (q, k, v)
        )
        y = q.new_empty(q.shape)
        written = self._functions["attend", q.dtype](
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            held_k.data_ptr(),
            held_v.data_ptr(),
            places.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            held_k.stride(0),
            held_k.size(1),
            B,
            H,
            k.size(2),
            D,
            window,
            scale,
        )
        if not written:
            raise IndexError(
                f"a row of the cache has {held_k.size(1):,} places, and a new token goes beyond them"
            )
        return y

    def swiglu(self, x: Tensor) -> Tensor:  # (..., 2 N) -> (..., N)
        """silu of the first half of the channels, times the second half."""
        x, width = x.contiguous(), x.size(-1) // 2
        y = x.new_empty(*x.shape[:-1], width)
        self._functions["swiglu", x.dtype](
            x.data_ptr(), y.data_ptr(), torch.get_num_threads(), y.numel() // width, width
        )
        return y

    def squared_relu(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """relu(x)^2, written to `y` if it is given; `y` may be `x` then, and both are contiguous."""
        x = x.contiguous()
        y = torch.empty_like(x) if y is None else y
        self._functions["squared_relu", x.dtype](
            x.data_ptr(), y.data_ptr(), torch.get_num_threads(), x.numel()
        )
        return y

    def mix(
        self, x: Tensor, x0: Tensor, a: Tensor, b: Tensor
    ) -> Tensor:  # (..., C) twice, () twice
        """a x + b x0."""
        x, x0 = x.contiguous(), x0.contiguous()
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

    def softcap(
        self, x: Tensor, cap: float
    ) -> Tensor:  # (..., V), whose rows may be parts of longer ones -> fp32
        """cap tanh(x / cap)."""
        flat = x.flatten(0, -2)
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        y = x.new_empty(x.shape, dtype=torch.float32)
        self._functions["softcap", x.dtype](
            flat.data_ptr(), y.data_ptr(), torch.get_num_threads(), *flat.shape, flat.stride(0), cap
        )
        return y

    def log_totals(self, x: Tensor) -> Tensor:  # (B, V) -> (B,) fp32
        """The logarithm of the sum of each row's exponentials."""
        x = x.contiguous()
        y = x.new_empty(x.size(0), dtype=torch.float32)
        self._functions["log_total", x.dtype](
            x.data_ptr(), y.data_ptr(), torch.get_num_threads(), *x.shape
        )
        return y

    def loss(
        self,
        logits: Tensor,  # (n, V') contiguous, overwritten with the gradient of the result
        targets: Tensor,  # (n,) token ids below `vocab`; any number where the weight is 0
        weights: Tensor,  # (n,) fp32
        vocab: int,
        cap: float,  # of the softcap; 0: none
    ) -> Tensor:  # ()
        """The weighted sum of the cross-entropies of rows of logits, of which the first `vocab` count."""
        targets, weights = targets.contiguous(), weights.contiguous()
        losses = torch.empty_like(weights)
        status = self._functions["loss", logits.dtype](
            logits.data_ptr(),
            targets.data_ptr(),
            weights.data_ptr(),
            losses.data_ptr(),
            torch.get_num_threads(),
            *logits.shape,
            vocab,
            cap,
        )
        if not status:
            raise IndexError(f"a target is not one of the {vocab:,} tokens of the vocabulary")
        return losses.sum()
