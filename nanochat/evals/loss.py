"""Bits per byte: the loss of a model in a unit that does not depend on the tokenizer."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from nanochat import dataloader
from nanochat.common import UserError
from nanochat.context import model_arguments
from nanochat.data.mixing import Data
from nanochat.device import Compute, to_device
from nanochat.model import Model
from nanochat.runtime import parallel, signals
from nanochat.tokenizer import Tokenizer


class Batches(Protocol):
    """A step of the data loader: inputs and targets of shape (B, T) on the host, and what `extras` names besides; a
    target of -1 is ignored."""

    @property
    def micro_batches(self) -> Iterable[tuple[Tensor, ...]]: ...

    @property
    def extras(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Loss:
    """The loss over all ranks. Special tokens count neither as tokens nor as bytes."""

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
    """The loss over all targets of `steps` that are text, divided by the bytes of that text.

    Every rank must call it with the same number of steps, each with its own rows; all ranks get the same result.
    The device sums the nats of each row in fp32, and the host adds up the rows in float64 after the last step.
    UserError if there is no text to measure; signals.Stopped if a training run is told to stop.
    """
    lengths = torch.from_numpy(token_bytes.astype(np.int64))
    row_nats: list[Tensor] = []
    tokens = size = 0
    for step in steps:
        signals.check(compute)
        for inputs, targets, *more in step.micro_batches:
            of_target = torch.where(targets >= 0, lengths[targets.clamp_min(0)], 0)  # (B, T)
            text = torch.where(of_target > 0, targets, -1)  # the loss of a target of -1 is 0 nats
            extras = {
                name: to_device(value, compute)
                for name, value in zip(step.extras, more, strict=True)
            }
            losses = model(
                to_device(inputs, compute),
                to_device(text, compute),
                reduction="none",
                **model_arguments(extras),
            )
            row_nats.append(losses.float().sum(dim=1))
            tokens += int((of_target > 0).sum())
            size += int(of_target.sum())
    nats = float(torch.cat(row_nats).cpu().double().sum()) if row_nats else 0.0
    nats, all_tokens, all_bytes = parallel.total([nats, float(tokens), float(size)], compute)
    if all_bytes == 0:
        raise UserError(
            "no text to measure bits per byte on: the rows to evaluate hold only special tokens. Evaluate more tokens "
            "(--eval_tokens or --split_tokens), or prepare more validation data"
        )
    return Loss(
        nats / (math.log(2) * all_bytes), nats / all_tokens, int(all_tokens), int(all_bytes)
    )


def bits_per_byte(
    model: Callable[..., Any], steps: Iterable[Batches], token_bytes: np.ndarray, compute: Compute
) -> float:
    """The bits per byte that `evaluate_loss` measures."""
    return evaluate_loss(model, steps, token_bytes, compute).bits_per_byte


def evaluate_split(
    model: Model,
    tokenizer: Tokenizer,
    data: Data,
    split: Literal["train", "val"],
    tokens: int | Literal["auto"],
    device_batch_size: int | Literal["auto"],
    compute: Compute,
) -> Loss:
    """The loss of an unsharded model on the first `tokens` tokens of a split, equal for any number of ranks.

    auto means 10 M tokens and 32 rows per pass, or, on a CPU, 262,144 tokens and 4,096 tokens per pass.
    """
    length, platform = model.config.sequence_len, compute.platform
    if tokens == "auto":
        tokens = platform.split_tokens
    if device_batch_size == "auto":
        per_pass = platform.pass_tokens
        device_batch_size = (
            platform.evaluation_rows if per_pass is None else max(per_pass // length, 1)
        )
    if tokens < 1 or device_batch_size < 1:
        raise UserError(
            f"split_tokens and device_batch_size must be at least 1, got {tokens} and {device_batch_size}",
            exit_code=2,
        )
    rows = dataloader.split_rows(data, tokenizer, split, length)
    steps = dataloader.one_pass(rows, tokens, device_batch_size, compute)
    return evaluate_loss(model, steps, tokenizer.token_bytes(), compute)
