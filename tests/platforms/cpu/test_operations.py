"""What CPUs compute their own way: matrices laid out for oneDNN, and attention of single bf16 queries."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanochat import loss
from nanochat.evals.branches import Branches
from nanochat.generate.adapters import Adapters
from nanochat.linear import Linear
from nanochat.models.lora import Adapter, LoraConfig, add_adapters, first_values
from nanochat.models.qwen.model import Qwen
from nanochat.platforms import host
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.platforms.layers import accelerate
from nanochat.platforms.operations import Operations
from tests.support.qwens import CONFIGS, tiny_qwen
from tests.support.tiny_model import tiny_gpt

LAID_OUT = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_prompts_are_read_by_kernels_as_by_torch_with_a_cache_and_without() -> None:
    operations = CpuOperations()
    config = replace(CONFIGS["qwen3"], head_dim=64)
    model = Qwen(config, torch.bfloat16).eval()
    accelerate(model, operations)
    model.init_weights()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = (4 * parameter.data).bfloat16()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(300, (size,), generator=generator).tolist() for size in (70, 64, 90)]
    prompts = [[*prompts[0][:40], *prompt] for prompt in prompts]

    def states() -> list[torch.Tensor]:
        with torch.inference_mode():
            whole = [model.hidden(torch.tensor([prompt]))[0, 40:] for prompt in prompts]
            parts = Branches(model, 0).hidden(prompts, [40, 40, 40])
        return [*whole, *(part[: len(prompt) - 40] for part, prompt in zip(parts, prompts, strict=True))]

    before = states()
    operations.serve(model)
    q, k = torch.empty(1, 70, 4, 64, dtype=torch.bfloat16), torch.empty(1, 90, 2, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        cached = k.clone(), k.clone()
        places = torch.arange(70)[None]

        def extends(q: torch.Tensor, size: int = 64) -> bool:
            new = k[:, : q.size(1), :, :size]
            old = (held[..., :size] for held in cached)
            return operations.extend(q[..., :size], new, new, *old, places[:, : q.size(1)], 90) is not None

        assert extends(q) == ("avx512_bf16" in host.cpu_flags())
        assert extends(q[:, :6]) and not extends(q, 32)
        check_few_queries(operations)
    for one, other in zip(states(), before, strict=True):
        assert (one - other).norm() <= 0.03 * other.norm()


def check_few_queries(operations: CpuOperations) -> None:
    """A few queries of two rows at different places give what they give one after another, bit by bit."""
    q, k, v = (torch.randn(2, 5, heads, 64).bfloat16() for heads in (4, 2, 2))
    places = torch.tensor([[7], [20]]) + torch.arange(5)
    together = [torch.randn(2, 40, 2, 64).bfloat16() for _ in range(2)]
    alone = [cached.clone() for cached in together]
    y = operations.extend(q, k, v, *together, places, 90)
    for t in range(5):
        new = (x[:, t : t + 1].contiguous() for x in (q, k, v))
        expected = operations.extend(*new, *alone, places[:, t : t + 1].contiguous(), 90)
        assert y is not None and expected is not None and torch.equal(y[:, t : t + 1], expected)
    assert all(map(torch.equal, together, alone))


def test_a_matrix_with_a_bias_adds_it_in_training() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 32, generator=generator)
    matrix = Linear(32, 32, bias=True)
    products = [operations.project(x, matrix, None) for operations in (CpuOperations(), Operations())]
    torch.testing.assert_close(*products)


def test_adapters_add_to_matrices_that_are_multiplied_together() -> None:
    operations, (name, shape) = CpuOperations(), ("a", LoraConfig(2))
    model: Any = tiny_qwen("qwen3", dtype=torch.bfloat16, operations=operations)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.bfloat16()
    with torch.device("meta"):
        like = Qwen(model.config)
    add_adapters(like, shape)
    generator = torch.Generator().manual_seed(1)
    values = {key: torch.randn(value.shape, generator=generator) for key, value in first_values(like, 1).items()}
    idx = torch.randint(300, (2, 9), generator=generator)

    def logits(numbers: list[int]) -> torch.Tensor:
        adapters = Adapters(model, {name: Adapter(shape, values)}, torch.bfloat16, model.device)
        with torch.inference_mode(), adapters.rows(numbers):
            return model(idx)

    wanted = [logits(numbers) for numbers in ([0, -1], [-1, -1])]
    operations.serve(model)
    assert (model.blocks[0].self_attn.joined is not None) == LAID_OUT
    for numbers, before in zip(([0, -1], [-1, -1]), wanted, strict=True):
        assert (logits(numbers) - before).abs().max() <= 4e-2 * before.abs().max()
    assert (wanted[0][0] - wanted[1][0]).abs().max() > 0.1 * wanted[1].abs().max()  # the adapter changes its row


@pytest.mark.parametrize("family", ["gpt", "qwen3"])
@pytest.mark.parametrize("kind", ["sum", "weighted sum", "none", "frozen"])
def test_tokens_without_a_target_are_left_out_of_the_loss(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SFT trains a quarter of its tokens, and the head is two fifths of the FLOPs of a small model."""
    read: list[int] = []
    whole = loss.loss_and_gradients
    monkeypatch.setattr(
        loss, "loss_and_gradients", lambda x, *rest, **named: read.append(len(x)) or whole(x, *rest, **named)
    )
    generator = torch.Generator().manual_seed(4)
    idx = torch.randint(0, 320, (20, 24), generator=generator)
    targets = torch.where(torch.rand(20, 24, generator=generator) < 0.25, idx, -1)
    weights = torch.rand(20, 24, generator=generator)
    found = []
    for operations in (CpuOperations(), Operations()):
        model: Any = (
            tiny_gpt(320, 64, operations=operations) if family == "gpt" else tiny_qwen(family, operations=operations)
        )
        if kind == "frozen":
            head = model.lm_head if family == "gpt" else model.head
            head.weight.requires_grad_(False)
        if kind in ("none", "frozen"):  # any function of the losses has a gradient
            total = (model(idx, targets, "none") * weights).square().sum()
        else:
            total = model(idx, targets, "sum", weights if kind == "weighted sum" else None)
        total.backward()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found.append([total.detach(), *(parameter.grad for parameter in parameters)])
    assert read == [256, targets.numel()]  # of 124 with a target
    for mine, plain in zip(*found, strict=True):
        largest = plain.abs().max().item()  # fp32 rounds sums in proportion to it, near zero too
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6 * max(largest, 1.0))
    model = tiny_gpt(320, 64, operations=CpuOperations())
    assert model(idx, torch.full_like(idx, -1), "sum").item() == 0
