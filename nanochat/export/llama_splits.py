"""The ways of splitting text that llama.cpp knows by name, as tokenizer.json describes them.

A tokenizer first splits text into pieces, and then merges the bytes of each piece. llama.cpp does
not read the rule of the first step from a file: it has its own code for each rule, and a GGUF file
names the rule. The table holds rules of byte-level vocabularies. llama.cpp's code follows them but
for the long s (U+017F), which it does not treat as an s, and for the rules in APPROXIMATE.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Steps that are not regular expressions: single digits, and the splitter of GPT-2.
DIGITS = "digits"
GPT2 = "gpt2"

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*",
)
CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
DEEPSEEK_3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES
)


@dataclass(frozen=True)
class Split:
    """A way of splitting text: steps that each split the pieces of the step before."""

    steps: tuple[str, ...]  # regular expressions, DIGITS or GPT2
    # Whether a piece that is a token becomes this token, whatever the merges say.
    whole_pieces: bool = False


LLAMA3 = f"{ENDINGS}|{WORD}|\\p{{N}}{{1,3}}|{REST}"
QWEN2 = f"{ENDINGS}|{WORD}|\\p{{N}}|{REST}"
QWEN35 = (
    rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
# Name in llama.cpp -> the split.
SPLITS = {
    "gpt-2": Split((GPT2,)),
    "smollm": Split((DIGITS, GPT2)),
    "qwen2": Split((QWEN2,)),
    "qwen35": Split((QWEN35,)),
    "llama-bpe": Split((LLAMA3,), whole_pieces=True),
    "smaug-bpe": Split((LLAMA3,)),
    "deepseek-v3": Split((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK_3)),
    "gpt-4o": Split((f"{CASED[0]}{ENDINGS}?|{CASED[1]}{ENDINGS}?|\\p{{N}}{{1,3}}|{CASED_REST}",)),
    "tekken": Split((f"{CASED[0]}|{CASED[1]}|\\p{{N}}|{CASED_REST}",), whole_pieces=True),
    "minicpm5": Split(
        (r"\p{N}{1,3}", f"{ENDINGS}|{WORD}|\\p{{N}}+|{REST}"),
        whole_pieces=True,
    ),
    "seed-coder": Split(
        (f"{ENDINGS}|{WORD}|\\p{{N}}{{1}}| ?[^\\s\\p{{L}}\\p{{N}}\\r\\n]+|{SPACES}",)
    ),
}
# Names of splits that llama.cpp only approximates: letters beyond ASCII may become other tokens.
APPROXIMATE = ("gpt-4o", "tekken")
# Other names in GGUF files -> the name of the same split in SPLITS.
OTHER_NAMES = {
    **dict.fromkeys(("phi-2", "olmo", "mpt", "jais", "gigachat", "mellum", "exaone4"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), "smollm"),
    **dict.fromkeys(("minerva-7b", "mellum2"), "smollm"),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"), "qwen2"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), "llama-bpe"),
    **dict.fromkeys(("midm-2.0", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), "smaug-bpe"),
    **dict.fromkeys(("llama4", "kanana2"), "gpt-4o"),
    **dict.fromkeys(("hunyuan-dense", "joyai-llm"), "deepseek-v3"),
}
ISOLATED = {"behavior": "Isolated", "invert": False}
# Values of a ByteLevel step: one that only spells bytes as letters, and one that splits as well.
SPELLS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
SPLITS_TOO = SPELLS | {"use_regex": True}


def pre_tokenizer(split: Split) -> dict[str, Any]:
    """Return the pre_tokenizer of a tokenizer.json that splits text in this way."""
    steps: list[dict[str, Any]] = []
    for step in split.steps:
        if step == DIGITS:
            steps.append({"type": "Digits", "individual_digits": True})
        elif step != GPT2:
            steps.append({"type": "Split", "pattern": {"Regex": step}, **ISOLATED})
    steps.append(SPLITS_TOO if GPT2 in split.steps else SPELLS)
    return {"type": "Sequence", "pretokenizers": steps}


def steps_of(pre_tokenizer: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the steps of a tokenizer.json's pre_tokenizer, or None if a Split cannot hold them."""
    pieces = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    steps: list[str] = []
    for piece in pieces[:-1]:
        if piece == {"type": "Digits", "individual_digits": True}:
            steps.append(DIGITS)
        elif "Regex" in piece.get("pattern", {}) and piece.items() >= ISOLATED.items():
            steps.append(piece["pattern"]["Regex"])
        else:
            return None
    last = pieces[-1] if pieces else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if last.get("use_regex", True):
        steps.append(GPT2)
    return tuple(steps)
