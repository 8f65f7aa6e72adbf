"""--graphs on a GPU, as far as a CPU can show it: torch's own capturing code over graphs that are played back here.

torch.cuda.make_graphed_callables runs as it is. Below it, a graph notes the operators that run while it is captured,
and a replay runs them again and writes their results where the first ones lie, as a captured kernel would. What a
GPU refuses in a capture, other than waiting for it, is not refused here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.updates import update
from nanochat.engine import Engine
from nanochat.optim import Optimizers, Rates
from nanochat.platforms.cpu.platform import Cpu
from nanochat.platforms.nvidia.platform import Nvidia
from nanochat.platforms.operations import Operations
from nanochat.runtime.graphs import GraphedModel, check
from nanochat.step import LossScale
from tests.generate.test_graphs import replies
from tests.platforms.test_ascend_training import CPU, VOCAB, Batch
from tests.support.qwens import VOCABULARY, tiny_qwen
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer


class Played(TorchDispatchMode):
    """A graph that notes operators, and plays them again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "a captured pass waits for the device"
        out = func(*args, **(kwargs or {}))
        self.work.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, before in self.work:
            for old, new in zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextmanager
def capture(graph: Played, **_: Any) -> Iterator[None]:
    with graph:
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Played]:
    """torch.cuda, as far as capturing needs it, on the CPU; the graphs that were made."""
    made: list[Played] = []

    def new() -> Played:
        made.append(Played())
        return made[-1]

    stand_ins = {
        "CUDAGraph": new, "graph": capture, "graph_pool_handle": lambda: (0, 0), "synchronize": lambda: None,
        "Stream": SimpleNamespace, "stream": lambda stream: nullcontext(),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
        if hasattr(torch.cuda.graphs, name):
            monkeypatch.setattr(torch.cuda.graphs, name, stand_in)
    return made


class Host(Cpu):
    """A CPU that captures as a GPU does."""

    def graphs_missing(self) -> str:
        return Nvidia().graphs_missing()

    def graphed(self, call: torch.nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., Any]:
        return Nvidia().graphed(call, samples)

    def captured(self, work: Callable[[], None], pool: Any = None) -> Callable[[], None]:
        return Nvidia().captured(work, pool)

    def graph_pool(self) -> Any:
        return Nvidia().graph_pool()


def trained(graphed: bool, compute: Any) -> tuple[list[float], list[Tensor]]:
    """Five steps of two passes each, whose gradients add up outside the graph's memory."""
    model = tiny_gpt(VOCAB, dtype=compute.dtype, operations=compute.operations).train()
    optimizers = Optimizers(model, model.parameter_roles(), model.config.n_embd, Rates(), 1.0, compute.dtype)
    passes = GraphedModel(model, (2, 140), compute) if graphed else model
    optimizers.capture(compute.platform) if graphed else None
    scale = LossScale.start(compute, {})
    losses = [update(passes, optimizers, Batch(compute, 7), scale, compute).loss for _ in range(5)]
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def test_training_with_graphs_is_training_without(gpu: list[Played]) -> None:
    plain = replace(CPU, operations=Operations())  # a graph notes torch's operators, not the kernels of CPUs
    compute = replace(plain, platform=Host())
    check(compute)
    expected_losses, expected = trained(False, plain)
    losses, parameters = trained(True, compute)
    assert [graph.replays for graph in gpu] == [10, 10]  # a forward and a backward graph; Muon's step is not captured
    assert losses == expected_losses
    for ours, theirs in zip(parameters, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "qwen3", "qwen3.5"])
def test_replies_with_graphs_are_replies_without(gpu: list[Played], family: str) -> None:
    model = tiny_gpt(VOCABULARY, 640) if family == "gpt" else tiny_qwen(family)
    tokenizer = tiny_tokenizer(VOCABULARY)
    expected = replies(Engine(model, tokenizer, 6), ("",))
    engine = Engine(model, tokenizer, 6, graphs=Host())
    assert replies(engine, ("",)) == expected
    assert engine.graphs is not None and len(gpu) == len(engine.graphs.shapes)
    assert sum(graph.replays for graph in gpu) == engine.graphs.replays > 5 * len(gpu)
