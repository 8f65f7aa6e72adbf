"""Rows of several documents, none of which may see another."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat.nn.plain_attention import cache_mask


@dataclass(frozen=True)
class Packed:
    """What the layers need to know of rows that hold several documents."""

    documents: Tensor  # (B, T) the number of each token's document, rising along a row
    positions: Tensor  # (B, T) the place of each token in its document
    mask: Tensor  # (B, 1, T, T) bool, True where a query sees a key


def packed_rows(documents: Tensor) -> Packed:  # (B, T)
    """Positions and attention mask of rows whose tokens belong to the given documents."""
    T = documents.size(1)
    places = torch.arange(T, device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = (places * first).cummax(dim=1).values
    same = (documents[:, :, None] == documents[:, None, :])[:, None]
    return Packed(documents, places - starts, same & cache_mask(places, T, T))
