"""The Llama models: Llama 2 and 3, SmolLM2, Mistral, and others with their layers.

They are Qwen models without biases and without norms of queries and keys, unless their config.json
asks for biases. The class is their mark in checkpoints and in GGUF files, whose layout differs.
"""

from dataclasses import dataclass

from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen


@dataclass(frozen=True)
class LlamaConfig(QwenConfig):
    """The shape of a Llama model."""

    qk_norm: int = 0


class Llama(Qwen):
    """A Llama model, with the members that model.py requires of every family."""

    config: LlamaConfig
