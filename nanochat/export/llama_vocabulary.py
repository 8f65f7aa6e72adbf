"""Describes a tokenizer and a chat template to llama.cpp.

Tokenizers that split text in a way that llama.cpp does not support are refused.
"""

from collections.abc import Mapping
from typing import Any

from nanochat.checkpoint_manager.huggingface.spm import is_sentence_pieces
from nanochat.checkpoint_manager.huggingface.template import CHATML
from nanochat.checkpoint_manager.huggingface.tokenizer import FILE_NAME, FolderTokenizer
from nanochat.checkpoint_manager.huggingface.vocabulary import added_with_rows
from nanochat.common import log, read_json, tr
from nanochat.export import llama_pieces
from nanochat.export.gguf import Value
from nanochat.export.huggingface import CHAT_TEMPLATE, tokenizer_json
from nanochat.export.llama_splits import APPROXIMATE, QWEN2, SPLITS, Split, steps_of
from nanochat.tokenizer import PATTERNS, Tokenizer

# Our patterns for splits that llama.cpp knows under another regular expression.
SAME_SPLITS = {PATTERNS["qwen2"]: QWEN2}
# llama.cpp's codes for the kinds of tokens.
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
# Options of the tokenizers library that llama.cpp lacks -> the values that switch them off.
UNSUPPORTED = {
    "dropout": (None, 0, 0.0),
    "byte_fallback": (None, False),
    "fuse_unk": (None, False),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
}
# Normalisers that leave texts as they are, and NFC, which leaves most as they are.
NORMALIZERS = (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []})


def _split_name(content: Mapping[str, Any], advice: str) -> str:
    """Return llama.cpp's name for the way in which a tokenizer.json splits text.

    Raises UserError (exit code 2), with `advice`, if llama.cpp does not support it.
    """

    def refuse_if(is_unsupported: bool, why: str) -> None:
        if is_unsupported:
            raise llama_pieces.refusal(why, advice)

    model = content["model"]
    kind = model.get("type", "BPE")
    refuse_if(kind != "BPE", tr("its vocabulary is of kind {kind}", kind=kind))
    for name, off_values in UNSUPPORTED.items():
        refuse_if(
            model.get(name) not in off_values,
            tr("its vocabulary has {name}={value}", name=name, value=model.get(name)),
        )
    normalizer = content.get("normalizer")
    refuse_if(
        normalizer not in NORMALIZERS,
        tr("it normalises texts by {normalizer}", normalizer=normalizer),
    )
    steps = steps_of(content["pre_tokenizer"] or {})
    if steps is None:
        refuse_if(True, tr("it knows no such split as {split}", split=content["pre_tokenizer"]))
    assert steps is not None
    split = Split(
        tuple(SAME_SPLITS.get(step, step) for step in steps),
        whole_pieces=bool(model.get("ignore_merges")),
    )
    names = [name for name, known in SPLITS.items() if known == split]
    patterns = {pattern: name for name, pattern in PATTERNS.items()}
    spelled = tr(", then ").join(patterns.get(step, step) for step in steps)
    if split.whole_pieces:
        spelled += tr(", with ignore_merges")
    refuse_if(not names, tr("it knows no split by {spelled}", spelled=spelled))
    (name,) = names
    if name in APPROXIMATE:
        log(
            tr(
                "llama.cpp follows the split {name!r} only in ASCII: it makes other tokens "
                "of some words with letters such as É",
                name=name,
            )
        )
    return name


def _tokens(content: Mapping[str, Any], row_count: int, advice: str) -> dict[str, Value]:
    """Return GGUF metadata: the spelling and the kind of each token, and how texts become tokens.

    The embedding has `row_count` rows, and those without a token are marked as unused. Raises
    UserError (exit code 2), with `advice`, if llama.cpp cannot split text as the tokenizer does.
    """
    spellings = [f"[PAD{token_id}]" for token_id in range(row_count)]
    kinds = [UNUSED] * row_count
    for spelling, token_id in content["model"]["vocab"].items():
        spellings[token_id] = spelling
        kinds[token_id] = NORMAL
    for token in added_with_rows(content, row_count):
        token_id = int(token["id"])
        spellings[token_id] = token["content"]
        kinds[token_id] = CONTROL if token["special"] else USER_DEFINED
    values: dict[str, Value] = {
        "tokenizer.ggml.tokens": spellings,
        "tokenizer.ggml.token_type": kinds,
    }
    if is_sentence_pieces(content):
        return values | llama_pieces.pieces(content, kinds, advice)
    values["tokenizer.ggml.model"] = "gpt2"  # byte-level BPE
    values["tokenizer.ggml.pre"] = _split_name(content, advice)
    pairs = content["model"]["merges"]
    if pairs:
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
        values["tokenizer.ggml.merges"] = merges
    return values


def vocabulary(tokenizer: Tokenizer | FolderTokenizer) -> dict[str, Value]:
    """Return the GGUF metadata that makes llama.cpp tokenise, chat and stop as nanochat does.

    Tokens may differ in a few characters (see llama_splits.py) and, if a published tokenizer normalises
    text to NFC, in text that is not in NFC, because llama.cpp never normalises. Raises UserError
    (exit code 2) if llama.cpp cannot split text as the tokenizer does.
    """
    end_of_reply = tokenizer.special("assistant_end")
    if isinstance(tokenizer, Tokenizer):
        content = tokenizer_json(tokenizer)
        advice = tr(
            "Train the tokenizer with `python -m scripts.tok_train --pattern qwen2`, and the model "
            "again, or export with --format huggingface"
        )
        template = CHAT_TEMPLATE
        bos = tokenizer.bos
        eos = tokenizer.bos  # a document ends where the next one begins
    else:
        content = read_json(tokenizer.folder / FILE_NAME)
        advice = tr("Export with --format huggingface")
        template = tokenizer.chat_format.source or CHATML
        bos = tokenizer.named("bos_token")
        eos = tokenizer.named("eos_token")
        if eos is None:
            eos = end_of_reply
    mark_ids = {
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.eot_token_id": end_of_reply,
        "tokenizer.ggml.padding_token_id": end_of_reply,
    }
    if bos is not None:
        mark_ids["tokenizer.ggml.bos_token_id"] = bos
    return {
        **_tokens(content, tokenizer.vocab_size, advice),
        **mark_ids,
        "tokenizer.ggml.add_bos_token": tokenizer.adds_bos,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": template,
    }
