"""A model whose state depends on every token before, as a DeltaNet layer's does, and cannot be cut."""

import torch

from nanochat.attention import PlainAttention
from nanochat.cache import Cache
from nanochat.context import Cached
from nanochat.gpt import GPTConfig
from nanochat.tokenizer import Tokenizer

MODULUS = 1_000_003


class Recurrent:
    """Stands in for a GPT. A slot's state is a hash of its tokens, and the hash decides the next token."""

    def __init__(self, tokenizer: Tokenizer, length: int):
        self.config = GPTConfig(
            sequence_len=length, vocab_size=tokenizer.vocab_size, n_layer=1, n_head=1, n_kv_head=1, n_embd=24
        )
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.attention = PlainAttention()
        self._words = tokenizer.vocab_size - 9  # the model says no marks

    def new_cache(self, slots: int, length: int, dtype: torch.dtype | None = None) -> Cache:
        cache = Cache(1, slots, length, 1, 2, self.device, self.dtype)
        cache.states.append(torch.zeros(slots, 1, dtype=torch.long))
        return cache

    def hidden(self, idx: torch.Tensor, context: Cached) -> torch.Tensor:
        cache, slots, lengths = context.cache, context.slots, context.lengths
        assert lengths is not None and context.cached is not None
        assert list(context.cached) == cache.positions[slots].tolist()
        out = torch.zeros(*idx.shape, 1)
        for row, slot in enumerate(range(slots.start, slots.stop)):
            state = int(cache.states[2][slot])
            for t in range(int(lengths[row])):
                state = (state * 31 + int(idx[row, t]) + 1) % MODULUS
                out[row, t, 0] = state % self._words
            cache.states[2][slot] = state
        cache.positions[slots] += lengths
        return out

    def log_totals(self, logits: torch.Tensor) -> None:
        return None

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(x[:, 0].long(), self.config.vocab_size).float() * 10
