"""RL is pulled back to the model that it started from by the gradient of GRPO's KL estimate."""

import pytest
import torch

from nanochat.engine import Completion
from nanochat.gpt import GPT
from nanochat.rl.anchor import LARGEST, anchored
from nanochat.rl.trees import Sample
from tests.support.tiny_model import on_cpu, tiny_gpt

VOCABULARY = 300


def logprobs(model: GPT, prompt: list[int], reply: list[int]) -> list[float]:
    """What the model says of each token of a reply, one at a time and without padding."""
    idx = torch.tensor([[*prompt, *reply]])
    with torch.no_grad():
        said = model.logits(model.hidden(idx))[0].float().log_softmax(-1)
    return [said[len(prompt) - 1 + at, token].item() for at, token in enumerate(reply)]


def sampled(model: GPT, lengths: list[tuple[int, int]]) -> list[Sample]:
    """Replies of some lengths to prompts of some lengths, with the model's log-probabilities; the second token of each
    reply was forced."""
    generator, samples = torch.Generator().manual_seed(3), []
    for prompt_length, length in lengths:
        tokens = torch.randint(VOCABULARY, (prompt_length + length,), generator=generator).tolist()
        prompt, reply = tokens[:prompt_length], tokens[prompt_length:]
        forced = [at == 1 for at in range(length)]
        completion = Completion(reply, forced, logprobs(model, prompt, reply), "stop")
        samples.append(Sample(prompt, completion, [0.25] * length))
    return samples


@pytest.mark.parametrize("trees", [False, True])
def test_weights_get_the_gradient_of_the_divergence_and_forced_tokens_do_not(trees: bool) -> None:
    policy, reference = tiny_gpt(VOCABULARY), tiny_gpt(VOCABULARY, seed=2)
    samples = sampled(policy, [(3, 4), (7, 1), (3, 9), (12, 5)])
    samples.append(samples[0])  # replies that several samples share are scored once
    pulled, total = anchored(samples, 0.5, reference, on_cpu(), trees)
    expected = 0.0
    for sample, after in zip(samples, pulled, strict=True):
        reply = sample.completion
        ours = torch.tensor(reply.logprobs, requires_grad=True)
        log_ratio = torch.tensor(logprobs(reference, sample.prompt, reply.tokens)) - ours
        assert log_ratio.max() < LARGEST
        divergence = (log_ratio.exp() - log_ratio - 1)[[not forced for forced in reply.forced]].sum()
        divergence.backward()
        assert ours.grad is not None
        wanted = (torch.tensor(sample.weights) - 0.5 * ours.grad).tolist()
        assert after.weights == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        assert after.completion is reply and sample.weights == [0.25] * len(reply.tokens)
        expected += divergence.item()
    assert total == pytest.approx(expected, rel=1e-5) and total > 0


def test_nothing_pulls_on_a_model_that_is_the_reference() -> None:
    model = tiny_gpt(VOCABULARY)
    samples = sampled(model, [(3, 4), (5, 2)])
    pulled, total = anchored(samples, 10.0, model, on_cpu())
    assert total == pytest.approx(0, abs=1e-6)
    for sample, after in zip(samples, pulled, strict=True):
        assert after.weights == pytest.approx(sample.weights, abs=1e-3)


def test_a_token_that_only_the_reference_expects_pulls_within_bounds() -> None:
    policy = tiny_gpt(VOCABULARY)
    (sample,) = sampled(policy, [(3, 3)])
    sample.completion.logprobs[0] = -200.0
    (pulled,), total = anchored([sample], 1.0, policy, on_cpu())
    most = torch.tensor(LARGEST).exp().item() - 1
    assert pulled.weights[0] == pytest.approx(0.25 + most) and total == pytest.approx(most - LARGEST, rel=1e-3)


@pytest.mark.parametrize("trees", [False, True])
def test_no_samples_need_no_reference(trees: bool) -> None:
    assert anchored([], 1.0, tiny_gpt(VOCABULARY), on_cpu(), trees) == ([], 0.0)
