"""The settings of each role against the published table, and AdamW against its formulas written out."""

import inspect
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from nanochat import optim, schedule
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import ADAMW_SHARE, Optimizers, Rates
from nanochat.runtime.row_adam import RowAdam

DIM = 48
# role -> learning rate at 768 channels, whether it follows the width, betas, decay: upstream HEAD; eps (scalars: ours);
# bigrams are ours
PUBLISHED = {
    "head": (0.008, True, (0.8, 0.96), 0.01, 1e-10),
    "embedding": (0.3, True, (0.8, 0.995), 0.001, 1e-10),
    "value_embedding": (0.15, True, (0.8, 0.995), 0.01, 1e-10),
    "bigram": (0.03, True, (0.0, 0.995), 0.0, 1e-10),
    "resid": (0.005, False, (0.8, 0.95), 0.05, 1e-6),
    "x0": (0.5, False, (0.96, 0.95), 0.0, 1e-6),
    "smear": (0.2, False, (0.8, 0.95), 0.0, 1e-6),
}


def model_and_optimizers(scale: float = 1.0, rates: Rates = Rates()) -> tuple[GPT, Optimizers]:
    config = GPTConfig(sequence_len=16, vocab_size=60, n_layer=3, n_head=3, n_kv_head=3, n_embd=DIM, bigram_rows=40)
    model = GPT(config)
    model.init_weights(1)
    return model, Optimizers(model, model.parameter_roles(), DIM, rates, scale, torch.float32)


def fill_gradients(model: GPT, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def groups(optimizers: Optimizers) -> list[dict[str, Any]]:
    """The groups of AdamW, then RowAdam's."""
    assert optimizers.rows is not None
    return [*optimizers.adamw.param_groups, *optimizers.rows.param_groups]


def learning_rate(role: str) -> float:
    lr, follows_width, _, _, _ = PUBLISHED[role]
    return lr * (DIM / 768) ** -0.5 if follows_width else lr


def test_every_parameter_has_the_published_settings() -> None:
    model, optimizers = model_and_optimizers()
    roles, names, seen = model.parameter_roles(), optimizers.names, []
    for group in groups(optimizers):
        for parameter in group["params"]:
            role = roles[names[parameter]]
            seen.append(names[parameter])
            _, _, betas, decay, eps = PUBLISHED[role]
            assert group["lr"] == pytest.approx(learning_rate(role)), role
            assert (group["betas"], group["weight_decay"], group["eps"]) == (betas, decay, eps), role
    matrices = optimizers.muon.param_groups[0]
    assert (matrices["lr"], matrices["weight_decay"], matrices["beta2"]) == (0.02, 0.28, 0.9)
    seen += [names[parameter] for parameter in matrices["params"]]
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())
    assert {name for name, role in roles.items() if role == "matrix"} == set(seen[-len(matrices["params"]) :])


def test_rates_and_scale_reach_their_roles() -> None:
    rates = Rates(unembedding_lr=1, embedding_lr=2, matrix_lr=3, scalar_lr=4, weight_decay=5)
    _, optimizers = model_and_optimizers(scale=10, rates=rates)
    width = math.sqrt(768 / DIM)
    by_role = [group["lr"] for group in groups(optimizers)]
    assert by_role == pytest.approx([10 * width, 20 * width, 10 * width, 0.4, 40, 16, 2 * width])
    assert optimizers.muon.param_groups[0]["lr"] == 30
    assert optimizers.muon.param_groups[0]["weight_decay"] == 5


def test_large_and_long_runs_keep_upstreams_rates() -> None:
    """The run has the batch and the horizon of the reference: 12 tokens for each of its parameters."""
    reference = 12 * schedule.REFERENCE_SCALING_PARAMETERS
    assert Rates().for_run(2**19, round(reference / 2**19), 12) == Rates(weight_decay=pytest.approx(0.28, rel=1e-3))
    assert schedule.table_momentum(round(reference / 2**19)) == 0.8


def test_a_short_run_of_small_batches_has_rates_of_its_own() -> None:
    short = Rates().for_run(4096, 200, 12, short=True)
    assert short.weight_decay == pytest.approx(0.28 * 2 / 3)
    assert Rates().for_run(4096, 200, 12).weight_decay == 0.56
    assert (short.matrix_lr, short.embedding_lr, short.unembedding_lr) == (0.04, 0.3, 0.008)
    assert short.scalar_lr == pytest.approx(0.5 * (4096 / 2**19) ** 0.5)
    assert Rates(matrix_optimizer="adamw").for_run(4096, 200, 12).matrix_lr == 0.02  # fitted by itself


def test_only_tables_and_head_take_the_runs_momentum() -> None:
    model, _ = model_and_optimizers()
    roles = model.parameter_roles()
    optimizers = Optimizers(model, roles, DIM, Rates(), 1.0, torch.float32, table_momentum=0.0)
    betas = {group["role"]: group["betas"] for group in groups(optimizers)}
    assert betas == {
        role: (0.0, published[1]) if role in ("head", "embedding", "value_embedding") else published
        for role, (_, _, published, _, _) in PUBLISHED.items()
    }


def test_adamw_steps_equal_the_formulas() -> None:
    """Five steps of decoupled decay and then the bias-corrected update, written out in float64."""
    model, optimizers = model_and_optimizers()
    roles = model.parameter_roles()
    p = {name: x.detach().double() for name, x in model.named_parameters() if roles[name] in PUBLISHED}
    m, v = ({name: torch.zeros_like(x) for name, x in p.items()} for _ in range(2))
    for step in range(1, 6):
        gradients = fill_gradients(model, step)
        optimizers.schedule(1 / step, 0.9, 1.0)
        optimizers.step()
        for name in p:
            role, g = roles[name], gradients[name].double()
            _, _, (beta1, beta2), decay, eps = PUBLISHED[role]
            lr = learning_rate(role) / step
            p[name] = p[name] * (1 - lr * decay)
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g * g
            root = (v[name] / (1 - beta2**step)).sqrt() + eps
            p[name] = p[name] - lr * m[name] / (1 - beta1**step) / root
    for name, parameter in model.named_parameters():
        if name in p:
            torch.testing.assert_close(parameter.detach().double(), p[name], atol=2e-6, rtol=2e-6, msg=name)


def test_matrices_may_be_stepped_by_adamw() -> None:
    """Every matrix follows a torch.optim.AdamW of its own, under changing rates and decay."""
    model, optimizers = model_and_optimizers(2.0, Rates(matrix_optimizer="adamw", matrix_lr=0.04, weight_decay=0.3))
    assert optimizers.muon is None
    roles, oracles = model.parameter_roles(), {}
    rate = 2.0 * 0.04 * ADAMW_SHARE * (DIM / 768) ** -0.5
    for name, parameter in model.named_parameters():
        if roles[name] == "matrix":
            twin = torch.nn.Parameter(parameter.detach().clone())
            oracles[name] = (twin, torch.optim.AdamW([twin], lr=rate, betas=(0.8, 0.95), eps=1e-8, foreach=False))
    for step in range(5):
        gradients = fill_gradients(model, step)
        optimizers.schedule(1 - 0.1 * step, 0.9, 1 - 0.2 * step)
        for name, (twin, oracle) in oracles.items():
            twin.grad = gradients[name]
            oracle.param_groups[0].update(lr=rate * (1 - 0.1 * step), weight_decay=0.3 * (1 - 0.2 * step))
            oracle.step()
        optimizers.step()
    assert len(oracles) == len([name for name in roles if roles[name] == "matrix"]) > 10
    for name, parameter in model.named_parameters():
        if name in oracles:
            torch.testing.assert_close(parameter.detach(), oracles[name][0].detach(), atol=1e-6, rtol=1e-6, msg=name)
    optimizers.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    state = optimizers.state()
    assert {f"{name}.exp_avg_sq" for name in oracles} <= state.keys()
    assert not any(name.endswith((".momentum", ".variance")) for name in state)


def test_tables_are_stepped_by_row_as_adamw_would_step_them() -> None:
    """Few rows have a gradient, dense or sparse."""
    generator = torch.Generator().manual_seed(1)
    mine, theirs = (torch.nn.Parameter(torch.ones(50, 8)) for _ in range(2))
    how: dict[str, Any] = {"lr": 0.1, "betas": (0.0, 0.995), "eps": 1e-10}
    rows = RowAdam([{"params": [mine], **how}], {})
    oracle = torch.optim.AdamW([theirs], weight_decay=0.0, **how)
    for step in range(300):
        met = torch.randint(0, 50 if step % 3 else 4, (5,), generator=generator)
        g = torch.zeros(50, 8).index_put((met,), torch.randn(5, 8, generator=generator), accumulate=True)
        mine.grad, theirs.grad = g.to_sparse(1) if step % 2 else g, g
        before = mine.detach().clone()
        for optimizer in (rows, oracle):
            optimizer.step()
        untouched = ~g.any(dim=1)
        assert torch.equal(mine.detach()[untouched], before[untouched])
    torch.testing.assert_close(mine.detach(), theirs.detach())


def test_state_of_a_table_goes_from_one_kind_of_step_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a CPU resumes where AdamW steps the whole table, and one from there on a CPU."""
    sparse = model_and_optimizers()
    monkeypatch.setattr(optim, "make_sparse", lambda *_: False)
    dense = model_and_optimizers()
    assert sparse[1].rows is not None and dense[1].rows is None
    for step, (giver, taker) in enumerate([(sparse, dense), (dense, sparse), (sparse, dense)]):
        for model, optimizers in (sparse, dense):
            fill_gradients(model, step)
            table = model.bigrams
            assert table is not None and table.weight.grad is not None
            table.weight.grad[torch.arange(40) % 3 != step] = 0
            optimizers.step()
        for one, other in zip(sparse[0].parameters(), dense[0].parameters(), strict=True):
            torch.testing.assert_close(one, other)
        given = {name: value.clone() for name, (value, _, _) in giver[1].state().items()}
        with torch.no_grad():
            for name, (value, _, _) in taker[1].state().items():
                value.copy_(given[name])
        taker[1].restored()


def test_schedule_sets_what_it_says_from_the_base_each_time() -> None:
    _, optimizers = model_and_optimizers()
    base = [group["lr"] for group in groups(optimizers)]
    for lr, momentum, decay in ((0.5, 0.85, 0.9), (0.1, 0.97, 0.0), (1.0, 0.9, 1.0)):
        optimizers.schedule(lr, momentum, decay)
        assert [group["lr"] for group in groups(optimizers)] == pytest.approx([lr * x for x in base])
        matrices = optimizers.muon.param_groups[0]
        assert matrices["lr"] == pytest.approx(0.02 * lr)
        assert matrices["momentum"] == momentum
        assert matrices["weight_decay"] == pytest.approx(0.28 * decay)
    assert [group["weight_decay"] for group in groups(optimizers)] == [
        published[3] for role, published in [*PUBLISHED.items()] if role != "bigram"
    ] + [0.0]


def test_rounding_errors_do_not_steer_a_new_model() -> None:
    """The scalars of a model whose projections are zero have no gradient but rounding: two ways to sum the same step
    must leave them alike."""
    gone = []
    for split in (8, 2):
        model, optimizers = model_and_optimizers()
        generator = torch.Generator().manual_seed(1)
        idx = torch.randint(0, 60, (8, 16), generator=generator)
        for rows in idx.split(split):
            (model(rows, rows.roll(-1, 1), "sum") / idx.numel()).backward()
        optimizers.step()
        gone.append(torch.cat([model.x0_lambdas.detach(), model.resid_lambdas.detach(), model.backout_lambda.detach()]))
    torch.testing.assert_close(gone[0], gone[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("steps", [0, 2])
def test_state_names_everything_and_gives_the_tensors_themselves(steps: int) -> None:
    model, optimizers = model_and_optimizers()
    for step in range(steps):
        fill_gradients(model, step)
        optimizers.step()
    state, expected = optimizers.state(), {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if model.parameter_roles()[name] == "matrix":
            rows, cols = shape
            expected[f"{name}.momentum"] = shape
            expected[f"{name}.variance"] = (rows, 1) if rows >= cols else (1, cols)
        else:
            expected |= {f"{name}.exp_avg_sq": shape, f"{name}.step": (1,)}
            expected |= {f"{name}.age": shape[:1]} if name == "bigrams.weight" else {f"{name}.exp_avg": shape}
    assert {name: whole for name, (_, whole, _) in state.items()} == expected
    assert all(tuple(value.shape) == whole and first == 0 for value, whole, first in state.values())
    assert state["wte.weight.step"][0].item() == steps


def test_training_does_not_import_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import would take more than two CPU seconds of each start."""
    for method in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad):
        monkeypatch.delattr(inspect.unwrap(method), "__dynamo_disable", raising=False)  # what an import left behind
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    model, optimizers = model_and_optimizers()
    fill_gradients(model, 1)
    optimizers.step()
    optimizers.zero_grad()
