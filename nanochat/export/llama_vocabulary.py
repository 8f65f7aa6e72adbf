"""A vocabulary and chat template as llama.cpp reads them; tokenizers that llama.cpp cannot repeat are refused."""

from collections.abc import Mapping
from typing import Any

from nanochat.checkpoint_manager.huggingface.template import CHATML
from nanochat.checkpoint_manager.huggingface.tokenizer import FILE_NAME, FolderTokenizer
from nanochat.common import UserError, read_json
from nanochat.export.gguf import Value
from nanochat.export.huggingface import CHAT_TEMPLATE, tokenizer_json
from nanochat.tokenizer import PATTERNS, Tokenizer

# llama.cpp has the split patterns of known models written out, under names; its name for each pattern that it has.
# Beyond ASCII one letter differs, for published models too: llama.cpp does not take the long s (U+017F) for an s.
SPLITS = {
    PATTERNS["qwen2"]: "qwen2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": "qwen35",
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's kinds of tokens
# What a model of the tokenizers library may ask for and llama.cpp does not do -> the values that mean "no".
ABSENT = {
    "dropout": (None, 0, 0.0),
    "byte_fallback": (None, False),
    "ignore_merges": (None, False),
    "fuse_unk": (None, False),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
}


def _refused(why: str) -> UserError:
    return UserError(
        f"llama.cpp would split texts into other tokens than this model was trained on: {why}. Train the tokenizer "
        "with `python -m scripts.tok_train --pattern qwen2`, and the model again, or export with --format huggingface",
        exit_code=2,
    )


def _split_name(content: Mapping[str, Any]) -> str:
    """llama.cpp's name of how a tokenizer.json splits texts. UserError (code 2) if it has none."""
    model, before = content["model"], content["pre_tokenizer"] or {}
    if model.get("type", "BPE") != "BPE":
        raise _refused(f"its vocabulary is of kind {model['type']}")
    for name, allowed in ABSENT.items():
        if model.get(name) not in allowed:
            raise _refused(f"its vocabulary has {name}={model[name]!r}")
    if content.get("normalizer") not in (None, {"type": "NFC"}):
        raise _refused(f"it normalises texts by {content['normalizer']!r}")
    steps = before.get("pretokenizers", [before])
    shape = [
        (
            one.get("type"),
            one.get("behavior"),
            one.get("invert"),
            one.get("add_prefix_space"),
            one.get("use_regex"),
        )
        for one in steps
    ]
    if shape != [("Split", "Isolated", False, None, None), ("ByteLevel", None, None, False, False)]:
        raise _refused("it does not split texts by one regular expression alone")
    regex = steps[0]["pattern"].get("Regex")
    if regex not in SPLITS:
        own = next((name for name, known in PATTERNS.items() if known == regex), None)
        raise _refused(f"it knows no split pattern {own or repr(regex)}")
    return SPLITS[regex]


def _tokens(content: Mapping[str, Any], rows: int) -> dict[str, Value]:
    """Spelling and kind of each of `rows` tokens, and the merges."""
    tokens, kinds = [f"[PAD{number}]" for number in range(rows)], [UNUSED] * rows
    for text, number in content["model"]["vocab"].items():
        tokens[number], kinds[number] = text, NORMAL
    for token in content["added_tokens"]:
        number = int(token["id"])
        tokens[number], kinds[number] = (
            token["content"],
            CONTROL if token["special"] else USER_DEFINED,
        )
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]
    ]
    name = "tokenizer.ggml"
    return {
        f"{name}.tokens": tokens,
        f"{name}.token_type": kinds,
        **({f"{name}.merges": merges} if merges else {}),
    }


def vocabulary(tokenizer: Tokenizer | FolderTokenizer) -> dict[str, Value]:
    """The metadata of a GGUF file that make llama.cpp tokenise, chat and stop as we do.

    A published tokenizer that normalises to NFC keeps all other texts equal; llama.cpp itself never normalises.
    UserError (code 2) if llama.cpp cannot split texts as the tokenizer does.
    """
    if isinstance(tokenizer, Tokenizer):
        content, template, begin = tokenizer_json(tokenizer), CHAT_TEMPLATE, tokenizer.bos
    else:
        content, begin = read_json(tokenizer.folder / FILE_NAME), tokenizer.named("bos_token")
        template = tokenizer.template_source or CHATML
    ends = {"eos": tokenizer.special("assistant_end"), "eot": tokenizer.special("assistant_end")}
    if isinstance(tokenizer, Tokenizer):
        ends["eos"] = tokenizer.bos  # a document ends where the next one begins
    elif (end := tokenizer.named("eos_token")) is not None:
        ends["eos"] = end
    marks = {**ends, "padding": ends["eot"], **({} if begin is None else {"bos": begin})}
    return {
        "tokenizer.ggml.model": "gpt2",  # byte-level BPE
        "tokenizer.ggml.pre": _split_name(content),
        **_tokens(content, tokenizer.vocab_size),
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in marks.items()},
        "tokenizer.ggml.add_bos_token": tokenizer.marks_begin,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": template,
    }
