"""Graphs: sequences of kernels that are captured once and replayed by one launch.

As on the hardware, a capture computes nothing: what captured kernels would have changed is put back, and their results
are undefined (NaN here) until the graph is replayed. A replay runs the same kernels on the same memory. While a stream
captures, the device refuses whatever waits for it.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from torch_npu import _load
from torch_npu.npu.utils import current_device, synchronize

ALLOCATIONS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


def _whole(tensor: Tensor) -> Tensor:
    """The memory of a tensor's storage, as bytes on the host."""
    alias = _load.device().cpu_alias(tensor) if tensor.device.type == "npu" else tensor
    return torch.empty(0, dtype=torch.uint8).set_(alias.untyped_storage())


class _Recorder(TorchDispatchMode):
    """Records every kernel that runs, and undoes on leaving what they have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # address -> memory, and what it held
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        for argument, value in [*zip(schema.arguments, args, strict=False), *_named(schema, kwargs)]:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    self._remember(tensor)
        result = func(*args, **kwargs)
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        leaves = tree_leaves(result)
        if not views:
            known = {id(leaf) for leaf in tree_leaves((args, kwargs))}
            fresh = [leaf if isinstance(leaf, Tensor) and id(leaf) not in known else None for leaf in leaves]
            for leaf in fresh:
                if leaf is not None:
                    self.made.setdefault(_whole(leaf).data_ptr(), leaf)
            if schema.name.split("::")[1] not in ALLOCATIONS:
                self.calls.append((func, args, kwargs, fresh))
        return result

    def _remember(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.device.type in ("npu", "cpu") and tensor.numel():
            memory = _whole(tensor)
            if memory.data_ptr() not in self.made and memory.data_ptr() not in self.before:
                self.before[memory.data_ptr()] = (memory, memory.clone())

    def undo(self) -> None:
        """Put back what was there before the capture; results become undefined."""
        for memory, held in self.before.values():
            memory.copy_(held)
        for tensor in self.made.values():
            if tensor.is_floating_point():
                (_load.device().cpu_alias(tensor) if tensor.device.type == "npu" else tensor).fill_(float("nan"))


def _named(schema: Any, kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]


class NPUGraph:
    """A captured sequence of kernels. It keeps its memory, its pool, for as long as it lives."""

    def __init__(self) -> None:
        self._recorder: _Recorder | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Record the kernels of this stream from here on."""
        if os.environ.get("TASK_QUEUE_ENABLE") == "2":
            raise RuntimeError("Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture")
        if not _load.emulated()["chip"]["fused_attention"]:
            raise RuntimeError("aclmdlRICaptureBegin failed, error code is 207000: feature not supported on this chip")
        self._recorder = _Recorder()
        _load.device().set_capturing(current_device())
        self._recorder.__enter__()

    def capture_end(self) -> None:
        """End the recording."""
        assert self._recorder is not None, "capture_begin() comes first"
        self._recorder.__exit__(None, None, None)
        _load.device().set_capturing(-1)
        self._recorder.undo()

    def replay(self) -> None:
        """Run the recorded kernels again, on the memory that they were recorded with: one launch."""
        if self._recorder is None:
            raise RuntimeError("Called NPUGraph::replay without a preceding successful capture.")
        device = _load.device()
        device.count_kernel("graph_replay", 1, 0)
        device.push_quiet(1)
        try:
            with torch.no_grad():
                for func, args, kwargs, results in self._recorder.calls:
                    again = tree_leaves(func(*args, **kwargs))
                    for result, fresh in zip(results, again, strict=True):
                        if result is not None:
                            result.copy_(fresh)
        finally:
            device.push_quiet(-1)

    def reset(self) -> None:
        """Forget the recording and its memory."""
        self._recorder = None

    def pool(self) -> tuple[int, int]:
        """What names this graph's memory."""
        return (0, id(self))


class graph:
    """A context whose kernels are captured into a graph."""

    def __init__(
        self, npu_graph: NPUGraph, pool: Any = None, stream: Any = None, auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ):  # fmt: skip
        self.npu_graph, self.mode = npu_graph, capture_error_mode

    def __enter__(self) -> None:
        synchronize()
        self.npu_graph.capture_begin(capture_error_mode=self.mode)

    def __exit__(self, *failure: Any) -> None:
        self.npu_graph.capture_end()


def is_current_stream_capturing() -> bool:
    """Whether a graph is being captured."""
    return _load.device().capturing() >= 0


def graph_pool_handle() -> tuple[int, int]:
    """A name for memory that graphs share."""
    return (0, 0)


def make_graphed_callables(
    callables: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False, pool: Any = None
) -> Any:
    """A function or module whose forward and backward pass each replay as one launch; inputs are copied in."""
    if isinstance(callables, tuple):
        raise NotImplementedError("several callables at once are not emulated")
    module = callables if isinstance(callables, torch.nn.Module) else None
    parameters = tuple(module.parameters()) if module is not None else ()
    surface = (*sample_args, *parameters)
    wanted = tuple(tensor for tensor in surface if tensor.requires_grad)

    def gradients(outputs: list[Tensor], towards: tuple[Tensor, ...]) -> tuple[Any, ...]:
        differentiable = [output for output in outputs if output.requires_grad]
        return torch.autograd.grad(differentiable, wanted, towards, allow_unused=allow_unused_input)

    for _ in range(num_warmup_iters):
        outputs = tree_leaves(callables(*sample_args))
        gradients(outputs, tuple(torch.empty_like(output) for output in outputs if output.requires_grad))
    forward_graph, backward_graph = NPUGraph(), NPUGraph()
    with graph(forward_graph):
        result = callables(*sample_args)
    outputs, spec = tree_flatten(result)
    towards = tuple(torch.empty_like(output) for output in outputs if output.requires_grad)
    with graph(backward_graph):
        found = iter(gradients(outputs, towards))
    static = tuple(next(found) if tensor.requires_grad else None for tensor in surface)

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
            for place, tensor in zip(sample_args, given, strict=False):
                if place.shape != tensor.shape:
                    raise RuntimeError(f"a graph captured for shape {tuple(place.shape)} got {tuple(tensor.shape)}")
                if place.data_ptr() != tensor.data_ptr():
                    place.copy_(tensor)
            forward_graph.replay()
            return tuple(output.detach() for output in outputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            given = (grad for grad, output in zip(grads, outputs, strict=True) if output.requires_grad)
            for place, grad in zip(towards, given, strict=True):
                place.copy_(grad)
            backward_graph.replay()
            return tuple(None if grad is None else grad.detach() for grad in static)

    def replayed(*given: Tensor) -> Any:
        return torch.utils._pytree.tree_unflatten(list(Replay.apply(*given, *parameters)), spec)

    if module is None:
        return replayed
    eager: Callable[..., Any] = module.forward
    module.forward = lambda *given: replayed(*given) if module.training else eager(*given)
    return module
