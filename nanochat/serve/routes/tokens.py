"""/tokenize, /detokenize and /tokenizer_info in vLLM's shapes: a client need not have the tokenizer itself."""

from typing import Any

from nanochat.serve.routes.fields import Limits, flag, invalid, kind, missing, read_fields
from nanochat.serve.routes.fields import tokens as read_tokens
from nanochat.serve.routes.intake import whole_prompt
from nanochat.serve.routes.messages import read_conversation
from nanochat.tokenizer import ROLES, Tokenizer

TEXT = {"prompt", "messages", "add_special_tokens", "return_token_strs", "add_generation_prompt"}


def tokenize(value: Any, tokenizer: Tokenizer, limits: Limits) -> dict[str, Any]:
    """The tokens of a text or of a chat. A text that spells one special token, and nothing else, is that token."""
    fields = read_fields(value, limits, TEXT, {"add_generation_prompt": (True,)})
    prompt = fields.get("prompt")
    if fields.get("messages") is not None:
        found = whole_prompt(read_conversation(fields["messages"]), tokenizer)
    elif prompt is None:
        raise missing("prompt", "a text, or messages")
    elif not isinstance(prompt, str):
        raise invalid(f"prompt must be a text, got {kind(prompt)}", "prompt")
    else:
        start = (
            [tokenizer.bos]
            if flag(fields, "add_special_tokens", True) and tokenizer.marks_begin
            else []
        )
        special = specials(tokenizer).get(prompt)
        found = [*start, *(tokenizer.encode(prompt) if special is None else [special])]
    strings = flag(fields, "return_token_strs")
    texts = [tokenizer.decode([token]) for token in found] if strings else None
    return {
        "count": len(found),
        "max_model_len": limits.context,
        "tokens": found,
        "token_strs": texts,
    }


def detokenize(value: Any, tokenizer: Tokenizer, limits: Limits) -> dict[str, Any]:
    """The text of tokens; a special token gives its spelling."""
    fields = read_fields(value, limits, {"tokens"}, {})
    if "tokens" not in fields:
        raise missing("tokens", "a list of token ids")
    return {"prompt": tokenizer.decode(read_tokens(fields["tokens"], "tokens", limits))}


def tokenizer_info(tokenizer: Tokenizer, limits: Limits) -> dict[str, Any]:
    """What a harness asks of a tokenizer: its marks, and how long a prompt may be."""
    marks = {number: text for text, number in specials(tokenizer).items()}
    decoder = {
        str(number): {"content": text, "special": True} for number, text in sorted(marks.items())
    }
    return {
        "tokenizer_class": "nanochat",
        "vocab_size": limits.vocabulary,
        "model_max_length": limits.context,
        "bos_token": marks.get(tokenizer.bos),
        "eos_token": marks[tokenizer.special("assistant_end")],
        "pad_token": None,
        "added_tokens_decoder": decoder,
    }


def specials(tokenizer: Tokenizer) -> dict[str, int]:
    """Spelling -> special token.

    A published model may have no token for a role, or only a free row, which has no spelling.
    """
    numbers = [number for number in map(tokenizer.special, ROLES) if number >= 0]
    spellings = {tokenizer.decode_bytes([number]).decode(): number for number in numbers}
    return {text: number for text, number in spellings.items() if text}
