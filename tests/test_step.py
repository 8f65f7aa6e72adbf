"""The update: what it computes, and what it skips."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.updates import update
from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.meter import due
from nanochat.optim import Optimizers, Rates
from nanochat.step import LossScale, Outcome, Safeguards
from nanochat.train.validation import mean_over
from tests.support.tiny_model import on_cpu

CPU = on_cpu()
FP16 = replace(CPU, dtype=torch.float16)
CONFIG = GPTConfig(sequence_len=16, vocab_size=60, n_layer=2, n_head=2, n_kv_head=2, n_embd=32)


@dataclass
class Batches:
    """A step's micro-batches."""

    num_targets: int
    micro_batches: list[tuple[Tensor, ...]]
    extras: tuple[str, ...] = ()


def gpt(dtype: torch.dtype = torch.float32, seed: int = 1) -> GPT:
    model = GPT(CONFIG, dtype)
    model.init_weights(seed)
    with torch.no_grad():  # projections start at zero and would hide the layers
        for block in model.blocks:
            block.attn.c_proj.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
            block.mlp.c_proj.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
        model.lm_head.weight.mul_(100)
    return model


def optimizers_of(model: GPT) -> Optimizers:
    return Optimizers(model, model.parameter_roles(), CONFIG.n_embd, Rates(), 1.0, torch.float32)


def rows(seed: int = 0, count: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets with unequal numbers of ignored ones in every row, and token weights."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randint(0, 60, (count, 16), generator=generator) for _ in range(2))
    for row in range(count):
        targets[row, : 2 * row] = -1
    return inputs, targets, torch.randn(count, 16, generator=generator)


def split(columns: tuple[Tensor, ...], sizes: list[int]) -> Batches:
    parts = list(zip(*(column.split(sizes) for column in columns), strict=True))
    return Batches(int((columns[1] >= 0).sum()), parts, ("weights",) if len(columns) > 2 else ())


def test_sparse_gradients_of_bigrams_count_in_the_norm_and_give_the_same_step() -> None:
    """The same step of the same model, over two micro-batches, with sparse and with dense gradients of the table."""
    stepped, outcomes = [], []
    for sparse in (True, False):
        model = GPT(replace(CONFIG, bigram_rows=40))
        model.init_weights(1)
        with torch.no_grad():
            model.lm_head.weight.mul_(100)
        optimizers = optimizers_of(model)
        assert model.bigrams is not None and model.bigrams.sparse and optimizers.rows is not None
        model.bigrams.sparse = sparse
        outcomes.append(update(model, optimizers, split(rows()[:2], [5, 3]), LossScale(), CPU))
        stepped.append(model.bigrams.weight.detach().clone())
    assert outcomes[0].grad_norm == pytest.approx(outcomes[1].grad_norm, rel=1e-6)
    torch.testing.assert_close(stepped[0], stepped[1])
    assert stepped[0].any(dim=1).sum() > 20


class Recorder:
    """Stands in for the optimizers: keeps the gradients that a step would use."""

    def __init__(self, model: GPT):
        self.model, self.gradients = model, {}

    def step(self) -> None:
        with_gradient = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.gradients = {name: getattr(grad, "full_tensor", grad.clone)() for name, grad in with_gradient.items()}

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)


def gradients_of(
    model: GPT, batches: Batches, compute: Compute = CPU, scale: LossScale | None = None
) -> tuple[Outcome, dict[str, Tensor]]:
    recorder = Recorder(model)
    outcome = update(model, recorder, batches, scale or LossScale(), compute)
    return outcome, recorder.gradients


def snapshot(model: GPT, optimizers: Optimizers) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()] + [v.clone() for v, _, _ in optimizers.state().values()]


# --- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "every", "last", "expected"),
    [
        (0, 10, False, False), (1, 10, False, False), (10, 10, False, True), (20, 10, False, True),
        (15, 10, True, True), (0, 10, True, True), (0, 0, True, False), (5, 0, False, False), (5, 0, True, False),
        (5, -1, False, False), (5, -1, True, False), (1, 1, False, True),
    ],
)  # fmt: skip
def test_due_is_the_one_predicate(step: int, every: int, last: bool, expected: bool) -> None:
    assert due(step, every, last) is expected


# --- the update ----------------------------------------------------------------------------------


@dataclass
class Squares:
    """A loss that is no weighted sum of losses: their squares; it also counts the losses above 4."""

    figures: tuple[str, ...] = ("large",)

    def __call__(self, model: torch.nn.Module, inputs: Tensor, targets: Tensor, **extras: Tensor) -> Tensor:
        losses = model(inputs, targets, "none")
        return torch.stack((losses.square().sum(), (losses > 4).sum().float()))


class PartedSquares(Squares):
    def __call__(self, *arguments: Any) -> Any:
        sums = super().__call__(*arguments)
        return sums[0], sums[1:]


@pytest.mark.parametrize("sizes", [[8], [5, 3]])
def test_a_loss_may_be_any_function_of_the_losses_and_has_its_own_figures(sizes: list[int]) -> None:
    inputs, targets, _ = rows()
    model, reference = gpt(), gpt()
    losses = torch.nn.functional.cross_entropy(reference(inputs).flatten(0, 1), targets.flatten(), ignore_index=-1,
                                               reduction="none")  # fmt: skip
    count = int((targets >= 0).sum())
    (losses.square().sum() / count).backward()
    wanted = {"loss": losses.square().sum().item() / count, "large": (losses > 4).sum().item() / count}
    batches, recorder = split((inputs, targets), sizes), Recorder(model)
    assert mean_over(Squares(), model, [batches], CPU) == pytest.approx(wanted, rel=1e-4)
    outcome = update(model, recorder, batches, LossScale(), CPU, loss=PartedSquares())
    assert {"loss": outcome.loss, **outcome.figures} == pytest.approx(wanted, rel=1e-4)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(recorder.gradients[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("sizes", [[8], [1] * 8, [3, 3, 2]])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_does_not_depend_on_the_split(sizes: list[int], weighted: bool) -> None:
    """Rows have unequal numbers of targets, so a mean of means would differ."""
    columns = rows() if weighted else rows()[:2]
    model, reference = gpt(), gpt()
    total = reference(columns[0], columns[1], "sum", *columns[2:])
    mean = total / (columns[1] >= 0).sum()
    mean.backward()
    outcome, gradients = gradients_of(model, split(columns, sizes))
    assert outcome.loss == pytest.approx(mean.item(), rel=1e-5)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in reference.parameters()))
    assert outcome.grad_norm == pytest.approx(norm, rel=1e-5)
    assert not outcome.skipped
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_an_update_steps_the_optimizers_and_leaves_no_gradient() -> None:
    model = gpt()
    optimizers = optimizers_of(model)
    before = snapshot(model, optimizers)
    outcome = update(model, optimizers, split(rows()[:2], [4, 4]), LossScale(), CPU)
    assert not outcome.skipped
    assert sum(not torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizers), strict=True)) > 30
    assert all(p.grad is None for p in model.parameters())


def test_a_step_without_targets_changes_no_gradient() -> None:
    inputs, targets, _ = rows()
    outcome, gradients = gradients_of(gpt(), split((inputs, torch.full_like(targets, -1)), [8]))
    assert (outcome.loss, outcome.grad_norm, outcome.skipped) == (0, 0, False)
    assert all(not g.any() for g in gradients.values())


def break_loss(model: GPT) -> None:
    with torch.no_grad():
        model.wte.weight[:] = float("nan")


def break_one_gradient(model: GPT) -> None:
    model.x0_lambdas.register_hook(lambda g: torch.full_like(g, float("inf")))


@pytest.mark.parametrize("break_it", [break_loss, break_one_gradient])
def test_a_step_that_is_not_finite_touches_nothing(break_it: Callable[[GPT], None]) -> None:
    model = gpt()
    optimizers = optimizers_of(model)
    update(model, optimizers, split(rows()[:2], [8]), LossScale(), CPU)
    break_it(model)
    before = snapshot(model, optimizers)
    outcome = update(model, optimizers, split(rows(1)[:2], [4, 4]), LossScale(), CPU)
    assert outcome.skipped
    for one, two in zip(before, snapshot(model, optimizers), strict=True):
        assert torch.equal(one, two) or (one.isnan().all() and two.isnan().all())
    assert all(p.grad is None for p in model.parameters())


def test_running_out_of_memory_names_the_next_value() -> None:
    model = gpt()

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    model.lm_head.register_full_backward_hook(full)
    with pytest.raises(UserError, match="--device_batch_size=2:"):
        update(model, optimizers_of(model), split(rows()[:2], [4, 4]), LossScale(), CPU)


# --- fp16 ----------------------------------------------------------------------------------------


def test_fp16_gradients_are_lifted_and_put_back() -> None:
    """Against fp32: with the scale close, without it too small for the format and mostly lost."""
    batches = split(rows()[:2], [8])
    tiny = replace(batches, num_targets=10**7)  # gradients of a very large step: 1e-7 of a sum
    _, exact = gradients_of(gpt(), tiny)
    scale = LossScale.start(FP16, {})
    outcome, lifted = gradients_of(gpt(torch.float16), tiny, FP16, scale)
    _, lost = gradients_of(gpt(torch.float16), tiny, FP16, LossScale())
    assert not outcome.skipped

    def distance(gradients: dict[str, Tensor], name: str) -> float:
        return float((gradients[name] - exact[name]).norm() / exact[name].norm())

    names = [name for name in exact if name.startswith("h.") and "gate" not in name]
    assert max(distance(lifted, name) for name in names) < 0.05
    assert max(distance(lost, name) for name in names) > 0.5
    assert outcome.grad_norm == pytest.approx(
        math.sqrt(sum(float(g.double().square().sum()) for g in exact.values())), rel=0.02
    )


def test_an_overflow_halves_the_scale_and_skips() -> None:
    model = gpt(torch.float16)
    scale = LossScale(2.0**40, 5, growing=True)
    outcome, gradients = gradients_of(model, split(rows()[:2], [8]), FP16, scale)
    assert outcome.skipped and not gradients
    assert (scale.value, scale.good_steps) == (2.0**39, 0)
    assert outcome.reason == "fp16 overflowed at a loss scale of 1.09951e+12, which is now 5.49756e+11"


def test_the_scale_doubles_after_2000_good_steps() -> None:
    scale = LossScale.start(FP16, {})
    assert scale.value == 65536
    for _ in range(1999):
        scale.update(finite=True)
    assert scale.value == 65536
    scale.update(finite=True)
    assert (scale.value, scale.good_steps) == (131072, 0)
    scale.update(finite=True)
    scale.update(finite=False)
    assert (scale.value, scale.good_steps) == (65536, 0)


def test_the_scale_resumes_where_it_was() -> None:
    kept = {"scale": {"value": 1024.0, "good_steps": 17}}
    assert LossScale.start(FP16, json.loads(json.dumps(kept))) == LossScale(1024.0, 17, True)


def test_a_run_that_began_in_another_format_gets_a_new_scale() -> None:
    saved = Safeguards.start(CPU, {}).state()
    assert LossScale.start(FP16, saved).value == 65536


def test_other_formats_have_no_scale() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        scale = LossScale.start(replace(CPU, dtype=dtype), {"scale": {"value": 7.0, "good_steps": 3}})
        scale.update(finite=False)
        assert scale.value == 1
