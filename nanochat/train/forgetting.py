"""Measures what a model forgets in fine-tuning: how well it still predicts general text.

The package has some English and Chinese passages of its own for this, which no run trains on.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import cast

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.common import UserError, log, tr
from nanochat.data.library_words import os_problem
from nanochat.dataloader import IGNORED
from nanochat.device import Compute
from nanochat.evals import loss
from nanochat.model import Model
from nanochat.runtime.trackers.jsonl import read_metrics
from nanochat.tokenizer import Tokenizer
from nanochat.train.validation import without_dropout

FIGURE = "general_perplexity"  # the name of the figure in metrics.jsonl
MOST_TOKENS = 32_768  # measured of a general text, so that a long file does not take hours
LONGEST_PASSAGE = 512  # tokens; longer passages are cut


@dataclass(frozen=True)
class PassageBatch:
    """A batch of passages in the form that evaluate_loss() reads."""

    micro_batches: Sequence[tuple[Tensor, ...]]  # inputs and targets, (B, T)
    extras: tuple[str, ...] = ()


def read_passages(file: Path | None) -> list[str]:
    """Return the passages of a text file, which blank lines separate.

    If `file` is None, return the passages that come with the package. Raises UserError (exit code
    2) if the file cannot be read, is not UTF-8, or holds no text.
    """
    if file is None:
        text = resources.files("nanochat").joinpath("data/general/texts.txt").read_text("utf-8")
    else:
        text = _read_text(file)
    passages = [passage.strip() for passage in text.split("\n\n") if passage.strip()]
    if not passages:
        raise UserError(
            tr("{file} holds no text: name a text file with some paragraphs", file=file),
            exit_code=2,
        )
    return passages


def _read_text(file: Path) -> str:
    try:
        return file.expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = os_problem(error)
    except UnicodeDecodeError:
        reason = tr("not UTF-8")
    raise UserError(
        tr(
            "--general_text must name a text file in UTF-8, with blank lines between passages; "
            "got {file} ({reason})",
            file=file,
            reason=reason,
        ),
        exit_code=2,
    )


def before_training(folder: Path) -> float | None:
    """Return the perplexity that a run measured before its first step, or None if it did not."""
    for line in read_metrics(folder):
        if line["step"] == 0 and FIGURE in line:
            return line[FIGURE]
    return None


class GeneralText:
    """Measures a model's perplexity on general text. Every rank creates one and calls it.

    `before` is the perplexity before training, once it is known.
    """

    def __init__(
        self,
        passages: Sequence[str],
        model: Model,
        tokenizer: Tokenizer,
        compute: Compute,
        before: float | None = None,
    ):
        self.model = model
        self.token_bytes = tokenizer.token_bytes()
        self.compute = compute
        self.before = before
        longest = min(model.config.sequence_len, LONGEST_PASSAGE)
        self._passages = _tokens_of(passages, tokenizer, longest)

    def perplexity(self, rows_per_pass: int) -> float:
        """Return exp of the mean loss per token, with at most `rows_per_pass` passages per pass.

        Raises signals.Stopped if the run is asked to stop.
        """
        with without_dropout(cast(nn.Module, self.model)):
            measured = loss.evaluate_loss(
                self.model, self._batches(rows_per_pass), self.token_bytes, self.compute
            )
        return math.exp(min(measured.nats_per_token, 700.0))

    def measure(self, step: int, rows_per_pass: int) -> float:
        """Return the perplexity, and log it beside the one before training if that is known.

        That is the one at step 0, or `before`; a run that measured nothing then has none.
        """
        perplexity = self.perplexity(rows_per_pass)
        if step == 0:
            self.before = perplexity
        if step == 0 or self.before is None:
            log(
                tr(
                    "step {step:05d} | general text: perplexity {perplexity:.3f}",
                    step=step,
                    perplexity=perplexity,
                )
            )
            return perplexity
        log(
            tr(
                "step {step:05d} | general text: perplexity {perplexity:.3f}, {factor:.2f} times "
                "the {before:.3f} before training",
                step=step,
                perplexity=perplexity,
                factor=perplexity / self.before,
                before=self.before,
            )
        )
        return perplexity

    def _batches(self, rows_per_pass: int) -> Iterator[PassageBatch]:
        """Yield this rank's batches; every rank gets the same number of them."""
        ranks = self.compute.world_size
        per_step = rows_per_pass * ranks
        for first in range(0, len(self._passages), per_step):
            rows = self._passages[first : first + per_step]
            rank_rows = rows[self.compute.rank :: ranks]
            if rank_rows:
                yield PassageBatch([_padded(rank_rows)])
            else:  # a sharded model needs every rank
                inputs, targets = _padded(rows[:1])
                yield PassageBatch([(inputs, torch.full_like(targets, IGNORED))])


def _tokens_of(passages: Sequence[str], tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    """Return the tokens of each passage after a BOS token, cut to `longest` inputs and a target."""
    tokens = []
    total = 0
    for passage in passages:
        passage_tokens = [tokenizer.bos, *tokenizer.encode(passage)][: longest + 1]
        tokens.append(passage_tokens)
        total += len(passage_tokens)
        if total >= MOST_TOKENS:
            break
    return tokens


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:  # (B, T), (B, T)
    """Return the inputs and targets of rows, padded to the longest row with ignored targets."""
    length = max(len(row) for row in rows) - 1
    inputs = torch.zeros(len(rows), length, dtype=torch.long)
    targets = torch.full((len(rows), length), IGNORED)
    for i, row in enumerate(rows):
        inputs[i, : len(row) - 1] = torch.tensor(row[:-1])
        targets[i, : len(row) - 1] = torch.tensor(row[1:])
    return inputs, targets
