"""Which model a chat is with: ours, or a published one with or without an adapter."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanochat.checkpoint_manager.huggingface.adapter import merge_adapter
from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.common import UserError
from nanochat.platforms import host
from nanochat.serve import chosen
from nanochat.serve.chosen import (
    ModelFlags,
    adapter_folders,
    choose,
    choose_also,
    drafts_for,
    load_adapters,
    names_adapter,
    plan_caches,
)
from tests.support.adapters import write_folder_with_adapter
from tests.support.qwens import oracle, write_folder
from tests.support.tiny_model import on_cpu, tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder_with_adapter(tmp_path_factory.mktemp("models") / "Qwen-tiny")


def logits(choice: chosen.Chosen) -> torch.Tensor:
    with torch.no_grad():
        return choice.loaded.model(torch.arange(12)[None])


def test_a_published_model_is_served_as_it_is_or_with_its_adapter(folder: Path) -> None:
    plain = choose(ModelFlags(model=folder), on_cpu())
    assert (plain.loaded.stage, plain.loaded.tag, plain.context, plain.other_models) == (
        "published",
        "Qwen-tiny",
        256,
        [],
    )
    mine = choose(ModelFlags(model=folder), on_cpu(), folder.parent / "mine")
    assert mine.loaded.tag == "Qwen-tiny + mine"
    other = load_qwen(folder, on_cpu())
    merge_adapter(other, folder.parent / "mine", on_cpu())
    with torch.no_grad():
        torch.testing.assert_close(logits(mine), other(torch.arange(12)[None]), rtol=1e-4, atol=1e-4)
    assert (logits(mine) - logits(plain)).abs().max() > 0.1


def test_a_long_context_is_not_taken_in_full_unless_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "LONGEST", 100)
    assert choose(ModelFlags(model=folder), on_cpu()).context == 100
    assert choose(ModelFlags(model=folder, context=200), on_cpu()).context == 200
    for context in (10, 300):
        with pytest.raises(UserError, match=f"--context must be from 32 to 256, .* got {context}: .* to take 100"):
            choose(ModelFlags(model=folder, context=context), on_cpu())


@pytest.mark.parametrize(
    ("slots", "context", "room", "planned"),
    [
        ("auto", None, 1000, (32, 256)),  # `room` is the free memory in slots of the whole context
        ("auto", None, 10, (8, 256)),  # four fifths of it
        ("auto", None, 3, (4, 128)),  # rather shorter chats than fewer than 4
        ("auto", 256, 3, (2, 256)),  # unless the length was asked for
        (3, 256, 3, (3, 256)),
        (6, None, 4, (6, 128)),
        ("auto", None, 0.5, (1, 64)),
        (8, None, 1, "--slots 3"),
        (4, 256, 3, "--slots 3"),
        ("auto", 256, 1, "--slots 1 --context 204"),
        ("auto", None, 0.25, "--slots 1 --context 51"),
    ],
)
def test_caches_are_planned_by_the_free_memory_or_refused_with_the_flags_that_fit(
    slots: Any, context: int | None, room: float, planned: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "SHORTEST", 64)
    one, platform = choose(ModelFlags(model=folder), on_cpu()), on_cpu().platform
    size = one.loaded.model.new_cache(1, 256).bytes
    monkeypatch.setattr(host, "memory_free", lambda: round(2 * size * room))
    if isinstance(planned, str):
        with pytest.raises(UserError, match=f"{planned},") as caught:
            plan_caches([one, one], slots, context, platform)
        assert caught.value.exit_code == 1
        return
    caches = plan_caches([one, one], slots, context, platform)
    assert (caches.slots, *caches.contexts) == (planned[0], planned[1], planned[1])
    expected = planned[0] * one.loaded.model.new_cache(1, planned[1]).bytes
    assert caches.sizes == [expected, expected]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (ModelFlags(source="sft", model=Path("a")), "give either"),
        (ModelFlags(model=Path("/nowhere")), "/nowhere does not exist"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: ModelFlags, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose(flags, on_cpu())


def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen2")
    with pytest.raises(UserError, match="belongs to another base"):
        choose(ModelFlags(model=tmp_path), on_cpu(), folder.parent / "mine")


def test_further_models_are_folders_and_steps(folder: Path, base_folder: Path) -> None:
    first = ModelFlags(model=folder)
    name, plain = choose_also(f"base={folder}", ModelFlags(), on_cpu())
    assert (name, plain.loaded.tag) == ("base", "Qwen-tiny")
    for step in (10, 20):
        tiny_checkpoint("sft", step)
    assert [choose_also(words, first, on_cpu())[0] for words in ("sft/d2", "sft/d2/10")] == [
        "nanochat-sft-d2", "nanochat-sft-d2-10",
    ]  # fmt: skip
    assert choose_also("sft/d2/10", first, on_cpu())[1].loaded.step == 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("d4", "--also must be STAGE/TAG or STAGE/TAG/STEP with a stage of base, mid, sft, rl, tune"),
        ("sft/", "--also must be"),
        ("sft/d4/last", "--also must be"),
        ("=folder", "--also must be"),
        ("sft/d4", "no"),
        ("mine=/nowhere", "/nowhere does not exist"),
    ],
)
def test_a_further_model_that_is_not_there_is_refused(base_folder: Path, words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose_also(words, ModelFlags(), on_cpu())


def test_adapters_have_the_names_that_they_are_given_or_those_of_their_folders(folder: Path) -> None:
    mine = folder.parent / "mine"
    found = adapter_folders([str(mine), f"pip={mine}"], folder)
    assert found == {"mine": mine, "pip": mine} and list(found) == ["mine", "pip"]
    assert names_adapter(f"pip={mine}") and not names_adapter(f"pip={folder}") and not names_adapter("sft/d4")
    first = choose(ModelFlags(model=folder), on_cpu())
    assert load_adapters(first, {}, on_cpu()) is None
    adapters = load_adapters(first, found, on_cpu())
    assert adapters is not None and adapters.names == ["mine", "pip"]
    merged = choose(ModelFlags(model=folder), on_cpu(), mine)
    with adapters.rows([1]):
        torch.testing.assert_close(logits(first), logits(merged), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["a=x", "b=y", "a=z"], "two adapters would have the name 'a'"),
        (["/a/mine", "/b/mine"], "two adapters would have the name 'mine'"),
        (["=x"], "--adapter must be NAME=FOLDER or FOLDER, got '=x'"),
        (["a="], "--adapter must be NAME=FOLDER or FOLDER, got 'a='"),
        (["a\nb=x"], "the name of an adapter"),
        (["\u202ea=x"], "the name of an adapter"),
        (["a/b=x"], "the name of an adapter"),
        ([f"{'a' * 300}=x"], "the name of an adapter"),
    ],
)
def test_names_that_adapters_cannot_have_are_refused(values: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        adapter_folders(values, Path("base"))
    assert caught.value.exit_code == 2


def test_adapters_without_a_base_are_refused() -> None:
    for refused in (lambda: adapter_folders(["a"], None), lambda: choose(ModelFlags(), on_cpu(), Path("a"))):
        with pytest.raises(UserError, match="--adapter belongs to a published model: name its folder with --model"):
            refused()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda settings, _: settings.update(r=0), "rank of at least 1.*got rank 0"),
        (
            lambda settings, _: settings.update(r=5),
            r"mine belongs to another base.*is \(4, \d+\) instead of \(5, \d+\)",
        ),
        (lambda settings, _: settings.update(target_modules=["q_proj", "in_proj_z"]), None),
        (lambda settings, _: settings.update(peft_type="IA3"), "not of a LoRA adapter"),
        (lambda _, values: values.clear(), "it has nothing for model.layers.0.self_attn.q_proj"),
        (lambda _, values: values.pop(next(iter(values))), "missing"),
        (lambda _, values: values.update({"base_model.model.model.wpe.lora_A.weight": torch.ones(4, 3)}), "wpe"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(folder: Path, tmp_path: Path, change: Any, said: str | None) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(folder.parent / "mine", mine)
    settings = json.loads((mine / "adapter_config.json").read_text())
    values = load_file(mine / "adapter_model.safetensors")
    change(settings, values)
    (mine / "adapter_config.json").write_text(json.dumps(settings))
    save_file(values, mine / "adapter_model.safetensors")
    first = choose(ModelFlags(model=folder), on_cpu())
    if said is None:  # a target that this base does not have, as peft too accepts
        load_adapters(first, {"mine": mine}, on_cpu())
        return
    with pytest.raises(UserError, match=said):
        load_adapters(first, {"mine": mine}, on_cpu())


def test_int8_is_for_qwen_on_a_cpu_with_products_for_it(
    folder: Path, base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ModelFlags(model=folder, weights="int8")
    plain = choose(ModelFlags(model=folder), on_cpu().in_format("bfloat16"))
    packed = choose(flags, on_cpu().in_format("bfloat16"))
    assert packed.parameters == plain.parameters > sum(p.numel() for p in packed.loaded.model.parameters())
    assert 0 < (logits(packed) - logits(plain)).abs().max() < 0.2 * logits(plain).abs().max()
    assert (
        choose_also(f"other={folder}", flags, on_cpu().in_format("bfloat16"))[1].loaded.model.head.multiply is not None
    )
    if "avx2" in host.cpu_flags() and host.compiler():
        assert choose(flags, on_cpu().in_format("float32")).loaded.model.head.multiply is not None
    with monkeypatch.context() as without_avx2:
        without_avx2.setattr(host, "cpu_flags", lambda: frozenset())
        with pytest.raises(UserError, match="faster only where a CPU"):
            choose(flags, on_cpu().in_format("float32"))
    tiny_checkpoint("sft", 10)
    refusals: dict[Any, str] = {"int8": "no Qwen or Llama model", "nf4": "whole model that was trained here"}
    for weights, said in refusals.items():
        with pytest.raises(UserError, match=f"{said}.*Leave --weights out") as caught:
            choose(ModelFlags(weights=weights), on_cpu().in_format("bfloat16"))
        assert caught.value.exit_code == 2


def test_drafts_come_from_the_chat_or_from_a_model_of_the_same_tokenizer(folder: Path, base_folder: Path) -> None:
    plain = choose(ModelFlags(model=folder), on_cpu().in_format("float32"))
    assert drafts_for(ModelFlags(model=folder), plain, on_cpu().in_format("float32")) is None
    for value in ("ngram", str(folder)):
        assert drafts_for(ModelFlags(model=folder, draft=value), plain, on_cpu().in_format("float32")) is not None
    tiny_checkpoint("sft", 10)
    ours = choose(ModelFlags(), on_cpu().in_format("float32"))
    assert drafts_for(ModelFlags(draft="sft/d2"), ours, on_cpu().in_format("float32")) is not None
    with pytest.raises(UserError, match=r"--draft sft/d2.*another tokenizer") as caught:
        drafts_for(ModelFlags(draft="sft/d2"), plain, on_cpu().in_format("float32"))
    assert caught.value.exit_code == 2


def test_a_draft_with_states_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen3.5")
    recurrent = choose(ModelFlags(model=tmp_path), on_cpu().in_format("float32"))
    with pytest.raises(UserError, match="DeltaNet") as caught:
        drafts_for(ModelFlags(draft=str(tmp_path)), recurrent, on_cpu().in_format("float32"))
    assert caught.value.exit_code == 2
    assert drafts_for(ModelFlags(draft="ngram"), recurrent, on_cpu().in_format("float32")) is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # matrices in bf16 may be stored elsewhere
def test_an_adapter_that_can_only_be_merged_is_not_served_beside_others(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    import peft

    theirs = peft.get_peft_model(oracle(load_qwen(folder, on_cpu())), peft.LoraConfig(target_modules=["q_proj"]))
    theirs.save_pretrained(tmp_path / "plain")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm", "k_proj"])
    theirs = peft.get_peft_model(oracle(load_qwen(folder, on_cpu())), config)
    theirs.save_pretrained(tmp_path / "whole")
    base = choose(ModelFlags(model=folder), on_cpu().in_format(dtype))
    assert load_adapters(base, {"plain": tmp_path / "plain"}, on_cpu())
    with pytest.raises(UserError) as refused:
        load_adapters(base, {"plain": tmp_path / "plain", "whole": tmp_path / "whole"}, on_cpu())
    assert refused.value.exit_code == 2
    for part in ("'whole'", "norm.weight", f"nanochat.export MERGED --model BASE --adapter {tmp_path / 'whole'}"):
        assert part in str(refused.value)


@pytest.mark.slow
def test_serving_a_model_imports_no_compiler_and_no_library_of_training(folder: Path, base_folder: Path) -> None:
    """sympy alone, which torch's compiler needs, takes 40 MB as long as the server runs."""
    tiny_checkpoint("sft", 10)
    code = """if True:
        import sys
        from pathlib import Path
        from scripts.chat_web import Config, models_of
        from nanochat.device import compute_init
        for which in ({"source": "sft"}, {"model": Path(sys.argv[1])}):
            models_of(Config(**which, slots=1, device_type="cpu", dtype="bfloat16"), compute_init("cpu"))
        print(*{name.partition(".")[0] for name in sys.modules}, *sys.modules)
    """
    printed = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    unneeded = {"sympy", "triton", "torch._dynamo", "torch._inductor", "transformers", "peft", "datasets", "pyarrow"}
    assert unneeded.isdisjoint(printed.stdout.splitlines()[-1].split())
