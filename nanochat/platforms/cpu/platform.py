"""CPUs: the host is the device."""

import contextlib
import functools
import os
import resource
import sys
import sysconfig
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from nanochat.common import base_dir, tr
from nanochat.nn.blocked_attention import BlockedAttention
from nanochat.nn.operations import Asked, Matrices, Operations, multiplied
from nanochat.nn.plain_attention import by_products, one_query
from nanochat.platforms import host
from nanochat.platforms.base import Platform
from nanochat.platforms.cpu.kernels import SUFFIXES, Kernels, compiler, kernels

# Two products beat torch's operator in a decoding pass of so many rows times keys, and of so many numbers in all keys.
DECODED_KEYS, DECODED_NUMBERS = 256, 1 << 24
FEW_ROWS = 32  # that are multiplied with a matrix faster by our own loop than by oneDNN, on one thread
EPSILON = 2.0**-23  # that torch's RMS norm adds by default
PASS_TOKENS = 4096  # tokens of a pass: larger passes only fall out of the caches


class _Packed:
    """A bf16 matrix in the layout of oneDNN."""

    def __init__(self, weight: Tensor, kernels: Kernels | None):  # (outputs, inputs)
        weight = weight.detach()
        self._shape, self._kernels = weight.shape, kernels
        self._laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._place = None if kernels is None else kernels.reads(self._laid_out, weight.contiguous())
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:  # (..., inputs) -> (..., outputs)
        if self._place is not None and x.numel() <= FEW_ROWS * self._shape[1] and torch.get_num_threads() == 1:
            assert self._kernels is not None
            return self._kernels.multiply(x, self._place, self._shape[0])
        return self._multiply(x, self._laid_out, None, "none", [], "")


class CpuOperations(Operations):
    """Plain torch, and blocked attention in compiled bf16 models, where it takes less than half the time."""

    loss_logits = 1 << 24
    skips_masked = True

    def __init__(self, stacks_matrices: bool = True, compiles: bool = True):
        """`compiles`: models that are held use compiled kernels for small operators."""
        super().__init__(stacks_matrices)
        self._compiles = compiles
        self._kernels: Kernels | None = None

    @torch.no_grad()
    def hold(self, model: nn.Module) -> None:
        """See Operations.hold. A matrix of bf16 is laid out for oneDNN once instead of in every product: one row is
        multiplied in half the time, at the speed of the memory, with the same result up to rounding. fp32 stays as it
        is, since there the rounding would depend on how many rows are multiplied together. From here on whatever is
        computed without gradients uses compiled kernels for small operators."""
        if self._compiles:
            self._kernels = kernels(host.use_compile_cache(base_dir()))
        for module in model.modules():
            if (settle := getattr(module, "settle", None)) is not None:
                settle()
        if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return
        pack = functools.partial(_Packed, kernels=self._kernels)
        for module in model.modules():
            if (join := getattr(module, "join", None)) is not None:
                join(pack, torch.bfloat16)
            weight = getattr(module, "weight", None)
            if getattr(module, "packed", 0) is not None or not isinstance(weight, nn.Parameter):
                continue  # it cannot be packed, or is packed already
            if weight.dtype == torch.bfloat16 and weight.numel():
                setattr(module, "packed", pack(weight))  # noqa: B010 - not an attribute of every module
                if module.only_multiplies:
                    module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def weighted_norm(
        self,
        x: Tensor,  # (..., C)
        weight: Tensor,  # (C,) fp32, or (H, C) for x (..., H, C)
        epsilon: float,
    ) -> Tensor:
        """See Operations.weighted_norm. Without gradients the operators are called one by one, which costs less."""
        if weight.dim() == 1 and (kernels := self._fast(x)) is not None:
            return kernels.norm(x, weight, epsilon)[0]
        if torch.is_grad_enabled():
            return super().weighted_norm(x, weight, epsilon)
        wide = F.rms_norm(x.float(), (x.size(-1),), eps=epsilon)
        return wide.mul_(weight).to(x.dtype)

    def _fast(self, *tensors: Tensor) -> Kernels | None:
        """The compiled kernels, if they can compute with these tensors."""
        if self._kernels is None or torch.is_grad_enabled() or is_compiling():
            return None
        dtype = tensors[0].dtype
        return self._kernels if dtype in SUFFIXES and all(x.dtype == dtype for x in tensors) else None

    def norm(self, x: Tensor) -> Tensor:
        """See Operations.norm."""
        kernels = self._fast(x)
        return super().norm(x) if kernels is None else kernels.norm(x, None, EPSILON)[0]

    def add_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """See Operations.add_norm."""
        kernels = self._fast(x, y)
        return super().add_norm(x, y) if kernels is None else kernels.norm(x, None, EPSILON, y)

    def add_weighted_norm(self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """See Operations.add_weighted_norm."""
        kernels = self._fast(x, y)
        return (
            super().add_weighted_norm(x, y, weight, epsilon) if kernels is None else kernels.norm(x, weight, epsilon, y)
        )

    def normed_heads(self, x: Tensor, weight: Tensor, epsilon: float, cos: Tensor, sin: Tensor) -> Tensor:
        """See Operations.normed_heads."""
        if (kernels := self._fast(x, cos)) is None:
            return super().normed_heads(x, weight, epsilon, cos, sin)
        return kernels.turn(x, weight, cos, sin, epsilon)

    def heads(
        self,
        x: Tensor,  # (B, T, C)
        matrices: Matrices,
        head_dim: int,
        cos: Tensor,
        sin: Tensor,
        sharpen: float,
        made: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Operations.heads. Rotating keeps the norm of a head, so it does not matter what comes first."""
        if (kernels := self._fast(x, cos)) is None:
            return super().heads(x, matrices, head_dim, cos, sin, sharpen, made)
        q, k, v = multiplied(x, matrices, head_dim)
        q, k = (kernels.turn(each, None, cos, sin, EPSILON, sharpen) for each in (q, k))
        return q, k, v

    def mix(self, x: Tensor, x0: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """See Operations.mix."""
        kernels = self._fast(x, x0, a, b)
        return super().mix(x, x0, a, b) if kernels is None else (kernels.mix(x, x0, a, b), x0)

    def squared_relu(self, x: Tensor) -> Tensor:
        """See Operations.squared_relu."""
        kernels = self._fast(x)
        return super().squared_relu(x) if kernels is None else kernels.squared_relu(x)

    def swiglu(self, x: Tensor) -> Tensor:
        """See Operations.swiglu."""
        kernels = self._fast(x)
        return super().swiglu(x) if kernels is None else kernels.swiglu(x)

    def takes_one(self, q: Tensor, held_k: Tensor) -> bool:
        """Whether the queries are one for each row, and the kernels can compute with them."""
        return q.size(1) == 1 and self._fast(q, held_k) is not None

    def extend(
        self,
        q: Tensor,  # (B, 1, H, D)
        k: Tensor,  # (B, 1, Hkv, D)
        v: Tensor,  # (B, 1, Hkv, D)
        held_k: Tensor,  # (B, K, Hkv, D)
        held_v: Tensor,  # (B, K, Hkv, D)
        places: Tensor,  # (B, 1)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, 1, H, D)
        """See Operations.extend."""
        assert self._kernels is not None
        return self._kernels.attend(
            q, k, v, held_k, held_v, places, window, q.size(3) ** -0.5 if scale is None else scale
        )

    def attend_cached(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D)
        v: Tensor,  # (B, K, Hkv, D)
        mask: Tensor,  # (B, 1, T, K)
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """See Operations.attend_cached.

        In bf16, torch's operator multiplies a single query number by number, which takes 2 to 10 times as long as what
        is done instead: heads that share their keys become queries of one head, and others become two products for each
        row. With gradients, products take less than half the time of torch's operator with a mask.
        """
        B, T, H, D = q.shape
        groups = H // k.size(2)
        if not q.dtype == k.dtype == torch.bfloat16:
            return super().attend_cached(q, k, v, mask, scale)
        if T > 1:
            products = q.requires_grad and groups == 1
            return by_products(q, k, v, mask, scale) if products else super().attend_cached(q, k, v, mask, scale)
        if groups == 1 and B * k.size(1) >= DECODED_KEYS and k.numel() <= DECODED_NUMBERS:
            return one_query(q, k, v, mask, scale)
        several = q.reshape(B, k.size(2), groups, D)
        if groups == 1:
            several = several.expand(-1, -1, 2, -1)
        y = F.scaled_dot_product_attention(
            several, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale
        )  # (B, Hkv, queries, D)
        return y[:, :, :groups].reshape(B, 1, H, D)

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """See Operations.attend."""
        grouped = k.size(2) != q.size(2)
        if is_compiling() and q.dtype == torch.bfloat16 and not grouped:
            return BlockedAttention.apply(q, k, v, window, self.hidden_score)  # type: ignore[no-any-return]
        return super().attend(q, k, v, window, scale)


class Cpu(Platform):
    """The host's processor."""

    name = "cpu"
    backend = "gloo"
    is_host = True
    context = (512, "a CPU")
    pass_tokens = PASS_TOKENS
    split_tokens = 1 << 18
    evaluation_rows = 4

    @property
    def module(self) -> None:
        """The host needs no driver."""
        return None

    def unavailable(self) -> str:
        """Every machine has a CPU."""
        return ""

    def count(self) -> int:
        """One, however many ranks share the host."""
        return 1

    def is_slow(self) -> bool:
        """Whether the processor has no registers of 512 bits, which double or triple the speed of a step."""
        return "avx512f" not in host.cpu_flags()

    def best_dtype(self) -> tuple[torch.dtype, str]:
        """bf16 where the processor multiplies it faster than fp32; elsewhere bf16 is emulated, or no faster."""
        faster, reason = host.bf16_unit()
        return (torch.bfloat16 if faster else torch.float32), reason

    def open(self) -> torch.device:
        """Nothing can fail; freed memory is kept for the next step."""
        host.keep_freed_memory()
        return torch.device("cpu")

    def describe(self) -> str:
        """The processor's name, and how many threads torch uses."""
        return f"{host.cpu_model()}, {torch.get_num_threads()} thread(s)"

    @property
    def collectives(self) -> str:
        """gloo alone."""
        return self.backend

    def prepare_sharding(self) -> None:
        """Fix FSDP2 of torch 2.7, which cannot train on CPUs."""
        if not _has_averages():
            _fix_fsdp()

    def operations(self, asked: Asked) -> Operations:
        """Plain torch, whatever was asked for except fused kernels."""
        self.refuse_fused(asked)
        return CpuOperations(stacks_matrices=asked != "plain", compiles=asked != "plain")

    def synchronize(self) -> None:
        """The host is always done."""

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Copies are made by the thread that asks for them."""
        yield

    def memory_total(self) -> int:
        """Bytes of physical memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_reachable(self) -> int:
        """All physical memory: the system can take pages back from other processes."""
        return self.memory_total()

    def memory_peak(self) -> int:
        """Bytes of this process that were resident at most."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def start_memory_watch(self) -> None:
        """The host has nothing to reset."""

    def memory_taken(self) -> int:
        """Nobody asks this of the host."""
        raise NotImplementedError("passes are not probed on the host")

    def graphs_missing(self) -> str:
        """The host launches nothing."""
        return tr("the device is a CPU, which launches no operators that a graph could hold")

    def compiler_missing(self) -> str:
        """What torch.compile lacks on the host."""
        if compiler() is None:
            return "no C++ compiler (g++) was found"
        if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
            return "Python's headers (python3-dev) were not found"
        return ""

    def prepare_compiling(self) -> None:
        """As for every device; and several compiled threads would otherwise add to a row of a table in any order."""
        super().prepare_compiling()
        os.environ.setdefault("TORCH_WARM_POOL", "0")  # processes that compile for GPUs alone
        if torch.get_num_threads() > 1:
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Filling new memory is for debugging, and slow.
            torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]

    @contextlib.contextmanager
    def saving_memory(self, tokens: int) -> Iterator[None]:
        """In passes too large for the caches, recompute in the backward pass what costs no matmul (norms, rotations,
        squares): half the memory of activations, and 5 % less time at 16,384 tokens. At 4,096 tokens recomputing would
        take 5 % more time."""
        if tokens <= PASS_TOKENS:
            yield
            return
        from torch._functorch import config  # of the part of the compiler that decides what is kept

        # The reasons for which the compiler keeps values that are cheap to recompute.
        reasons = ("materialized_backward", "used_far_apart", "long_fusible_chains", "reductions")
        with config.patch({f"ban_recompute_{reason}": False for reason in reasons}):
            yield


def _has_averages() -> bool:
    """Whether gloo can average, which FSDP2 asks for; gloo of torch 2.7 cannot."""
    try:
        dist.all_reduce(torch.ones(1), dist.ReduceOp.AVG)
    except RuntimeError:
        return False
    return True


def _fix_fsdp() -> None:
    """Give FSDP2 of torch 2.7 the two things that it lacks on CPUs.

    FSDP2 asks for averages: gloo's all-reduce raises, and its reduce-scatter gives the sum without a word. FSDP2 is
    told to sum and divide instead, as it does for fp16. And with replicas FSDP2 waits for an event that a host's stream
    never gave.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    def factors(
        scattered: dist.ProcessGroup, replicated: dist.ProcessGroup | None, *_: object
    ) -> tuple[float, float]:  # before and after the sum
        return 1.0, float(scattered.size() * (replicated.size() if replicated is not None else 1))

    _fsdp_collectives._get_gradient_divide_factors = factors  # type: ignore[assignment]
    torch.cpu.Stream.record_event = lambda self: torch.cpu.Event()  # type: ignore[assignment,method-assign]
