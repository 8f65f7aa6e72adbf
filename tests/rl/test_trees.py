"""Training over trees gives the gradients of separate rows, with fewer tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.updates import update
from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.engine import Completion
from nanochat.generate.sampling import Sampling
from nanochat.gpt import GPT
from nanochat.models.qwen.model import Qwen
from nanochat.platforms.nvidia.platform import Nvidia
from nanochat.rl import rollout, trees
from nanochat.rl.groups import Groups
from nanochat.rl.policy import PolicyFlags
from nanochat.rl.trees import Sample, over_trees, pack
from nanochat.runtime import parallel
from nanochat.step import LossScale, Outcome
from tests.rl.test_rollout import NUMBERS, SAMPLING, TOKENIZER, Even, talkative
from tests.support.qwens import tiny_qwen
from tests.support.ranks import run_ranks
from tests.support.tiny_model import on_cpu, pretend, words
from tests.test_step import Recorder

LOSSES = (
    PolicyFlags(), PolicyFlags(average="reply"), PolicyFlags(loss="cispo", advantage="normalized"),
    PolicyFlags(loss="ppo", average="limit", clip_low=1e-3, clip_high=1e-3),
    PolicyFlags(loss="gspo", average="reply"), PolicyFlags(loss="gspo", clip_low=0.1, clip_high=0.1),
)  # fmt: skip


def talkative_qwen() -> Qwen:
    """A Qwen3 with heads that share keys, of which some replies end."""
    model = tiny_qwen("qwen3")
    shape = replace(model.config, vocab_size=TOKENIZER.vocab_size, tied=0)
    model = Qwen(shape)
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
        model.lm_head.weight[TOKENIZER.special("assistant_end")] *= 2
    return model


def learned(
    policy: PolicyFlags, over: bool, compute: Compute, rows: int = 100, moved: bool = False,
    make: Callable[[], Any] = talkative, sampling: Sampling = SAMPLING,
) -> tuple[Outcome, dict[str, torch.Tensor]]:  # fmt: skip
    """The gradient of a step, in rows or over trees; `moved`: of a model that is no longer the sampler."""
    sampler, model = make(), make()
    if moved:
        with torch.no_grad():
            model.lm_head.weight.mul_(1.02)
    parallel.shard(model, model.shard_groups(), compute)
    groups = Groups(sampler, TOKENIZER) if over else None
    practice = rollout.Practice(8, sampling, rows, policy)
    rolled, _ = rollout.roll_out(Even(), NUMBERS, practice, sampler, TOKENIZER, compute, groups)
    recorder: Any = Recorder(model)
    return update(model, recorder, rolled, LossScale(), compute, loss=policy.ratio_loss), recorder.gradients


def check(found: tuple[Outcome, dict[str, torch.Tensor]], expected: tuple[Outcome, dict[str, torch.Tensor]]) -> None:
    assert found[0].figures == pytest.approx(expected[0].figures, rel=1e-4, abs=1e-6)
    assert found[0].loss == pytest.approx(expected[0].loss, rel=1e-5, abs=1e-6) and expected[0].loss != 0
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=2e-6, msg=name)


@pytest.mark.parametrize("policy", LOSSES, ids=lambda policy: f"{policy.loss}-{policy.average}-{policy.clip_low}")
def test_the_gradient_over_trees_is_that_of_rows(policy: PolicyFlags) -> None:
    check(learned(policy, True, on_cpu(), moved=True), learned(policy, False, on_cpu(), moved=True))


@pytest.mark.parametrize("policy", LOSSES[2:5], ids=lambda policy: policy.loss)
def test_the_figures_of_a_ratio_count_every_reply(policy: PolicyFlags, monkeypatch: pytest.MonkeyPatch) -> None:
    alike = Sampling(0.5, 3, max_tokens=10, seed=7)  # some replies to a prompt are equal, and more begin alike
    found = [learned(policy, over, on_cpu(), moved=True, sampling=alike)[0].figures for over in (False, True)]
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "merged", list)  # every reply is a row of its own
        expected = learned(policy, False, on_cpu(), moved=True, sampling=alike)[0].figures
    assert expected["policy_shift"] > 1e-5 and (expected["clipped"] > 0 or policy.loss == "cispo")
    assert all(figures == pytest.approx(expected, rel=1e-4) for figures in found)


def test_a_qwen_learns_over_trees_what_it_learns_from_rows() -> None:
    check(*(learned(LOSSES[0], over, on_cpu(), make=talkative_qwen) for over in (True, False)))


def test_a_qwen_with_deltanets_reads_rows_only() -> None:
    assert over_trees(None, talkative_qwen(), on_cpu())
    assert not over_trees(None, tiny_qwen("qwen3.5"), on_cpu())


def test_the_gradient_over_trees_does_not_depend_on_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "LEAST_ROW_TOKENS", 32)
    expected = learned(LOSSES[0], False, on_cpu())
    for rows in (1, 2, 100):
        check(learned(LOSSES[0], True, on_cpu(), rows), expected)


def test_a_large_group_becomes_several_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MOST_TREE_TOKENS", 24)
    monkeypatch.setattr(trees, "LEAST_ROW_TOKENS", 32)
    check(learned(LOSSES[0], True, on_cpu()), learned(LOSSES[0], False, on_cpu()))


def on_a_rank(compute: Compute) -> tuple[Outcome, dict[str, torch.Tensor]]:
    return learned(LOSSES[0], True, compute, 2)


@pytest.mark.ranks
def test_the_gradient_over_trees_does_not_depend_on_the_ranks() -> None:
    expected = learned(LOSSES[0], False, on_cpu())
    for found in run_ranks(2, on_a_rank):
        check(found, expected)


def sample(prompt: list[int], reply: list[int], weight: float) -> Sample:
    return Sample(prompt, Completion(reply, [False] * len(reply), [-1.0] * len(reply), "stop"), [weight] * len(reply))


def test_replies_share_their_beginning_and_targets_that_cancel_are_left_out() -> None:
    prompt = words(5, 1)
    given = [
        sample(prompt, [7, 8, 9], 0.5),
        sample(prompt, [7, 8, 10, 11], -0.25),
        sample(prompt, [7, 8, 10, 11], -0.25),
    ]
    (tree,) = trees.grow(given, "all")
    assert tree.tokens == [*prompt, 7, 8, 10] and tree.parents == [0, 0, 1, 2, 3, 4, 5, 6]
    assert {(place, token): sums.weight for (place, token, _), sums in tree.targets.items()} == {
        (6, 9): 0.5, (6, 10): -0.5, (7, 11): -0.5,
    }  # fmt: skip
    (apart,) = trees.grow(given, "same sign")
    assert {key: sums.weight for key, sums in apart.targets.items()} == {
        (4, 7, True): 0.5, (4, 7, False): -0.5, (5, 8, True): 0.5, (5, 8, False): -0.5,
        (6, 9, True): 0.5, (6, 10, False): -0.5, (7, 11, False): -0.5,
    }  # fmt: skip
    (replies,) = trees.grow(given, "same reply")
    assert {key: sums.weight for key, sums in replies.targets.items() if key[0] > 5} == {
        (6, 9, 0): 0.5, (6, 10, 1): -0.25, (7, 11, 1): -0.25, (6, 10, 2): -0.25, (7, 11, 2): -0.25,
    }  # fmt: skip


@pytest.mark.parametrize("make", [talkative, talkative_qwen])
def test_tokens_of_replies_are_as_likely_in_trees_as_alone(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    monkeypatch.setattr(trees, "MOST_TREE_TOKENS", 30)  # so that a prompt has several trees
    monkeypatch.setattr(trees, "PASS_TOKENS", 4 * trees.LEAST_ROW_TOKENS)  # and the trees are read in several passes
    generator, samples = torch.Generator().manual_seed(5), []
    for length in range(1, 25):
        prompt = list(range(5, 8 + length % 3 * 20))
        reply = [7, *torch.randint(3, (length,), generator=generator).tolist()]  # few tokens, so that many are shared
        samples.append(Sample(prompt, Completion(reply, [False] * len(reply), [0.0] * len(reply)), [0.0] * len(reply)))
    found = trees.logprobs(samples, model, on_cpu())
    for sample, of_reply in zip(samples, found, strict=True):
        row = torch.tensor([[*sample.prompt, *sample.completion.tokens]])
        with torch.no_grad():
            alone = -model(row[:, :-1], row[:, 1:], "none")[0, len(sample.prompt) - 1 :]
        assert of_reply == pytest.approx(alone.tolist(), abs=1e-4)


def test_a_step_without_anything_to_train_has_no_pass() -> None:
    for samples in ([], [sample(words(5, 1), [7], 0.0)]):
        assert pack(samples, 8, TOKENIZER.bos, on_cpu(), "all", extras=("weights", *trees.TREE)) == []


class Rows(GPT):
    """A model that reads rows only."""

    takes_trees = False


def test_trees_are_the_default_on_cpus_where_the_model_reads_them() -> None:
    model = talkative()
    assert over_trees(None, model, on_cpu())
    assert not over_trees(False, model, on_cpu())
    assert not over_trees(None, Rows(model.config), on_cpu())
    assert not over_trees(None, model, pretend(Nvidia()))
    assert over_trees(True, model, pretend(Nvidia()))
    with pytest.raises(UserError, match="rows only"):
        over_trees(True, Rows(model.config), on_cpu())
