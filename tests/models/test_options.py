"""Every option of the published families against Hugging Face transformers, and against itself."""

import random
from dataclasses import replace

import pytest
import torch

from nanochat.context import Cached, Packed
from nanochat.models.rope import rotary_base
from nanochat.rl.trees import Tree
from tests.models.test_qwen import gradients, recomputed, replies, tokens
from tests.support.qwens import OPTIONS, VOCABULARY, oracle, tiny_qwen
from tests.support.tiny_model import on_cpu

LENGTH = 150  # tokens: beyond the context of pretraining and beyond every window
# Options that change what a token sees or where it stands.
PLACES = [option for option in OPTIONS if "biases" not in option]


@pytest.mark.parametrize("option", OPTIONS)
def test_logits_and_gradients_equal_transformers(option: str) -> None:
    ours = tiny_qwen(option)
    theirs = oracle(ours)
    idx = tokens(2, LENGTH)
    logits, expected = ours(idx), theirs(idx).logits
    assert logits.std() > 0.3
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    targets = tokens(2, LENGTH, seed=1)
    ours(idx, targets).backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    reference = gradients(theirs)
    assert gradients(ours).keys() == reference.keys()
    for name, gradient in gradients(ours).items():
        scale = reference[name].abs().max()
        torch.testing.assert_close(gradient / scale, reference[name] / scale, atol=1e-5, rtol=1e-5, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("option", PLACES)
def test_cached_pieces_have_the_logits_of_the_whole(option: str) -> None:
    """A long piece, single tokens, and a piece again, in rows that have different lengths before."""
    for operations in (None, on_cpu().operations):
        model = tiny_qwen(option, operations=operations)
        idx = tokens(2, LENGTH)
        cache = model.new_cache(2, LENGTH)
        pieces = []
        for piece in idx.split([100, *[1] * 5, LENGTH - 105], dim=1):
            pieces.append(model(piece, context=Cached(cache, piece)))
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(idx), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("option", ["mistral windows", "qwen3 windows", "llama yarn"])
def test_the_engine_gives_a_request_the_same_reply_in_any_batch(option: str) -> None:
    model, rng = tiny_qwen(option), random.Random(0)
    prompts = [[rng.randrange(VOCABULARY - 9) for _ in range(length)] for length in (1, 90, 7, 30)]
    prompts.append([*prompts[1][:60], 3])  # the beginning of another prompt, which is in the cache
    together = replies(model, prompts, slots=3)
    for prompt, reply in zip(prompts, together, strict=True):
        assert replies(model, [prompt], slots=1) == [reply]
        if all(token < VOCABULARY - 9 for token in reply):
            recomputed(model, prompt, reply)


@torch.no_grad()
@pytest.mark.parametrize("option", PLACES)
def test_packed_and_branching_texts_are_computed_as_if_alone(option: str) -> None:
    model = tiny_qwen(option)
    idx = tokens(1, LENGTH)
    documents = torch.tensor([[0] * 60 + [1] * (LENGTH - 60)])
    packed = model(idx, context=Packed(documents))
    for part in (slice(0, 60), slice(60, LENGTH)):
        torch.testing.assert_close(packed[:, part], model(idx[:, part]), atol=2e-5, rtol=1e-4)
    if not model.takes_trees:
        return
    # After 60 tokens there are two ways to go on: 30 tokens, or the 60 tokens after them.
    parents = torch.arange(-1, LENGTH - 1).clamp_min(0)
    parents[90] = 59
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    visible[90:, 60:90] = False
    logits = model(idx, context=Tree(parents[None], visible[None], torch.arange(LENGTH)))
    second_way = torch.cat((idx[:, :60], idx[:, 90:]), dim=1)
    torch.testing.assert_close(logits[:90], model(idx[:, :90])[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits[90:], model(second_way)[0, 60:], atol=2e-5, rtol=1e-4)


def test_two_rotated_channels_have_one_frequency_under_the_dynamic_rule() -> None:
    """Their only frequency is base ** 0; the formula of the base divides by the number of channels minus two."""
    config = replace(OPTIONS["llama dynamic"], rotary_dim=2)
    assert rotary_base(config) == config.rope_theta
