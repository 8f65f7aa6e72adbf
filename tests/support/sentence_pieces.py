"""Small SentencePiece vocabularies in the layouts of published models, and the chat templates of those models."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support.qwens import write_folder
from tests.support.tiny_model import TEXT

ROWS = 500  # of the embedding
CHATS = "[INST] <<SYS>> be kind <</SYS>> what is it? [/INST] It is a cat. <|user|> <|assistant|> hello world "
TRAINED = [TEXT, CHATS, "def f(x):\n    return x**2\n", "你好，世界。今天天气很好。", "  two   three    spaces "]
LAYOUTS = ("llama2", "mistral1", "mistral3")
OF_ONE_TEXT = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}

ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}" + ALTERNATE +
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)  # fmt: skip
TINY_LLAMA = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
NO_SYSTEM = "{{ raise_exception('Only user and assistant roles are supported!') }}"
MISTRAL1 = (
    "{{ bos_token }}{% for message in messages %}" + ALTERNATE +
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
    "{% else %}" + NO_SYSTEM + "{% endif %}{% endfor %}"
)  # fmt: skip
MISTRAL3 = (
    "{{- bos_token }}{%- for message in messages %}" + ALTERNATE +
    "{%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + '[/INST]' }}"
    "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + eos_token }}"
    "{%- else %}" + NO_SYSTEM + "{%- endif %}{%- endfor %}"
)  # fmt: skip
TEMPLATES = {"llama2": LLAMA2, "tinyllama": TINY_LLAMA, "mistral1": MISTRAL1, "mistral3": MISTRAL3}


@cache
def learned() -> tuple[list[str], list[str]]:
    """Pieces of several letters in the order in which they were learned, and single letters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator(TRAINED * 4, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    vocab = tokenizer.get_vocab()
    vocab = {piece: rank for piece, rank in vocab.items() if "\n" not in piece}  # bytes, as in the published files
    pieces = sorted((piece for piece in vocab if len(piece) > 1), key=lambda piece: vocab[piece])
    spaces = ["▁" * count for count in (2, 4, 3)]  # SentencePiece learns runs of spaces too
    return [*pieces, *spaces], sorted(piece for piece in vocab if len(piece) == 1)


def merges_of(pieces: Iterable[str], known: set[str]) -> list[list[str]]:
    """Each way to put a piece together, as converters of SentencePiece files list them."""
    return [
        [piece[:cut], piece[cut:]]
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]


def tokenizer_json(layout: str) -> dict[str, Any]:
    """The content of tokenizer.json in the layout of Llama 2, or Mistral 7B Instruct v0.1 or v0.3."""
    marks = ["<unk>", "<s>", "</s>", *(["[INST]", "[/INST]"] if layout == "mistral3" else [])]
    pieces, letters = learned()
    tokens = [*marks, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    first = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    prefix = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": mark, **OF_ONE_TEXT} for i, mark in enumerate(marks)],
        "normalizer": None if layout == "mistral3" else {"type": "Sequence", "normalizers": prefix},
        "pre_tokenizer": first if layout == "mistral3" else None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges_of(pieces, {*pieces, *letters}),
        },
    }


def write_tokenizer(folder: Path, layout: str, template: str | None = None) -> Path:
    """Write the tokenizer's files of a published model to its folder."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    if template is not None:
        config["chat_template"] = TEMPLATES[template]
    contents = {
        "tokenizer.json": tokenizer_json(layout),
        "tokenizer_config.json": {**config, "tokenizer_class": "PreTrainedTokenizerFast"},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_model(folder: Path, layout: str, template: str | None = None) -> Path:
    """Write a random model of Llama's or Mistral's architecture with such a tokenizer."""
    write_folder(folder, "mistral windows" if layout.startswith("mistral") else "llama2", rows=ROWS)
    return write_tokenizer(folder, layout, template)
