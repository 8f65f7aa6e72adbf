"""Answers /tokenize, /detokenize and /tokenizer_info in vLLM's format.

With these, a client does not need a copy of the tokenizer.
"""

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
from nanochat.serve.routes.messages import read_conversation, render_chat
from nanochat.tokenizer import ROLES, Tokenizer

FIELDS = {"prompt", "messages", "add_special_tokens", "return_token_strs", "add_generation_prompt"}


def tokenize(
    value: Any,
    tokenizer: Tokenizer,
    limits: Limits,
) -> dict[str, Any]:
    """Return the answer to /tokenize, a dict with the tokens of a text or of a chat.

    A text that spells one special token, and nothing else, becomes that token.
    """
    fields = read_fields(value, FIELDS, {"add_generation_prompt": (True,)})
    if fields.get("messages") is not None:
        tokens = render_chat(read_conversation(fields["messages"]), tokenizer)
    else:
        tokens = _text_tokens(fields, tokenizer)
    texts = None
    if flag(fields, "return_token_strs"):
        texts = [tokenizer.decode([token]) for token in tokens]
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
    if flag(fields, "add_special_tokens", True) and tokenizer.marks_begin:
        tokens.append(tokenizer.bos)
    special = specials(tokenizer).get(prompt)
    if special is None:
        tokens += tokenizer.encode(prompt)
    else:
        tokens.append(special)
    return tokens


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
    spellings = {token: text for text, token in specials(tokenizer).items()}
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


def specials(tokenizer: Tokenizer) -> dict[str, int]:
    """Return a dict from the spelling of each special token to its ID.

    Special tokens without a spelling are left out: a published model may have no token for a role,
    or only an unused row of its vocabulary.
    """
    tokens: dict[str, int] = {}
    for token in map(tokenizer.special, ROLES):
        text = tokenizer.decode_bytes([token]).decode() if token >= 0 else ""
        if text:
            tokens[text] = token
    return tokens
