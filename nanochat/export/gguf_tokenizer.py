"""Turns the vocabulary in a GGUF file into the tokenizer files of a published model."""

from collections.abc import Sequence
from typing import Any

from nanochat.common import UserError, tr
from nanochat.export.gguf_reader import GGUFFile
from nanochat.export.huggingface import begin_mark
from nanochat.export.llama_splits import OTHER_NAMES, SPELLS, SPLITS, Split, pre_tokenizer
from nanochat.export.llama_vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED

UNKNOWN = 2  # llama.cpp's code for the token of unknown text
OF_ONE_TEXT = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
NORMALIZING = ("qwen2", "qwen35")  # splits of tokenizers that normalise text to NFC
# Splits before which llama.cpp puts the begin mark, unless the file says otherwise.
MARKING = ("llama-bpe", "tekken")
# Special tokens at which llama.cpp ends every reply, whatever the file says.
ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>")
# Setting of generation_config.json -> its name in GGUF files.
SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
}


def published_tokenizer(source: GGUFFile) -> dict[str, dict[str, Any]]:
    """Return the contents of a tokenizer's JSON files, by file name.

    They are tokenizer.json, tokenizer_config.json with the chat template, and
    generation_config.json. Raises UserError (exit code 2) if the vocabulary is not byte-level BPE
    or splits text by an unknown rule.
    """
    split_name = _split_name(source)
    spellings: list[str] = source.get("tokenizer.ggml.tokens")
    kinds: list[int] = source.get("tokenizer.ggml.token_type", [NORMAL] * len(spellings))
    content = _tokenizer_json(source, SPLITS[split_name], spellings, kinds)
    if split_name in NORMALIZING:
        content["normalizer"] = {"type": "NFC"}
    marks = {
        name: source.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    bos = marks["bos"]
    if bos is not None and source.get("tokenizer.ggml.add_bos_token", split_name in MARKING):
        content["post_processor"] = begin_mark(spellings[bos], bos)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **{f"{name}_token": spellings[mark] for name, mark in marks.items() if mark is not None},
    }
    if "tokenizer.chat_template" in source.metadata:
        config["chat_template"] = source.metadata["tokenizer.chat_template"]
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": config,
        "generation_config.json": _generation_config(source, spellings, kinds),
    }


def _split_name(source: GGUFFile) -> str:
    """Return the name, in SPLITS, of the rule by which a file's tokenizer splits text.

    Raises UserError (exit code 2) if the rule or the kind of the vocabulary is unknown.
    """
    kind = source.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UserError(
            tr(
                "{path} has a vocabulary of kind {kind!r}, and only byte-level ones, of "
                "kind 'gpt2', are known. Use another model",
                path=source.path,
                kind=kind,
            ),
            exit_code=2,
        )
    rule = source.get("tokenizer.ggml.pre", "default")
    name = OTHER_NAMES.get(rule, rule)
    if name not in SPLITS:
        raise UserError(
            tr(
                "{path} splits text by the rule {rule!r}, and the known ones are {known}. "
                "Use another model",
                path=source.path,
                rule=rule,
                known=", ".join(sorted([*SPLITS, *OTHER_NAMES])),
            ),
            exit_code=2,
        )
    return name


def _tokenizer_json(
    source: GGUFFile, split: Split, spellings: Sequence[str], kinds: Sequence[int]
) -> dict[str, Any]:
    """Return the content of tokenizer.json without normaliser and post-processor."""
    added_tokens = [
        {"id": token, "content": spellings[token], "special": kind != USER_DEFINED, **OF_ONE_TEXT}
        for token, kind in enumerate(kinds)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    vocab = {spelling: token for token, spelling in enumerate(spellings) if kinds[token] != UNUSED}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer(split),
        "post_processor": SPELLS,
        "decoder": SPELLS,
        "model": {
            "type": "BPE",
            "ignore_merges": split.whole_pieces,
            "vocab": vocab,
            "merges": source.get("tokenizer.ggml.merges", []),
        },
    }


def _generation_config(
    source: GGUFFile, spellings: Sequence[str], kinds: Sequence[int]
) -> dict[str, Any]:
    """Return the content of generation_config.json: special tokens, and advice for sampling."""
    marks = [
        source.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")
    ]
    ends = {mark for mark in marks if mark is not None}
    for token, spelling in enumerate(spellings):
        if spelling in ENDS and kinds[token] == CONTROL:
            ends.add(token)
    content: dict[str, Any] = {"eos_token_id": sorted(ends)}
    for name, key in (("bos", "bos"), ("pad", "padding")):
        token = source.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            content[f"{name}_token_id"] = token
    advice = {
        name: source.metadata[key] for name, key in SAMPLING.items() if key in source.metadata
    }
    if advice:
        content |= {"do_sample": True, **advice}
    return content
