"""Vocabularies for llama.cpp: spellings, kinds, merges and marks, and the tokenizers that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.common import UserError
from nanochat.export.llama_splits import QWEN2, SPLITS, pre_tokenizer
from nanochat.export.llama_vocabulary import vocabulary
from nanochat.tokenizer import Tokenizer
from tests.support.qwens import write_folder
from tests.support.sentence_pieces import ROWS, tokenizer_json, write_tokenizer
from tests.support.tiny_model import TEXT

PREFIXES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}


def folder_with(path: Path, changes: dict[str, Any] | None = None, family: str = "qwen3") -> FolderTokenizer:
    """A published model with Qwen's pattern; `changes` are made in its tokenizer.json."""
    write_folder(path, family)
    content = json.loads((path / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = QWEN2
    content["normalizer"] = {"type": "NFC"}
    for name, value in (changes or {}).items():
        part, _, rest = name.partition(".")
        if rest:
            content[part][rest] = value
        else:
            content[part] = value
    (path / "tokenizer.json").write_text(json.dumps(content))
    return FolderTokenizer(path, 320)


def test_an_added_token_without_a_row_is_not_in_the_file(tmp_path: Path) -> None:
    folder_with(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 303, "content": "<pad>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokens = vocabulary(FolderTokenizer(tmp_path, 303))["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list) and tokens[300:] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def test_a_published_vocabulary(tmp_path: Path) -> None:
    tokenizer = folder_with(tmp_path)
    made = vocabulary(tokenizer)
    tokens, kinds = made["tokenizer.ggml.tokens"], made["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(kinds, list)
    assert tokens[300:304] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[PAD303]"] and len(tokens) == 320
    assert kinds == [1] * 300 + [3] * 3 + [5] * 17
    assert made["tokenizer.ggml.add_bos_token"] is False and "tokenizer.ggml.bos_token_id" not in made
    assert made["tokenizer.ggml.eos_token_id"] == made["tokenizer.ggml.eot_token_id"] == 302
    assert "<|im_start|>" in str(made["tokenizer.chat_template"])
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert vocabulary(tokenizer)["tokenizer.chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("name", SPLITS)
def test_splits_of_published_tokenizers_have_names(name: str, tmp_path: Path) -> None:
    split = SPLITS[name]
    changes = {"pre_tokenizer": pre_tokenizer(split), "model.ignore_merges": split.whole_pieces}
    assert vocabulary(folder_with(tmp_path, changes))["tokenizer.ggml.pre"] == name


def test_the_pre_tokenizer_of_gpt2_is_one_step(tmp_path: Path) -> None:
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    assert vocabulary(folder_with(tmp_path, {"pre_tokenizer": step}))["tokenizer.ggml.pre"] == "gpt-2"


def test_a_merge_may_be_written_as_one_text(tmp_path: Path) -> None:
    merges = vocabulary(folder_with(tmp_path))["tokenizer.ggml.merges"]
    assert vocabulary(folder_with(tmp_path, {"model.merges": merges}))["tokenizer.ggml.merges"] == merges


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"model.ignore_merges": True}, "with ignore_merges"),
        ({"model.byte_fallback": True}, "byte_fallback"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ({"pre_tokenizer": None}, "no such split"),
        ({"pre_tokenizer": PREFIXES}, "add_prefix_space"),
    ],
)
def test_what_llama_cpp_would_do_otherwise_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why) as failure:
        vocabulary(folder_with(tmp_path, changes))
    assert failure.value.exit_code == 2
    assert "tok_train" not in str(failure.value)  # nobody trains a published tokenizer again


@pytest.mark.parametrize("pattern", ["nanochat", "han", "han4"])
def test_our_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UserError, match=rf"no split by {pattern}.*--pattern qwen2"):
        vocabulary(Tokenizer.train([TEXT] * 4, 290, pattern))


JOINED_BY_WORD = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}


def pieces_with(folder: Path, **changes: Any) -> FolderTokenizer:
    """A vocabulary of SentencePiece; `changes` are made in its tokenizer.json."""
    write_tokenizer(folder, "llama2")
    content = tokenizer_json("llama2")
    content["model"]["merges"] = changes.pop("merges", content["model"]["merges"])
    (folder / "tokenizer.json").write_text(json.dumps({**content, **changes}))
    return FolderTokenizer(folder, ROWS)


def test_a_vocabulary_of_sentencepiece_has_scores_in_the_order_of_its_merges(tmp_path: Path) -> None:
    made = vocabulary(pieces_with(tmp_path))
    kinds, scores = made["tokenizer.ggml.token_type"], made["tokenizer.ggml.scores"]
    assert isinstance(kinds, list) and isinstance(scores, list)
    assert kinds[:4] == [2, 3, 3, 6] and kinds[259:261] == [1, 1] and kinds[-1] == 5
    assert scores[258:262] == [0.0, -1.0, -2.0, -3.0]
    assert made["tokenizer.ggml.add_space_prefix"] is True and made["tokenizer.ggml.add_bos_token"] is True


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"merges": tokenizer_json("llama2")["model"]["merges"][1:]}, "merges lack"),
        ({"merges": sorted(tokenizer_json("llama2")["model"]["merges"])}, "not next to each other"),
        ({"normalizer": {"type": "NFKC"}}, "NFKC"),
        ({"normalizer": None, "pre_tokenizer": JOINED_BY_WORD}, "Metaspace"),
    ],
)
def test_pieces_that_llama_cpp_would_join_otherwise_are_refused(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=why) as failure:
        vocabulary(pieces_with(tmp_path, **changes))
    assert failure.value.exit_code == 2
