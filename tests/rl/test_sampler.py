"""RL samples from exactly the weights that are trained, and the trained model computes as if there were no sampler."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.families import cast_matrices, on_meta
from nanochat.gpt import GPT
from nanochat.models.lora import LoraConfig, add_adapters, merge
from nanochat.models.qwen.model import Qwen
from nanochat.platforms import host
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.rl.sampler import Sampler
from nanochat.runtime import parallel
from tests.support.qwens import tiny_qwen
from tests.support.tiny_model import on_cpu, tiny_gpt

LAID_OUT = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def changed(model: GPT | Qwen, seed: int) -> None:
    """Change every parameter, as an update does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("family", ["gpt", "qwen2", "qwen3", "qwen3.5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_renewed_sampler_computes_as_one_that_was_just_made(family: str, dtype: torch.dtype) -> None:
    compute = replace(on_cpu(), dtype=dtype)
    trained: Any = tiny_gpt(320, 64) if family == "gpt" else tiny_qwen(family)
    idx = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(1))
    sampler, seen = Sampler(trained, compute), []
    for step in range(3):
        compute = replace(compute, operations=CpuOperations())
        changed(trained, step)
        sampler.renew(trained)
        plain = on_meta(trained.config, compute).to_empty(device=compute.device).eval()
        cast_matrices(plain, dtype)
        parallel.refresh(plain, trained)
        with torch.inference_mode():
            seen.append(sampler.model(idx))
            far = (seen[-1] - plain(idx)).norm() / seen[-1].norm()
            assert far <= (1e-5 if dtype == torch.float32 else 0.1)  # a DeltaNet magnifies rounding
            compute.operations.serve(plain)
            assert torch.equal(seen[-1], plain(idx))
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    held = any(getattr(module, "multiply", None) is not None for module in sampler.model.modules())
    has_panels = "avx2" in host.cpu_flags() and host.compiler() is not None
    assert held == (LAID_OUT if dtype == torch.bfloat16 else has_panels)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "qwen3.5-moe"])
def test_adapters_are_merged_into_the_sampler(family: str) -> None:
    """Also those of experts, whose matrices lie in stacks."""
    trained = tiny_qwen(family)
    add_adapters(trained, LoraConfig(rank=3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    idx = torch.randint(300, (2, 9), generator=generator)
    sampler = Sampler(trained, on_cpu())
    sampler.renew(trained)
    with torch.no_grad():
        torch.testing.assert_close(sampler.model(idx), trained(idx), rtol=1e-4, atol=1e-4)
        trained.requires_grad_(False)
        merge(trained)
        torch.testing.assert_close(sampler.model(idx), trained(idx), rtol=1e-5, atol=1e-5)


def test_the_trained_model_keeps_its_own_operations() -> None:
    compute = replace(on_cpu(), dtype=torch.bfloat16, operations=CpuOperations())
    trained = tiny_gpt(320, 64, operations=compute.operations)
    trained.dtype = torch.bfloat16
    idx = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = trained(idx)
        sampler = Sampler(trained, compute)
        sampler.renew(trained)
        assert torch.equal(trained(idx), before)
    assert sampler.model.operations is not compute.operations
