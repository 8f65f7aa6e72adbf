"""What a token knows of the token before it: embeddings of pairs of tokens, and keys with an offset.

Bigrams are embeddings of pairs of neighbouring tokens, in one table whose rows the pairs share by a hash. They cost a
look-up and no FLOPs. The idea is the hashed bigrams of modded-nanogpt's record of January 2026, which adds them in
every layer; here they join the token's embedding once, which learned as much (dev/LOG.md).

With an offset, half of every key tells what the token before was. A query finds the places where its own token stood
before by one layer, and reads there what followed; without an offset that takes two layers (induction heads, arXiv
2209.11895). The idea is modded-nanogpt's partial key offset.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from nanochat.common import UserError
from nanochat.nn.together import Embedding

FACTORS = (
    2654435,
    40503,
)  # of the token before and of the token: odd, so that no row of a power of two is left out


class Bigrams(Embedding):
    """A table of `rows` embeddings; UserError if there are none."""

    few_rows = True  # a step reads few of them, so ranks need not exchange the others; see parallel.shard()

    def __init__(self, rows: int, channels: int):
        if rows < 1:
            raise UserError(
                f"bigram_rows must be at least 1, or 0 for none, got {rows}", exit_code=2
            )
        super().__init__(rows, channels)

    def forward(
        self, before: Tensor, input: Tensor
    ) -> Tensor:  # (B, T) token ids each -> (B, T, C)
        """The embedding of every token `input` with the token `before` it; 0 stands for no token."""
        rows = (before * FACTORS[0] + input * FACTORS[1]) % self.num_embeddings
        return F.embedding(rows, self.weight, sparse=self.sparse and not is_compiling())


def with_offset(k: Tensor, before: Tensor) -> Tensor:  # (B, T, Hkv, D) each, as the result
    """Keys whose slowly turning half comes from the keys `before`: those of the token before each token. Channels i
    and i + D/2 turn together, the slower the larger i is."""
    own, other = (keys.unflatten(-1, (2, 2, -1)) for keys in (k, before))
    return torch.stack((own[..., 0, :], other[..., 1, :]), dim=-2).flatten(-3)


def shifted(x: Tensor) -> Tensor:  # (B, T, ...)
    """What the place before each place of a row has in `x`; zeros at the first."""
    return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
