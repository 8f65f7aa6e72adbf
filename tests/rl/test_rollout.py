"""What RL trains on: which tokens, with what weight, on any split into passes and ranks."""

import random
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

from bench.updates import update
from nanochat.common import UserError
from nanochat.data.conversation import Conversation, chat
from nanochat.device import Compute
from nanochat.engine import Completion, Engine
from nanochat.generate.sampling import Sampling
from nanochat.gpt import GPT
from nanochat.rl import rollout
from nanochat.rl.groups import Groups
from nanochat.rl.policy import PolicyFlags, shuffled
from nanochat.runtime import parallel
from nanochat.step import LossScale, Outcome
from tests.support.ranks import run_ranks
from tests.support.tiny_model import on_cpu, tiny_gpt, tiny_tokenizer
from tests.test_step import Recorder

TOKENIZER = tiny_tokenizer()
SAMPLING = Sampling(1.0, 50, max_tokens=10, seed=7)
REINFORCE = PolicyFlags()
NUMBERS = [0, 1, 2, 3, 4, 5]


@dataclass(frozen=True)
class Even:
    """A reply is right if it has an even number of characters; of problem 3 every reply is right."""

    name: str = "even"
    kind: Literal["generative"] = "generative"

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Conversation:
        return chat(" ".join(random.Random(i).choices(["cat", "mat", "猫", "12"], k=2 + 3 * (i % 3))), "cat")

    def letters(self, i: int) -> tuple[str, ...]:
        return ()

    def grade(self, i: int, reply: str) -> float:
        return 1.0 if i == 3 else float(len(reply) % 2 == 0)


def talkative() -> GPT:
    """A model of which some replies end and some are cut off."""
    model = tiny_gpt(TOKENIZER.vocab_size)
    with torch.no_grad():
        model.lm_head.weight[TOKENIZER.special("assistant_end")] *= 3
    return model


def rolled(
    device_batch_size: int = 100, compute: Compute | None = None, shuffle: bool = False, model: GPT | None = None,
    policy: PolicyFlags = REINFORCE,
):  # fmt: skip
    practice = rollout.Practice(4, SAMPLING, device_batch_size, policy, shuffle)
    return rollout.roll_out(Even(), NUMBERS, practice, model or talkative(), TOKENIZER, compute or on_cpu())


def gradient(device_batch_size: int, compute: Compute) -> tuple[Outcome, dict[str, torch.Tensor], int]:
    """Of one step, in whatever passes and on however many ranks."""
    sampler, model = talkative(), talkative()
    parallel.shard(model, model.shard_groups(), compute)
    rollouts, _ = rolled(device_batch_size, compute, model=sampler)
    recorder = Recorder(model)
    outcome = update(model, recorder, rollouts, LossScale(), compute)  # type: ignore[arg-type]
    return outcome, recorder.gradients, rollouts.num_targets


def test_rows_weigh_the_reply_s_tokens_and_no_others():
    rollouts, samples = rolled()
    ((inputs, targets, weights),) = rollouts.micro_batches
    assert len(inputs) == rollout.ROUND >= len(samples) and inputs.shape == targets.shape == weights.shape
    assert bool((targets[len(samples) :] == -1).all()) and not weights[len(samples) :].any()
    assert inputs.shape[1] % rollout.ROUND == 0
    for row, sample in enumerate(samples):
        tokens, first = sample.prompt + sample.completion.tokens, len(sample.prompt) - 1
        assert inputs[row, : len(tokens) - 1].tolist() == tokens[:-1]
        for t in range(inputs.shape[1]):
            inside = first <= t < len(tokens) - 1 and sample.weights[t - first] != 0
            assert weights[row, t] == (sample.weights[t - first] if inside else 0)
            assert targets[row, t] == (tokens[t + 1] if inside else -1)
    assert rollouts.num_targets == int((targets >= 0).sum()) > 0


def test_cut_off_samples_are_not_trained_and_are_counted():
    rollouts, samples = rolled()
    cut = [sample for sample in samples if sample.completion.finish == "length"]
    whole = [sample for sample in samples if sample.completion.finish == "stop"]
    assert cut and whole and all(len(sample.completion.tokens) == SAMPLING.max_tokens for sample in cut)
    assert not any(weight for sample in cut for weight in sample.weights)
    assert any(weight for sample in whole for weight in sample.weights)
    assert 0 < rollouts.measured.truncated < 1


def test_tokens_that_the_calculator_wrote_are_not_trained(monkeypatch):
    def generate(self, prompts, sampling, samples, on_done):
        forced = [False, False, True, True, False]
        replies = [Completion([at % 2] * 5, forced, [-1.0] * 5, "stop") for at in range(samples * len(prompts))]
        for at, completion in enumerate(replies):
            on_done(at, completion)
        return replies

    monkeypatch.setattr(Engine, "generate", generate)
    grades = [float(at % 2) for at in range(2 * len(NUMBERS))]
    monkeypatch.setattr(Even, "grade_all", lambda self, problems, replies: grades, raising=False)
    practice = rollout.Practice(2, SAMPLING, 8, REINFORCE)
    rollouts, samples = rollout.roll_out(Even(), NUMBERS, practice, talkative(), TOKENIZER, on_cpu())
    assert [[weight != 0 for weight in sample.weights] for sample in samples] == [[True, True, False, False, True]] * 12
    assert rollouts.num_targets == 12 * 3
    assert rollouts.measured.entropy == 1.0  # of chosen tokens only
    assert rollouts.measured.reward == 0.5 and rollouts.measured.length == 5


def test_flat_groups_are_left_out_and_counted():
    rollouts, samples = rolled()
    prompts = [TOKENIZER.render_prompt(Even()[i]) for i in NUMBERS]
    present = {tuple(sample.prompt) for sample in samples}
    assert tuple(prompts[3]) not in present
    flat = [prompt for prompt in prompts if tuple(prompt) not in present]
    assert rollouts.measured.flat == pytest.approx(len(flat) / len(NUMBERS))
    assert len(samples) == 4 * (len(NUMBERS) - len(flat)) > 0


def replies_to(numbers: list[int], compute: Compute) -> list[list[list[int]]]:
    """The tokens of the replies to each of this rank's problems, in the order of the problems."""

    class Mixed(Even):
        def grade_all(self, problems, graded):
            return [float(i % 2) for i in range(len(graded))]

    practice = rollout.Practice(4, SAMPLING, 8, REINFORCE)
    _, samples = rollout.roll_out(Mixed(), numbers, practice, talkative(), TOKENIZER, compute)
    replies = [sample.completion.tokens for sample in samples]
    return [replies[first : first + 4] for first in range(0, len(replies), 4)]


def test_a_problem_that_a_step_has_twice_gets_other_replies(monkeypatch):
    """As where there are fewer problems than --examples_per_step; the samples had the same seeds."""
    first, between, second = replies_to([0, 1, 0], on_cpu())
    assert first != second
    assert [first, between] == replies_to([0, 1], on_cpu())
    monkeypatch.setattr(parallel, "total", lambda values, compute: [value or 1.0 for value in values])
    ranks = [replies_to([0, 1, 0], on_cpu(rank, 3)) for rank in range(3)]
    assert ranks == [[first], [between], [second]]


@dataclass(frozen=True)
class Hopeless(Even):
    def grade(self, i: int, reply: str) -> float:
        return 0.0


def test_a_step_of_flat_groups_has_nothing_to_train_and_no_figure_that_is_not_a_number():
    practice = rollout.Practice(4, SAMPLING, 8, REINFORCE)
    rollouts, samples = rollout.roll_out(Hopeless(), NUMBERS, practice, talkative(), TOKENIZER, on_cpu())
    assert rollouts.micro_batches == [] and samples == [] and rollouts.num_targets == 0
    assert (rollouts.measured.flat, rollouts.measured.reward) == (1.0, 0.0)
    assert rollout.sampler_gap(samples, talkative(), on_cpu()) == 0.0


def test_the_gradient_is_that_of_the_definition():
    outcome, gradients, count = gradient(100, on_cpu())
    model = talkative()
    _, samples = rolled()
    total = torch.zeros(())
    for sample in samples:
        tokens = torch.tensor([sample.prompt + sample.completion.tokens])
        logprobs = model(tokens[:, :-1]).log_softmax(-1)[0]
        for t, weight in enumerate(sample.weights, start=len(sample.prompt) - 1):
            total = total - weight * logprobs[t, tokens[0, t + 1]]
    loss = total / count
    loss.backward()
    assert outcome.loss == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_the_gradient_does_not_depend_on_device_batch_size():
    whole, expected, count = gradient(100, on_cpu())
    for size in (1, 3, 8):
        outcome, gradients, targets = gradient(size, on_cpu())
        assert targets == count and outcome.loss == pytest.approx(whole.loss, abs=1e-6)
        assert max((gradients[name] - expected[name]).abs().max().item() for name in expected) < 1e-5


def figures_of(rollouts: rollout.Rollouts) -> dict[str, float]:
    return {"num_targets": rollouts.num_targets, **rollouts.figures()}


def on_a_rank(compute: Compute) -> tuple[float, dict[str, torch.Tensor], int, float, dict[str, float]]:
    model = talkative()
    parallel.shard(model, model.shard_groups(), compute)
    rollouts, samples = rolled(3, compute)
    recorder = Recorder(model)
    outcome = update(model, recorder, rollouts, LossScale(), compute)  # type: ignore[arg-type]
    gap = rollout.sampler_gap(samples, model, compute)
    return outcome.loss, recorder.gradients, rollouts.num_targets, gap, figures_of(rollouts)


@pytest.mark.ranks
def test_the_gradient_and_the_figures_do_not_depend_on_the_ranks():  # of which two have two problems, two have one
    alone, expected, count = gradient(100, on_cpu())
    figures = figures_of(rolled()[0])
    for loss, gradients, targets, gap, found in run_ranks(4, on_a_rank):
        assert targets == count and loss == pytest.approx(alone.loss, abs=1e-6)
        assert max((gradients[name] - expected[name]).abs().max().item() for name in expected) < 1e-5
        assert gap <= 1e-4
        assert found == pytest.approx(figures)


def test_sampler_and_trainer_agree_on_log_probabilities():
    model = talkative()
    _, samples = rolled(model=model)
    for sample in samples:
        assert rollout.sampler_gap([sample], model, on_cpu()) <= 1e-4
    other = tiny_gpt(TOKENIZER.vocab_size, seed=2)
    assert rollout.sampler_gap(samples, other, on_cpu()) > 0.01  # so it would be seen


def test_shuffled_rewards_keep_the_figures_and_weigh_other_replies():
    (plain, samples), (control, others) = rolled(), rolled(shuffle=True)
    same = ("reward", "length", "truncated")
    assert all(plain.figures()[name] == control.figures()[name] for name in same)
    assert plain.measured.flat > control.measured.flat  # a problem that all solve is flat no more
    weights, shuffled_weights = (
        {tuple(one.prompt + one.completion.tokens): one.weights for one in found} for found in (samples, others)
    )
    assert weights.keys() <= shuffled_weights.keys()
    assert any(weights[reply] != shuffled_weights[reply] for reply in weights)


def test_equal_replies_to_a_prompt_are_trained_once_with_their_weights_added():
    def sample(prompt: list[int], reply: list[int], weights: list[float]) -> rollout.Sample:
        return rollout.Sample(prompt, Completion(reply, [False] * len(reply), [-1.0] * len(reply), "stop"), weights)

    given = [
        sample([1, 2], [3, 4], [0.5, 0.0]),
        sample([1, 2], [3, 5], [-0.25, -0.25]),
        sample([1, 2], [3, 4], [0.125, 0.0]),
        sample([1], [2, 3, 4], [1.0, 1.0, 1.0]),  # the same tokens, but another prompt
        sample([1], [2, 3, 4], [-0.5, -0.5, -0.5]),  # a clipped ratio treats this sign in another way
        sample([1], [2, 3, 4], [0.5, -0.5, 0.5]),  # the pull of --kl differs from token to token
    ]
    found = [(s.prompt, s.completion.tokens, s.weights) for s in rollout.merged(given)]
    assert found == [
        ([1, 2], [3, 4], [0.625, 0.0]), ([1, 2], [3, 5], [-0.25, -0.25]), ([1], [2, 3, 4], [1.0] * 3),
        ([1], [2, 3, 4], [-0.5] * 3), ([1], [2, 3, 4], [0.5, -0.5, 0.5]),
    ]  # fmt: skip
    assert [s.copies for s in rollout.merged(given)] == [[2, 0], [1, 1], [1] * 3, [1] * 3, [1] * 3]


def test_of_more_problems_the_first_with_unequal_rewards_are_trained_on():
    rollouts, samples = rolled(policy=PolicyFlags(oversample=2))
    every = rolled()[1]
    unequal = list(dict.fromkeys(tuple(sample.prompt) for sample in every))
    assert len(unequal) > 3  # so that some are left out
    assert list(dict.fromkeys(tuple(sample.prompt) for sample in samples)) == unequal[:3]
    assert rollouts.measured.reward == rolled()[0].measured.reward  # figures are of everything that was sampled


def test_replies_near_the_limit_lose_reward_and_are_trained_on():
    _, samples = rolled(policy=PolicyFlags(overlong_tokens=5))
    cut = [sample for sample in samples if sample.completion.finish == "length"]
    assert cut and all(any(sample.weights) for sample in cut)


@pytest.mark.parametrize("trees", [False, True])
def test_replies_that_the_context_cuts_lose_as_much_as_those_that_the_limit_cuts(monkeypatch, trees: bool):
    model = talkative()
    longest = max(len(TOKENIZER.render_prompt(Even()[i])) for i in NUMBERS)
    model.config = replace(model.config, sequence_len=longest + 8)  # the limit is 10 tokens
    monkeypatch.setattr(rollout, "advantages", lambda rewards, kind: rewards)
    monkeypatch.setattr(Even, "grade_all", lambda self, problems, replies: [2.0] * len(replies), raising=False)
    practice = rollout.Practice(4, SAMPLING, 8, PolicyFlags(overlong_tokens=5))
    groups = Groups(model, TOKENIZER) if trees else None
    _, samples = rollout.roll_out(Even(), NUMBERS, practice, model, TOKENIZER, on_cpu(), groups)
    cut = [sample for sample in samples if sample.completion.finish == "length"]
    assert {len(sample.completion.tokens) for sample in cut} == {8, 10}
    assert all(max(sample.weights) == 1.0 for sample in cut)


def test_a_ratio_gets_the_sampler_s_log_probabilities():
    policy = PolicyFlags(loss="ppo")
    rollouts, samples = rolled(policy=policy)
    assert rollouts.extras == ("weights", "sampled", "copies")
    ((*_, sampled, _),) = rollouts.micro_batches
    for row, sample in enumerate(samples):
        first = len(sample.prompt) - 1
        assert sampled[row, first : first + len(sample.completion.tokens)].tolist() == pytest.approx(
            sample.completion.logprobs
        )
    model = talkative()
    recorder = Recorder(model)
    outcome = update(model, recorder, rollouts, LossScale(), on_cpu(), loss=policy.ratio_loss)
    _, expected, _ = gradient(100, on_cpu())
    assert outcome.figures == {"clipped": 0.0, "policy_shift": pytest.approx(0, abs=1e-6)}
    for name, value in recorder.gradients.items():  # a policy that has not moved learns what REINFORCE does
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)


def test_problems_that_the_context_cannot_hold_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [len(TOKENIZER.render_prompt(Even()[i])) for i in range(8)]
    assert rollout.fitting(Even(), TOKENIZER, max(lengths) + 1) == list(range(8))
    assert not capsys.readouterr().err
    kept = [i for i, length in enumerate(lengths) if length < max(lengths)]  # a reply needs a place
    assert rollout.fitting(Even(), TOKENIZER, max(lengths)) == kept and 0 < len(kept) < 8
    assert f"{8 - len(kept)} of 8 problems are left out" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"no problem of even fits into .* of 1 tokens"):
        rollout.fitting(Even(), TOKENIZER, 1)


def dealt(compute: Compute) -> list[float]:
    """Rewards 0, 1, ... 11 of two replies to each of six problems."""
    mine = [float(2 * at + reply) for at in range(compute.rank, 6, compute.world_size) for reply in range(2)]
    return rollout._shuffled(mine, 6, 2, "7", compute)


def test_rewards_are_shuffled_over_all_ranks() -> None:
    alone = dealt(on_cpu())
    assert alone == shuffled([float(reward) for reward in range(12)], "7")
    first, second = run_ranks(2, dealt)
    pairs = [part[at : at + 2] for at in (0, 2, 4) for part in (first, second)]
    assert [reward for pair in pairs for reward in pair] == alone
