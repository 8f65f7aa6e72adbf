"""Prompts that begin alike, whose beginning is read once: the same hidden states and likelihoods as one by one."""

from typing import Any

import pytest
import torch

from nanochat.evals import likelihood
from nanochat.evals.branches import Branches
from nanochat.evals.likelihood import PromptRow, score_rows
from tests.support.qwens import tiny_qwen
from tests.support.tiny_model import tiny_gpt


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(1, 280, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def model_of(family: str) -> Any:
    return tiny_gpt(290, 128) if family == "gpt" else tiny_qwen(family)


def questions() -> list[PromptRow]:
    """Three questions of 1 to 4 options, of which the second one shares too little to be read together."""
    shapes = [(80, (3, 9, 1, 1)), (5, (2, 4)), (50, (6, 6, 2)), (70, (4,))]
    rows = []
    for question, (alike, ends) in enumerate(shapes):
        common = tokens(alike, question)
        rows += [PromptRow(question, [*common, *tokens(end, 100 * question + i)], alike) for i, end in enumerate(ends)]
    return rows


@pytest.mark.parametrize("family", ["gpt", "qwen2", "qwen3", "qwen3.5"])
@pytest.mark.parametrize(("tokens_per_batch", "rows_per_batch"), [(None, None), (400, None), (None, 4), (1, None)])
def test_likelihoods_are_those_of_one_row_at_a_time(
    family: str, tokens_per_batch: int | None, rows_per_batch: int | None
) -> None:
    model, rows = model_of(family), questions()
    together = score_rows(model, rows, 0, tokens_per_batch, rows_per_batch)
    for row, found in zip(rows, together, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([row.tokens[:-1]]))[0].double().log_softmax(-1)
        wanted = [logits[place - 1, row.tokens[place]] for place in range(row.start, len(row.tokens))]
        assert found.tokens == len(wanted)
        assert found.logprob == pytest.approx(float(sum(wanted)), abs=1e-3)


def test_a_common_beginning_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = model_of("qwen3"), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda idx, *given: read.append(idx.numel()) or hidden(idx, *given))
    common = tokens(60, 1)
    rows = [PromptRow(0, [*common, *tokens(5, seed)], 60) for seed in range(2, 6)]
    score_rows(model, rows, 0)
    assert read == [59, 4 * 5]  # the last common token predicts the first scored one, so that each row reads it
    read.clear()
    monkeypatch.setattr(likelihood, "LEAST_SHARED", 1000)
    score_rows(model, rows, 0)
    assert read == [4 * 64]


def test_batches_keep_their_limits_and_every_row() -> None:
    rows = questions()
    families = likelihood._families(likelihood._inputs(rows), rows)
    assert sorted(family.prefix_length for family in families) == [0, 0, 0, 49, 79]
    for most in (1, 200, 400, 10**6):
        taken = [*likelihood._batches(families, most, None)]
        assert sum(len(entry.row_numbers) for _, inputs in taken for entry in inputs) == len(rows)
        for prefix_lengths, inputs in taken:
            alone = len(inputs) == 1 or len({*prefix_lengths}) == 1
            assert len(inputs) * max(len(entry.tokens) for entry in inputs) <= most or alone


def test_the_cache_of_a_batch_serves_the_next() -> None:
    model = model_of("gpt")
    branches, common = Branches(model, 0), tokens(20, 1)
    prompts = [[*common, *tokens(3, 2)], [*common, *tokens(2, 3)]]
    with torch.inference_mode():
        first = branches.hidden(prompts, [20, 20])
        kept = branches._cache
        again = branches.hidden([*prompts[:1], tokens(6, 4)], [20, 3])
        assert branches._cache is kept
        whole = model.hidden(torch.tensor([prompts[0]]))[:, 20:]
    assert torch.allclose(first[0, :3], whole[0], atol=1e-4) and torch.allclose(again[0, :3], whole[0], atol=1e-4)
