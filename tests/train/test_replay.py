"""Rows of a model's own words, which fine-tuning mixes into the data."""

from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.huggingface.base import open_base
from nanochat.common import UserError
from nanochat.dataloader import MixedRows, chat_rows
from nanochat.train import replay
from tasks.mixtures import own_conversations
from tests.support.qwens import write_folder
from tests.support.tiny_model import on_cpu

LENGTH = 48


@pytest.fixture(autouse=True)
def base_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path


def mixed(tmp_path: Path, every: int = 3, seed: int = 1) -> tuple[Any, MixedRows]:
    if not (tmp_path / "model").exists():
        (tmp_path / "model").mkdir()
        write_folder(tmp_path / "model", "qwen3")
        line = '{"messages": [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "mat"}]}\n'
        (tmp_path / "chats.jsonl").write_text(line * 40)
    base = open_base(tmp_path / "model", LENGTH, None, on_cpu(), 1)
    conversations = own_conversations([str(tmp_path / "chats.jsonl")])
    rows, _ = chat_rows("tune", conversations, base.tokenizer, LENGTH, 1, True, "cut")
    return rows, replay.with_own_words(rows, every, base, seed, on_cpu())


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


def test_the_same_seed_samples_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = mixed(tmp_path)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "again"))
    _, again = mixed(tmp_path)
    _, other = mixed(tmp_path, seed=2)
    assert first.key == again.key != other.key


def test_a_model_larger_than_the_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed(tmp_path)
    base = open_base(tmp_path / "model", LENGTH, None, on_cpu(), 1)
    replay.check_replay(4, base, on_cpu())
    monkeypatch.setattr(replay, "reachable", lambda compute: 1000)
    replay.check_replay(0, base, on_cpu())
    with pytest.raises(UserError, match="--replay_every=4") as failure:
        replay.check_replay(4, base, on_cpu())
    assert failure.value.exit_code == 2
