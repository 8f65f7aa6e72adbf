"""Describes rotary embeddings for longer contexts to llama.cpp."""

import math

from nanochat.export.gguf import Value
from nanochat.models.llama import LlamaConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.rope import rotary_base

ORIGINAL_KEY = "rope.scaling.original_context_length"


def is_supported(config: QwenConfig) -> bool:
    """Return whether llama.cpp can rotate as the model does.

    llama.cpp reads the divisors of Llama 3 in models of Llama's architecture only. Its YaRN
    leaves frequencies alone from 32 turns, and divides those of up to 1 turn by the whole factor.
    """
    if config.rope == "llama3":
        return isinstance(config, LlamaConfig)
    if config.rope == "yarn":
        return (config.rope_low, config.rope_high) == (1, 32)
    return True


def metadata(config: QwenConfig) -> dict[str, Value]:
    """Return the metadata of the rotary embeddings, without the architecture in front of the keys.

    The rule "dynamic" only raises the base here, see models/rope.py. Llama 3's divisors are a
    tensor of their own.
    """
    c = config
    values: dict[str, Value] = {
        "rope.freq_base": float(rotary_base(c)),
        "rope.dimension_count": c.rotated,
    }
    if c.rope == "llama3":
        values[ORIGINAL_KEY] = c.rope_original
    elif c.rope in ("linear", "yarn"):
        values["rope.scaling.type"] = c.rope
        values["rope.scaling.factor"] = float(c.rope_factor)
    if c.rope == "yarn":
        # llama.cpp multiplies cosines and sines with this and with YaRN's usual scale.
        usual_scale = 0.1 * math.log(c.rope_factor) + 1
        values[ORIGINAL_KEY] = c.rope_original
        values["rope.scaling.attn_factor"] = c.rope_scale / usual_scale
    return values
