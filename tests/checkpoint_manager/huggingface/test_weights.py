"""Published folders: sharded files, wrong files, and a model that is loaded piece by piece."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanochat.checkpoint_manager.families import build, family_of
from nanochat.checkpoint_manager.huggingface.weights import folder_mark, is_marked, load_qwen
from nanochat.common import UserError
from nanochat.models.qwen.model import Qwen
from tests.support.qwens import CONFIGS, published, tiny_qwen
from tests.support.tiny_model import on_cpu


def folder_of(model: Qwen, folder: Path, shards: int = 2, **extra: Any) -> Path:
    """A model's folder as publishers write it: bf16, several files and their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**published(model.config), **extra}))
    values = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    names, places = sorted(values), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: values[name] for name in part}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def test_weights_that_differ_between_the_ends_of_their_file_have_another_mark(tmp_path: Path) -> None:
    """As those of models into which other adapters were merged."""
    path = tmp_path / "model.safetensors"
    content = bytearray(8 << 20)
    path.write_bytes(content)
    before = folder_mark(tmp_path)
    first = len(content) // 3
    content[first : first + len(content) // 256] = bytes([1]) * (len(content) // 256)
    path.write_bytes(content)
    assert folder_mark(tmp_path)[:16] == before[:16]  # which was the whole mark once
    assert not is_marked(tmp_path, before) and is_marked(tmp_path, before[:16])


@pytest.mark.parametrize("family", [*CONFIGS, "llama biases"])
def test_a_folder_gives_the_config_and_the_weights(family: str, tmp_path: Path) -> None:
    model = tiny_qwen(family)
    folder = folder_of(model, tmp_path)
    loaded, held = load_qwen(folder, on_cpu(), torch.float32), load_qwen(folder, on_cpu(), torch.bfloat16)
    wanted = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter.bfloat16(), wanted[name])
    for name, parameter in held.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if parameter.dim() > 1 else torch.float32), name
    idx = torch.arange(30)[None]
    model.load_state_dict({name: value.float() for name, value in wanted.items()})
    torch.testing.assert_close(loaded(idx), model(idx), atol=1e-5, rtol=1e-5)


def test_the_vision_tower_and_the_multi_token_heads_are_skipped_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_qwen("qwen3.5")
    folder = folder_of(model, tmp_path, shards=1)
    (file,) = folder.glob("*.safetensors")
    values = {name.replace("model.", "model.language_model.", 1): value for name, value in load_file(file).items()}
    extra = {"model.visual.patch_embed.proj.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2)}
    save_file({**values, **extra}, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    text = published(model.config)
    (folder / "config.json").write_text(json.dumps(
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": False}
    ))  # fmt: skip
    loaded = load_qwen(folder, on_cpu())
    assert torch.equal(loaded.lm_head.weight.bfloat16(), model.lm_head.weight.bfloat16())
    printed = capsys.readouterr().out
    assert "the vision tower (1 tensors) skipped" in printed and "the multi-token heads (1 tensors) skipped" in printed


def test_a_tied_head_may_be_written_again_but_may_not_differ(tmp_path: Path) -> None:
    model = tiny_qwen("qwen3")
    folder = folder_of(model, tmp_path, shards=1)
    (file,) = folder.glob("*.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    values = load_file(file)
    table = values["model.embed_tokens.weight"]
    save_file({**values, "lm_head.weight": table.clone()}, folder / "model.safetensors")
    assert torch.equal(load_qwen(folder, on_cpu()).head.weight.bfloat16(), table)
    other = table.clone()
    other[-1, -1] += 1
    for head in (other, table[:-1].clone()):
        save_file({**values, "lm_head.weight": head}, folder / "model.safetensors")
        with pytest.raises(UserError) as refused:
            load_qwen(folder, on_cpu())
        for name in ("lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings"):
            assert name in str(refused.value)


def test_the_context_can_be_shortened_and_not_lengthened(tmp_path: Path) -> None:
    folder = folder_of(tiny_qwen("qwen3"), tmp_path)
    assert load_qwen(folder, on_cpu(), sequence_len=64).config.sequence_len == 64
    with pytest.raises(UserError, match=r"300 tokens was asked for.*at most 256"):
        load_qwen(folder, on_cpu(), sequence_len=300)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "'Gemma3ForCausalLM'.*Qwen3ForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "llama3"}}, "damaged"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'.*default, linear, dynamic, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "damaged: KeyError.'factor'"),
        ({"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}, "one rule for each kind"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 40}}, "rope_low must be below rope_high"),
        ({"architectures": None}, "architecture None"),
        ({"architectures": [{}]}, r"architecture \{\}"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "architecture .*Qwen3ForCausalLM"),
        ({"architectures": ["x" * 100_000]}, "architecture 'xxx"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "need a sliding_window"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1"),
        ({"layer_types": ["full_attention"]}, "1 layers, and num_hidden_layers is 2"),
        ({"layer_types": ["chunked_attention"] * 2}, "'chunked_attention', and the known ones are full_attention"),
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 1}, "window must be at least 2"),
        ({"hidden_act": "gelu"}, "activation is 'gelu'"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"hidden_size": "big"}, "n_embd is 'big'"),
        ({"num_attention_heads": 3}, "n_head must be a multiple of n_kv_head"),
        ({"rms_norm_eps": None}, "is damaged"),
        ({"vocab_size": 999}, r"model.embed_tokens.weight is \[320, 48\] in the files and \[999, 48\]"),
        ({"num_hidden_layers": 1}, "in the files and nowhere in the model"),
        ({"num_hidden_layers": 3}, "is missing in the files"),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_refused_in_one_line(
    extra: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = folder_of(tiny_qwen("qwen3"), tmp_path, **extra)
    with pytest.raises(UserError, match=words) as caught:
        load_qwen(folder, on_cpu())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "extra",
    [
        {"use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True, "layer_types": ["full_attention", "full_attention"]},
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 256},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_accepted(extra: dict[str, Any], tmp_path: Path) -> None:
    load_qwen(folder_of(tiny_qwen("qwen3"), tmp_path, **extra), on_cpu())


def test_an_index_may_name_files_with_a_dot_and_files_may_hold_frequencies(tmp_path: Path) -> None:
    model = tiny_qwen("qwen3")
    folder = folder_of(model, tmp_path)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    dotted = {name: f"./{file}" for name, file in places.items()}
    index.write_text(json.dumps({"weight_map": {**places, **dict(list(dotted.items())[::3])}}))
    path = folder / "model-00001-of-00002.safetensors"
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "model.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**load_file(path), **extra}, path, {"format": "pt"})
    loaded = load_qwen(folder, on_cpu())
    assert torch.equal(loaded.head.weight.bfloat16(), model.head.weight.bfloat16())


def test_files_load_without_their_index_if_all_are_there(tmp_path: Path) -> None:
    model = tiny_qwen("qwen3")
    folder = folder_of(model, tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    assert torch.equal(load_qwen(folder, on_cpu()).head.weight.bfloat16(), model.head.weight.bfloat16())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="is missing in the files"):
        load_qwen(folder, on_cpu())


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    folder = folder_of(tiny_qwen("qwen3"), tmp_path)
    second = folder / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:100])
    with pytest.raises(UserError, match=r"00002-of-00002\.safetensors is not a whole safetensors file"):
        load_qwen(folder, on_cpu())
    second.unlink()
    with pytest.raises(UserError, match="lacks 1 of 2 weight files: model-00002"):
        load_qwen(folder, on_cpu())
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere"}}')
    with pytest.raises(UserError, match=r"'\.\./elsewhere'"):
        load_qwen(folder, on_cpu())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 100_000}}))
    with pytest.raises(UserError, match=r"index\.json names 'xxx") as refused:
        load_qwen(folder, on_cpu())
    assert len(str(refused.value)) < 1000
    (tmp_path / "empty").mkdir()
    for name, problem in (("empty", r"it has no config\.json"), ("nowhere", "does not exist")):
        with pytest.raises(UserError, match=problem):
            load_qwen(tmp_path / name, on_cpu())


def test_a_checkpoint_of_our_own_names_the_family(tmp_path: Path) -> None:
    model = tiny_qwen("qwen3.5")
    meta = {"family": family_of(model.config), "model": json.loads(json.dumps(asdict(model.config)))}
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    built = build(meta, values, on_cpu(), "meta.json")
    assert isinstance(built, Qwen) and built.config == model.config
    with pytest.raises(UserError, match="rope_theta is inf"):
        build({**meta, "model": {**meta["model"], "rope_theta": float("inf")}}, values, on_cpu(), "meta.json")


@pytest.mark.slow
def test_nothing_imports_transformers() -> None:
    modules = "nanochat.checkpoint_manager.huggingface.adapter, nanochat.checkpoint_manager.huggingface.tokenizer"
    code = f"import sys, {modules}; sys.exit(not {{'transformers', 'peft', 'jinja2'}}.isdisjoint(sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)
