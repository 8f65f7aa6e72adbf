"""Captured graphs on the emulated NPU: training with them is training without, and what a graph may not hold."""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.updates import update
from nanochat import device
from nanochat.common import UserError
from nanochat.context import Packed
from nanochat.optim import Optimizers, Rates
from nanochat.runtime import graphs
from nanochat.runtime.graphs import GraphedModel
from nanochat.step import LossScale
from tests.emulated_npu.worker import on_npu
from tests.platforms.test_ascend_training import CPU, VOCAB, Batch, tokens, train
from tests.support.tiny_model import tiny_gpt


@on_npu(TASK_QUEUE_ENABLE="1", NANOCHAT_DTYPE="float32")
def test_training_with_graphs_is_training_without() -> None:
    """Several passes a step, whose gradients add up outside the graph's memory."""
    from tests.emulated_npu import log

    compute = device.compute_init("npu")
    eager, expected = train(compute, 5)
    model = tiny_gpt(VOCAB, dtype=compute.dtype, operations=compute.operations).train().to(compute.device)
    optimizers = Optimizers(model, model.parameter_roles(), model.config.n_embd, Rates(), 1.0, compute.dtype)
    graphed = GraphedModel(model, (2, 140), compute)
    optimizers.capture(compute.platform)
    scale, outcomes = LossScale.start(compute, {}), []
    for step in range(5):
        optimizers.schedule(1.0, 0.95, 1.0)
        batch = Batch(compute, 7)
        device.synchronize(compute)
        with log.record() as seen:
            outcomes.append(update(graphed, optimizers, batch, scale, compute))
        assert bool(seen.captured) == (step == 1)  # Muon's step is captured after the first has warmed up
    assert seen.operators["graph_replay"] == 2 * 2 + 1
    assert dict(seen.synchronisations) == {"copy to host": 1}
    for ours, theirs in zip(outcomes, expected, strict=True):  # rates are fp32 in a graph
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-4)
    for ours, theirs in zip(graphed.parameters(), eager.parameters(), strict=True):
        assert float((ours - theirs).norm()) < 1e-3 * float(theirs.norm())


@on_npu(TASK_QUEUE_ENABLE="1", NANOCHAT_DTYPE="float32")
def test_rates_change_between_replays() -> None:
    compute = device.compute_init("npu")

    def trained(capture: bool) -> list[Tensor]:
        model = tiny_gpt(VOCAB, dtype=compute.dtype, operations=compute.operations).train().to(compute.device)
        optimizers = Optimizers(model, model.parameter_roles(), model.config.n_embd, Rates(), 1.0, compute.dtype)
        if capture:
            optimizers.capture(compute.platform)
        for step in range(4):
            optimizers.schedule(1.0 - step / 4, 0.85 + step / 40, 1.0 - step / 8)
            update(model, optimizers, Batch(compute, 7), LossScale.start(compute, {}), compute)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    for ours, theirs in zip(trained(True), trained(False), strict=True):
        assert float((ours - theirs).norm()) < 1e-3 * float(theirs.norm())


@on_npu(TASK_QUEUE_ENABLE="1", NANOCHAT_DTYPE="float32")
def test_a_pass_of_another_shape_or_with_weights_is_refused() -> None:
    compute = device.compute_init("npu")
    model = tiny_gpt(VOCAB, dtype=compute.dtype, operations=compute.operations).train().to(compute.device)
    graphed = GraphedModel(model, (2, 140), compute)
    rows = tokens(3, 140).npu()
    with pytest.raises(
        UserError, match=r"one shape, without weights: \(2, 140\) was captured, and a pass of \(3, 140\)"
    ):
        graphed(rows, rows, "sum")
    with pytest.raises(UserError, match=r"one shape, without context: \(2, 140\) was captured"):
        graphed(rows[:2], rows[:2], "sum", context=Packed(torch.ones(2, 140).npu()))


def test_graphs_and_a_compiler_exclude_each_other() -> None:
    with pytest.raises(UserError, match="--graphs and --compile were both asked for"):
        graphs.check(CPU, compile=True)


@on_npu()
def test_graphs_are_refused_where_the_task_queue_or_the_chip_forbids_them() -> None:
    compute = device.compute_init("npu")
    with pytest.raises(UserError, match="TASK_QUEUE_ENABLE is 2, with which nothing can be captured; export"):
        graphs.check(compute)
    with pytest.raises(UserError, match=r"with 2 ranks, but collectives cannot be captured: .*NPROC_PER_NODE=1"):
        os.environ["TASK_QUEUE_ENABLE"] = "1"
        try:
            graphs.check(replace(compute, world_size=2))
        finally:
            os.environ["TASK_QUEUE_ENABLE"] = "2"


@pytest.mark.parametrize("window", [5, 64])
@on_npu(TASK_QUEUE_ENABLE="1", NANOCHAT_DTYPE="float32")
def test_captured_attention_is_attention(window: int) -> None:
    """The first version of the fused operator cannot be captured, and the third can, in one layout."""
    import torch_npu

    compute = device.compute_init("npu")
    q, k, v = (torch.randn(2, 12, 4, 16, generator=torch.Generator().manual_seed(i)).npu() for i in range(3))
    expected, out = compute.operations.attend(q, k, v, window), torch.zeros_like(q)
    replay = compute.platform.captured(lambda: out.copy_(compute.operations.attend(q, k, v, window)))
    replay()
    assert torch.equal(out.cpu(), expected.cpu())
    with pytest.raises(RuntimeError, match=r"not permitted .*: npu_fusion_attention on a second stream"):
        compute.platform.captured(lambda: torch_npu.npu_fusion_attention(q, k, v, 4, "BSND"))
    with pytest.raises(RuntimeError, match="a graph can hold the layout BNSD alone"):
        compute.platform.captured(lambda: torch_npu.npu_fusion_attention_v3(q, k, v, 4, "BSND"))


@on_npu(TASK_QUEUE_ENABLE="1", NANOCHAT_DTYPE="float32")
def test_graphs_are_refused_where_attention_cannot_be_captured() -> None:
    import torch_npu

    compute = device.compute_init("npu")
    graphs.check(compute)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch_npu, "npu_fusion_attention_v3")
        with pytest.raises(UserError, match="attention of this torch_npu cannot be captured"):
            graphs.check(compute)


@on_npu(TASK_QUEUE_ENABLE="1", NANOCHAT_DTYPE="float32")
def test_a_graph_may_not_wait_allocate_elsewhere_or_read_pageable_memory() -> None:
    x, pinned = torch.arange(4.0).npu(), torch.ones(4).pin_memory()
    forbidden = {
        "item": lambda: x.sum().item(),
        "copy to host": lambda: x.cpu(),
        "synchronize": lambda: torch.npu.synchronize(),
        "nonzero": lambda: x.nonzero(),
        "copy of pageable memory": lambda: x.copy_(torch.ones(4), non_blocking=True),
        "allocation outside the pool": lambda: torch.zeros(3, device="npu:1"),
    }
    for what, work in forbidden.items():
        graph = torch.npu.NPUGraph()
        refusal = f"not permitted while a stream is capturing a graph: {what}"
        with pytest.raises(RuntimeError, match=refusal), torch.npu.graph(graph):
            work()
    assert not torch.npu.is_current_stream_capturing()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x.copy_(pinned, non_blocking=True) * 2
    assert x.tolist() == [0, 1, 2, 3] and y.isnan().all()  # a capture computes nothing
    graph.replay()
    assert x.tolist() == [1.0] * 4 and y.tolist() == [2.0] * 4
