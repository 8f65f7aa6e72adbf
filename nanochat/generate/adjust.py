"""Changes logits before a token is chosen: penalties, biases, end marks that must wait, and the masks of schemas.

Every request keeps the tokens it has seen in arrays that grow by one entry at a time. A step joins the arrays of the
requests that need any, so that all of them are adjusted by the same few operators and others cost nothing.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from nanochat.generate.sampling import Sampling
from nanochat.generate.schema.grammar import allowed_rows


class History:
    """The distinct tokens of one request, and how often each one occurs in the reply."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, ends: Sequence[int], most: int):
        """`ends` are the tokens that end the reply; at most `most` tokens are seen in all."""
        self._sampling, self._ends = sampling, list(ends)
        seen = sorted(set(prompt)) if sampling.repetition_penalty != 1 else []
        self._places = {token: place for place, token in enumerate(seen)}
        self._tokens = np.zeros(len(seen) + most, dtype=np.int64)
        self._tokens[: len(seen)] = seen
        self._counts = np.zeros(len(seen) + most, dtype=np.float32)
        self._biased = np.array([token for token, _ in sampling.logit_bias], dtype=np.int64)
        self._biases = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        self.generated = 0

    def add(self, token: int) -> None:
        """Count a token of the reply."""
        place = self._places.setdefault(token, len(self._places))
        self._tokens[place] = token
        self._counts[place] += 1
        self.generated += 1

    def seen(self) -> tuple[np.ndarray, np.ndarray, float]:
        """The distinct tokens, what is taken from the logit of each, and the repetition penalty."""
        size, s = len(self._places), self._sampling
        counts = self._counts[:size]
        return (
            self._tokens[:size],
            counts * s.frequency_penalty + (counts > 0) * s.presence_penalty,
            (s.repetition_penalty),
        )

    def added(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and what is added to the logit of each."""
        if self.generated >= self._sampling.min_tokens:
            return self._biased, self._biases
        waiting = np.full(len(self._ends), -np.inf, dtype=np.float32)
        return np.concatenate((self._biased, self._ends)), np.concatenate((self._biases, waiting))


def adjuster(
    histories: Sequence[History | None], masks: Mapping[int, bytes]
) -> Callable[[Tensor], None] | None:
    """What to do to the logits (B, V) of rows with these histories, and of rows that have a mask of a grammar; None if
    nothing is to be done."""
    counted = [(row, history) for row, history in enumerate(histories) if history is not None]
    if not counted and not masks:
        return None

    def adjust(logits: Tensor) -> None:
        if counted:
            _penalise(logits, counted)
        if masks:
            index = torch.tensor([*masks]).to(logits.device, non_blocking=True)
            allowed = allowed_rows([*masks.values()], logits.size(1), logits.device)
            logits.index_copy_(0, index, logits[index].masked_fill_(~allowed, float("-inf")))

    return adjust


def _penalise(logits: Tensor, counted: Sequence[tuple[int, History]]) -> None:
    """Apply penalties and biases; a request's own tokens are the only ones that change."""
    V, flat = logits.size(1), logits.view(-1)
    seen = [(row, *history.seen()) for row, history in counted]
    places = np.concatenate([row * V + tokens for row, tokens, _, _ in seen])
    taken = np.concatenate([minus for _, _, minus, _ in seen]).astype(np.float32)
    factors = np.concatenate(
        [np.full(len(tokens), factor, np.float32) for _, tokens, _, factor in seen]
    )
    if len(places):
        index, minus, factor = (_on(array, logits.device) for array in (places, taken, factors))
        before = flat[index]
        flat[index] = torch.where(before > 0, before / factor, before * factor) - minus
    added = [(row, *history.added()) for row, history in counted]
    places = np.concatenate([row * V + tokens for row, tokens, _ in added])
    if len(places):
        values = np.concatenate([bias for _, _, bias in added]).astype(np.float32)
        flat.index_add_(0, _on(places, logits.device), _on(values, logits.device))


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
