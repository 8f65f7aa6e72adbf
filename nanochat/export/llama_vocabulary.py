"""Describes a tokenizer and a chat template to llama.cpp.

Tokenizers that split text in a way that llama.cpp does not support are refused.
"""

from collections.abc import Mapping
from typing import Any

from nanochat.checkpoint_manager.huggingface.template import CHATML
from nanochat.checkpoint_manager.huggingface.tokenizer import FILE_NAME, FolderTokenizer
from nanochat.common import UserError, read_json
from nanochat.export.gguf import Value
from nanochat.export.huggingface import CHAT_TEMPLATE, tokenizer_json
from nanochat.tokenizer import PATTERNS, Tokenizer

# Split pattern -> llama.cpp's name for its own implementation. Outside ASCII they differ in one
# letter, for published models too: llama.cpp does not treat the long s (U+017F) as an s.
SPLITS = {
    PATTERNS["qwen2"]: "qwen2",
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ): "qwen2",
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ): "qwen35",
}
# llama.cpp's codes for the kinds of tokens.
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
# Options of the tokenizers library that llama.cpp lacks -> the values that switch them off.
UNSUPPORTED = {
    "dropout": (None, 0, 0.0),
    "byte_fallback": (None, False),
    "ignore_merges": (None, False),
    "fuse_unk": (None, False),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
}
# A pre-tokenizer that splits text by one regular expression alone has the steps in SPLIT_STEPS.
# They are compared by the values of STEP_KEYS.
STEP_KEYS = ("type", "behavior", "invert", "add_prefix_space", "use_regex")
SPLIT_STEPS = [
    ("Split", "Isolated", False, None, None),
    ("ByteLevel", None, None, False, False),
]


def _refusal(why: str) -> UserError:
    return UserError(
        f"llama.cpp would split texts into other tokens than this model was trained on: {why}. "
        "Train the tokenizer with `python -m scripts.tok_train --pattern qwen2`, and the model "
        "again, or export with --format huggingface",
        exit_code=2,
    )


def _split_name(content: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a tokenizer.json splits text.

    Raises UserError (exit code 2) if llama.cpp does not support it.
    """
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        raise _refusal(f"its vocabulary is of kind {model['type']}")
    for name, off_values in UNSUPPORTED.items():
        if model.get(name) not in off_values:
            raise _refusal(f"its vocabulary has {name}={model[name]!r}")
    if content.get("normalizer") not in (None, {"type": "NFC"}):
        raise _refusal(f"it normalises texts by {content['normalizer']!r}")
    pre_tokenizer = content["pre_tokenizer"] or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if [tuple(map(step.get, STEP_KEYS)) for step in steps] != SPLIT_STEPS:
        raise _refusal("it does not split texts by one regular expression alone")
    regex = steps[0]["pattern"].get("Regex")
    if regex not in SPLITS:
        names = {pattern: name for name, pattern in PATTERNS.items()}
        raise _refusal(f"it knows no split pattern {names.get(regex) or repr(regex)}")
    return SPLITS[regex]


def _tokens(content: Mapping[str, Any], row_count: int) -> dict[str, Value]:
    """Return GGUF metadata: the spelling and the kind of each token, and the merges.

    The embedding has `row_count` rows, and those without a token are marked as unused.
    """
    spellings = [f"[PAD{token_id}]" for token_id in range(row_count)]
    kinds = [UNUSED] * row_count
    for spelling, token_id in content["model"]["vocab"].items():
        spellings[token_id] = spelling
        kinds[token_id] = NORMAL
    for token in content["added_tokens"]:
        token_id = int(token["id"])
        spellings[token_id] = token["content"]
        kinds[token_id] = CONTROL if token["special"] else USER_DEFINED
    values: dict[str, Value] = {
        "tokenizer.ggml.tokens": spellings,
        "tokenizer.ggml.token_type": kinds,
    }
    pairs = content["model"]["merges"]
    if pairs:
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
        values["tokenizer.ggml.merges"] = merges
    return values


def vocabulary(tokenizer: Tokenizer | FolderTokenizer) -> dict[str, Value]:
    """Return the GGUF metadata that makes llama.cpp tokenise, chat and stop as nanochat does.

    Tokens may differ around the letter U+017F (see SPLITS) and, if a published tokenizer normalises
    text to NFC, in text that is not in NFC, because llama.cpp never normalises. Raises UserError
    (exit code 2) if llama.cpp cannot split text as the tokenizer does.
    """
    end_of_reply = tokenizer.special("assistant_end")
    if isinstance(tokenizer, Tokenizer):
        content = tokenizer_json(tokenizer)
        template = CHAT_TEMPLATE
        bos = tokenizer.bos
        eos = tokenizer.bos  # a document ends where the next one begins
    else:
        content = read_json(tokenizer.folder / FILE_NAME)
        template = tokenizer.template_source or CHATML
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
        "tokenizer.ggml.model": "gpt2",  # byte-level BPE
        "tokenizer.ggml.pre": _split_name(content),
        **_tokens(content, tokenizer.vocab_size),
        **mark_ids,
        "tokenizer.ggml.add_bos_token": tokenizer.marks_begin,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": template,
    }
