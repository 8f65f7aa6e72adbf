"""The Qwen models against Hugging Face transformers, and against themselves: cached, batched and packed."""

import random
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from nanochat.context import Packed
from nanochat.engine import Engine
from nanochat.generate.sampling import Sampling
from nanochat.models.qwen.model import Qwen
from tests.support.qwens import CONFIGS, VOCABULARY, oracle, tiny_qwen
from tests.support.tiny_model import tiny_tokenizer

FAMILIES = list(CONFIGS)


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_losses_and_gradients_equal_transformers(family: str) -> None:
    """150 tokens: more than two chunks of a DeltaNet."""
    ours = tiny_qwen(family)
    theirs = oracle(ours)
    idx, targets = tokens(2, 150), tokens(2, 150, seed=1)
    targets[0, :30] = -1
    logits, expected = ours(idx), theirs(idx).logits
    assert logits.std() > 0.3
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    reference = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss = ours(idx, targets)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    loss.backward()
    reference.backward()
    mine, wanted = gradients(ours), gradients(theirs)
    assert mine.keys() == wanted.keys() == dict(ours.named_parameters()).keys()
    for name, gradient in mine.items():
        scale = wanted[name].abs().max()
        assert scale > 0, name
        torch.testing.assert_close(gradient / scale, wanted[name] / scale, atol=1e-5, rtol=1e-5, msg=name)


def replies(model: Qwen, prompts: list[list[int]], slots: int) -> list[list[int]]:
    engine = Engine(model, tiny_tokenizer(VOCABULARY), slots, prefill_tokens=24)
    return [done.tokens for done in engine.generate(prompts, Sampling(temperature=0.0, max_tokens=12))]


@torch.inference_mode()
def recomputed(model: Qwen, prompt: list[int], reply: list[int]) -> None:
    """Every token of the reply is the likeliest, by passes over the whole text without a cache."""
    logits = model(torch.tensor([prompt + reply]))[0, len(prompt) - 1 : -1]
    tokenizer = tiny_tokenizer(VOCABULARY)
    logits[:, [tokenizer.special("output_start"), tokenizer.special("output_end")]] = float("-inf")
    best = logits.max(dim=1).values
    torch.testing.assert_close(logits[range(len(reply)), reply], best, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_batches_requests_of_different_lengths(family: str) -> None:
    """Prompts are prefilled in pieces, of which the rows of a pass have different lengths; slots are copied, freed and
    used again."""
    model, rng = tiny_qwen(family), random.Random(0)
    prompts = [[rng.randrange(VOCABULARY - 9) for _ in range(length)] for length in (1, 90, 7, 30, 7, 3)]
    prompts[4] = prompts[2]
    together = replies(model, prompts, slots=3)
    for prompt, reply in zip(prompts, together, strict=True):
        assert replies(model, [prompt], slots=1) == [reply]
        if all(token < VOCABULARY - 9 for token in reply):
            recomputed(model, prompt, reply)


def test_padding_rows_borrow_slots_without_changing_their_states() -> None:
    model = tiny_qwen("qwen3.5")
    prompts = [[5, 6, 7], [8, 9], [3, 4, 1, 2, 9]]
    engine = Engine(model, tiny_tokenizer(VOCABULARY), 4, pad=True)
    greedy = Sampling(temperature=0.0, max_tokens=9)
    padded = [done.tokens for done in engine.generate(prompts, greedy)]
    assert padded == [reply[:9] for reply in replies(model, prompts, slots=3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_computed_as_if_each_were_alone(family: str) -> None:
    """Borders fall inside chunks, on their edges, one token after another, and before the convolution's width."""
    model = tiny_qwen(family)
    lengths = [[1, 2, 61, 64, 22], [70, 3, 1, 76]]
    idx, targets = tokens(2, 150, seed=3), tokens(2, 150, seed=4)
    documents = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in lengths])
    packed = model.hidden(idx, context=Packed(documents))
    total = model(idx, targets, "sum", context=Packed(documents))
    total.backward()
    packed_gradients = {name: g.clone() for name, g in gradients(model).items()}
    model.zero_grad()
    alone = 0
    for row, ends in enumerate(lengths):
        start = 0
        for n in ends:
            part = idx[row : row + 1, start : start + n]
            torch.testing.assert_close(
                packed[row : row + 1, start : start + n], model.hidden(part), atol=2e-4, rtol=1e-3
            )
            alone = alone + model(part, targets[row : row + 1, start : start + n], "sum")
            start += n
    assert isinstance(alone, Tensor)
    alone.backward()
    assert total.item() == pytest.approx(alone.item(), rel=1e-6)
    for name, gradient in gradients(model).items():
        scale = gradient.abs().max()
        torch.testing.assert_close(packed_gradients[name] / scale, gradient / scale, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_close_to_fp32_with_its_gradients(family: str) -> None:
    exact, rounded = tiny_qwen(family), tiny_qwen(family, dtype=torch.bfloat16)
    idx, targets = tokens(2, 40), tokens(2, 40, seed=1)
    losses = [model(idx, targets) for model in (exact, rounded)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.02)
    for loss in losses:
        loss.backward()
    mine, wanted = gradients(rounded), gradients(exact)
    distance = sum((mine[n] - g).square().sum() for n, g in wanted.items()).sqrt()
    assert distance < 0.25 * sum(g.square().sum() for g in wanted.values()).sqrt()


def test_counts_roles_and_groups_cover_every_parameter() -> None:
    for family, config in CONFIGS.items():
        model = tiny_qwen(family)
        whole = sum(parameter.numel() for parameter in model.parameters())
        counts = model.parameter_counts()
        assert counts["total"] == whole
        assert set(model.parameter_roles()) == {name for name, _ in model.named_parameters()}
        grouped = {id(p) for group in model.shard_groups() for p in group.parameters()}
        assert {n for n, p in model.named_parameters() if id(p) not in grouped} == {"model.norm.weight"}
        assert ("head" in counts) != bool(config.tied)
        assert model.flops_per_token() > 6 * counts["scaling"]


class Aside:
    """Counts what is put aside and what comes back."""

    def __init__(self) -> None:
        self.moved: list[tuple[int, ...]] = []
        self.back = 0

    def __call__(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.moved.append(tuple(x.shape))

        def back() -> torch.Tensor:
            self.back += 1
            return x.clone()

        return back


@pytest.mark.parametrize(
    ("family", "compiled"), [("qwen3.5", False), pytest.param("qwen3", True, marks=pytest.mark.slow)]
)
def test_inputs_of_layers_that_wait_elsewhere_change_no_gradient(family: str, compiled: bool) -> None:
    """Compiled without generated code, which takes half a minute to make."""
    idx, gradients = torch.arange(160).view(2, 80), []
    for offloads in (False, True):
        model = tiny_qwen(family)
        model.offload_tensor = aside = Aside()
        model.checkpoints, model.offloads = True, offloads
        compiles = compiled and offloads  # an eager model says what the gradients are
        fast = cast(nn.Module, torch.compile(model, dynamic=False, backend="aot_eager")) if compiles else model
        fast(idx[:, :-1], idx[:, 1:]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        inputs = model.config.n_layer if offloads else 0
        assert aside.moved == [(2, 79, model.config.n_embd)] * inputs and aside.back == inputs
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-5)


def test_a_deltanet_that_computes_again_has_the_same_gradients_and_keeps_less() -> None:
    idx = torch.arange(160).view(2, 80)
    kept, gradients = [], []
    for checkpoints in (False, True):  # checkpoints: every layer computes itself again, and the DeltaNet does not
        model = tiny_qwen("qwen3.5")
        model.checkpoints = checkpoints
        assert [block.linear_attn.recomputes for block in model.blocks if block.linear_attn] == [not checkpoints] * 3
        model(idx[:, :-1], idx[:, 1:]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for recomputes in (True, False):
        model, bytes_kept = tiny_qwen("qwen3.5"), 0
        for block in model.blocks:
            if block.linear_attn is not None:
                block.linear_attn.recomputes = recomputes

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal bytes_kept
            bytes_kept += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(idx[:, :-1], idx[:, 1:]).backward()
        kept.append(bytes_kept)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert kept[0] < 0.8 * kept[1]
    for other in gradients[1:]:
        for first, second in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-5)
