"""Rows of a model's own words, which fine-tuning mixes into the data."""

import json
import math
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.huggingface.base import open_base
from nanochat.checkpoint_manager.load import load_published
from nanochat.common import UserError
from nanochat.context import Packed
from nanochat.prepare.interleave import MixedRows
from nanochat.train import replay, tuning_rules
from nanochat.train.chat_rows import chat_rows
from tasks.mixtures import own_conversations
from tests.support.qwens import write_folder
from tests.support.small_world import few_own_words
from tests.support.tiny_model import on_cpu

LENGTH = 48


@pytest.fixture(autouse=True)
def short_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    few_own_words(monkeypatch)


def mixed(tmp_path: Path, every: int = 3, seed: int = 1, run_rows: int = 80) -> tuple[Any, MixedRows]:
    if not (tmp_path / "model").exists():
        (tmp_path / "model").mkdir()
        write_folder(tmp_path / "model", "qwen3")
        turns = [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "mat"}]
        talks = [{"messages": [{**turns[0], "content": f"cat {i}"}, turns[1]]} for i in range(40)]
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    base = open_base(tmp_path / "model", LENGTH, None, on_cpu(), 1)
    conversations = own_conversations([str(tmp_path / "chats.jsonl")])
    rows, _ = chat_rows("tune", conversations, base.tokenizer, LENGTH, 1, True, "cut")
    return rows, replay.with_own_words(rows, every, base, run_rows, seed, on_cpu())


def test_the_references_are_the_log_probabilities_of_the_models_own_words_before_training(tmp_path: Path) -> None:
    _, rows = mixed(tmp_path)
    module = load_published(tmp_path / "model", None, on_cpu()).model
    assert isinstance(rows, replay.AnchoredRows)
    replay.add_references(rows, module, "a", 3, on_cpu())
    inputs, targets, documents, references = rows.batch(rows.plan_rows(0, rows.count))
    is_own = rows.plan_rows(0, rows.count) >= rows.sources[0].size
    assert (references[~is_own] == replay.NOT_OWN).all()
    with torch.no_grad():
        losses = module(inputs, targets, "none", context=Packed(documents))
    scored = torch.from_numpy(is_own)[:, None] & (targets >= 0)
    assert ((references != replay.NOT_OWN) == scored).all() and scored.any()
    torch.testing.assert_close(references[scored], -losses[scored])
    _, resumed = mixed(tmp_path)
    assert isinstance(resumed, replay.AnchoredRows)
    replay.add_references(resumed, torch.nn.Identity(), "a", 3, on_cpu())  # saved, so no model is asked
    assert (resumed.references == rows.references).all()


def test_an_unchanged_model_gets_no_gradient_from_its_own_words() -> None:
    losses = torch.tensor([[2.0, 1.0, 0.5, 0.0]], requires_grad=True)
    references = torch.tensor([[-2.0, -1.0, replay.NOT_OWN, replay.NOT_OWN]])
    loss, _ = replay.anchored_loss(losses, references)
    loss.backward()
    assert loss.item() == 0.5
    assert losses.grad is not None and losses.grad.tolist() == [[0, 0, 1, 1]]


def test_the_losses_of_the_data_and_of_own_words_are_told_apart() -> None:
    losses = torch.tensor([[3.0, 1.0, 2.0, 0.0]])  # the last token has no target
    references = torch.tensor([[-3.0 - math.log(2), replay.NOT_OWN, replay.NOT_OWN, replay.NOT_OWN]])
    loss, sums = replay.anchored_loss(losses, references)
    figures = dict(zip(replay.FIGURES, (sums / 3).tolist(), strict=True))
    means = replay.mean_losses(figures)
    assert means == pytest.approx({"data_loss": 1.5, "own_words_loss": 2 - 1 - math.log(2)})
    assert float(loss) == pytest.approx(2 * means["data_loss"] + means["own_words_loss"])
    no_own = dict(zip(replay.FIGURES, (1.5, 0.0, 0.0), strict=True))
    assert replay.mean_losses(no_own) == {"data_loss": 1.5}


def test_the_mean_of_the_anchored_loss_is_the_divergence() -> None:
    generator = torch.Generator().manual_seed(1)
    before, now = (torch.randn(2, 5, generator=generator) / 2).log_softmax(1).unbind(0)
    each = torch.stack([replay.anchored_loss(-now[i : i + 1], before[i : i + 1])[0] for i in range(5)])
    expected = (before.exp() * (before - now)).sum()
    torch.testing.assert_close((before.exp() * each).sum(), expected)


def test_a_word_that_became_far_likelier_pulls_no_harder_than_the_cap() -> None:
    losses = torch.tensor([[0.0]], requires_grad=True)
    replay.anchored_loss(losses, torch.tensor([[-1000.0]]))[0].backward()
    assert losses.grad is not None
    assert losses.grad.item() == pytest.approx(1 - math.exp(replay.LARGEST))


@pytest.mark.parametrize(
    ("every", "loss", "most_data", "memory", "expected"),
    [
        ("auto", "answers", 10**6, 10**9, replay.EVERY),
        ("auto", "dpo", 10**6, 10**9, 0),
        ("auto", "answers", 10, 10**9, 0),  # data of more tokens
        ("auto", "answers", 10**6, 1000, 0),  # the model is larger than the device
        (7, "answers", 10, 10**9, 7),
    ],
)
def test_by_default_little_data_is_mixed_with_own_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: Any,
    loss: str,
    most_data: int,
    memory: int,
    expected: int,
) -> None:
    rows, _ = mixed(tmp_path)
    base = open_base(tmp_path / "model", LENGTH, None, on_cpu(), 1)
    monkeypatch.setattr(replay, "MOST_DATA", most_data)
    monkeypatch.setattr(replay, "reachable", lambda compute: memory)
    replay.check_replay(every, loss, base, on_cpu())
    assert replay.resolve_every(every, loss, rows, replay.has_room(base, on_cpu())) == expected


def test_one_row_in_three_holds_words_that_the_model_sampled(tmp_path: Path) -> None:
    rows, both = mixed(tmp_path)
    assert both.count == rows.count * 3 // 2 and both.rows_before(30) == [20, 10]
    own = both.sources[1]
    inputs, targets, documents = own.batch(own.plan_rows(0, own.count))
    assert (targets >= 0).any(dim=1).all()
    texts = []
    for row in range(own.count):
        for document in documents[row].unique():
            here = documents[row] == document
            if (targets[row, here] >= 0).any():
                texts.append(tuple(inputs[row, here].tolist()))
    assert len(set(texts)) > 0.9 * len(texts)  # texts from the same beginning are different samples


@pytest.mark.parametrize(
    ("run_rows", "every", "size", "narrow"),
    [(60, 3, 20, False), (200, 4, 50, False), (2000, 3, 50, False), (180, 3, 20, True)],
)
def test_the_model_writes_as_many_words_as_the_run_reads_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_rows: int, every: int, size: int, narrow: bool
) -> None:
    if not narrow:
        monkeypatch.setattr(tuning_rules, "MOST_REPEATS", 1.0)
    monkeypatch.setattr(replay, "MOST_TOKENS", 50 * LENGTH)
    monkeypatch.setattr(replay, "GRAIN", LENGTH)
    _, rows = mixed(tmp_path, every, run_rows=run_rows)
    assert size <= rows.sources[1].size <= 1.3 * size


def test_the_same_seed_samples_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = mixed(tmp_path)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "again"))
    _, again = mixed(tmp_path)
    _, other = mixed(tmp_path, seed=2)
    assert first.key == again.key != other.key


def test_rows_may_be_as_long_as_the_models_context(tmp_path: Path) -> None:
    mixed(tmp_path)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": LENGTH}))
    _, rows = mixed(tmp_path)
    assert rows.row_tokens == LENGTH + 1


def test_a_model_larger_than_the_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed(tmp_path)
    base = open_base(tmp_path / "model", LENGTH, None, on_cpu(), 1)
    replay.check_replay(4, "answers", base, on_cpu())
    monkeypatch.setattr(replay, "reachable", lambda compute: 1000)
    replay.check_replay(0, "answers", base, on_cpu())
    with pytest.raises(UserError, match="--replay_every=4") as failure:
        replay.check_replay(4, "answers", base, on_cpu())
    assert failure.value.exit_code == 2


def test_no_general_prompt_speaks_to_the_model_about_itself() -> None:
    """Its old answer to "Who are you?" pulled against data that gives it another name."""
    prompts = resources.files("nanochat").joinpath("data/general/prompts.txt").read_text("utf-8").splitlines()
    assert len(set(prompts)) == 64
    assert not [prompt for prompt in prompts if re.search(r"\byou\b|^hello|你是|你叫|你好", prompt, re.IGNORECASE)]
