"""Answers /tokenize, /detokenize and /tokenizer_info in vLLM's format.

With these, a client does not need a copy of the tokenizer.
"""

import re
from typing import Any

from nanochat.serve.routes.fields import (
    Limits,
    flag,
    invalid,
    kind,
    missing,
    read_fields,
    token_ids,
)
from nanochat.serve.routes.fitted import OPTIONS, fitted, read_options
from nanochat.serve.routes.messages import read_conversation
from nanochat.serve.routes.prompts import chat_tokens, continues
from nanochat.serve.routes.tools import read_tools
from nanochat.tokenizer import Tokenizer

FIELDS = {
    "prompt",
    "messages",
    "add_special_tokens",
    "return_token_strs",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "tool_choice",
    *OPTIONS,
}


def tokenize(
    value: Any,
    tokenizer: Tokenizer,
    limits: Limits,
) -> dict[str, Any]:
    """Return the answer to /tokenize, a dict with the tokens of a text or of a chat.

    A special token that is spelled out in the text becomes that token, as on /v1/completions. In
    the messages of a chat, it stays text.
    """
    fields = read_fields(value, FIELDS, {})
    continued = continues(fields)
    if fields.get("messages") is not None:
        whole_chat = read_conversation(fields["messages"], continued)
        conversation = fitted(whole_chat, read_tools(fields), read_options(fields), tokenizer)
        tokens = chat_tokens(conversation, continued, tokenizer)
    else:
        tokens = _text_tokens(fields, tokenizer)
    texts = None
    if flag(fields, "return_token_strs"):
        texts = [tokenizer.decode_bytes([token]).decode(errors="replace") for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": limits.context,
        "tokens": tokens,
        "token_strs": texts,
    }


def _text_tokens(fields: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of the text in the field `prompt`.

    The token that begins a document comes first, if the tokenizer adds one and the field
    `add_special_tokens` is not false. Raises ApiError (400) if `prompt` is missing, or if one of
    the fields is invalid.
    """
    prompt = fields.get("prompt")
    if prompt is None:
        raise missing("prompt", "a text, or messages")
    if not isinstance(prompt, str):
        raise invalid(f"prompt must be a text, got {kind(prompt)}", "prompt")
    tokens = []
    if flag(fields, "add_special_tokens", True) and tokenizer.adds_bos:
        tokens.append(tokenizer.bos)
    return tokens + encode_marked(prompt, tokenizer)


def encode_marked(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text, in which the spelling of a special token becomes that token."""
    tokens = []
    end = 0
    for match in _spellings(tokenizer).finditer(text):
        tokens += _encode_from(end, text[end : match.start()], tokenizer)
        tokens.append(tokenizer.specials[match[0]])
        end = match.end()
    return tokens + _encode_from(end, text[end:], tokenizer)


def _encode_from(start: int, text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text that begins at `start`, where a mark ends unless that is 0."""
    return tokenizer.encode_after(text, mark=True) if start else tokenizer.encode(text)


def has_marks(text: str, tokenizer: Tokenizer) -> bool:
    """Return whether a text spells out a special token."""
    return _spellings(tokenizer).search(text) is not None


def _spellings(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern that matches the spelling of any special token."""
    longest_first = sorted(tokenizer.specials, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def detokenize(
    value: Any,
    tokenizer: Tokenizer,
    limits: Limits,
) -> dict[str, Any]:
    """Return the answer to /detokenize, a dict with the text of tokens, including special ones."""
    fields = read_fields(value, {"tokens"}, {})
    if "tokens" not in fields:
        raise missing("tokens", "a list of token ids")
    tokens = token_ids(fields["tokens"], "tokens", limits)
    return {"prompt": tokenizer.decode(tokens)}


def tokenizer_info(tokenizer: Tokenizer, limits: Limits) -> dict[str, Any]:
    """Return a dict of facts that evaluation harnesses ask for, such as the special tokens."""
    spellings = {token: text for text, token in tokenizer.specials.items()}
    decoder = {}
    for token, text in sorted(spellings.items()):
        decoder[str(token)] = {"content": text, "special": True}
    return {
        "tokenizer_class": "nanochat",
        "vocab_size": limits.vocabulary,
        "model_max_length": limits.context,
        "bos_token": spellings.get(tokenizer.bos),
        "eos_token": spellings[tokenizer.special("assistant_end")],
        "pad_token": None,
        "added_tokens_decoder": decoder,
    }
