"""Bits per byte against a plain sum: which bytes count, which targets are ignored, and how ranks add up."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.evals import loss as loss_eval
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer

CPU = Compute(torch.device("cpu"), "cpu", "gloo", 0, 0, 1, torch.float32, "a test")
TOKENIZER = tiny_tokenizer()
MODEL = tiny_gpt(TOKENIZER.vocab_size)


@dataclass
class Batch:
    """A step of the data loader."""

    micro_batches: list[tuple[Tensor, Tensor]]
    extras: tuple[str, ...] = ()


def batch_of(texts: list[str], length: int = 24) -> tuple[Tensor, Tensor]:
    """One row per text: BOS, the text, and BOS as padding. The targets of padding are ignored, except the first."""
    inputs = torch.full((len(texts), length), TOKENIZER.bos)
    targets = torch.full((len(texts), length), -1)
    for b, text in enumerate(texts):
        tokens = [TOKENIZER.bos, *TOKENIZER.encode(text), TOKENIZER.bos][: length + 1]
        inputs[b, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        targets[b, : len(tokens) - 1] = torch.tensor(tokens[1:])
    return inputs, targets


STEPS = [
    Batch([batch_of(["the cat sat", "on the mat"]), batch_of(["猫坐在垫子上"])]),
    Batch([batch_of(["strawberry 12 34"]), batch_of(["", "count"])]),
]


def by_hand(steps: list[Batch]) -> tuple[float, int, int]:
    """Nats, tokens and bytes, summed one position at a time in float64."""
    nats, tokens, size = 0.0, 0, 0
    for step in steps:
        for inputs, targets in step.micro_batches:
            with torch.no_grad():
                logits = MODEL(inputs).double()
            for b in range(inputs.size(0)):
                for t in range(inputs.size(1)):
                    target = int(targets[b, t])
                    if target >= 0 and target < TOKENIZER.special("bos"):
                        nats -= float(logits[b, t].log_softmax(0)[target])
                        tokens += 1
                        size += len(TOKENIZER.decode_bytes([target]))
    return nats, tokens, size


def test_bits_per_byte_is_nats_over_bytes_of_the_text() -> None:
    nats, tokens, size = by_hand(STEPS)
    assert TOKENIZER.special("bos") == min(TOKENIZER.special(role) for role in ("bos", "user_start", "output_end"))
    assert size == sum(
        len(text.encode()) for text in ("the cat sat", "on the mat", "猫坐在垫子上", "strawberry 12 34", "count")
    )
    loss = loss_eval.evaluate_loss(MODEL, STEPS, TOKENIZER.token_bytes(), CPU)
    assert (loss.tokens, loss.bytes) == (tokens, size)
    assert loss.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    assert loss.nats_per_token == pytest.approx(nats / tokens, rel=1e-6)
    assert loss_eval.bits_per_byte(MODEL, STEPS, TOKENIZER.token_bytes(), CPU) == loss.bits_per_byte


def test_a_uniform_model_has_the_bits_of_its_choice() -> None:
    def uniform(inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        assert reduction == "none"
        return torch.where(targets >= 0, math.log(8), 0.0)

    token_bytes = np.array([1, 3, 0], dtype=np.int32)
    targets = torch.tensor([[0, 1, 2, -1]])  # one byte, three bytes, a special token, ignored
    loss = loss_eval.evaluate_loss(uniform, [Batch([(targets.clamp_min(0), targets)])], token_bytes, CPU)
    assert (loss.tokens, loss.bytes) == (2, 4)
    assert loss.bits_per_byte == pytest.approx(2 * 3 / 4)


def test_what_is_ignored_changes_nothing() -> None:
    inputs, targets = batch_of(["the cat sat on the mat"])
    masked = targets.clone()
    masked[0, 5:] = -1
    longer = torch.cat((masked, torch.full((1, 3), -1)), dim=1)
    more = torch.cat((inputs, torch.full((1, 3), 7)), dim=1)
    results = [
        loss_eval.evaluate_loss(MODEL, [Batch([pair])], TOKENIZER.token_bytes(), CPU)
        for pair in ((inputs, masked), (more, longer))
    ]
    assert results[0].bits_per_byte == pytest.approx(results[1].bits_per_byte, rel=1e-6)
    assert results[0].tokens == results[1].tokens == 5


def test_ranks_with_unlike_shares_give_the_result_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[list[float]] = []
    monkeypatch.setattr(loss_eval.parallel, "total", lambda values, compute: shares.append(values) or values)
    for steps in (STEPS[:1], STEPS[1:]):
        loss_eval.evaluate_loss(MODEL, steps, TOKENIZER.token_bytes(), CPU)
    both = [a + b for a, b in zip(*shares, strict=True)]
    monkeypatch.setattr(loss_eval.parallel, "total", lambda values, compute: both)
    # a rank without rows of its own still takes part
    loss = loss_eval.evaluate_loss(MODEL, [], TOKENIZER.token_bytes(), CPU)
    monkeypatch.undo()
    assert loss == loss_eval.evaluate_loss(MODEL, STEPS, TOKENIZER.token_bytes(), CPU)


def test_long_sums_lose_nothing() -> None:
    def constant(inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return torch.full(targets.shape, 0.1)

    pair = torch.zeros(8, 512, dtype=torch.long), torch.zeros(8, 512, dtype=torch.long)
    steps = [Batch([pair])] * 500  # 2 M tokens; a running fp32 sum would be wrong by several percent
    loss = loss_eval.evaluate_loss(constant, steps, np.array([1], dtype=np.int32), CPU)
    assert loss.nats_per_token == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("steps", [[], [Batch([])], [Batch([batch_of([""])])]])
def test_nothing_to_measure_is_refused_not_infinite(steps: list[Batch]) -> None:
    with pytest.raises(UserError, match="no text to measure"):
        loss_eval.bits_per_byte(MODEL, steps, TOKENIZER.token_bytes(), CPU)
