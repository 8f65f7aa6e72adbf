"""Adapters against peft, and merged models against their adapters."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.huggingface.adapter import merge_adapter, read_adapter, save_adapter
from nanochat.checkpoint_manager.huggingface.peft_settings import ALLOWED, HARMLESS, HONOURED
from nanochat.common import UserError
from nanochat.linear import Linear
from nanochat.models.lora import LoraConfig, LowRank, StackLowRank, add_adapters, init_adapters, merge
from nanochat.models.nf4 import hold_in_nf4, nf4_matrices
from nanochat.models.qwen.experts import Experts
from nanochat.platforms.grouped_experts import GroupedExperts
from nanochat.platforms.operations import Operations
from tests.support.adapters import with_adapter
from tests.support.qwens import VOCABULARY, oracle, tiny_qwen
from tests.support.tiny_model import on_cpu

CONFIG = LoraConfig(rank=4, alpha=12.0)
DELTA = LoraConfig(
    rank=3, alpha=5.0, targets=("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "down_proj"), stabilised=True
)
SCALED = LoraConfig(rank=3, alpha=5.0, stabilised=True)
ATTENTION = LoraConfig(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
EXPERTS = LoraConfig(rank=4, targets=("gate_proj", "up_proj", "down_proj"))
CASES = [
    ("qwen2", CONFIG),
    ("qwen3", CONFIG),
    ("qwen3.5", DELTA),
    ("llama biases", CONFIG),
    ("mistral windows", CONFIG),
    *[("qwen3-moe", CONFIG), ("qwen3-moe", SCALED), ("qwen3-moe", ATTENTION), ("qwen3.5-moe", CONFIG)],
    ("qwen3-moe", EXPERTS),
]


def text(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("family", "config"), CASES)
def test_peft_loads_our_adapter_with_the_same_logits_and_gradients(
    family: str, config: LoraConfig, tmp_path: Path
) -> None:
    import peft

    model, idx, targets = with_adapter(family, config), text(), text(1)
    save_adapter(model, config, "base", tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(oracle(tiny_qwen(family)), tmp_path / "adapter", is_trainable=True)
    logits = theirs(idx).logits
    torch.testing.assert_close(model(idx), logits, atol=1e-5, rtol=1e-5)
    assert (logits - tiny_qwen(family)(idx)).abs().max() > 0.1
    model(idx, targets).backward()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    wanted = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    mine = {f"base_model.model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert mine.keys() == wanted.keys()
    for name, gradient in mine.items():
        scale = wanted[name].abs().max()
        torch.testing.assert_close(gradient / scale, wanted[name] / scale, atol=1e-5, rtol=1e-4, msg=name)


def of_peft(folder: Path, family: str = "qwen3", **settings: Any) -> Any:
    """A model of peft whose adapter changes what it says, saved to a folder as peft saves it."""
    import peft

    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 9, "target_modules": ["q_proj", "down_proj"], **settings})
    theirs = peft.get_peft_model(oracle(tiny_qwen(family)), config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if ".lora_" in name or value.requires_grad:  # the factors, and biases and the like
                value.add_(torch.randn(value.shape, generator=generator) * 0.05)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"init_lora_weights": "gaussian"}),
        ("qwen3", {"init_lora_weights": "orthogonal"}),
        ("qwen3", {"init_lora_weights": "eva"}),
        ("qwen3", {"init_lora_weights": "mica"}),
        ("qwen3", {"target_modules": "all-linear", "use_rslora": True}),
        ("qwen3", {"target_modules": r".*\.(q|v)_proj"}),
        ("qwen3", {"layers_to_transform": [1], "layers_pattern": "layers"}),
        ("qwen3", {"layers_to_transform": 0}),
        ("qwen3", {"exclude_modules": ["down_proj"]}),
        ("qwen3", {"exclude_modules": r".*\.0\..*"}),
        ("qwen3", {"rank_pattern": {"down_proj": 7}, "alpha_pattern": {r"layers\.1\..*q_proj": 2}}),
        ("qwen3", {"rank_pattern": {"q_proj": 2}, "use_rslora": True}),
        ("qwen2", {"bias": "all"}),
        ("qwen2", {"bias": "lora_only"}),
        ("qwen3", {"bias": "all"}),
        ("qwen2", {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}),
        ("qwen2", {"use_dora": True}),
        ("qwen3", {"use_dora": True, "alpha_pattern": {"q_proj": 1}}),
        ("qwen3", {"modules_to_save": ["norm", "input_layernorm"]}),
        ("qwen3", {"modules_to_save": ["down_proj"]}),
        ("qwen2", {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("qwen3", {"modules_to_save": ["lm_head"]}),
        ("qwen3", {"modules_to_save": ["embed_tokens"]}),
        ("qwen3", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
        ("qwen2", {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
        ("qwen2", {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "use_dora": True}),
        ("qwen3", {"target_modules": ["q_proj", "lm_head"]}),
        ("qwen3", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("qwen3", {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
        ("qwen3", {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}),
        ("qwen3-moe", {"target_modules": ["q_proj"]}),
        ("qwen3-moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
        ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
        ("qwen3.5-moe", {"target_modules": ["up_proj"]}),
        (
            "qwen3.5-moe",
            {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj", "experts.gate_up_proj"]},
        ),
        (
            "qwen3-moe",
            {"target_modules": [], "target_parameters": ["mlp.experts.down_proj", "experts.gate_up_proj"]},
        ),
        ("qwen3.5-moe", {"target_modules": [], "target_parameters": ["down_proj"]}),  # not of the shared expert
    ],
)
def test_an_adapter_of_peft_gives_its_logits(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    theirs, model = of_peft(tmp_path, family, **settings), tiny_qwen(family)
    merge_adapter(model, tmp_path, on_cpu())
    torch.testing.assert_close(model(text()), theirs(text()).logits, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "config"), CASES)
def test_our_adapter_is_read_as_it_was_saved(family: str, config: LoraConfig, tmp_path: Path) -> None:
    adapted, model = with_adapter(family, config), tiny_qwen(family)
    save_adapter(adapted, config, "base", tmp_path / "adapter")
    merge_adapter(model, tmp_path / "adapter", on_cpu())
    torch.testing.assert_close(model(text()), adapted(text()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"init_lora_weights": "pissa_niter_4"}),
        ("qwen3", {"init_lora_weights": "olora"}),
        ("qwen3", {"init_lora_weights": "lora_ga"}),
        ("qwen3", {"alora_invocation_tokens": [5]}),
        ("qwen3", {"lora_bias": True}),  # its matrices have no bias
    ],
)
def test_an_adapter_of_peft_that_cannot_be_merged_is_refused(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    of_peft(tmp_path, family, **settings)
    ((name, value),) = settings.items()
    with pytest.raises(UserError) as refused:
        merge_adapter(tiny_qwen(family), tmp_path, on_cpu())
    assert refused.value.exit_code == 2 and f"{name}={value!r}" in str(refused.value)


def test_every_setting_of_this_peft_is_sorted() -> None:
    import peft

    refused = {"fan_in_fan_out", "megatron_config", "trainable_token_indices", "velora_config", "layer_replication"}
    refused |= {"alora_invocation_tokens", "use_qalora", "monteclora_config", "use_bdlora"}
    refused |= {"arrow_config", "kasa_config"}
    known = {*HONOURED, *HARMLESS, *ALLOWED}
    assert known | refused == {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert not known & refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_lora_weights", "of 2031"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("bias", "some"),
        ("use_dora", "yes"),
        ("rank_pattern", ["q_proj"]),
        ("trainable_token_indices", [3]),
        ("target_parameters", ["mlp.down_proj.weight"]),
        ("layer_replication", [[0, 2]]),
        ("use_qalora", True),
        ("megatron_config", {"a": 1}),
        ("setting_of_2031", "on"),
    ],
)
def test_a_setting_that_is_not_known_to_be_harmless_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    save_adapter(with_adapter("qwen3", CONFIG), CONFIG, "base", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "off_in_2031": None, "also_off_in_2031": False}))
    read_adapter(tiny_qwen("qwen3"), tmp_path / "adapter")
    path.write_text(json.dumps({**written, name: value}))
    with pytest.raises(UserError) as refused:
        read_adapter(tiny_qwen("qwen3"), tmp_path / "adapter")
    assert refused.value.exit_code == 2 and f"{name}={value!r}" in str(refused.value)


@pytest.mark.parametrize("pattern", [{"(": 3}, {"q_proj": "many"}])
def test_a_pattern_that_cannot_be_read_is_damage(pattern: dict[str, Any], tmp_path: Path) -> None:
    save_adapter(with_adapter("qwen3", CONFIG), CONFIG, "base", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "alpha_pattern": pattern}))
    with pytest.raises(UserError, match=r"adapter_config\.json is damaged"):
        read_adapter(tiny_qwen("qwen3"), tmp_path / "adapter")


@pytest.mark.parametrize("pattern", ["(a|a)*x", ".*.*.*.*.*x"])
def test_a_pattern_that_takes_for_ever_is_refused(pattern: str, tmp_path: Path) -> None:
    save_adapter(with_adapter("qwen3", CONFIG), CONFIG, "base", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rank_pattern": {pattern: 3}}))
    with pytest.raises(UserError, match="rank_pattern") as refused:
        read_adapter(tiny_qwen("qwen3"), tmp_path / "adapter")
    assert pattern in str(refused.value)


def test_an_adapter_that_grew_the_vocabulary_is_refused(tmp_path: Path) -> None:
    import peft

    theirs = oracle(tiny_qwen("qwen3"))
    theirs.resize_token_embeddings(VOCABULARY + 3)
    peft.get_peft_model(theirs, peft.LoraConfig(target_modules=["q_proj", "lm_head"])).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"lm_head.*\({VOCABULARY + 3}, 48\) instead of \({VOCABULARY}, 48\)"):
        merge_adapter(tiny_qwen("qwen3"), tmp_path, on_cpu())


def test_an_adapter_of_nan_is_refused(tmp_path: Path) -> None:
    model = with_adapter("qwen3", CONFIG)
    with torch.no_grad():
        model.blocks[1].self_attn.q_proj.lora_B.weight[0, 0] = torch.nan
    save_adapter(model, CONFIG, "base", tmp_path / "adapter")
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.q_proj\.lora_B"):
        read_adapter(tiny_qwen("qwen3"), tmp_path / "adapter")


@pytest.mark.parametrize(("family", "config"), CASES)
def test_a_merged_model_equals_the_adapter_and_needs_no_more_than_its_weights(family: str, config: LoraConfig) -> None:
    model = with_adapter(family, config)
    before = model(text())
    merge(model)
    torch.testing.assert_close(model(text()), before, atol=1e-5, rtol=1e-5)
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in tiny_qwen(family).named_parameters()}


def test_a_new_adapter_changes_nothing_and_trains_alone() -> None:
    model = tiny_qwen("qwen3")
    before = model(text())
    add_adapters(model, CONFIG)
    init_adapters(model)
    torch.testing.assert_close(model(text()), before, atol=0, rtol=0)
    model(text(), text(1)).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        name for name in dict(model.named_parameters()) if ".lora_" in name
    }
    assert model.parameter_counts()["adapter"] == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_dropout_acts_in_training_only() -> None:
    config = LoraConfig(rank=4, dropout=0.5)
    model = with_adapter("qwen3", config)
    torch.testing.assert_close(model(text()), model(text()), atol=0, rtol=0)
    model.train()
    assert (model(text()) - model(text())).abs().max() > 0.01


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    save_adapter(with_adapter("qwen3", CONFIG), CONFIG, "some/base", tmp_path / "adapter")
    before = tiny_qwen("qwen2.5-tied")
    with pytest.raises(UserError, match="another base, some/base"):
        read_adapter(before, tmp_path / "adapter")
    same_shape = tiny_qwen("qwen3", seed=5)
    with pytest.raises(UserError, match="another base, some/base: its base has other norms"):
        read_adapter(same_shape, tmp_path / "adapter")


def test_targets_that_name_no_matrix_are_refused() -> None:
    with pytest.raises(UserError, match=r"'c_attn', which names no matrix.*q_proj"):
        add_adapters(tiny_qwen("qwen3"), LoraConfig(targets=("c_attn", "q_proj")))
    with pytest.raises(UserError, match="rank of at least 1"):
        LoraConfig(rank=0)


def test_a_frozen_matrix_costs_four_flops_an_entry_and_its_adapter_six() -> None:
    model, full = with_adapter("qwen3", CONFIG), tiny_qwen("qwen3").flops_per_token()
    counts = model.parameter_counts()
    assert model.flops_per_token() == full - 2 * (counts["matrix"] + model.head.weight.numel()) + 6 * counts["adapter"]


def share_kept(adapted: torch.Tensor, plain: torch.Tensor, added: torch.Tensor) -> float:
    """How much of what an adapter adds is in an output, which is rounded: 1 if rounding loses none on average."""
    change = adapted.double() - plain.double()
    return float((change * added.double()).sum() / added.double().square().sum())


@pytest.mark.parametrize("bits", [16, 4])
def test_rounding_does_not_swallow_what_a_new_adapter_adds(bits: int) -> None:
    torch.manual_seed(1)
    holder = torch.nn.Sequential(Linear(256, 512))
    matrix = holder[0]
    weight = torch.randn(512, 256) / 16
    if bits == 4:
        hold_in_nf4(holder, torch.bfloat16)
        (held,) = nf4_matrices(holder).values()
        held.fill(lambda first, count: weight[first : first + count])
    else:
        matrix.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
    x = torch.randn(64, 256).bfloat16()
    plain = matrix(x)
    adapter = LowRank(matrix, LoraConfig(4))
    torch.nn.init.normal_(adapter.second.weight, std=4e-5)  # a tenth of what the product is rounded by
    assert adapter(x).abs().mean() < 0.1 * 2**-8 * plain.abs().mean()
    assert share_kept(matrix(x), plain, adapter(x)) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("operations", [None, Operations()])
def test_rounding_does_not_swallow_what_a_new_adapter_of_experts_adds(operations: Operations | None) -> None:
    experts = next(m for m in tiny_qwen("qwen3-moe", operations=operations).modules() if isinstance(m, Experts))
    torch.manual_seed(1)
    inputs = experts.down_proj.size(2)
    torch.nn.init.normal_(experts.down_proj, std=inputs**-0.5)
    x = torch.randn(2048, inputs).bfloat16()
    counts = torch.tensor([2048] + [0] * (experts.num_experts - 1))

    def products() -> torch.Tensor:
        if isinstance(experts, GroupedExperts):
            return experts._grouped("down_proj", x, counts)
        return experts._product("down_proj", 0, x)

    plain = products()
    adapter = StackLowRank(experts, "down_proj", LoraConfig(4))
    torch.nn.init.normal_(adapter.second.weight, std=4e-5)
    first, second = adapter(torch.bfloat16)
    added = x @ first[0].mT @ second[0].mT
    assert added.abs().mean() < 0.1 * 2**-8 * plain.abs().mean()
    assert share_kept(products(), plain, added) == pytest.approx(1, abs=0.25)
