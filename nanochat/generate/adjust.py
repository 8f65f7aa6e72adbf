"""Changes logits before tokens are chosen: penalties, biases, delayed end marks and schema masks.

A request with such settings keeps arrays of its tokens. A step joins the arrays of these requests,
so that the same few operators adjust all of them, and the other requests cost nothing.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from nanochat.generate.sampling import Sampling


class History:
    """A request's biases, and the tokens subject to penalties with their counts in the reply."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        ends: Sequence[int],
        reply_length: int,
    ):
        """Start the history of a request, before its reply.

        `ends` are the tokens that end the reply, which has at most `reply_length` tokens.
        """
        self._sampling = sampling
        self._ends = np.array(ends, dtype=np.int64)
        prompt_ids = []
        if sampling.repetition_penalty != 1:
            prompt_ids = sorted(set(prompt))
        size = len(prompt_ids) + reply_length
        self._indices = {token: index for index, token in enumerate(prompt_ids)}
        self._tokens = np.zeros(size, dtype=np.int64)
        self._tokens[: len(prompt_ids)] = prompt_ids
        self._counts = np.zeros(size, dtype=np.float32)
        biased = [token for token, _ in sampling.logit_bias]
        biases = [bias for _, bias in sampling.logit_bias]
        self._biased = np.array(biased, dtype=np.int64)
        self._biases = np.array(biases, dtype=np.float32)
        self.generated = 0

    def add(self, token: int) -> None:
        """Count a token of the reply."""
        index = self._indices.setdefault(token, len(self._indices))
        self._tokens[index] = token
        self._counts[index] += 1
        self.generated += 1

    def tokens(self) -> np.ndarray:
        """Return the distinct tokens that are subject to penalties, in a fixed order."""
        return self._tokens[: len(self._indices)]

    def penalties(self) -> np.ndarray:
        """Return the amount to subtract from the logit of each of tokens()."""
        counts = self._counts[: len(self._indices)]
        frequency = counts * self._sampling.frequency_penalty
        presence = (counts > 0) * self._sampling.presence_penalty
        return (frequency + presence).astype(np.float32)

    def factors(self) -> np.ndarray:
        """Return the repetition penalty of each of tokens()."""
        factors = np.empty(len(self._indices), dtype=np.float32)
        factors.fill(self._sampling.repetition_penalty)
        return factors

    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens, and the amount to add to the logit of each.

        Until the reply has its minimum length, they include -inf for every token that ends it.
        """
        if self.generated >= self._sampling.min_tokens:
            return self._biased, self._biases
        forbidden = np.empty(len(self._ends), dtype=np.float32)
        forbidden.fill(-np.inf)
        tokens = np.concatenate((self._biased, self._ends))
        values = np.concatenate((self._biases, forbidden))
        return tokens, values


def adjuster(
    histories: Sequence[History | None],
    masks: Mapping[int, bytes],
) -> Callable[[Tensor], None]:
    """Return a function that applies penalties, biases and masks to logits (B, V) in place.

    `histories` has one entry per row, None if a row has no penalties or biases. `masks` maps each
    row that has a grammar to the mask of its allowed tokens.
    """
    by_row: dict[int, History] = {}
    for row, history in enumerate(histories):
        if history is not None:
            by_row[row] = history

    def adjust(logits: Tensor) -> None:
        if by_row:
            _penalise(logits, by_row)
            _add_biases(logits, by_row)
        if masks:
            _mask(logits, masks)

    return adjust


def _penalise(logits: Tensor, histories: Mapping[int, History]) -> None:
    """Apply the penalties of each row to the logits of the tokens in its history."""
    V = logits.size(1)
    positions = []
    penalties = []
    factors = []
    for row, history in histories.items():
        positions.append(row * V + history.tokens())
        penalties.append(history.penalties())
        factors.append(history.factors())
    index = np.concatenate(positions)
    if not len(index):
        return
    index = _on(index, logits.device)
    penalty = _on(np.concatenate(penalties), logits.device)
    factor = _on(np.concatenate(factors), logits.device)
    flat = logits.view(-1)
    before = flat[index]
    repeated = torch.where(before > 0, before / factor, before * factor)
    flat[index] = repeated - penalty


def _add_biases(logits: Tensor, histories: Mapping[int, History]) -> None:
    """Add each row's biases to its logits, including -inf for end tokens before min_tokens."""
    V = logits.size(1)
    positions = []
    biases = []
    for row, history in histories.items():
        tokens, values = history.biases()
        positions.append(row * V + tokens)
        biases.append(values)
    index = np.concatenate(positions)
    if not len(index):
        return
    values = np.concatenate(biases).astype(np.float32)
    index = _on(index, logits.device)
    values = _on(values, logits.device)
    logits.view(-1).index_add_(0, index, values)


def _mask(logits: Tensor, masks: Mapping[int, bytes]) -> None:
    """Set logits to -inf where a row has a mask that does not allow the token."""
    rows = torch.tensor(list(masks))
    index = rows.to(logits.device, non_blocking=True)
    row_masks = list(masks.values())
    allowed = allowed_rows(row_masks, logits.size(1), logits.device)
    masked = logits[index].masked_fill_(~allowed, float("-inf"))
    logits.index_copy_(0, index, masked)


def allowed_rows(
    masks: Sequence[bytes],
    vocabulary: int,
    device: torch.device,
) -> Tensor:  # (n, V) bool
    """Return the masks of Grammar.allowed(), one per row, unpacked to one boolean per token."""
    joined = bytearray(b"".join(masks))
    packed = torch.frombuffer(joined, dtype=torch.uint8).view(len(masks), -1)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    bits = packed.to(device)[:, :, None] >> shifts
    return (bits & 1).flatten(1)[:, :vocabulary].bool()


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on a device."""
    contiguous = np.ascontiguousarray(array)
    return torch.from_numpy(contiguous).to(device, non_blocking=True)
