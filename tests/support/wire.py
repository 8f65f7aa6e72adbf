"""Counts collectives and the bytes that they send, as a dispatch mode of torch."""

from collections import Counter, defaultdict
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode


def sent(name: str, group: ProcessGroup, args: tuple[Any, ...]) -> float:
    """Bytes that a rank of the group sends in one collective, on average, by the cost of the ring algorithms."""
    ranks = group.size()

    def size(tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    if name == "_allgather_base_":  # output, input
        return size(args[1]) * (ranks - 1)
    if name == "allgather_":  # lists of outputs, inputs
        return sum(map(size, args[1])) * (ranks - 1)
    if name == "_reduce_scatter_base_":  # output, input
        return size(args[0]) * (ranks - 1)
    if name == "allreduce_":  # a list of tensors; a reduce-scatter, then an all-gather
        return sum(map(size, args[0])) * 2 * (ranks - 1) / ranks
    if name == "alltoall_base_":  # output, input, group, output sizes, input sizes; a rank sends all but its own part
        splits = args[4]
        own = splits[group.rank()] * args[1].element_size() if splits else size(args[1]) / ranks
        return size(args[1]) - own
    if name == "broadcast_":
        return sum(map(size, args[0])) * (ranks - 1) / ranks
    if name == "barrier":
        return 0
    raise NotImplementedError(f"the cost of c10d::{name} is not known; add it to sent()")


class Wire(TorchDispatchMode):
    """While active, counts this rank's `calls` and `bytes` by the collective's name, except in groups of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            names = [argument.name for argument in func._schema.arguments]
            group = ProcessGroup.unbox(args[names.index("process_group")])
            if group.size() > 1:
                name = func._schema.name.removeprefix("c10d::")
                self.calls[name] += 1
                self.bytes[name] += sent(name, group, args)
        return func(*args, **(kwargs or {}))
