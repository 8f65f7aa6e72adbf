"""Folders of published models from GGUF files: weights, shapes and tokenizers come back, and the rest is refused."""

import errno
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from nanochat.checkpoint_manager.huggingface.config import read_config
from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.load import Loaded, load_published
from nanochat.checkpoint_manager.tensors import TensorFile
from nanochat.common import UserError
from nanochat.data.conversation import chat
from nanochat.export import llama
from nanochat.export.__main__ import Config, main
from nanochat.export.from_gguf import convert
from nanochat.export.gguf import PlannedTensor, write
from nanochat.export.llama_splits import SPLITS, pre_tokenizer
from scripts import finetune
from tests.export.test_llama_vocabulary import folder_with
from tests.support.flags import configured
from tests.support.qwens import CONFIGS, tiny_qwen
from tests.support.tiny_model import on_cpu

TEXTS = ("the cat sat on 12345 mats", "I'll don't\r\n\n  x", "naïve 猫坐 ½", "")


def exported(folder: Path, family: str = "llama3", **changes: Any) -> tuple[Any, FolderTokenizer, Path]:
    """A tiny model, its tokenizer, and the GGUF file of both."""
    (folder / "published").mkdir()
    model, tokenizer = tiny_qwen(family), folder_with(folder / "published", changes)
    llama.export(Loaded(model, tokenizer, {}, "tune", "a", 1), folder / "x.gguf", "float32")  # type: ignore[arg-type]
    return model, tokenizer, folder / "x.gguf"


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen2.5-tied", "qwen3"])
def test_an_exported_model_comes_back(family: str, tmp_path: Path) -> None:
    model, tokenizer, path = exported(tmp_path, family)
    main(Config(tmp_path / "out", from_gguf=path))
    again = load_published(tmp_path / "out", None, on_cpu(), torch.float32)
    assert again.model.config == CONFIGS[family]
    for name, value in again.model.named_parameters():
        assert torch.equal(value, dict(model.named_parameters())[name]), name
    assert [again.tokenizer.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert again.tokenizer.render_prompt(chat("<|im_end|> hi")) == tokenizer.render_prompt(chat("<|im_end|> hi"))
    assert again.tokenizer.stops == tokenizer.stops and again.tokenizer.adds_bos is False


@pytest.mark.parametrize(
    "flags",
    [
        {"format": "gguf"},
        {"model": Path("x")},
        {"adapter": Path("x")},
        {"source": "sft"},
        {"model_tag": "d12"},
        {"step": 0},
    ],
)
def test_flags_that_name_another_model_are_refused(flags: dict[str, Any], tmp_path: Path) -> None:
    (name,) = flags
    with pytest.raises(UserError, match=f"--{name}") as refused:
        main(Config(tmp_path / "out", from_gguf=exported(tmp_path)[2], **flags))
    assert refused.value.exit_code == 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_comes_back(name: str, tmp_path: Path) -> None:
    split = SPLITS[name]
    changes = {"pre_tokenizer": pre_tokenizer(split), "model.ignore_merges": split.whole_pieces}
    _, tokenizer, path = exported(tmp_path, "qwen3", **changes)
    convert(path, tmp_path / "out", "bfloat16")
    again = FolderTokenizer(tmp_path / "out", tokenizer.vocab_size)
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


LLAMA3 = """{{ bos_token }}{% for message in messages %}<|start|>{{ message.role }}

{{ message.content }}<|eot_id|>{% endfor %}"""


def test_the_marks_of_llama_3(tmp_path: Path) -> None:
    """Texts begin with a mark, and a turn ends at another token than a text."""
    model, _, path = exported(tmp_path)
    reader = gguf.GGUFReader(path)
    metadata: dict[str, Any] = {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
    }
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[300:304] = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start|>"]
    metadata["tokenizer.ggml.token_type"][300:304] = [3, 3, 3, 3]
    metadata |= {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 300, "tokenizer.chat_template": LLAMA3,
                 "tokenizer.ggml.eos_token_id": 301}  # fmt: skip
    del metadata["tokenizer.ggml.add_bos_token"], metadata["tokenizer.ggml.eot_token_id"]
    write(tmp_path / "3.gguf", metadata, list(llama.tensors(model, "float32")))
    convert(tmp_path / "3.gguf", tmp_path / "out", "float32")
    tokenizer = FolderTokenizer(tmp_path / "out", 320)
    assert tokenizer.adds_bos and tokenizer.bos == 300
    assert tokenizer.special("assistant_end") == 302 and tokenizer.stops == {300, 301, 302}
    assert tokenizer.render_prompt(chat("hi"))[:2] == [300, 303]
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["ignore_merges"] is True


def a_file(path: Path, **metadata: Any) -> Path:
    """A GGUF file of one tensor that is no model."""
    values = {"general.architecture": "llama", **{name.replace("__", "."): value for name, value in metadata.items()}}
    write(path, values, [PlannedTensor("x.weight", (2, 2), "float32", lambda: torch.ones(2, 2))])
    return path


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general__architecture": "gpt-oss"}, "gpt-oss"),
        ({"split__count": 3, "split__no": 0}, "one of the 3 files"),
        ({"llama__rope__scaling__type": "yarn"}, "yarn"),
        ({}, "embedding_length"),
    ],
)
def test_a_file_of_another_kind_is_refused(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        convert(a_file(tmp_path / "x.gguf", **metadata), tmp_path / "out", "float32")
    assert caught.value.exit_code == 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.ggml.model", "llama", "kind 'llama'"),
        ("tokenizer.ggml.pre", "kimi-k2", "kimi-k2.*qwen2"),
        ("llama.block_count", 1, "blk.1.attn_k.weight"),
        ("llama.attention.head_count_kv", 4, "blk.0.attn_k.weight"),
        ("llama.rope.freq_base", 10_000.0, "in another way than Llama 3"),
    ],
)
def test_a_model_that_would_compute_something_else_is_refused(
    key: str, value: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, path = exported(tmp_path)
    contents = gguf.gguf_reader.ReaderField.contents

    def changed(self: Any, *place: Any) -> Any:
        return value if self.name == key else contents(self, *place)

    monkeypatch.setattr(gguf.gguf_reader.ReaderField, "contents", changed)
    with pytest.raises(UserError, match=words):
        convert(path, tmp_path / "out", "float32")


def test_what_is_no_whole_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = exported(tmp_path)[2]
    whole = path.read_bytes()
    for size, words in ((0, "no GGUF file"), (3, "no GGUF file"), (20, "damaged"), (3000, "damaged"), (-40, "damaged")):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=words):
            convert(path, tmp_path / "out", "float32")
    with pytest.raises(UserError, match="not a file"):
        convert(tmp_path, tmp_path / "out", "float32")
    path.write_bytes(whole)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        convert(path, tmp_path / "out", "float32")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="pip install gguf"):
        convert(path, tmp_path / "new", "float32")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = exported(tmp_path)[2]
    before = sorted(tmp_path.iterdir())

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(TensorFile, "add", full)
    with pytest.raises(OSError, match="No space"):
        convert(path, tmp_path / "out", "float32")
    assert sorted(tmp_path.iterdir()) == before


def test_a_gguf_file_as_a_model_names_the_command(tmp_path: Path) -> None:
    path = a_file(tmp_path / "x.gguf")
    (tmp_path / "chats.jsonl").write_text("{}")
    with pytest.raises(UserError, match=f"--from-gguf {path} {tmp_path}/x`"):
        read_config(path)
    flags = configured(finetune.Config, model=path, data=(str(tmp_path / "chats.jsonl"),))
    with pytest.raises(UserError, match="--from-gguf"):
        finetune.train(flags, on_cpu())
