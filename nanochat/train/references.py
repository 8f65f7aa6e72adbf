"""Scores rows under the model as it is before training, and saves the scores beside the tokens.

A run that resumes has only the trained model, so it reads the saved scores.
"""

import hashlib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from nanochat.common import atomic_path, tr, warn
from nanochat.data.library_words import in_words
from nanochat.dataloader import Rows
from nanochat.device import Compute, to_device
from nanochat.runtime import parallel, signals
from nanochat.runtime.progress import Progress

Scores = np.ndarray  # float32


def saved_or_scored(
    folder: Path,
    facts: str,
    shape: tuple[int, ...],
    score: Callable[[], Scores],
    compute: Compute,
) -> Scores:
    """Return the saved scores of the given shape or, if there are none, save what score() returns.

    `facts` names all that the scores depend on. score() returns 0 for the rows of other ranks.
    Every rank must call this, and all of them get the same scores.
    """
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    path = folder / f"reference-{digest}.npz"
    scores = _load(path, shape) if compute.main else None
    if not parallel.agree(int(scores is not None), compute):
        scores = _sum(score(), compute)
        if compute.main:
            with atomic_path(path) as temporary, open(temporary, "wb") as file:
                np.savez(file, references=scores)
    if scores is None or not compute.main:
        # Rank 0 sends its scores to the other ranks, which may not share its disk.
        scores = np.zeros(shape, np.float32)
    return _sum(scores, compute)


def _load(path: Path, shape: tuple[int, ...]) -> Scores | None:
    """Return the scores in a file, or None if there is no such file.

    If the file is damaged or holds another shape or type, warn and return None.
    """
    if not path.exists():
        return None
    try:
        with np.load(path) as content:  # checks the CRC of what it reads
            scores = content["references"]
        if scores.shape == shape and scores.dtype == np.float32:
            return scores
        why = tr(
            "it holds {shape} values of {dtype}, expected {expected}",
            shape=scores.shape,
            dtype=scores.dtype,
            expected=shape,
        )
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as failure:
        why = in_words(failure)
    warn(
        tr(
            "the reference's log-probabilities in {path} cannot be used and are computed "
            "again: {why}",
            path=path,
            why=why,
        )
    )
    return None


@torch.no_grad()
def row_scores(
    rows: Rows,
    model: nn.Module,
    score: Callable[..., Tensor],  # takes the tensors of a batch on the device, returns (B, ...)
    batch_rows: int,
    compute: Compute,
) -> Iterator[tuple[int, Scores]]:
    """Yield each of this rank's rows of the plan, by its number, with its scores.

    The ranks divide the rows, and a pass has at most `batch_rows` of them on each rank. Every rank
    must read all that this yields. Raises signals.Stopped if the run is asked to stop.
    """
    rows_per_pass = batch_rows * compute.world_size
    title = tr("reference {name}", name=rows.folder.name)
    model.eval()  # without dropout
    with Progress(title, rows.size, tr("rows"), shown=compute.main) as progress:
        for first in range(0, rows.size, rows_per_pass):
            signals.check(compute)
            begin = first + compute.rank * batch_rows
            numbers = range(begin, min(begin + batch_rows, rows.size))
            # A sharded model needs every rank in every pass, so a rank without rows reads row 0.
            tensors = rows.batch(np.array(numbers or [0], np.int64))
            scores = score(*(to_device(tensor, compute) for tensor in tensors))
            yield from zip(numbers, scores.cpu().numpy(), strict=len(numbers) > 0)
            compute.pulse.beat()
            progress.advance(min(rows_per_pass, rows.size - first))
    model.train()


def _sum(values: Scores, compute: Compute) -> Scores:
    """Return the sum of `values` over all ranks.

    Where only one rank has a nonzero value, the sum is exactly that value.
    """
    sums = parallel.total(values.ravel().tolist(), compute)
    return np.array(sums, np.float32).reshape(values.shape)
