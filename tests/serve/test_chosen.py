"""Which model a chat is with: ours, or a published one with or without an adapter."""

from pathlib import Path

import pytest
import torch

from nanochat.checkpoint_manager.huggingface.adapter import load_adapter, save_adapter
from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.common import UserError
from nanochat.nn.lora import LoraConfig, adapted, add_adapters, init_adapters
from nanochat.serve import chosen
from nanochat.serve.chosen import ModelFlags, choose, choose_also
from tests.support.qwens import write_folder
from tests.support.tiny_model import on_cpu, tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model, and beside it an adapter that changes what the model says."""
    place = tmp_path_factory.mktemp("models") / "Qwen-tiny"
    place.mkdir()
    write_folder(place, "qwen3")
    model = load_qwen(place, on_cpu())
    add_adapters(model, LoraConfig(4))
    init_adapters(model)
    for _, _, _, second in adapted(model):
        torch.nn.init.normal_(second.weight, generator=torch.Generator().manual_seed(3))
    save_adapter(model, LoraConfig(4), str(place), place.parent / "mine")
    return place


def logits(choice: chosen.Chosen) -> torch.Tensor:
    with torch.no_grad():
        return choice.loaded.model(torch.arange(12)[None])


def test_a_published_model_is_served_as_it_is_or_with_its_adapter(folder: Path) -> None:
    plain = choose(ModelFlags(model=folder), "auto", on_cpu())
    assert (plain.loaded.stage, plain.loaded.tag, plain.context, plain.others) == ("published", "Qwen-tiny", 256, [])
    mine = choose(ModelFlags(model=folder, adapter=folder.parent / "mine"), "auto", on_cpu())
    assert mine.loaded.tag == "Qwen-tiny + mine"
    other = load_qwen(folder, on_cpu())
    load_adapter(other, folder.parent / "mine")
    with torch.no_grad():
        torch.testing.assert_close(logits(mine), other(torch.arange(12)[None]), rtol=1e-4, atol=1e-4)
    assert (logits(mine) - logits(plain)).abs().max() > 0.1


def test_a_long_context_is_not_taken_in_full_unless_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "LONGEST", 100)
    assert choose(ModelFlags(model=folder), "auto", on_cpu()).context == 100
    assert choose(ModelFlags(model=folder, context=200), "auto", on_cpu()).context == 200
    with pytest.raises(UserError, match="--context must be from 2 to 256"):
        choose(ModelFlags(model=folder, context=300), "auto", on_cpu())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (ModelFlags(adapter=Path("a")), "--adapter belongs to a published model"),
        (ModelFlags(source="sft", model=Path("a")), "give either"),
        (ModelFlags(model=Path("/nowhere")), "has no config.json"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: ModelFlags, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose(flags, "auto", on_cpu())


def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen2")
    with pytest.raises(UserError, match="belongs to another base"):
        choose(ModelFlags(model=tmp_path, adapter=folder.parent / "mine"), "auto", on_cpu())


def test_further_models_are_folders_adapters_and_steps(folder: Path, base_folder: Path) -> None:
    first = ModelFlags(model=folder)
    name, plain = choose_also(f"base={folder}", ModelFlags(), "auto", on_cpu())
    assert (name, plain.loaded.tag) == ("base", "Qwen-tiny")
    name, mine = choose_also(f"pip={folder.parent / 'mine'}", first, "auto", on_cpu())
    assert (name, mine.loaded.tag) == ("pip", "Qwen-tiny + mine")
    for step in (10, 20):
        tiny_checkpoint("sft", step)
    assert [choose_also(words, first, "auto", on_cpu())[0] for words in ("sft/d2", "sft/d2/10")] == [
        "nanochat-sft-d2", "nanochat-sft-d2-10",
    ]  # fmt: skip
    assert choose_also("sft/d2/10", first, "auto", on_cpu())[1].loaded.step == 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("d4", "--also must be STAGE/TAG or STAGE/TAG/STEP with a stage of base, mid, sft, rl, tune"),
        ("sft/", "--also must be"),
        ("sft/d4/last", "--also must be"),
        ("=folder", "--also must be"),
        ("sft/d4", "no"),
        ("mine=/nowhere", "has no config.json"),
    ],
)
def test_a_further_model_that_is_not_there_is_refused(base_folder: Path, words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose_also(words, ModelFlags(), "auto", on_cpu())


def test_a_further_adapter_needs_the_folder_of_its_base(folder: Path) -> None:
    with pytest.raises(UserError, match="names an adapter: name the folder of its base with --model"):
        choose_also(f"pip={folder.parent / 'mine'}", ModelFlags(), "auto", on_cpu())
