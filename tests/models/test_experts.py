"""Experts: their grouped form against the loop, what their router chooses, and the files that hold them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanochat.checkpoint_manager.huggingface.config import published, read_config
from nanochat.checkpoint_manager.huggingface.expert_files import one_by_one
from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.common import UserError
from nanochat.models.lora import LoraConfig, add_adapters, init_adapters
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.experts import Router
from nanochat.models.qwen.model import Qwen
from nanochat.platforms import grouped_experts
from nanochat.platforms.operations import Operations
from tests.models.test_qwen import tokens
from tests.support.qwens import CONFIGS, oracle, tiny_qwen
from tests.support.theirs import their_model
from tests.support.tiny_model import on_cpu

FAMILIES = ["qwen3-moe", "qwen3.5-moe"]


def pass_of(model: Qwen, rows: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(tokens(rows, 40))
    logits.square().mean().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("few_sizes", [False, True])  # of products, as in bf16 on a CPU
@pytest.mark.parametrize("rows", [2, 1])  # with one row, some experts have no token
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_grouped_form_equals_the_loop(
    family: str, adapter: bool, rows: int, few_sizes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_experts, "_few_sizes", lambda x: few_sizes)
    monkeypatch.setattr(grouped_experts, "COARSE", 16)
    monkeypatch.setattr(grouped_experts, "FINE", 8)
    results = []
    for operations in (None, Operations()):
        model = tiny_qwen(family, operations=operations)
        if adapter:
            add_adapters(model, LoraConfig(4))
            init_adapters(model)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
        results.append(pass_of(model, rows))
    (logits, gradients), (grouped_logits, grouped_gradients) = results
    torch.testing.assert_close(grouped_logits, logits, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == grouped_gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().clamp_min(1e-9)
        torch.testing.assert_close(grouped_gradients[name] / scale, gradient / scale, atol=2e-5, rtol=1e-4, msg=name)


def test_products_in_bf16_have_few_sizes_and_take_each_row_once() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.empty(2000, 3, dtype=torch.bfloat16)
    sizes = set()
    for experts in (3, 16, 200):
        chosen = torch.randint(experts - 1, (2000,), generator=generator)  # the last expert has no rows
        own_rows: list[int] = []
        for _, own, rows in grouped_experts._parts(chosen.bincount(minlength=experts), x):
            assert rows.start >= 0 and rows.stop <= 2000
            assert rows.start <= own.start < own.stop <= rows.stop
            own_rows += range(own.start, own.stop)
            sizes.add(rows.stop - rows.start)
        assert own_rows == list(range(2000))
    assert sizes <= {64, 128, 192, 256, 512, 768}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparisons_with_transformers_do_not_hang_on_ties(family: str) -> None:
    """The last expert that a token takes is ahead of the next one by more than rounding."""
    model = tiny_qwen(family)
    margins = []

    def measure(router: Router, args: tuple[Tensor], _: Any) -> None:
        scores = torch.softmax(torch.nn.functional.linear(args[0], router.weight), dim=-1)
        best = scores.sort(dim=-1, descending=True).values
        K = model.config.experts_per_token
        margins.append((best[:, K - 1] - best[:, K]).min())

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(measure)
    model(tokens(2, 150))
    assert min(margins) > 1e-6


def test_the_router_takes_more_than_one_expert_for_different_tokens() -> None:
    router = Router(CONFIGS["qwen3-moe"])
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    chosen, shares = router(torch.randn(50, 48, generator=torch.Generator().manual_seed(1)))
    assert chosen.shape == shares.shape == (50, 3)
    assert len(chosen.unique()) == 8
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(50))


def test_active_parameters_are_those_that_a_token_passes_through() -> None:
    model = tiny_qwen("qwen3-moe")
    counts = model.parameter_counts()
    of_one_expert = 3 * 48 * 20
    assert counts["total"] - counts["active"] == 2 * (8 - 3) * of_one_expert
    everything = Qwen(replace(model.config, experts_per_token=8)).flops_per_token()
    assert everything - model.flops_per_token() == 6 * 2 * (8 - 3) * of_one_expert


def one_by_one_folder(model: Qwen, folder: Path) -> Path:
    """A folder in the layout of publishers."""
    values: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        values |= {part: value.contiguous() for part, value in one_by_one(name, parameter.detach())}
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(published(model.config)))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_one_by_one_give_the_stacks_here_and_in_transformers(family: str, tmp_path: Path) -> None:
    model = tiny_qwen(family)
    folder = one_by_one_folder(model, tmp_path)
    shape = read_config(folder)
    assert shape.mlp_kinds == model.config.mlp_kinds
    assert replace(shape, mlps="M", n_hidden=1) == replace(model.config, mlps="M", n_hidden=1)
    loaded = dict(load_qwen(folder, on_cpu()).named_parameters())
    theirs = their_model(folder, dtype=torch.float32)
    names = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded[name], parameter), name
        assert torch.equal(names[name], parameter), name


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    model = tiny_qwen("qwen3-moe")
    oracle(model).save_pretrained(tmp_path)
    loaded = load_qwen(tmp_path, on_cpu())
    for (name, parameter), (_, value) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(parameter, value), name


def test_a_missing_matrix_of_an_expert_is_named(tmp_path: Path) -> None:
    folder = one_by_one_folder(tiny_qwen("qwen3-moe"), tmp_path)
    file = folder / "model.safetensors"
    values = load_file(file)
    lost = next(name for name in values if "experts" in name)
    del values[lost]
    save_file(values, file, {"format": "pt"})
    with pytest.raises(UserError, match="do not fit its"):
        load_qwen(folder, on_cpu())


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [({"experts_per_token": 9}, "from 1 to n_experts, which is 8"), ({"n_expert_hidden": 0}, "at least 1"),
     ({"mlps": "EX"}, "made of M and E")],
)  # fmt: skip
def test_shapes_that_cannot_be_are_refused(wrong: dict[str, Any], rule: str) -> None:
    shape = {"mlps": "E", "n_experts": 8, "experts_per_token": 2, "n_expert_hidden": 16, **wrong}
    with pytest.raises(UserError, match=rule):
        QwenConfig(**shape)


def test_adapters_of_some_of_an_expert_s_matrices_are_refused() -> None:
    with pytest.raises(UserError, match="name only down_proj"):
        add_adapters(tiny_qwen("qwen3-moe"), LoraConfig(targets=("q_proj", "down_proj")))
    with pytest.raises(UserError, match=r"no dropout.*0\.1"):
        add_adapters(tiny_qwen("qwen3-moe"), LoraConfig(dropout=0.1))
