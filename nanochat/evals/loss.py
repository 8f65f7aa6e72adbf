"""Measures bits per byte, a model's loss in a unit that does not depend on the tokenizer."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from nanochat import dataloader
from nanochat.common import UserError, tr
from nanochat.context import Packed
from nanochat.data.mixing import Data
from nanochat.device import Compute, to_device
from nanochat.model import Model
from nanochat.runtime import parallel, signals
from nanochat.tokenizer import Tokenizer


class Batches(Protocol):
    """A step of the data loader, as batches on the host.

    Each batch holds inputs and targets, (B, T), and then the tensors named in `extras`. Negative
    targets are ignored.
    """

    @property
    def micro_batches(self) -> Iterable[tuple[Tensor, ...]]: ...

    @property
    def extras(self) -> tuple[str, ...]: ...


def one_pass(
    rows: dataloader.Source,
    tokens: int,
    device_batch_size: int,
    compute: Compute,
) -> Iterator[dataloader.Step]:
    """Yield steps that together hold the first `tokens` tokens of the rows, for an evaluation.

    Only whole rows count, at least one row and at most one epoch, and they are the same on any
    number of ranks. Each step has one micro-batch per rank. A rank without a row in the last step
    gets a row without targets, because a sharded model needs every rank.
    """
    num_rows = tokens // (rows.row_tokens - 1)
    num_rows = max(min(num_rows, rows.count), 1)
    rows_per_step = device_batch_size * compute.world_size
    for first in range(0, num_rows, rows_per_step):
        size = min(rows_per_step, num_rows - first)
        step = dataloader.make_step(rows, first, size, device_batch_size, compute)
        if not step.micro_batches:
            inputs, targets, *extras = rows.batch(rows.plan_rows(first, 1))
            no_targets = torch.full_like(targets, dataloader.IGNORED)
            step.micro_batches.append(dataloader.pinned((inputs, no_targets, *extras), compute))
        yield step


@dataclass(frozen=True)
class Loss:
    """A model's loss over all ranks; special tokens count neither as tokens nor as bytes."""

    bits_per_byte: float
    nats_per_token: float
    tokens: int
    bytes: int


@torch.no_grad()
def evaluate_loss(
    model: Callable[..., Any],
    steps: Iterable[Batches],
    token_bytes: np.ndarray,  # (V,) bytes of text in each token, 0 for special tokens
    compute: Compute,
) -> Loss:
    """Return the loss over all targets of `steps` that are text, per token and per byte.

    Every rank must call this with the same number of steps, each with its own rows; all ranks get
    the same result. The device sums the nats of each row in fp32, and the host adds up the rows in
    float64 after the last step. Raises UserError if there is no text to measure, and
    signals.Stopped if any rank is asked to stop.
    """
    bytes_of = torch.from_numpy(token_bytes.astype(np.int64))  # (V,)
    row_nats: list[Tensor] = []
    token_count = 0
    byte_count = 0
    for step in steps:
        signals.check(compute)
        for inputs, targets, *more in step.micro_batches:
            target_bytes = torch.where(targets >= 0, bytes_of[targets.clamp_min(0)], 0)  # (B, T)
            is_text = target_bytes > 0
            text_targets = torch.where(is_text, targets, -1)  # a target of -1 has a loss of 0 nats
            arguments = {}
            if "documents" in step.extras:
                documents = more[step.extras.index("documents")]
                arguments["context"] = Packed(to_device(documents, compute))
            losses = model(
                to_device(inputs, compute),
                to_device(text_targets, compute),
                reduction="none",
                **arguments,
            )
            row_nats.append(losses.float().sum(dim=1))
            token_count += int(is_text.sum())
            byte_count += int(target_bytes.sum())
    nats = float(torch.cat(row_nats).cpu().double().sum()) if row_nats else 0.0
    rank_sums = [nats, float(token_count), float(byte_count)]
    all_nats, all_tokens, all_bytes = parallel.total(rank_sums, compute)
    if all_bytes == 0:
        raise UserError(
            tr(
                "no text to measure bits per byte on: the rows to evaluate hold only "
                "special tokens. Evaluate more tokens (--eval_tokens or --split_tokens), or "
                "prepare more validation data"
            )
        )
    return Loss(
        bits_per_byte=all_nats / (math.log(2) * all_bytes),
        nats_per_token=all_nats / all_tokens,
        tokens=int(all_tokens),
        bytes=int(all_bytes),
    )


def bits_per_byte(
    model: Callable[..., Any],
    steps: Iterable[Batches],
    token_bytes: np.ndarray,
    compute: Compute,
) -> float:
    """Return only the bits per byte that evaluate_loss() measures."""
    return evaluate_loss(model, steps, token_bytes, compute).bits_per_byte


def check_sizes(tokens: int | Literal["auto"], device_batch_size: int | Literal["auto"]) -> None:
    """Raise UserError (exit code 2) if either of the sizes for evaluate_split() is less than 1."""
    for size in (tokens, device_batch_size):
        if size != "auto" and size < 1:
            raise UserError(
                tr(
                    "split_tokens and device_batch_size must be at least 1, got {tokens} and "
                    "{device_batch_size}",
                    tokens=tokens,
                    device_batch_size=device_batch_size,
                ),
                exit_code=2,
            )


def evaluate_split(
    model: Model,
    tokenizer: Tokenizer,
    data: Data,
    split: Literal["train", "val"],
    tokens: int | Literal["auto"],
    device_batch_size: int | Literal["auto"],
    compute: Compute,
    row_tokens: int | None = None,
) -> Loss:
    """Return an unsharded model's loss on about the first `tokens` tokens of a shuffled split.

    The model reads rows of `row_tokens` tokens, by default as many as its context has. Up to
    rounding, the result does not depend on the number of ranks. "auto" means 10,485,760 tokens and
    32 rows per pass or, on a CPU, 262,144 tokens and about 4,096 tokens per pass. Raises UserError
    as check_sizes() does.
    """
    check_sizes(tokens, device_batch_size)
    if row_tokens is None:
        row_tokens = model.config.sequence_len
    platform = compute.platform
    if tokens == "auto":
        tokens = platform.split_tokens
    if device_batch_size == "auto":
        device_batch_size = platform.evaluation_rows
        if platform.pass_tokens is not None:
            device_batch_size = max(platform.pass_tokens // row_tokens, 1)
    rows = dataloader.split_rows(data, tokenizer, split, row_tokens)
    steps = one_pass(rows, tokens, device_batch_size, compute)
    return evaluate_loss(model, steps, tokenizer.token_bytes(), compute)
