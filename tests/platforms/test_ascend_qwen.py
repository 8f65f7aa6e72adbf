"""The Qwen models on the emulated NPU, with each kind of chip's operators, against the CPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanochat import device
from nanochat.context import Packed
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.generate.sampling import Sampling
from tests.emulated_npu.worker import on_npu
from tests.support.qwens import VOCABULARY, tiny_qwen
from tests.support.tiny_model import tiny_tokenizer


def results(family: str, compute: Compute | None) -> tuple[float, dict[str, Tensor], list[int]]:
    """The loss and gradients of packed rows, and a greedy reply."""
    given = {} if compute is None else {"operations": compute.operations, "dtype": compute.dtype}
    where = torch.device("cpu") if compute is None else compute.device
    model = tiny_qwen(family, **given).to(where)
    idx = torch.randint(0, VOCABULARY, (2, 71), generator=torch.Generator().manual_seed(3)).to(where)
    documents = (torch.arange(70) > 33).int().expand(2, 70).to(where)
    loss = model(idx[:, :-1], idx[:, 1:], "sum", context=Packed(documents)) / 140
    loss = loss + model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    gradients = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    engine = Engine(model, tiny_tokenizer(VOCABULARY), 2, length=64)
    (reply,) = engine.generate([list(range(9, 30))], Sampling(temperature=0.0, max_tokens=6))
    return loss.item(), gradients, reply.tokens


def compare(family: str, compute: Compute, most: float) -> None:
    loss, gradients, reply = results(family, compute)
    expected, wanted, same = results(family, None)
    assert abs(loss - expected) < most
    if most < 1e-3:
        assert reply == same
    far = {name: float((gradients[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
    assert max(far.values()) < 50 * most, far


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3.5", "llama yarn", "smollm3 windows"])
@on_npu()
def test_fp32_on_a_910b_is_that_on_the_cpu(family: str) -> None:
    compare(family, replace(device.compute_init("npu"), dtype=torch.float32), 1e-4)
