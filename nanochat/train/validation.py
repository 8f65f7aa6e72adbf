"""Measures a model on held-out rows during training, by a loss and by sample replies."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.nn as nn
from torch import Tensor

from nanochat import dataloader, device
from nanochat.common import tr
from nanochat.dataloader import Source
from nanochat.device import Compute
from nanochat.evals import loss
from nanochat.model import Model
from nanochat.runtime import parallel, signals
from nanochat.tokenizer import Tokenizer
from nanochat.train import samples


class Sums(Protocol):
    """A loss function that also computes other figures, as the preference loss does (Protocol)."""

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of the figures other than the loss."""
        ...

    def __call__(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, **extras: Tensor
    ) -> Tensor:
        """Return the sums of the loss and of every figure over the targets of a pass, (1 + F,)."""
        ...


def validation_line(step: int, val_bpb: float, of_answers: bool = False) -> str:
    """Return the log line of a validation. Scripts read the figure from metrics.jsonl instead."""
    values = {"step": step, "val_bpb": val_bpb}
    if of_answers:
        return tr(
            "step {step:05d} | validation: {val_bpb:.4f} bits per byte of the answers", **values
        )
    return tr("step {step:05d} | validation: {val_bpb:.4f} bits per byte", **values)


class Validation:
    """Measures a model on the held-out rows of a run.

    Every rank creates one, and calls the same methods. The methods that measure raise
    signals.Stopped if the run is asked to stop.
    """

    def __init__(
        self,
        rows: Source,
        tokens: int,
        model: Model,
        tokenizer: Tokenizer,
        prompts: int,
        compute: Compute,
    ):
        """Prepare to measure on the first `tokens` tokens of `rows`.

        The model will reply to at most `prompts` prompts from these rows.
        """
        self.rows = rows
        self.tokens = tokens
        self.model = model
        self.tokenizer = tokenizer
        self.compute = compute
        self.prompts = samples.held_out_prompts(rows, prompts, tokenizer)

    def bits_per_byte(self, device_batch_size: int) -> float:
        """Return the bits per byte, measured with at most `device_batch_size` rows per pass."""
        with without_dropout(cast(nn.Module, self.model)):
            return loss.bits_per_byte(
                self.model,
                self._steps(device_batch_size),
                self.tokenizer.token_bytes(),
                self.compute,
            )

    def means(self, sums: Sums, device_batch_size: int) -> dict[str, float]:
        """Return a dict of means over all targets: "loss" and, by name, each figure of `sums`."""
        module = cast(nn.Module, self.model)
        with without_dropout(module):
            return mean_over(sums, module, self._steps(device_batch_size), self.compute)

    def keep_replies(self, folder: Path, step: int) -> None:
        """Let the model reply to the prompts, and save the replies as samples of this step."""
        samples.keep_replies(folder, step, self.prompts, self.model, self.tokenizer, self.compute)

    def _steps(self, device_batch_size: int) -> Iterator[dataloader.Step]:
        return loss.one_pass(self.rows, self.tokens, device_batch_size, self.compute)


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside this block, and into training mode afterwards."""
    model.eval()
    try:
        yield
    finally:
        model.train()


@torch.no_grad()
def mean_over(
    sums: Sums, model: nn.Module, steps: Iterable[dataloader.Step], compute: Compute
) -> dict[str, float]:
    """Return a dict of means over all targets of `steps`: "loss" and, by name, each figure.

    Every rank must call this with the same number of steps, each with its own rows; all ranks get
    the same result. Raises signals.Stopped if the run is asked to stop.
    """
    on_device = [torch.zeros(1 + len(sums.figures), device=compute.device)]
    num_targets = 0
    for step in steps:
        signals.check(compute)
        num_targets += step.num_targets
        for batch in step.micro_batches:
            inputs, targets, *extra_tensors = (
                device.to_device(tensor, compute) for tensor in batch
            )
            extras = dict(zip(step.extras, extra_tensors, strict=True))
            on_device.append(sums(model, inputs, targets, **extras))
    # sum on the host, since NPUs have no float64
    on_host = torch.stack(on_device).cpu().double().sum(dim=0)
    totals = parallel.total(on_host.tolist(), compute)
    means = [total / max(num_targets, 1) for total in totals]
    return dict(zip(("loss", *sums.figures), means, strict=True))
